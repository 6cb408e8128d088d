"""What looking costs a decoded token, from a configuration alone: attention and index scores.

Multiply-adds are counted as `labkit.model.work` counts them (the tests hold one to the other),
with one difference: later index sources score the pool alone where it is said so. The reference
kernel scores all entries and masks them, which gives the same selection.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, log10
from typing import Any

from labkit.config import ModelConfig
from labkit.viz.palette import DESIGNS, NEUTRAL
from labkit.viz.picture import Picture, base_layout

WIDTH = 860
SHORTEST, LONGEST = 7, 20          # powers of two: 128 tokens to 1 M


@dataclass(frozen=True)
class LookCost:
    """Of one decoded token, `context` tokens into a text; all layers together.

    scored     entries that are scored by an index
    read       window tokens and entries that are attended to
    index, attention   multiply-adds of the scores, and of queries with keys and weights with values
    """

    context: int
    scored: int
    read: int
    index: int
    attention: int

    @property
    def total(self) -> int:
        return self.index + self.attention


def look_cost(config: ModelConfig, context: int, design: str = "pool") -> LookCost:
    """The cost under one of `DESIGNS`; "pool" is the model, the others are what it saves.

    all     every layer that reads entries attends to all of them, and nothing is scored
    own     each of them scores all entries of its cache, with an index of its own
    shared  the index sources score, the others reuse; no pool
    """
    c, scored, read = config, 0, 0
    for role in c.roles:
        read += min(c.sliding_window, context)
        if not role.ratio:
            continue
        entries = context // role.ratio
        read += entries if design == "all" else min(c.index_topk, entries)
        if design == "own" or (design != "all" and role.index_source == role.layer):
            pool = c.candidate_topk_blocks * c.candidate_block_size
            scored += min(entries, pool) if design == "pool" and role.uses_candidates else entries
    return LookCost(context, scored, read,
                    scored * c.index_n_heads * (c.index_head_dim + 1),
                    2 * read * c.num_attention_heads * c.head_dim)


def changed(config: ModelConfig, ratio: int | None = None, topk: int | None = None) -> ModelConfig:
    """The configuration with another ratio in the encoder, another K in all layers."""
    first = next((r for r in config.compress_ratios if r), 0)
    end = config.encoder_layers
    ratios = tuple(ratio if ratio and r == first and i < end else r
                   for i, r in enumerate(config.compress_ratios))
    return config.replace(compress_ratios=ratios, index_topk=topk or config.index_topk)


def cost_of_looking(config: ModelConfig, context: int) -> Picture:
    """Multiply-adds of a decoded token by context, one curve for each of `DESIGNS`."""
    import plotly.graph_objects as go

    fig = go.Figure(data=_empty_traces(go), layout=_layout())
    for trace, values in zip(fig.data, parts(config, context), strict=True):
        trace.update(values)
    columns, rows = table(config, context)
    return Picture(fig, alt(config, context), caption(config, context), columns, rows)


def parts(config: ModelConfig, context: int) -> list[dict[str, Any]]:
    """What changes: one dict for each trace, in order."""
    powers = [p / 2 for p in range(2 * SHORTEST, 2 * LONGEST + 1)]
    curves = [{"x": powers, "y": [log10(look_cost(config, round(2**p), design).total)
                                  for p in powers]} for design in DESIGNS]
    at = log2(context)
    return [*curves, {"x": [at, at], "y": [5.0, 13.0]},
            {"x": [at] * len(DESIGNS),
             "y": [log10(look_cost(config, context, design).total) for design in DESIGNS]}]


def _empty_traces(go: Any) -> list[Any]:
    dashes = {"all": "dot", "own": "dash", "shared": None, "pool": None}
    lines = [go.Scatter(name=mark.label, mode="lines+markers" if key == "pool" else "lines",
                        line={"color": mark.colour, "width": 2.5, "dash": dashes[key]},
                        marker={"color": mark.colour, "size": 6}, hoverinfo="skip")
             for key, mark in DESIGNS.items()]
    return [*lines,
            go.Scatter(name="context", mode="lines", showlegend=False, hoverinfo="skip",
                       line={"color": NEUTRAL, "width": 1.5, "dash": "dash"}),
            go.Scatter(name="at this context", mode="markers", showlegend=False, hoverinfo="skip",
                       marker={"size": 10, "color": [m.colour for m in DESIGNS.values()]})]


def _layout() -> dict[str, Any]:
    units = {5: "100 K", 6: "1 M", 7: "10 M", 8: "100 M", 9: "1 G", 10: "10 G",
             11: "100 G", 12: "1 T", 13: "10 T"}
    return base_layout(
        WIDTH, 400, margin={"l": 70, "r": 20, "t": 62, "b": 46},
        xaxis={"range": [SHORTEST - 0.2, LONGEST + 0.2], "fixedrange": True, "zeroline": False,
               "showgrid": True, "gridcolor": "rgba(128,128,128,.3)",
               "tickvals": list(range(SHORTEST, LONGEST + 1)),
               "ticktext": [_tokens(2**p) for p in range(SHORTEST, LONGEST + 1)],
               "title": {"text": "tokens before the decoded one; upwards: its multiply-adds (both "
                         "logarithmic)"}},
        yaxis={"range": [5, 13], "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickvals": list(units), "ticktext": list(units.values())})


def _tokens(count: int) -> str:
    return f"{count // 2**20} M" if count >= 2**20 else (
        f"{count // 1024} K" if count >= 1024 else str(count))


# ---------------------------------------------------------------------------------- in words
def caption(config: ModelConfig, context: int) -> str:
    """The finding: what sharing and the pool save at this context."""
    costs = {design: look_cost(config, context, design) for design in DESIGNS}
    own, pool = costs["own"], costs["pool"]
    return (f"{context:,} tokens into a text, with K = {config.index_topk}: "
            f"{costs['all'].total / pool.total:,.1f} times the multiply-adds if every layer read "
            f"all entries, {own.total / pool.total:,.1f} times if every layer had its own index. "
            f"Scored are {pool.scored:,} entries instead of {own.scored:,}.")


def alt(config: ModelConfig, context: int) -> str:
    listed = ", ".join(f"{DESIGNS[design].label} {look_cost(config, context, design).total:.3g}"
                       for design in DESIGNS)
    return (f"Curves of multiply-adds of attention and index for one decoded token against the "
            f"context, both logarithmic. At {context:,} tokens: {listed}.")


def table(config: ModelConfig, context: int,
          ) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    rows = []
    for design, mark in DESIGNS.items():
        cost = look_cost(config, context, design)
        rows.append((mark.label, f"{cost.scored:,}", f"{cost.read:,}", f"{cost.index:,}",
                     f"{cost.attention:,}"))
    return ("design", "entries scored", "keys read", "multiply-adds: index",
            "multiply-adds: attention"), tuple(rows)
