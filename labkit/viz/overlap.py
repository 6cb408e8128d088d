"""Selections against each other: one cell for every pair of ways to select.

Columns and rows are the indexes and, for every layer that reads entries, what its own attention
would pick. Where the two number the entries of different caches there is nothing to compare.
"""

from __future__ import annotations

from math import isnan
from typing import Any

import torch

from labkit.config import ModelConfig
from labkit.viz.palette import MAGNITUDE, OKABE_ITO, contrast
from labkit.viz.picture import Picture, base_layout
from labkit.viz.selection_data import Column, Comparison, Selections

MEASURES = {"jaccard": "overlap of two selections (Jaccard)",
            "kept": "share of the row's attention on entries that the column's selection keeps"}
EMPTY = "rgba(128,128,128,.12)"


def overlap_matrix(run: Selections, measure: str = "jaccard", first: int = 0,
                   last: int | None = None) -> Picture:
    """The matrix of one measure (`MEASURES`), the mean over the queries first..last."""
    import plotly.graph_objects as go

    last = len(run) - 1 if last is None else last
    compared = run.comparison
    fig = go.Figure(data=[_empty_trace(go), _frames(go, compared, run.config)],
                    layout=_layout(compared))
    values = compared.mean(measure, first, last)
    fig.data[0].update(cells(values))
    columns, rows = table(compared, run.config, first, last)
    return Picture(fig, alt(compared, measure, first, last),
                   caption(compared, run.config, measure, first, last), columns, rows)


def cells(values: torch.Tensor) -> dict[str, Any]:
    """The matrix [N,N] as bars of height 1: row i at y = i, dark is small, light is large."""
    from plotly.colors import sample_colorscale

    n, flat = len(values), values.flatten().tolist()
    known = [v for v in flat if not isnan(v)]
    shades = iter(_hex(c) for c in sample_colorscale(MAGNITUDE, known)) if known else iter(())
    colours = [EMPTY if isnan(v) else next(shades) for v in flat]
    return {"x": [j for _ in range(n) for j in range(n)],
            "base": [i - 0.5 for i in range(n) for _ in range(n)], "y": [1.0] * (n * n),
            "marker": {"color": colours}, "text": ["" if isnan(v) else f"{v:.0%}" for v in flat],
            "insidetextfont": {"color": [_ink(c) for c in colours]},
            "customdata": [None if isnan(v) else v for v in flat]}   # JSON knows no nan


def _hex(colour: str) -> str:
    """"rgb(1, 2, 3)" -> "#010203"."""
    numbers = [round(float(v)) for v in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return "#" + "".join(f"{v:02X}" for v in numbers)


def _ink(colour: str) -> str:
    """Black or white, whichever can be read better on it."""
    if colour == EMPTY:
        return "#000000"
    return max(("#000000", "#FFFFFF"), key=lambda ink: contrast(ink, colour))


def _empty_trace(go: Any) -> Any:
    return go.Bar(name="pairs", width=1.0, textposition="inside", insidetextanchor="middle",
                  textangle=0, constraintext="none", showlegend=False,
                  insidetextfont={"size": 12}, marker={"line": {"color": "#888", "width": 1}},
                  hovertemplate="%{customdata:.1%}<extra></extra>")


def _frames(go: Any, compared: Comparison, config: ModelConfig) -> Any:
    """A frame around the index that a layer really reads."""
    x: list[float | None] = []
    y: list[float | None] = []
    for i, j in read_cells(compared, config):
        x += [j - 0.45, j + 0.45, j + 0.45, j - 0.45, j - 0.45, None]
        y += [i - 0.42, i - 0.42, i + 0.42, i + 0.42, i - 0.42, None]
    return go.Scatter(name="what the layer reads", x=x, y=y, mode="lines", hoverinfo="skip",
                      line={"color": OKABE_ITO["vermilion"], "width": 3})


def _layout(compared: Comparison) -> dict[str, Any]:
    names = [column.name for column in compared.columns]
    n, pixels = len(names), 58
    axis = {"fixedrange": True, "showgrid": False, "zeroline": False,
            "tickvals": list(range(n)), "ticktext": names}
    return base_layout(
        100 + pixels * n, 88 + 30 * n, margin={"l": 80, "r": 20, "t": 36, "b": 52},
        xaxis={"range": [-0.5, n - 0.5], "title": {"text": "selection (index: of that layer; own: "
               "what its attention would pick)"}, **axis},
        yaxis={"range": [n - 0.5, -0.5], **axis})


def read_cells(compared: Comparison, config: ModelConfig) -> list[tuple[int, int]]:
    """(row, column): what a layer would pick itself, and the index whose selection it reads."""
    at = {(column.kind, column.layer): i for i, column in enumerate(compared.columns)}
    return [(i, at["index", config.roles[column.layer].index_source])  # type: ignore[index]
            for i, column in enumerate(compared.columns) if column.kind == "own"]


# ---------------------------------------------------------------------------------- in words
def _pairs(compared: Comparison, config: ModelConfig, values: torch.Tensor,
           ) -> list[tuple[float, Column, Column]]:
    found = [(float(values[i, j]), compared.columns[i], compared.columns[j])
             for i, j in read_cells(compared, config)]
    return [row for row in found if not isnan(row[0])]


def caption(compared: Comparison, config: ModelConfig, measure: str, first: int, last: int) -> str:
    """The finding: the framed cells, least and most."""
    framed = _pairs(compared, config, compared.mean(measure, first, last))
    if not framed:
        return (f"Queries {first} to {last}: none of them sees more entries than it may select "
                f"(K = {config.index_topk}), so nothing is chosen.")
    low, high = min(framed, key=lambda p: p[0]), max(framed, key=lambda p: p[0])
    what = {"jaccard": "What a layer's own attention would pick and what it reads (framed): of "
                       "the entries in either, between {} and {} are in both",
            "kept": "What a layer reads (framed) keeps between {} and {} of its attention on "
                    "entries"}[measure]
    return (f"Queries {first} to {last}, {compared.chosen(first, last)} of which have to choose. "
            + what.format(f"{low[0]:.1%} (layer {low[1].layer})",
                          f"{high[0]:.1%} (layer {high[1].layer})") + ".")


def alt(compared: Comparison, measure: str, first: int, last: int) -> str:
    values, names = compared.mean(measure, first, last), [c.name for c in compared.columns]
    listed = [f"{names[i]} with {names[j]} {float(values[i, j]):.0%}"
              for i in range(len(names)) for j in range(len(names))
              if i != j and not isnan(float(values[i, j])) and (measure == "kept" or i < j)]
    return (f"Matrix of {len(names)} ways to select, {MEASURES[measure]}, queries {first} to "
            f"{last}: {'; '.join(listed) or 'no query has to choose'}.")


def table(compared: Comparison, config: ModelConfig, first: int, last: int,
          ) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Both measures of the framed cells, and what a random selection would keep."""
    within = (compared.queries >= first) & (compared.queries <= last)
    random = compared.random[within].nanmean(0)
    both = [compared.mean(measure, first, last) for measure in ("jaccard", "kept")]
    rows = []
    for i, j in read_cells(compared, config):
        row, column = compared.columns[i], compared.columns[j]
        values = [float(both[0][i, j]), float(both[1][i, j]), float(random[i])]
        rows.append((f"layer {row.layer}", column.name,
                     *("-" if isnan(v) else f"{v:.1%}" for v in values)))
    return ("layer", "reads", "overlap with its own choice", "keeps", "random keeps"), tuple(rows)
