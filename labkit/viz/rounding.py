"""From rounded codes to what the model says: the same text with each recipe on or off.

`measure` runs the text once for every combination of the three recipes and compares each run
with the one in which nothing is rounded, link by link:

    stored vectors -> selection -> attention -> distribution of the next token -> bits per byte
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from labkit.numerics import relative_rms
from labkit.numerics.blocks import FORMATS, block_format
from labkit.train.agreement import Agreement
from labkit.train.controls import cache_rounding
from labkit.viz.attention_data import Recording, record
from labkit.viz.palette import NEUTRAL, OKABE_ITO, ROUNDING
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab

Chosen = frozenset[str]         # the recipes that are on
ALL: Chosen = frozenset(FORMATS)
WIDTH = 900
LEAST, MOST = 1e-9, 1.0         # ends of the logarithmic axis
LINKS = (  # field of a Chain, its name, unit
    ("window", "window keys", "error"), ("entries", "entries", "error"),
    ("keys", "index keys", "error"), ("exchanged", "selection", "exchanged"),
    ("attention", "attention", "total variation"), ("kl", "next token", "KL, nats"),
    ("bits", "text", "bits a byte"),
)


@dataclass(frozen=True)
class Chain:
    """How far a run with some recipes on is from the run with none.

    window, entries, keys   relative error (rms) of what attention and index read, all layers
    exchanged   share of the selected entries that the other run did not select, of queries that
                see more than they may select; 0 where no query has to choose
    attention   total variation of the attention of a query and head (window, entries, sink),
                mean over layers, queries and heads
    kl, kl_max  KL(exact || rounded) of the next-token distributions in nats, mean and largest
    same        share of positions with the same likeliest token
    bits        bits per byte of text, rounded minus exact; bits_error: standard error of that,
                from the spread over tokens
    """

    on: Chosen
    window: float
    entries: float
    keys: float
    exchanged: float
    attention: float
    kl: float
    kl_max: float
    same: float
    bits: float
    bits_error: float


def measure(lab: Lab, text: str | Sequence[int], max_tokens: int | None = None,
            ) -> dict[Chosen, Chain]:
    """Eight runs: all combinations of the recipes, each compared with none."""
    choices = [frozenset(chosen) for n in range(len(FORMATS) + 1)
               for chosen in itertools.combinations(FORMATS, n)]
    ids = lab.encode(text)[:max_tokens]
    exact = run(lab, ids, frozenset())
    return {chosen: compare(lab, exact, run(lab, ids, chosen), chosen) for chosen in choices}


def run(lab: Lab, ids: Sequence[int], on: Iterable[str]) -> Recording:
    """One run with these recipes on. InputError for a recipe that there is not."""
    with cache_rounding(lab.model, frozenset(on)):
        return record(lab, ids, more=["*.index_keys", "logits"])


def compare(lab: Lab, exact: Recording, other: Recording, on: Chosen) -> Chain:
    """The chain of a run, given the run without rounding."""
    c, logits = lab.config, Agreement()
    logits.add(exact.taps["logits"][0], other.taps["logits"][0])
    cost = nats(other) - nats(exact)                                     # [T-1]
    a_byte = 1 / math.log(2) / len(lab.tokenizer.decode(exact.ids[1:]).encode("utf-8"))
    spread = [0.5 * (exact.spread(layer) - other.spread(layer)).abs().sum(-1).mean()
              for layer in range(c.num_hidden_layers)]
    return Chain(
        on, window=_error(exact, other, "window"), entries=_error(exact, other, "compressed_kv"),
        keys=_error(exact, other, "index_keys"), exchanged=exchanged(exact, other),
        attention=float(torch.stack(spread).mean()), kl=logits.mean, kl_max=max(logits.kl),
        same=logits.same / len(logits.kl), bits=float(cost.sum()) * a_byte,
        bits_error=float(cost.std()) * len(cost) ** 0.5 * a_byte)


def nats(recording: Recording) -> torch.Tensor:
    """What each token behind the first costs, [T-1], in float64."""
    logits = recording.taps["logits"][0, :-1].double()
    return F.cross_entropy(logits, torch.tensor(recording.ids[1:]), reduction="none")


def exchanged(exact: Recording, other: Recording) -> float:
    """Share of the selection that differs, of queries that have to choose."""
    c, kept, total = exact.config, 0, 0
    for layer in c.index_source_layer_ids:
        name = f"layers.{layer}.attn.topk_indices"
        first = c.index_topk * c.compress_ratios[layer]     # the first query that leaves some out
        rows = [taps[name][0, first:].tolist() for taps in (exact.taps, other.taps)]
        kept += sum(len(set(a) & set(b)) for a, b in zip(*rows, strict=True))
        total += sum(len(a) for a in rows[0])
    return 1 - kept / total if total else 0.0


def _error(exact: Recording, other: Recording, tensor: str) -> float:
    """Relative error over all layers that have such a tensor."""
    names = [name for name in exact.taps if name.endswith(f".{tensor}")]
    flat = [torch.cat([taps[name].flatten() for name in names])
            for taps in (exact.taps, other.taps)]
    return relative_rms(*flat)


# ---------------------------------------------------------------------------------- drawing
def rounding_picture(chains: Mapping[Chosen, Chain], on: Iterable[str]) -> Picture:
    """The links with these recipes on, beside those with all on."""
    import plotly.graph_objects as go

    view = look(chains, on)
    fig = go.Figure(data=_empty_traces(go), layout=_layout())
    for trace, values in zip(fig.data, view["parts"], strict=True):
        trace.update(values)
    return Picture(fig, view["alt"], view["caption"], view["columns"], view["rows"])


def look(chains: Mapping[Chosen, Chain], on: Iterable[str]) -> dict[str, Any]:
    """Everything that depends on the choice: parts of the traces, alt, caption, table.

    InputError for a recipe that there is not.
    """
    chosen = frozenset(block_format(name).name for name in on)
    chain, whole = chains[chosen], chains[ALL]
    rows = list(range(len(LINKS)))
    values, others = (
        [abs(getattr(one, field)) for field, *_ in LINKS] for one in (chain, whole))
    texts = [_told(chain, field) for field, *_ in LINKS]
    lines: dict[str, Any] = {"x": [], "y": []}
    for row, value in zip(rows, values, strict=True):
        lines["x"] += [math.log10(LEAST), _place(value), None]
        lines["y"] += [row, row, None]
    parts = [
        lines,
        {"x": [_place(v) for v in others], "y": rows, "customdata": others},
        {"x": [_place(v) for v in values], "y": rows, "customdata": values},
        {"x": [math.log10(MOST) + 0.2] * len(rows), "y": rows, "text": texts,
         "customdata": values},
    ]
    table = tuple((name, unit, told, _told(whole, field))
                  for (field, name, unit), told in zip(LINKS, texts, strict=True))
    return {"parts": parts, "rows": table, "columns": ("link", "measure", "chosen", "all three"),
            "caption": _caption(chain), "alt": (
                f"Dots on a logarithmic axis, rounded in {_named(chosen)}: " + ", ".join(
                    f"{name} {told}" for (_, name, _), told in zip(LINKS, texts, strict=True))
                + ".")}


def _place(value: float) -> float:
    return math.log10(min(MOST, max(LEAST, value)))


def _named(on: Chosen) -> str:
    names = [ROUNDING[name].label for name in ROUNDING if name in on]
    return " + ".join(names) or "nothing"


def _told(chain: Chain, field: str) -> str:
    value = getattr(chain, field)
    if not value:
        return "0"
    if field == "bits":
        return f"{value:+.1e} \u00b1 {2 * chain.bits_error:.1e}"
    return f"{value:.1e}" if field == "kl" or value < 5e-4 else f"{value:.2%}"


def _caption(chain: Chain) -> str:
    if not chain.on:
        return "Nothing is rounded: this is the run that the others are compared with."
    text = (f"Rounded: {_named(chain.on)}. Of the selection {_told(chain, 'exchanged')} is "
            f"exchanged, of the attention {_told(chain, 'attention')} moves, and {chain.same:.1%} "
            f"of the positions keep their likeliest token. The text costs {chain.bits:+.1e} bits "
            "a byte, ")
    told = "more than" if abs(chain.bits) > 2 * chain.bits_error else "within"
    return text + f"{told} two standard errors ({2 * chain.bits_error:.1e}) of no change."


def _empty_traces(go: Any) -> list[Any]:
    blue, orange = OKABE_ITO["blue"], OKABE_ITO["orange"]
    return [
        go.Scatter(name="to the dot", mode="lines", showlegend=False, hoverinfo="skip",
                   line={"color": NEUTRAL, "width": 1}),
        go.Scatter(name="all three recipes on", mode="markers",
                   marker={"color": orange, "symbol": "circle-open", "size": 16,
                           "line": {"width": 2}},
                   hovertemplate="all three: %{customdata:.3g}<extra></extra>"),
        go.Scatter(name="the chosen ones (numbers on the right)", mode="markers",
                   marker={"color": blue, "symbol": "diamond", "size": 10},
                   hovertemplate="chosen: %{customdata:.3g}<extra></extra>"),
        go.Scatter(name="values", mode="text", textposition="middle right", showlegend=False,
                   hoverinfo="skip", textfont={"size": 12}, cliponaxis=False),
    ]


def _layout() -> dict[str, Any]:
    ticks = range(round(math.log10(LEAST)) + 1, 1, 2)
    return base_layout(
        WIDTH, 330, margin={"l": 210, "r": 150, "t": 44, "b": 46},
        xaxis={"range": [math.log10(LEAST), math.log10(MOST)], "tickvals": list(ticks),
               "ticktext": ["1" if t == 0 else f"10^{t}" for t in ticks], "fixedrange": True,
               "showgrid": True, "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "size of the difference from the run without rounding "
                                 "(logarithmic; left edge: less than 10^-9, or 0)"}},
        yaxis={"range": [len(LINKS) - 0.4, -0.6], "tickvals": list(range(len(LINKS))),
               "ticktext": [f"{name}: {unit}" for _, name, unit in LINKS], "fixedrange": True,
               "showgrid": False, "zeroline": False})
