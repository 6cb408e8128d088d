"""Choose a context and a machine; see what a sequence weighs in each design."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from labkit.explorers.frame import Explorer
from labkit.viz import footprint as drawing
from labkit.viz.picture import Picture

CONTEXTS = tuple(1 << n for n in range(10, 21))      # 1,024 to 1,048,576 tokens


class FootprintExplorer(Explorer):
    """`tokens` and `memory`, a machine's bytes less `weights`.

    machines: name -> bytes of all its memory. A machine that does not hold the weights is not
    offered.
    """

    def __init__(self, listed: Sequence[drawing.Design], machines: dict[str, float],
                 weights: float, tokens: int = CONTEXTS[-1]) -> None:
        import ipywidgets as widgets

        self.listed, self.seconds = tuple(listed), 0.0
        style, wide = {"description_width": "80px"}, widgets.Layout(width="560px")
        self.tokens = widgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in CONTEXTS], value=tokens, description="tokens",
            style=style, layout=wide)
        self.memory = widgets.Dropdown(
            options=[(f"{name}, {drawing.told(size - weights)} free", size - weights)
                     for name, size in machines.items() if size > weights],
            description="machine", style=style, layout=wide)
        self._build(self.picture(), [self.tokens, self.memory])
        for control in (self.tokens, self.memory):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.footprint(self.listed, self.tokens.value, self.memory.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        at = (self.listed, self.tokens.value, self.memory.value)
        self._redraw(drawing.parts(*at), drawing.alt(*at[:2]), drawing.caption(*at),
                     drawing.COLUMNS, drawing.table(*at))
        self.seconds = time.perf_counter() - started
