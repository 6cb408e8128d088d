"""Explorers of hyper-connections: coefficients of a token over all sites, and Sinkhorn's sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import streams as drawing
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab

STYLE = {"description_width": "80px"}


class StreamsExplorer(Explorer):
    """`token` and `what` (read, write, keep) over one recorded run."""

    def __init__(self, lab: Lab | None = None, text: str | Sequence[int] = "", *,
                 run: drawing.Streams | None = None) -> None:
        import ipywidgets as widgets

        if run is None:
            assert lab is not None, "give a lab and a text, or a run"
            run = drawing.record(lab, text)
        self.run, self.seconds = run, 0.0
        wide = widgets.Layout(width="560px")
        self.what = widgets.Dropdown(options=list(drawing.WHAT.items()), description="show",
                                     style=STYLE, layout=wide)
        self.token = widgets.IntSlider(min=0, max=len(run.texts) - 1, value=len(run.texts) - 1,
                                       description="token", style=STYLE, layout=wide)
        self._build(self.picture(), [self.what, self.token])
        for control in (self.what, self.token):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.streams_picture(self.run, self.token.value, self.what.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        at = (self.run, self.token.value, self.what.value)
        self._redraw(drawing.stream_parts(*at), drawing.streams_alt(*at),
                     drawing.streams_caption(*at), drawing.STREAM_COLUMNS,
                     drawing.streams_table(*at))
        self.seconds = time.perf_counter() - started


class SinkhornExplorer(Explorer):
    """`iterations` and `site` for one token of a recorded run."""

    def __init__(self, run: drawing.Streams, eps: float, token: int = -1,
                 iterations: int = 1) -> None:
        import ipywidgets as widgets

        self.run, self.eps, self.seconds = run, eps, 0.0
        self.token = range(len(run.texts))[token]
        wide = widgets.Layout(width="560px")
        self.iterations = widgets.IntSlider(min=1, max=20, value=iterations, style=STYLE,
                                            description="iterations", layout=wide)
        self.site = widgets.Dropdown(
            options=[(f"layer {i // 2}, {('attention', 'experts')[i % 2]}", i)
                     for i in range(len(run.pre))], description="site", style=STYLE, layout=wide)
        self._build(self.picture(), [self.iterations, self.site])
        for control in (self.iterations, self.site):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.sinkhorn_picture(self.run, self.site.value, self.token,
                                        self.iterations.value, self.eps)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        n = self.iterations.value
        rows, columns = drawing.sums(self.run, self.site.value, self.token, n, self.eps)
        self._redraw([{"y": rows}, {"y": columns}], drawing.sinkhorn_alt(rows, columns, n),
                     drawing.sinkhorn_caption(rows, columns, n), drawing.SUM_COLUMNS,
                     drawing.sums_table(rows, columns))
        self.seconds = time.perf_counter() - started
