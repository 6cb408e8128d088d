"""What the index keeps and what it costs: one query, all queries, and any length of text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.explorers.frame import Explorer
from labkit.train.ablations import cache_bytes_a_token
from labkit.viz import overlap, selection_cost
from labkit.viz import selection as drawing
from labkit.viz.palette import ROLES
from labkit.viz.picture import Picture
from labkit.viz.selection_data import Selections

WIDE = {"width": "560px"}
STYLE = {"description_width": "80px"}


class SelectionExplorer(Explorer):
    """One query of one layer: its entries by attention, and what the index takes of them.

    run         a recorded run (`record_selections`)
    layer, query, topk   what is shown first; the model's own K unless said otherwise
    seconds     how long the last move took, from the changed control to the updated figure
    """

    def __init__(self, run: Selections, layer: int | None = None, query: int | None = None,
                 topk: int | None = None) -> None:
        import ipywidgets as widgets

        self.run, self.seconds = run, 0.0
        roles, first = run.config.roles, max(run.config.compress_ratios) - 1
        names = [(f"{i}: {ROLES[roles[i].kind].label}, r = {roles[i].ratio}"
                  + (f", index of layer {roles[i].index_source}" if roles[i].kind == "reuse"
                     else ""), i) for i in run.readers]
        wide = widgets.Layout(**WIDE)
        self.layer = widgets.Dropdown(
            options=names, value=run.config.index_source_layer_ids[-1] if layer is None else layer,
            description="layer", layout=wide, style=STYLE)
        self.query = widgets.IntSlider(
            min=first, max=len(run) - 1, value=len(run) - 1 if query is None else query,
            description="query", layout=wide, style=STYLE,
            tooltip="position of the token that asks; arrow keys move it by one")
        self.topk = widgets.IntSlider(
            min=1, max=len(run), value=topk or run.config.index_topk, description="K",
            layout=wide, style=STYLE, tooltip="entries that the index may take")
        controls = [self.layer, self.query, self.topk]
        self._build(self.picture(), controls)
        for control in controls:
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return drawing.kept_of_query(self.run, self.layer.value, self.query.value, self.topk.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        ranked = self.run.ranked(self.layer.value, self.query.value, self.topk.value)
        self._redraw(drawing.parts(ranked), drawing.alt(self.run, ranked),
                     drawing.caption(self.run, ranked), *drawing.table(self.run, ranked))
        self.seconds = time.perf_counter() - started


class OverlapExplorer(Explorer):
    """All ways of selecting against each other, over a range of queries of one of some texts.

    runs    name -> recorded run; all selections are compared once, here
    """

    def __init__(self, runs: Mapping[str, Selections], measure: str = "jaccard") -> None:
        import ipywidgets as widgets

        if not runs:
            raise InputError("runs is empty: give at least one recorded run")
        self.runs, self.seconds = dict(runs), 0.0
        for run in self.runs.values():
            _ = run.comparison
        longest = max(map(len, self.runs.values()))
        wide = widgets.Layout(**WIDE)
        self.text = widgets.Dropdown(options=list(self.runs), description="text", layout=wide,
                                     style=STYLE)
        self.measure = widgets.Dropdown(
            options=[(words, key) for key, words in overlap.MEASURES.items()], value=measure,
            description="measure", layout=wide, style=STYLE)
        self.queries = widgets.IntRangeSlider(
            min=0, max=longest - 1, value=(0, longest - 1), description="queries", layout=wide,
            style=STYLE, tooltip="mean over the queries of this range")
        controls = [self.text, self.measure, self.queries]
        self._build(self.picture(), controls)
        for control in controls:
            control.observe(self._moved, names="value")

    def picture(self) -> Picture:
        return overlap.overlap_matrix(self.runs[self.text.value], self.measure.value,
                                      *self.queries.value)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        run, measure = self.runs[self.text.value], self.measure.value
        first, last = self.queries.value
        compared, config = run.comparison, run.config
        self._redraw([overlap.cells(compared.mean(measure, first, last))],
                     overlap.alt(compared, measure, first, last),
                     overlap.caption(compared, config, measure, first, last),
                     *overlap.table(compared, config, first, last))
        self.seconds = time.perf_counter() - started


class CostExplorer(Explorer):
    """Multiply-adds of looking, as far as a configuration decides them.

    configs  name -> configuration; `config` is the chosen one with the ratio and K of the sliders
    """

    def __init__(self, configs: Mapping[str, ModelConfig], context: int = 2**20) -> None:
        import ipywidgets as widgets

        self.configs, self.seconds = dict(configs), 0.0
        wide = widgets.Layout(**WIDE)
        self.model = widgets.Dropdown(options=list(self.configs), description="model", layout=wide,
                                      style=STYLE)
        first = self.configs[self.model.value]
        self.context = widgets.SelectionSlider(
            options=[(f"{2**p:,}", 2**p) for p in range(selection_cost.SHORTEST,
                                                        selection_cost.LONGEST + 1)],
            value=context, description="context", layout=wide, style=STYLE)
        self.ratio = widgets.SelectionSlider(
            options=[1, 2, 4, 8, 16], value=_ratio(first), description="ratio", layout=wide,
            style=STYLE, tooltip="tokens that the encoder squeezes into an entry")
        self.topk = widgets.SelectionSlider(
            options=[2**p for p in range(4, 13)], value=first.index_topk, description="K",
            layout=wide, style=STYLE, tooltip="entries that a query may select")
        controls = [self.model, self.context, self.ratio, self.topk]
        self._build(self.picture(), controls)
        self.model.observe(self._chosen, names="value")
        for control in controls[1:]:
            control.observe(self._moved, names="value")

    @property
    def config(self) -> ModelConfig:
        """The chosen configuration, changed as the sliders say."""
        return selection_cost.changed(self.configs[self.model.value], self.ratio.value,
                                      self.topk.value)

    def picture(self) -> Picture:
        picture = selection_cost.cost_of_looking(self.config, self.context.value)
        return Picture(picture.figure, picture.alt, picture.caption + self._memory(),
                       picture.columns, picture.rows)

    def _memory(self) -> str:
        return (f" Entries and keys, packed, take {cache_bytes_a_token(self.config):,.0f} bytes "
                "a token of text.")

    def _chosen(self, change: Any) -> None:
        """Another model begins with its own numbers."""
        config = self.configs[self.model.value]
        self.ratio.value, self.topk.value = _ratio(config), config.index_topk
        self._moved(change)

    def _moved(self, change: Any) -> None:
        started = time.perf_counter()
        config, context = self.config, self.context.value
        self._redraw(selection_cost.parts(config, context), selection_cost.alt(config, context),
                     selection_cost.caption(config, context) + self._memory(),
                     *selection_cost.table(config, context))
        self.seconds = time.perf_counter() - started


def _ratio(config: ModelConfig) -> int:
    """The ratio of the first layer that compresses."""
    return next(r for r in config.compress_ratios if r)
