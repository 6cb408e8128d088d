"""Go through the layers; see which experts the tokens of each text visited."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from labkit.explorers.frame import Explorer
from labkit.viz import routing as drawing
from labkit.viz.picture import Picture

if TYPE_CHECKING:
    from labkit.lab import Lab


class RoutingExplorer(Explorer):
    """`layer` is the control; texts by name, each run once when the explorer is made."""

    def __init__(self, lab: Lab, texts: dict[str, str | Sequence[int]], layer: int = 0) -> None:
        import ipywidgets as widgets

        self.found, self.seconds = drawing.visits(lab, texts), 0.0
        self.layer = widgets.IntSlider(
            min=0, max=lab.config.num_hidden_layers - 1, value=layer, description="layer",
            style={"description_width": "80px"}, layout=widgets.Layout(width="560px"))
        self._build(self.picture(), [self.layer])
        self.layer.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.routing_picture(self.found, self.layer.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        at = (self.found, self.layer.value)
        self._redraw(drawing.routing_parts(*at), drawing.routing_alt(*at),
                     drawing.routing_caption(*at), drawing.COLUMNS, drawing.routing_table(*at))
        self.seconds = time.perf_counter() - started
