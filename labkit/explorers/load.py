"""Change the number of requests and see how much each policy verifies, and what it gains."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from labkit.explorers.frame import Explorer
from labkit.viz import load as drawing
from labkit.viz.load_data import DELAY, STEPS, Load
from labkit.viz.picture import Picture


class LoadExplorer(Explorer):
    """`requests`, `kind`, `rates` and `step` are the controls; `seconds`: of the last move.

    loads  by the name of the step rates that they count with; of the same proposals
    """

    def __init__(self, loads: Mapping[str, Load], requests: int = 1,
                 kind: str | None = None) -> None:
        import ipywidgets as widgets

        self.loads, self.seconds = dict(loads), 0.0
        self.highest = max(load.highest for load in self.loads.values())
        load = next(iter(self.loads.values()))
        wide, style = widgets.Layout(width="560px"), {"description_width": "90px"}
        self.requests = widgets.IntSlider(
            min=1, max=load.rates.largest, value=requests, description="requests R", layout=wide,
            style=style, tooltip="requests in a step; arrow keys move it by one")
        self.kind = widgets.Dropdown(options=list(load.kinds), value=kind or load.kinds[0],
                                     description="text", layout=wide, style=style)
        self.rates = widgets.Dropdown(options=list(self.loads), description="step rates",
                                      layout=wide, style=style)
        self.step = widgets.IntSlider(
            min=DELAY, max=STEPS - 1, value=DELAY, description="step", layout=wide, style=style,
            tooltip="each step has other proposals")
        self._build(self.picture(), [self.requests, self.kind, self.rates, self.step])
        for control in (self.requests, self.kind, self.rates, self.step):
            control.observe(self._moved, names="value")

    @property
    def load(self) -> Load:
        """The one whose rates are chosen."""
        return self.loads[self.rates.value]

    def picture(self) -> Picture:
        return drawing.throughput(self.load, self.kind.value, self.requests.value,
                                  self.step.value, self.highest)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        kind, requests, step = self.kind.value, self.requests.value, self.step.value
        choices = self.load.choices(kind, requests)
        self._redraw(drawing.parts(self.load, choices, kind, requests, step),
                     drawing.alt(choices, kind, requests, step),
                     drawing.caption(choices, kind, requests, step), *drawing.table(choices, step))
        self.seconds = time.perf_counter() - started
