"""A figure with what belongs to it: text for those who do not see it, a finding, a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.viz.svg import to_svg

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Text of a live figure follows JupyterLab's theme, as the SVG does by itself.
STYLE = """<style>
.labkit .js-plotly-plot text:not(.bartext-inside) {
  fill: var(--jp-content-font-color1, #222) !important }
.labkit, .labkit-text { color: var(--jp-content-font-color1, #222) }
.labkit table { border-collapse: collapse; font-size: 12px; line-height: 1.3; margin: 4px 0 }
.labkit td, .labkit th { padding: 2px 10px 2px 0; text-align: left; vertical-align: top }
.labkit td.n, .labkit th.n { text-align: right; font-variant-numeric: tabular-nums }
.labkit figcaption, .labkit p { font-size: 14px; line-height: 1.4; max-width: 56em; margin: 4px 0 }
.labkit figure { margin: 0 }
</style>"""


@dataclass(frozen=True)
class Picture:
    """What a figure function returns; in a notebook it shows itself, without scripts.

    figure   plotly figure; `figure.layout.meta` holds alt and caption as well
    alt      what the picture shows, for those who do not see it
    caption  the finding, computed from the data
    columns, rows   the small table beside it
    """

    figure: go.Figure
    alt: str
    caption: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    def __post_init__(self) -> None:
        self.figure.update_layout(meta={"alt": self.alt, "caption": self.caption})

    def html(self) -> str:
        """The figure as inline SVG in the reader's theme, its caption and its table."""
        picture = to_svg(self.figure, self.alt, themed=True)
        return (f'<div class="labkit">{STYLE}<figure>{picture}'
                f"<figcaption>{escape(self.caption)}</figcaption></figure>"
                f"{table_html(self.columns, self.rows)}</div>")

    def static(self) -> Static:
        """The same for repository viewers and print: an SVG image, then caption and table."""
        svg = to_svg(self.figure, self.alt)
        return Static(svg, self.alt, self.caption, self.columns, self.rows)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": f"{self.alt}\n{self.caption}"}


@dataclass(frozen=True)
class Static:
    """A picture that needs no scripts at all: `.svg` is a whole file."""

    svg: str
    alt: str
    caption: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Any, ...], ...] = ()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display({"image/svg+xml": self.svg, "text/plain": self.alt}, raw=True)
        display({"text/markdown": self.markdown(), "text/plain": self.caption}, raw=True)

    def markdown(self) -> str:
        """Caption and table."""
        lines = [self.caption]
        if self.rows:
            lines += ["", "| " + " | ".join(self.columns) + " |", "|---" * len(self.columns) + "|"]
            lines += ["| " + " | ".join(str(v).replace("|", "\\|") for v in row) + " |"
                      for row in self.rows]
        return "\n".join(lines)


def table_html(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table with its heads marked as such; numbers flush right."""
    if not rows:
        return ""
    numeric = [all(_number(row[i]) for row in rows) for i in range(len(columns))]

    def cell(tag: str, value: Any, i: int) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        return f"<{tag}{scope}{' class=n' if numeric[i] else ''}>{escape(str(value))}</{tag}>"

    head = "".join(cell("th", name, i) for i, name in enumerate(columns))
    body = "".join("<tr>" + "".join(cell("td", v, i) for i, v in enumerate(row)) + "</tr>"
                   for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) or str(value).replace(",", "").rstrip(" %").replace(
        ".", "", 1).isdigit()


def base_layout(width: int, height: int, **more: Any) -> dict[str, Any]:
    """What the lab's figures share: clear ground, no mode bar needed, legend on top."""
    layout: dict[str, Any] = {
        "width": width, "height": height, "autosize": False, "showlegend": True,
        "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "sans-serif", "size": 12, "color": "#444"},
        "legend": {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"},
        "barmode": "overlay", "hoverlabel": {"font": {"family": "monospace"}}, "dragmode": False,
    }
    return {**layout, **more}
