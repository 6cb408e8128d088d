"""Make a table smaller or larger; see how many n-grams of a corpus share a row in it."""

from __future__ import annotations

import time
from typing import Any

from labkit.explorers.frame import Explorer
from labkit.viz import ngrams as drawing
from labkit.viz.ngram_data import Census, table_sizes
from labkit.viz.picture import Picture


class CollisionExplorer(Explorer):
    """A slider over table sizes; every size hashes the corpus' distinct n-grams anew.

    counted  the n-grams (`labkit.viz.ngram_data.census`)
    largest  the last size, e.g. a released table's prime
    rows     the size shown first; default: the config's own
    seconds  how long the last move took, from the changed control to the updated figure
    """

    def __init__(self, counted: Census, largest: int, rows: int | None = None) -> None:
        import ipywidgets as widgets

        self.counted, self.seconds = counted, 0.0
        sizes = table_sizes(counted.config, largest)
        own = next(size for size in sizes if size >= counted.config.engram_vocab_size)
        self.rows = widgets.SelectionSlider(
            options=[(f"{size:,}", size) for size in sizes], value=own if rows is None else rows,
            description="table rows", continuous_update=False,
            layout=widgets.Layout(width="560px"), style={"description_width": "80px"},
            tooltip="a prime; arrow keys double or halve it")
        self._build(self.picture(), [self.rows])
        self.rows.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.collisions(self.counted, self.rows.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        rows = self.rows.value
        found = drawing.measure(self.counted, rows)
        self._redraw(drawing.collision_parts(self.counted, rows, found),
                     drawing.collision_alt(rows, found),
                     drawing.collision_caption(self.counted, rows, found),
                     drawing.COLLISION_COLUMNS, drawing.collision_rows(rows, found))
        self.seconds = time.perf_counter() - started
