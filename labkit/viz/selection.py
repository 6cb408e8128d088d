"""What the index keeps: of one query, of every layer.

`kept_of_query` puts a query's entries in the order of its layer's attention. The same axis counts
both ranks and K: the bar at rank 7 is the seventh entry, the curves at 7 are what selections of
seven entries keep. `parts` turns a `Ranked` into numbers; the explorer replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

from labkit.viz.palette import NEUTRAL, ROLES, SELECTION
from labkit.viz.picture import Picture, base_layout
from labkit.viz.selection_data import Kept, Ranked, Selections, kept_by_layer
from labkit.viz.tokens import visible

WIDTH = 860
BARS = 48            # ranks that have a bar; behind them bars would be thinner than a pixel
STRIP = (-0.10, 0.06)    # base and height of the strip that says what is taken


def kept_of_query(run: Selections, layer: int, query: int, topk: int | None = None) -> Picture:
    """The figure of one query of one layer, with `topk` entries to select (None: the model's).

    InputError where the query sees no entries.
    """
    import plotly.graph_objects as go

    ranked = run.ranked(layer, query, topk or run.config.index_topk)
    fig = go.Figure(data=_empty_traces(go), layout=_layout(len(run)))
    for trace, values in zip(fig.data, parts(ranked), strict=True):
        trace.update(values)
    columns, rows = table(run, ranked)
    return Picture(fig, alt(run, ranked), caption(run, ranked), columns, rows)


def parts(ranked: Ranked) -> list[dict[str, Any]]:
    """What changes with layer, query and K: one dict for each trace, in order."""
    n, ranks = len(ranked.share), range(1, len(ranked.share) + 1)
    at = log2(ranked.topk)
    return [
        _bars(ranked, True), _bars(ranked, False), _strip(ranked, True), _strip(ranked, False),
        {"x": [log2(k) for k in ranks], "y": [k / n for k in ranks]},
        {"x": [log2(k) for k in ranks], "y": ranked.best},
        {"x": [log2(k) for k in ranks][: len(ranked.by_index)], "y": ranked.by_index},
        {"x": [at, at], "y": [STRIP[0], 1.0]},
        {"x": [at], "y": [ranked.kept], "text": [f" {ranked.kept:.1%} "],
         "textposition": "bottom left" if at > 6 else "bottom right"},
    ]


def _bars(ranked: Ranked, taken: bool) -> dict[str, Any]:
    own = [j for j in range(min(BARS, len(ranked.share))) if ranked.taken[j] == taken]
    left = [log2(j + 0.5) for j in own]
    return {"x": left, "width": [log2(j + 1.5) - x for j, x in zip(own, left, strict=True)],
            "y": [ranked.share[j] for j in own],
            "customdata": [[ranked.entries[j], j + 1] for j in own]}


def _strip(ranked: Ranked, taken: bool) -> dict[str, Any]:
    """Ranks next to each other that share their fate are one piece."""
    own = [(start, stop) for start, stop, fate in _pieces(ranked.taken) if fate == taken]
    left = [log2(start + 0.5) for start, _ in own]
    return {"x": left, "y": [STRIP[1]] * len(own), "base": [STRIP[0]] * len(own),
            "width": [log2(stop + 0.5) - x for (_, stop), x in zip(own, left, strict=True)],
            "customdata": [[start + 1, stop] for start, stop in own]}


def _pieces(taken: list[bool]) -> Iterator[tuple[int, int, bool]]:
    start = 0
    for j in range(1, len(taken) + 1):
        if j == len(taken) or taken[j] != taken[start]:
            yield start, j, taken[start]
            start = j


def _empty_traces(go: Any) -> list[Any]:
    index, left = SELECTION["index"], SELECTION["left"]
    hatched = {"color": left.colour, "pattern": {"shape": left.pattern}, "line": {"width": 0}}
    plain = {"color": index.colour, "line": {"width": 0}}
    entry = "entry %{customdata[0]}, rank %{customdata[1]}: %{y:.2%}<extra></extra>"
    ranks = "ranks %{customdata[0]} to %{customdata[1]}<extra></extra>"

    def line(key: str, dash: str | None) -> Any:
        mark = SELECTION[key]
        return go.Scatter(name=f"kept: {mark.label}", mode="lines", hoverinfo="skip",
                          line={"color": mark.colour, "width": 2.5, "dash": dash})

    return [
        go.Bar(name="taken by the index", offset=0, marker=plain, hovertemplate=entry),
        go.Bar(name=left.label, offset=0, marker=hatched, hovertemplate=entry),
        go.Bar(name="strip: taken", offset=0, marker=plain, hovertemplate=ranks, showlegend=False),
        go.Bar(name="strip: left out", offset=0, marker=hatched, hovertemplate=ranks,
               showlegend=False),
        line("random", "dot"), line("best", "dash"), line("index", None),
        go.Scatter(name="K", mode="lines", line={"color": NEUTRAL, "width": 1.5, "dash": "dash"},
                   hoverinfo="skip", showlegend=False),
        go.Scatter(name="kept with K", mode="markers+text", textfont={"size": 13},
                   hoverinfo="skip", showlegend=False,
                   marker={"size": 10, "color": index.colour}),
    ]


def _layout(longest: int) -> dict[str, Any]:
    """Axes of a run: the same for every layer, query and K."""
    ticks = [2**i for i in range(longest.bit_length())]
    return base_layout(
        WIDTH, 420, margin={"l": 60, "r": 20, "t": 64, "b": 46},
        xaxis={"range": [log2(0.5), log2(longest) + 0.1], "fixedrange": True, "zeroline": False,
               "showgrid": True, "gridcolor": "rgba(128,128,128,.3)",
               "tickvals": [log2(k) for k in ticks], "ticktext": [f"{k:,}" for k in ticks],
               "title": {"text": "rank of an entry in its layer's attention; K of a selection"}},
        yaxis={"range": [-0.13, 1.04], "fixedrange": True, "zeroline": False, "showgrid": False,
               "tickvals": [-0.07, 0, 0.25, 0.5, 0.75, 1],
               "ticktext": ["taken?", "0", "25 %", "50 %", "75 %", "100 %"]},
    )


# ---------------------------------------------------------------------------------- in words
def _told(run: Selections, ranked: Ranked) -> str:
    role = run.config.roles[ranked.layer]
    whose = "" if role.index_source == role.layer else f", index of layer {role.index_source}"
    return (f"Layer {role.layer} ({ROLES[role.kind].label}, r = {role.ratio}{whose}), query "
            f"{ranked.query} \u201c{visible(run.texts[ranked.query])}\u201d")


def caption(run: Selections, ranked: Ranked) -> str:
    """The finding: what the index keeps, against the best and a random selection."""
    n, K = len(ranked.share), ranked.topk
    text = (f"{_told(run, ranked)}: of the attention on its {n} visible entries the index keeps "
            f"{ranked.kept:.1%} with K = {K}; the best selection {ranked.kept_best:.1%}, a random "
            f"one {ranked.kept_random:.1%}.")
    if K < n:
        common = sum(ranked.taken[:K])
        text += f" Of the {K} entries with most attention it takes {common}."
    if len(ranked.by_index) < n:
        text += f" The pool left it {len(ranked.by_index)} to select from."
    return text + f" The window holds {ranked.window:.1%} of all attention."


def alt(run: Selections, ranked: Ranked) -> str:
    top = ", ".join(f"entry {e} {s:.1%}" for e, s in zip(ranked.entries[:3], ranked.share,
                                                         strict=False))
    return (f"Bars of attention by rank, and curves of what selections of K entries keep. "
            f"{_told(run, ranked)}. Most attention: {top}. With K = {ranked.topk} the index keeps "
            f"{ranked.kept:.1%}, the best selection {ranked.kept_best:.1%}, a random one "
            f"{ranked.kept_random:.1%}.")


def table(run: Selections, ranked: Ranked) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """The entries with most attention, and which place the index gives them."""
    r, rows = ranked.ratio, []
    for j in range(min(8, len(ranked.entries))):
        entry, place = ranked.entries[j], ranked.place[j]
        words = visible("".join(run.texts[entry * r : entry * r + r]))
        rows.append((j + 1, entry, words, f"{ranked.share[j]:.1%}",
                     "not in the pool" if place is None else str(place),
                     "yes" if ranked.taken[j] else "no"))
    return ("rank", "entry", "text", "share", "place in the index", "taken"), tuple(rows)


# ---------------------------------------------------------------------------------- all layers
def kept_of_layers(run: Selections, every: int = 1) -> Picture:
    """Every layer that reads entries: the share of all attention on what it reads, with the
    selection of its index, the best one and a random one. every: look at each such query only.

    InputError for a text in which no query has to choose.
    """
    import plotly.graph_objects as go

    from labkit.errors import InputError

    found = kept_by_layer(run, every)
    if not found:
        raise InputError(f"no query of these {len(run)} tokens has to choose: with K = "
                         f"{run.config.index_topk} entries a longer text is needed")
    rows = list(range(len(found)))
    fig = go.Figure(layout=base_layout(
        WIDTH, 90 + 34 * len(found), margin={"l": 190, "r": 20, "t": 36, "b": 46},
        xaxis={"range": [0, 1.02], "tickvals": [0, 0.25, 0.5, 0.75, 1], "fixedrange": True,
               "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "showgrid": True,
               "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "share of all attention that is on what the layer reads"}},
        yaxis={"range": [len(found) - 0.5, -0.5], "tickvals": rows, "fixedrange": True,
               "ticktext": [_layer(k) for k in found], "showgrid": False, "zeroline": False}))
    for key, symbol, size in (("random", "triangle-up", 11), ("best", "diamond-open", 15),
                              ("index", "circle", 8)):
        fig.add_scatter(x=[getattr(k, key) for k in found], y=rows, mode="markers",
                        name=SELECTION[key].label, customdata=[k.layer for k in found],
                        marker={"symbol": symbol, "size": size, "color": SELECTION[key].colour,
                                "line": {"width": 2 if key == "best" else 0}},
                        hovertemplate="layer %{customdata}: %{x:.2%}<extra></extra>")
    worst, gap = min(found, key=lambda k: k.index), max(found, key=lambda k: k.best - k.index)
    words = (f"Worst: layer {worst.layer}, whose index keeps {worst.index:.2%} of all attention; "
             f"at random it would be {worst.random:.1%}. The best selection keeps at most "
             f"{100 * (gap.best - gap.index):.2f} points more (layer {gap.layer}).")
    listed = "; ".join(f"layer {k.layer} {k.index:.1%}, best {k.best:.1%}, random {k.random:.1%}"
                       for k in found)
    return Picture(fig, f"Share of attention kept by selection, layer by layer: {listed}.", words,
                   ("layer", "queries", "index", "best", "at random", "of entries alone"),
                   tuple((_layer(k), k.queries, f"{k.index:.2%}", f"{k.best:.2%}",
                          f"{k.random:.1%}", f"{k.entries:.1%}") for k in found))


def _layer(kept: Kept) -> str:
    name = f"{kept.layer}: {ROLES[kept.kind].label}"
    return name if kept.source == kept.layer else f"{name}, selection of {kept.source}"
