"""Choose a block of the run and make one of its values an outlier; see what three recipes store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import blocks as drawing
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab

FACTORS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)


class BlockExplorer(Explorer):
    """Widgets over unrounded vectors of one run: `tensor`, `row`, `channels` and `outlier`.

    lab, text   the model and what it reads (a text or ids), run once, here; or instead `tensors`
                that `labkit.viz.blocks.unrounded` gave
    seconds     how long the last move took, from the changed control to the updated figure
    """

    def __init__(self, lab: Lab | None = None, text: str | Sequence[int] = "", *,
                 tensors: Mapping[str, drawing.Tensor] | None = None, tensor: str | None = None,
                 row: int = 0, outlier: float = 1) -> None:
        import ipywidgets as widgets

        if tensors is None:
            assert lab is not None, "give a lab and a text, or tensors"
            tensors = drawing.unrounded(lab, text)
        self.tensors, self.seconds = tensors, 0.0
        wide = widgets.Layout(width="560px")
        style = {"description_width": "80px"}
        self.tensor = widgets.Dropdown(options=list(tensors), value=tensor or next(iter(tensors)),
                                       description="vectors", layout=wide, style=style)
        self.row = widgets.IntSlider(min=0, max=self._last_row, value=row, description="row",
                                     layout=wide, style=style,
                                     tooltip="token or entry; arrow keys move it by one")
        self.channels = widgets.Dropdown(options=self._places, value=0, description="channels",
                                         layout=wide, style=style)
        self.outlier = widgets.SelectionSlider(
            options=[(f"\u00d7 {factor:g}", factor) for factor in FACTORS], value=outlier,
            description="outlier", layout=wide, style=style,
            tooltip="the block's largest value is multiplied by this")
        self._build(self.picture(), [self.tensor, self.row, self.channels, self.outlier])
        self.tensor.observe(self._chosen, names="value")
        for control in (self.row, self.channels, self.outlier):
            control.observe(self._moved, names="value")

    @property
    def _last_row(self) -> int:
        return self.tensors[self.tensor.value].rows.shape[0] - 1

    @property
    def _places(self) -> list[tuple[str, int]]:
        width, n = self.tensors[self.tensor.value].rows.shape[1], drawing.CHANNELS
        return [(f"{first} to {first + n - 1}", first) for first in range(0, width - n + 1, n)]

    def _state(self) -> tuple[str, int, int, float]:
        return self.tensor.value, self.row.value, self.channels.value, self.outlier.value

    def picture(self) -> Picture:
        return drawing.block_picture(self.tensors, *self._state())

    def _chosen(self, change: Any) -> None:
        """Other vectors may be fewer or narrower."""
        self.row.max = self._last_row
        if self._places != list(self.channels.options):
            self.channels.options = self._places
        self._moved(change)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        view = drawing.look(self.tensors, *self._state())
        self._redraw(view["parts"], view["alt"], view["caption"], view["columns"], view["rows"])
        self.seconds = time.perf_counter() - started
