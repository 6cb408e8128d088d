"""Type a text, choose a token and an Engram layer: its n-grams, their rows, all gates."""

from __future__ import annotations

import time
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.explorers.frame import Explorer
from labkit.viz import engram as drawing
from labkit.viz.engram_data import record_engram
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab


class EngramExplorer(Explorer):
    """Widgets over a run that is made anew when the text changes.

    text, token, layer   the controls and what is shown first; default: the last token, the first
                         Engram layer
    recording            the run that is shown
    seconds              how long the last move took, from the changed control to the figure; of
                         a new text the run of the model is part of it
    """

    def __init__(self, lab: Lab, text: str, *, token: int | None = None,
                 layer: int | None = None) -> None:
        import ipywidgets as widgets

        self.lab, self.seconds = lab, 0.0
        self.recording = record_engram(lab, text)
        last = len(self.recording) - 1
        layout, style = widgets.Layout(width="620px"), {"description_width": "80px"}
        self.text = widgets.Text(
            value=text, description="text", continuous_update=False, layout=layout, style=style,
            tooltip="Enter runs the model over this text")
        self.token = widgets.IntSlider(
            min=0, max=last, value=last if token is None else token, description="token",
            layout=layout, style=style,
            tooltip="position of the token that looks up; arrow keys move it by one")
        layers = lab.config.engram_layer_ids
        self.layer = widgets.Dropdown(
            options=[(f"layer {number}", number) for number in layers],
            value=layers[0] if layer is None else layer, description="Engram of", layout=layout,
            style=style)
        self.problem = widgets.HTML()
        self._build(self.picture(), [self.text, self.token, self.layer, self.problem])
        for trace in self.figure.data:
            if trace.name == "tokens":
                trace.on_click(self._clicked)
        self._busy = False
        self.text.observe(self._typed, names="value")
        for control in (self.token, self.layer):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.engram_over_text(self.recording, self.layer.value, self.token.value)

    def _typed(self, change: Any) -> None:
        """A new text: run, then show its last token."""
        started = time.perf_counter()
        try:
            self.recording = record_engram(self.lab, self.text.value)
        except InputError as error:
            self.problem.value = f'<p role="alert">{escape(str(error))}</p>'
            return
        self.problem.value = ""
        self._busy = True
        try:
            self.token.max = len(self.recording) - 1
            self.token.value = self.token.max
        finally:
            self._busy = False
        self._show()
        self.seconds = time.perf_counter() - started

    def _moved(self, change: Any) -> None:
        if self._busy:
            return
        started = time.perf_counter()
        self._show()
        self.seconds = time.perf_counter() - started

    def _show(self) -> None:
        state = self.recording, self.layer.value, self.token.value
        self._redraw(drawing.parts(*state), drawing.alt(*state), drawing.caption(*state),
                     *drawing.table(*state))

    def _clicked(self, trace: Any, points: Any, state: Any) -> None:
        if points.point_inds:
            self.token.value = max(0, int(trace.customdata[points.point_inds[0]]))
