"""Replace one token of a text; see what of the run moves, in this encoder and in one that reads
both ways."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import causal as drawing
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab

MODELS = {"causal, as released": False, "an encoder that reads both ways": True}


class CausalExplorer(Explorer):
    """`position` says which token is replaced by `other`, `model` which way the encoder reads.

    A move runs the model once over the changed text; runs of the unchanged one are kept.
    """

    def __init__(self, lab: Lab, text: str | Sequence[int], other: str = " not",
                 position: int | None = None) -> None:
        import ipywidgets as widgets

        self.lab, self.ids = lab, lab.encode(text)
        self.other = lab.tokenizer.encode(other)[0]
        self.before = {both: drawing.streams(lab, self.ids, both) for both in MODELS.values()}
        style, wide = {"description_width": "80px"}, widgets.Layout(width="560px")
        places = [p for p, id_ in enumerate(self.ids) if p and id_ != self.other]
        at = places[len(places) // 2] if position is None else position
        self.position = widgets.SelectionSlider(
            options=places, value=at, description="token", continuous_update=False, style=style,
            layout=wide)
        self.model = widgets.Dropdown(options=list(MODELS), description="encoder", style=style,
                                      layout=wide)
        self.found = self._run()
        self.seconds = 0.0
        self._build(self.picture(), [self.position, self.model])
        for control in (self.position, self.model):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.causal_map(self.lab.config, self.found)

    def _run(self) -> drawing.Change:
        both, at = MODELS[self.model.value], self.position.value
        after = drawing.streams(self.lab, drawing.replaced(self.ids, at, self.other), both)
        return drawing.change(self.before[both], after, at)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        self.found = self._run()
        self._redraw(drawing.parts(self.found), drawing.alt(self.found),
                     drawing.caption(self.found), drawing.COLUMNS, drawing.table(self.found))
        self.seconds = time.perf_counter() - started
