"""Choose how a prompt is read and how long it is; see what every layer computes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.explorers.frame import Explorer
from labkit.viz import passes as drawing
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab


class PrefillExplorer(Explorer):
    """Widgets over prefills of the beginnings of one text; `mode` and `tokens` are the controls.

    Every prefill that can be chosen has run once, when the explorer was made: `lengths` times the
    four of `labkit.viz.passes.MODES`. Seconds are of those runs. InputError for a text shorter
    than the longest of the lengths.
    """

    def __init__(self, lab: Lab, text: str | Sequence[int],
                 lengths: Sequence[int] = (64, 128, 256, 512)) -> None:
        import ipywidgets as widgets

        ids = lab.encode(text)
        if len(ids) < max(lengths):
            raise InputError(f"the text has {len(ids)} tokens, fewer than {max(lengths)}: give a "
                             "longer one, or shorter lengths")
        self.config, self.lengths, self.seconds = lab.config, tuple(sorted(lengths)), 0.0
        drawing.prefill(lab, ids[: self.lengths[0]], "full")   # the first of all is slower
        self.runs = {(mode, n): drawing.prefill(lab, ids[:n], mode)
                     for n in self.lengths for mode in drawing.MODES}
        style, wide = {"description_width": "80px"}, widgets.Layout(width="560px")
        self.mode = widgets.Dropdown(options=list(drawing.MODES), value="CED, last window",
                                     description="prefill", style=style, layout=wide)
        self.tokens = widgets.SelectionSlider(
            options=[(f"{n:,}", n) for n in self.lengths], value=self.lengths[-1],
            description="tokens", style=style, layout=wide)
        self._build(self.picture(), [self.mode, self.tokens])
        for control in (self.mode, self.tokens):
            control.observe(self._moved, names="value")

    @property
    def run(self) -> drawing.Prefill:
        """The prefill that is shown."""
        return self.runs[self.mode.value, self.tokens.value]

    @property
    def full(self) -> drawing.Prefill:
        """The full prefill of the same prompt."""
        return self.runs["full", self.tokens.value]

    def picture(self) -> Picture:
        return drawing.passes_map(self.config, self.run, self.full, self.lengths[-1])

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        self._redraw(drawing.parts(self.config, self.run), drawing.alt(self.config, self.run),
                     drawing.caption(self.run, self.full), drawing.COLUMNS,
                     drawing.table(self.config, self.run, self.full))
        self.seconds = time.perf_counter() - started
