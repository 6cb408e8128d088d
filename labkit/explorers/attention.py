"""Choose a layer, a query and a head; see over the text where that query's attention went."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import attention as drawing
from labkit.viz.attention_data import Recording, record
from labkit.viz.palette import ROLES
from labkit.viz.picture import Picture
from labkit.viz.tokens import lay_out

if TYPE_CHECKING:
    from labkit.lab import Lab


class AttentionExplorer(Explorer):
    """Widgets over one recorded run; `layer`, `query` and `head` are the controls.

    lab, text   the model and what it reads (a text or ids), run once, here; or instead a
                `recording` that exists already
    layer, query, head   what is shown first; default: the last index source, the last token
    seconds     how long the last move took, from the changed control to the updated figure
    """

    def __init__(self, lab: Lab | None = None, text: str | Sequence[int] = "", *,
                 recording: Recording | None = None, layer: int | None = None,
                 query: int | None = None, head: int | None = None) -> None:
        import ipywidgets as widgets

        if recording is None:
            assert lab is not None, "give a lab and a text, or a recording"
            recording = record(lab, text)
        self.recording = recording
        config = recording.config
        self._placed = lay_out(recording.texts, drawing.COLUMNS)
        self.seconds = 0.0
        wide = widgets.Layout(width="560px")
        style = {"description_width": "80px"}
        sources = config.index_source_layer_ids
        self.layer = widgets.Dropdown(
            options=[(_named(role), role.layer) for role in config.roles],
            value=(sources[-1] if sources else 0) if layer is None else layer,
            description="layer", layout=wide, style=style)
        self.query = widgets.IntSlider(
            min=0, max=len(recording) - 1, value=len(recording) - 1 if query is None else query,
            description="query", layout=wide, style=style,
            tooltip="position of the token that asks; arrow keys move it by one")
        self.head = widgets.Dropdown(
            options=[("mean over all heads", -1),
                     *((f"head {h}", h) for h in range(config.num_attention_heads))],
            value=-1 if head is None else head, description="head", layout=wide, style=style)
        self._build(self.picture(), [self.layer, self.query, self.head])
        # A click on a token asks for that token.
        for trace in self.figure.data:
            if trace.name.startswith("tokens"):
                trace.on_click(self._clicked)
        for control in (self.layer, self.query, self.head):
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        head = self.head.value if self.head.value >= 0 else None
        return drawing.attention_over_text(self.recording, self.layer.value, self.query.value, head)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        head = self.head.value if self.head.value >= 0 else None
        look = self.recording.look(self.layer.value, self.query.value, head)
        self._redraw(drawing.parts(self.recording, look, self._placed),
                     drawing.alt(self.recording, look), drawing.caption(self.recording, look),
                     *drawing.table(self.recording, look))
        self.seconds = time.perf_counter() - started

    def _clicked(self, trace: Any, points: Any, state: Any) -> None:
        if points.point_inds:
            self.query.value = int(trace.customdata[points.point_inds[0]])


def _named(role: Any) -> str:
    text = f"{role.layer}: {ROLES[role.kind].label}"
    if role.ratio:
        text += f", r = {role.ratio}"
    if role.kind == "reuse":
        text += f", selection of layer {role.index_source}"
    if role.kind == "reindex":
        text += f", entries of layer {role.kv_source}"
    return text + ", publishes the pool" * role.publishes_candidates

