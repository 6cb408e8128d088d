"""Switch each cache quantiser on or off and follow the error from the codes to the text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import rounding as drawing
from labkit.viz.palette import ROUNDING
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab


class RoundingExplorer(Explorer):
    """Three checkboxes in `boxes` ("fp8", "mxfp4", "nvfp4") over eight runs of one text.

    lab, text   the model and what it reads (a text or ids): run here, once for every combination,
                so that a move has nothing to compute; or instead `chains` that
                `labkit.viz.rounding.measure` gave
    seconds     how long the last move took, from the changed control to the updated figure
    """

    def __init__(self, lab: Lab | None = None, text: str | Sequence[int] = "", *,
                 chains: Mapping[drawing.Chosen, drawing.Chain] | None = None,
                 on: Sequence[str] = tuple(ROUNDING)) -> None:
        import ipywidgets as widgets

        if chains is None:
            assert lab is not None, "give a lab and a text, or chains"
            chains = drawing.measure(lab, text)
        self.chains, self.seconds = chains, 0.0
        self.boxes = {name: widgets.Checkbox(
            value=name in on, description=f"{mark.label} ({mark.letter})", indent=False,
            layout=widgets.Layout(width="280px"), tooltip=f"round with {name} or not")
            for name, mark in ROUNDING.items()}
        self._build(self.picture(), [widgets.HBox(list(self.boxes.values()))])
        for box in self.boxes.values():
            box.observe(self._moved, names="value")

    @property
    def on(self) -> list[str]:
        """The recipes that are on."""
        return [name for name, box in self.boxes.items() if box.value]

    def picture(self) -> Picture:
        return drawing.rounding_picture(self.chains, self.on)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        view = drawing.look(self.chains, self.on)
        self._redraw(view["parts"], view["alt"], view["caption"], view["columns"], view["rows"])
        self.seconds = time.perf_counter() - started
