"""What explorers share: a caption that is read aloud when it changes, a table, the theme."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from labkit.viz.picture import STYLE, Picture, Static, table_html


class Explorer(ABC):
    """Base class: `.view` is the whole, `.figure` the live figure, `.static()` the picture.

    A subclass makes its controls, then calls `_build`, and `_tell` after every change.
    """

    figure: Any
    view: Any

    @abstractmethod
    def picture(self) -> Picture:
        """What is shown at this moment, as a picture."""

    def static(self) -> Static:
        """What is shown at this moment, for places without widgets."""
        return self.picture().static()

    def _build(self, picture: Picture, controls: list[Any], beside: bool = False) -> None:
        """Make figure, caption and table once; `beside`: the table stands beside the figure."""
        import ipywidgets as widgets
        import plotly.graph_objects as go

        self.figure = go.FigureWidget(picture.figure)
        self.figure._config = {**(self.figure._config or {}), "displayModeBar": False}
        self.caption, self.table = widgets.HTML(), widgets.HTML()
        body = [self.figure, self.caption, self.table]
        if beside:
            wrap = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="24px")
            body = [widgets.Box([self.figure, self.table], layout=wrap), self.caption]
        self.view = widgets.VBox([widgets.HTML(STYLE), *controls, *body])
        self.view.add_class("labkit")
        self._tell(picture.caption, picture.columns, picture.rows)

    def _redraw(self, parts: Sequence[Mapping[str, Any]], alt: str, caption: str,
                columns: Sequence[str], rows: Sequence[Sequence[Any]],
                layout: Mapping[str, Any] | None = None) -> None:
        """Replace numbers in the figure that is there; axes, traces and widgets stay.

        parts: what changes in each trace, in order; traces behind them stay as they are.
        """
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, parts, strict=False):
                trace.update(new)
            self.figure.layout.update({**(layout or {}), "meta": {"alt": alt, "caption": caption}})
        self._tell(caption, columns, rows)

    def _tell(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Caption and table; they say the same as the figure to those who do not see it."""
        self.caption.value = (f'<p class="labkit-text" role="status" aria-live="polite">'
                              f"{escape(caption)}</p>")
        self.table.value = table_html(columns, rows)

    def _ipython_display_(self) -> None:
        """The widgets; with LABKIT_STATIC set, as in saved solutions, the picture."""
        from IPython.display import display

        display(self.static() if os.environ.get("LABKIT_STATIC") else self.view)
