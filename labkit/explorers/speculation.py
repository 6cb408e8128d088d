"""Step through a text that is written with the draft: what was guessed, what stayed, and why."""

from __future__ import annotations

import time
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import Fixed, Policy, Threshold
from labkit.errors import InputError
from labkit.explorers.frame import Explorer
from labkit.viz import speculation as drawing
from labkit.viz.picture import Picture
from labkit.viz.speculation_data import record

if TYPE_CHECKING:
    from labkit.lab import Lab

LEAST = 0.5             # survival from which on a slot is sent, under "a >= 0.5"


class SpeculationExplorer(Explorer):
    """`step` moves through the steps of one text; `prompt`, `temperature` and `policy` write it
    anew. `recording` is what is shown; `seconds`: of the last move of `step`.
    """

    def __init__(self, lab: Lab, prompt: str, max_new_tokens: int = 40, *, seed: int = 0,
                 temperature: float = 1.0) -> None:
        import ipywidgets as widgets

        self.lab, self.max_new_tokens, self.seed = lab, max_new_tokens, seed
        self.rows = lab.config.dspark_block_size
        self.seconds = 0.0
        wide, style = widgets.Layout(width="620px"), {"description_width": "90px"}
        self.prompt = widgets.Text(value=prompt, description="prompt", continuous_update=False,
                                   layout=wide, style=style, tooltip="Enter writes a new text")
        self.temperature = widgets.Dropdown(
            options=[("0 (greedy)", 0.0), ("0.7", 0.7), ("1", 1.0)], value=temperature,
            description="temperature", layout=wide, style=style)
        self.policy = widgets.Dropdown(
            options=[("all slots", 0.0), (f"slots with a \u2265 {LEAST}", LEAST)], value=0.0,
            description="send", layout=wide, style=style)
        self.step = widgets.IntSlider(
            min=1, max=1, value=1, description="step", layout=wide, style=style,
            tooltip="passes of draft and target; arrow keys move it by one")
        self.text = widgets.HTML()
        self._record()
        self._build(self.picture(), [self.prompt, self.temperature, self.policy, self.text,
                                     self.step])
        self._moved(None)
        self.step.observe(self._moved, names="value")
        for control in (self.prompt, self.temperature, self.policy):
            control.observe(self._again, names="value")

    def picture(self) -> Picture:
        """The step, and the text up to it."""
        picture = drawing.speculation_step(self.recording, self.step.value - 1, self.rows)
        return replace(picture, caption=f"\u201c{self._written()}\u201d {picture.caption}")

    def _written(self) -> str:
        """The text before the step."""
        start = self.recording.steps[self.step.value - 1].start
        return self.recording.prompt + "".join(self.recording.texts[:start])

    def _record(self) -> None:
        policy: Policy = Threshold(self.policy.value) if self.policy.value else Fixed(self.rows)
        self.recording = record(self.lab, self.prompt.value, self.max_new_tokens,
                                Sampling(self.temperature.value), self.seed, policy)
        if not self.recording.steps:
            raise InputError("the text ended with its first token: try another prompt")

    def _again(self, change: Any) -> None:
        """Another text; the slider goes back to its first step."""
        before = self.recording
        try:
            self._record()
        except InputError as error:
            self.recording = before
            self.text.value = f'<p role="alert">{escape(str(error))}</p>'
            return
        self.step.unobserve(self._moved, names="value")
        self.step.value, self.step.max = 1, len(self.recording.steps)
        self.step.observe(self._moved, names="value")
        self._moved(None)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        self.step.max = len(self.recording.steps)
        number = self.step.value - 1
        step = self.recording.steps[number]
        words = f"\u201c{self._written()}\u201d {drawing.caption(self.recording, number)}"
        stop = step.start + step.kept + 1
        self.text.value = (
            '<p class="labkit-text" style="max-width:56em;white-space:pre-wrap">'
            f"{escape(self._written())}<b>"
            f"{escape(''.join(self.recording.texts[step.start : stop]))}</b></p>")
        self._redraw(drawing.parts(step, self.rows), drawing.alt(self.recording, number), words,
                     *drawing.table(step), layout={"yaxis": drawing.ticks(step, self.rows)})
        self.seconds = time.perf_counter() - started
