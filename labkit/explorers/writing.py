"""Write token by token: the text so far, a progress bar, and the distribution it is drawn from."""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.explorers.frame import Explorer
from labkit.viz.next_token import next_token_bars
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.engine.transcript import Event
    from labkit.lab import Lab

SHOWN = 8


class WritingExplorer(Explorer):
    """A model that writes on from `prompt`, one token a step.

    step() draws one token, run(n) several; both return what was written. The buttons do the
    same. max_new_tokens and sampling options are those of `Lab.stream`.
    """

    def __init__(self, lab: Lab, prompt: str, max_new_tokens: int = 60, *, seed: int = 0,
                 **options: Any) -> None:
        import ipywidgets as widgets

        self.lab, self.max_new_tokens, self.seed, self.options = lab, max_new_tokens, seed, options
        self.prompt = widgets.Text(
            value=prompt, description="prompt", continuous_update=False,
            layout=widgets.Layout(width="620px"), style={"description_width": "80px"},
            tooltip="Enter starts over with this text")
        self.next = widgets.Button(description="next token", tooltip="draw one token")
        self.more = widgets.Button(description="20 tokens", tooltip="draw up to twenty tokens")
        self.again = widgets.Button(description="start over", tooltip="forget what was written")
        self.progress = widgets.IntProgress(
            min=0, max=max_new_tokens, description="written", style={"description_width": "80px"},
            layout=widgets.Layout(width="620px"))
        self.text = widgets.HTML()
        self._begin()
        self.event: Event = next(self.generation)
        buttons = widgets.HBox([self.next, self.more, self.again])
        self._build(self.picture(), [self.prompt, buttons, self.progress, self.text], beside=True)
        self._update()
        self.next.on_click(lambda _: self.step())
        self.more.on_click(lambda _: self.run(20))
        self.again.on_click(lambda _: self.restart())
        self.prompt.observe(lambda _: self.restart(), names="value")

    def picture(self) -> Picture:
        """The text so far, and the distribution that its last token was drawn from."""
        picture = next_token_bars(self.event)
        text = f"\u201c{self.prompt.value}{self.generation.text}\u201d "
        return replace(picture, caption=text + picture.caption)

    def step(self) -> str:
        """Draw one token, unless the text has ended; the text of it."""
        return self.run(1)

    def run(self, count: int) -> str:
        """Draw up to `count` tokens; the text of them. Ctrl-C keeps what there is."""
        written = ""
        for event in self.generation:
            self.event = event
            written += event.text
            self._update()
            count -= 1
            if count <= 0:
                break
        return written

    def restart(self) -> None:
        """Begin anew with the prompt that stands in the box."""
        try:
            self._begin()
        except InputError as error:
            self.text.value = f'<p role="alert">{escape(str(error))}</p>'
            return
        self.event = next(self.generation)
        self._update()

    def _begin(self) -> None:
        self.generation = self.lab.stream(
            self.prompt.value, self.max_new_tokens, seed=self.seed, candidates=SHOWN,
            **self.options)

    def _update(self) -> None:
        picture = next_token_bars(self.event)
        with self.figure.batch_update():
            for trace, new in zip(self.figure.data, picture.figure.data, strict=True):
                trace.x, trace.y, trace.customdata = new.x, new.y, new.customdata
                if new.text is not None:
                    trace.text = new.text
            axis = picture.figure.layout.yaxis
            self.figure.layout.yaxis.ticktext = axis.ticktext
            self.figure.layout.yaxis.tickvals = axis.tickvals
            self.figure.layout.meta = picture.figure.layout.meta
        self.progress.value = len(self.generation.ids)
        self.progress.description = f"{self.progress.value} of {self.max_new_tokens}"
        self.text.value = (
            f'<p class="labkit-text" style="max-width:56em;white-space:pre-wrap">'
            f"<b>{escape(self.prompt.value)}</b>{escape(self.generation.text)}</p>")
        self._tell(picture.caption, picture.columns, picture.rows)
