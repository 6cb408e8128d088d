"""A plotly figure as an SVG text, for places that run no scripts: print, repository viewers.

Reads the same `fig.data` that the browser draws, so the two cannot differ. It knows what the
lab's figures are made of (bars, lines, markers, text; linear axes with a fixed range) and
refuses the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape, unescape
from typing import Any
from zlib import crc32

from labkit.errors import InputError
from labkit.viz.palette import NEUTRAL

PATTERNS = {"/": "M-2,2 l4,-4 M0,8 l8,-8 M6,10 l4,-4", "x": "M0,0 l8,8 M0,8 l8,-8",
            "-": "M0,4 h8", "|": "M4,0 v8", ".": "M3,4 h2"}
THEMED = ".labkit-t{fill:var(--jp-content-font-color1,#222)}"
PRINTED = ".labkit-t{fill:#222}"
DASHES = {"dash": "6 4", "dot": "2 3", "dashdot": "7 3 2 3", "longdash": "10 4"}
GAP = 12  # pixels between legend entries


def to_svg(fig: Any, alt: str, *, themed: bool = False) -> str:
    """fig: a plotly figure with width, height and axis ranges; alt: what a reader hears.

    themed  text takes JupyterLab's colour and the ground is clear (for inline use); otherwise
            dark on white, for files.
    """
    layout = fig.layout
    key = f"{crc32(alt.encode()):x}"  # several pictures share a page, so ids must differ
    if not (layout.width and layout.height and layout.xaxis.range and layout.yaxis.range):
        raise InputError("a figure needs width, height and both axis ranges to become an SVG")
    place = _Place(layout)
    body = [*_shapes(layout, place), *_axes(layout, place)]
    for number, trace in enumerate(fig.data):
        if trace.visible in (None, True):
            body += _trace(trace, place, f"{key}-{number}")
    body += [*_annotations(layout, place), *_legend(fig, place, key)]
    if layout.title.text:
        body.append(_text(8, 20, layout.title.text, "start", 15, weight="bold"))
    size = f'width="{layout.width}" height="{layout.height}"'
    ground = "" if themed else f'<rect {size} fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {layout.width} {layout.height}" '
        f'{size} role="img" '
        f'aria-label="{escape(alt)}" font-family="sans-serif" '
        'style="max-width:100%;height:auto">'
        f"<title>{escape(alt)}</title><style>{THEMED if themed else PRINTED}</style>"
        f"<defs>{_patterns(fig, key)}</defs>{ground}{''.join(body)}</svg>"
    )


class _Place:
    """Data coordinates -> pixels."""

    def __init__(self, layout: Any) -> None:
        m = layout.margin
        self.left, self.top = _or(m.l, 80), _or(m.t, 100)
        self.right, self.bottom = layout.width - _or(m.r, 80), layout.height - _or(m.b, 80)
        self._x0, self._x1 = layout.xaxis.range
        self._y0, self._y1 = layout.yaxis.range

    def x(self, value: float) -> float:
        return self.left + (value - self._x0) / (self._x1 - self._x0) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self._y0) / (self._y1 - self._y0) * (self.bottom - self.top)


# ---------------------------------------------------------------------------------- traces
def _trace(trace: Any, place: _Place, name: str) -> Iterator[str]:
    if trace.type == "bar":
        yield from _bars(trace, place, name)
    elif trace.type == "scatter":
        mode = trace.mode or "lines"
        if "lines" in mode:
            yield from _lines(trace, place)
        if "markers" in mode:
            yield from _markers(trace, place)
        if "text" in mode:
            yield from _labels(trace, place)
    else:
        raise InputError(f"the static rendering draws bars and scatters, not {trace.type!r}")


def _bars(trace: Any, place: _Place, name: str) -> Iterator[str]:
    """Bars from `base` over a length, `width` wide; vertical unless orientation is "h"."""
    flat = trace.orientation == "h"
    along = trace.x if flat else trace.y
    across = trace.y if flat else trace.x
    if along is None or across is None:
        return
    marker, n = trace.marker, len(along)
    base, width, offset = _spread(trace.base, n, 0), _spread(trace.width, n, 0.8), trace.offset
    colours, shifts = _spread(marker.color, n, NEUTRAL), _spread(offset, n, None)
    line = marker.line
    border = f' stroke="{line.color}" stroke-width="{line.width}"' if line.width else ""
    opacity = _or(marker.opacity, _or(trace.opacity, 1.0))
    hatched = bool(marker.pattern.shape)
    for i in range(n):
        if along[i] is None:
            continue
        low = across[i] + (-width[i] / 2 if shifts[i] is None else shifts[i])
        ends = (low, low + width[i], base[i], base[i] + along[i])
        if flat:
            ends = (*ends[2:], *ends[:2])
        x0, x1 = sorted(place.x(v) for v in ends[:2])
        y0, y1 = sorted(place.y(v) for v in ends[2:])
        box = f'x="{x0:.1f}" y="{y0:.1f}" width="{x1 - x0:.1f}" height="{y1 - y0:.1f}"'
        yield f'<rect {box} fill="{colours[i]}" opacity="{opacity}"{border}/>'
        if hatched:
            yield f'<rect {box} fill="url(#p{name})"/>'
        label = trace.text[i] if trace.text is not None and not isinstance(trace.text, str) else ""
        if label and trace.textposition == "inside":
            colour = _spread(trace.insidetextfont.color, n, "#000")[i]
            size = _or(trace.insidetextfont.size, 12)
            yield _text((x0 + x1) / 2, (y0 + y1) / 2, label, "middle", size, fill=colour)
        elif label and trace.textposition == "outside":
            yield _text(x1 + 4, (y0 + y1) / 2, label, "start", _or(trace.textfont.size, 12))


def _lines(trace: Any, place: _Place) -> Iterator[str]:
    """Polylines, broken where a coordinate is None."""
    dash = DASHES.get(trace.line.dash or "", "")
    style = (f'fill="none" stroke="{trace.line.color or NEUTRAL}" '
             f'stroke-width="{_or(trace.line.width, 2)}"')
    if dash:
        style += f' stroke-dasharray="{dash}"'
    run: list[str] = []
    for x, y in [*zip(trace.x, trace.y, strict=True), (None, None)]:
        if x is None or y is None:
            if len(run) > 1:
                yield f'<polyline points="{" ".join(run)}" {style}/>'
            run = []
        else:
            run.append(f"{place.x(x):.1f},{place.y(y):.1f}")


MARKERS: dict[str, Callable[[float], str]] = {
    "circle": lambda s: f'<circle r="{s / 2}"',
    "square": lambda s: f'<rect x="{-s / 2}" y="{-s / 2}" width="{s}" height="{s}"',
    "diamond": lambda s: f'<path d="M0,{-s * 0.65}L{s * 0.65},0L0,{s * 0.65}L{-s * 0.65},0Z"',
    "triangle-up": lambda s: f'<path d="M0,{-s / 2}L{s / 2},{s / 2}L{-s / 2},{s / 2}Z"',
    "triangle-down": lambda s: f'<path d="M0,{s / 2}L{s / 2},{-s / 2}L{-s / 2},{-s / 2}Z"',
    "triangle-left": lambda s: f'<path d="M{-s / 2},0L{s / 2},{s / 2}L{s / 2},{-s / 2}Z"',
    "triangle-right": lambda s: f'<path d="M{s / 2},0L{-s / 2},{s / 2}L{-s / 2},{-s / 2}Z"',
}


def _markers(trace: Any, place: _Place) -> Iterator[str]:
    marker, n = trace.marker, len(trace.x)
    symbols, sizes = _spread(marker.symbol, n, "circle"), _spread(marker.size, n, 6)
    colours = _spread(marker.color, n, NEUTRAL)
    line = marker.line
    for i, (x, y) in enumerate(zip(trace.x, trace.y, strict=True)):
        if x is None or y is None:
            continue
        hollow = str(symbols[i]).endswith("-open")
        name = str(symbols[i]).removesuffix("-open")
        if name not in MARKERS:
            raise InputError(f"the static rendering has no marker {name!r}")
        fill = "none" if hollow else colours[i]
        border = (colours[i], _or(line.width, 1)) if hollow else (line.color, line.width)
        stroke = f' stroke="{border[0]}" stroke-width="{border[1]}"' if border[1] else ""
        yield (f'<g transform="translate({place.x(x):.1f},{place.y(y):.1f})">'
               f'{MARKERS[name](sizes[i])} fill="{fill}"{stroke} '
               f'opacity="{_or(marker.opacity, 1.0)}"/></g>')


def _labels(trace: Any, place: _Place) -> Iterator[str]:
    n, faint = len(trace.x), trace.opacity not in (None, 1.0)
    if faint:
        yield f'<g opacity="{trace.opacity}">'
    texts, where = _spread(trace.text, n, ""), _spread(trace.textposition, n, "middle center")
    font = trace.textfont
    colours, sizes = _spread(font.color, n, None), _spread(font.size, n, 12)
    for x, y, label, at, colour, size in zip(
        trace.x, trace.y, texts, where, colours, sizes, strict=True
    ):
        if x is None or y is None or not label:
            continue
        vertical, side = at.split()
        dx = {"left": -4, "right": 4, "center": 0}[side] if "markers" in trace.mode else 0
        anchor = {"left": "end", "right": "start", "center": "middle"}[side]
        dy = {"top": -size * 0.8, "bottom": size * 0.8, "middle": 0}[vertical]
        yield _text(place.x(x) + dx, place.y(y) + dy, label, anchor, size, fill=colour,
                    family=font.family)
    if faint:
        yield "</g>"


# ---------------------------------------------------------------------------------- the rest
def _axes(layout: Any, place: _Place) -> Iterator[str]:
    if layout.xaxis.visible is not False:
        for value, label in _ticks(layout.xaxis):
            x = place.x(value)
            if layout.xaxis.showgrid:
                yield f'<path d="M{x:.1f},{place.top}V{place.bottom}" stroke="#888" opacity=".4"/>'
            yield _text(x, place.bottom + 12, label, "middle", 11)
        if layout.xaxis.title.text:
            yield _text((place.left + place.right) / 2, layout.height - 8, layout.xaxis.title.text,
                        "middle", 12)
    if layout.yaxis.visible is not False:
        for value, label in _ticks(layout.yaxis):
            yield _text(place.left - 6, place.y(value), label, "end",
                        _or(layout.yaxis.tickfont.size, 12), family=layout.yaxis.tickfont.family)


def _ticks(axis: Any) -> list[tuple[float, str]]:
    if axis.tickvals is None:
        return []
    texts = axis.ticktext if axis.ticktext is not None else [f"{v:g}" for v in axis.tickvals]
    return list(zip(axis.tickvals, texts, strict=True))


def _shapes(layout: Any, place: _Place) -> Iterator[str]:
    for shape in layout.shapes:
        x0, x1 = place.x(shape.x0), place.x(shape.x1)
        y0, y1 = place.y(shape.y0), place.y(shape.y1)
        dash = ' stroke-dasharray="5 4"' if shape.line.dash else ""
        colour, width = shape.line.color or NEUTRAL, _or(shape.line.width, 1)
        line = f'stroke="{colour}" stroke-width="{width}"{dash}'
        if shape.type == "line":
            yield f'<path d="M{x0:.1f},{y0:.1f}L{x1:.1f},{y1:.1f}" {line}/>'
        else:
            yield (f'<rect x="{min(x0, x1):.1f}" y="{min(y0, y1):.1f}" width="{abs(x1 - x0):.1f}" '
                   f'height="{abs(y1 - y0):.1f}" fill="{shape.fillcolor or "none"}" {line}/>')


def _annotations(layout: Any, place: _Place) -> Iterator[str]:
    anchors = {"left": "start", "right": "end", "center": "middle", None: "middle"}
    for note in layout.annotations:
        yield _text(place.x(note.x), place.y(note.y), note.text, anchors[note.xanchor],
                    _or(note.font.size, 12), fill=note.font.color)


def _legend(fig: Any, place: _Place, key: str) -> Iterator[str]:
    """Rows of entries above the plot, the last row just above it."""
    if fig.layout.showlegend is False:
        return
    rows: list[list[tuple[float, str]]] = [[]]
    x = float(place.left)
    for number, trace in enumerate(fig.data):
        if trace.showlegend is False or not trace.name or trace.visible not in (None, True):
            continue
        width = 24 + 7.2 * len(trace.name) + GAP
        if x + width > place.right and rows[-1]:
            x = float(place.left)
            rows.append([])
        rows[-1].append((x, _entry(trace, f"{key}-{number}")))
        x += width
    for up, row in enumerate(reversed(rows)):
        for x, entry in row:
            yield f'<g transform="translate({x:.0f},{place.top - 14 - 17 * up})">{entry}</g>'


def _entry(trace: Any, name: str) -> str:
    """A legend entry at the origin."""
    markers = trace.type == "scatter" and "markers" in (trace.mode or "")
    colour = trace.marker.color if trace.type == "bar" or markers else trace.line.color
    colour = colour if isinstance(colour, str) else NEUTRAL
    if markers:
        symbol = trace.marker.symbol if isinstance(trace.marker.symbol, str) else "circle"
        shape = MARKERS[symbol.removesuffix("-open")](10)
        hollow = symbol.endswith("-open")
        ink = f'fill="none" stroke="{colour}"' if hollow else f'fill="{colour}"'
        key = f'<g transform="translate(8,0)">{shape} {ink}/></g>'
    elif trace.type == "scatter":
        dash = DASHES.get(trace.line.dash or "", "none")
        key = f'<path d="M0,0h16" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
    else:
        key = f'<rect x="0" y="-6" width="16" height="12" fill="{colour}"/>'
        if trace.marker.pattern.shape:
            key += f'<rect x="0" y="-6" width="16" height="12" fill="url(#p{name})"/>'
    return key + _text(21, 0, trace.name, "start", 12)


def _patterns(fig: Any, key: str) -> str:
    out = []
    for number, trace in enumerate(fig.data):
        shape = trace.marker.pattern.shape if trace.type == "bar" else None
        if shape:
            out.append(f'<pattern id="p{key}-{number}" width="8" height="8" '
                       'patternUnits="userSpaceOnUse">'
                       f'<path d="{PATTERNS[shape]}" stroke="#000" stroke-width="1.2" '
                       'opacity=".65" fill="none"/></pattern>')
    return "".join(out)


def _text(x: float, y: float, text: str, anchor: str, size: float, *, fill: str | None = None,
          family: str | None = None, weight: str = "normal") -> str:
    colour = f' fill="{fill}"' if fill else ' class="labkit-t"'
    font = f' font-family="{escape(family)}"' if family else ""
    bold = ' font-weight="bold"' if weight == "bold" else ""
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" dominant-baseline="central" '
            f'font-size="{size}" xml:space="preserve"{colour}{font}{bold}>'
            f"{escape(unescape(text), quote=False)}</text>")  # plotly's texts are escaped already


def _spread(value: Any, n: int, default: Any) -> list[Any]:
    """One value for all, or one each; None elements and None become the default."""
    if value is None or isinstance(value, (str, int, float)):
        return [default if value is None else value] * n
    return [default if v is None else v for v in value]


def _or(value: Any, default: float) -> float:
    return default if value is None else value
