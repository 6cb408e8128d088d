"""What a sequence keeps of its tokens, design by design, from the numbers that decide it.

Counted is what grows with the text: keys and values, or what stands for them, of all layers.
Windows, remainders and drafts do not grow and are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

from labkit.cache import Cache
from labkit.cache.filled import fill
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.viz.palette import NEUTRAL, OKABE_ITO
from labkit.viz.picture import Picture, base_layout

WIDTH = 900


@dataclass(frozen=True)
class Design:
    """bytes_a_token follows from `rule`, whose numbers come from `source`."""

    name: str
    bytes_a_token: float
    rule: str
    source: str


def grouped_query(layers: int, heads: int, width: int, size: int = 2) -> int:
    """Keys and values of `heads` heads in every layer, `size` bytes a number."""
    return layers * heads * width * 2 * size


def latent(layers: int, width: int, size: int = 2) -> int:
    """One latent a layer (MLA), `size` bytes a number."""
    return layers * width * size


def counted(config: ModelConfig, tokens: int = 1024) -> float:
    """Bytes a token that the packed stores of this package grow by, from their storages."""
    cache = Cache(config, form="packed")
    fill(cache, tokens)
    used = cache.nbytes()
    return (used["global_kv"] + used["index_keys"]) / tokens


def designs(config: ModelConfig) -> tuple[Design, ...]:
    """From the oldest to that of `config`, which is the released V4.1-Flash in the course."""
    return (
        Design("V1 67B", grouped_query(95, 8, 128), "95 layers x 8 heads x 128 x 2 x 2 B",
               "config.json of deepseek-llm-67b"),
        Design("GQA, 40 layers", grouped_query(40, 8, 128), "40 layers x 8 heads x 128 x 2 x 2 B",
               "a comparison, not a model"),
        Design("V3.2", 61 * (656 + 132), "61 layers x (656 B latent + 132 B index key)",
               "report of DeepSeek-V3.2 and its FP8 cache layout"),
        Design("MLA, 40 layers", latent(40, 576), "40 layers x 576 x 2 B",
               "a comparison, not a model"),
        Design("V4-Flash", 21 * (584 + 68) / 4 + 20 * 584 / 128,
               "21 layers x 652 B / 4 + 20 layers x 584 B / 128", "report of DeepSeek-V4"),
        Design("V4.1-Flash", counted(config), "counted: packed stores of this package",
               "config.json, 2.5 entries x 356 B"),
    )


def footprint(listed: Sequence[Design], tokens: int, memory: float) -> Picture:
    """Bars of bytes a sequence, on a logarithmic axis; how many sequences fit into `memory`."""
    import plotly.graph_objects as go

    n = len(listed)
    fig = go.Figure(layout=base_layout(
        WIDTH, 90 + 40 * n, margin={"l": 130, "r": 90, "t": 40, "b": 46},
        xaxis={"range": [5, 12], "fixedrange": True, "zeroline": False, "showgrid": True,
               "gridcolor": "rgba(128,128,128,.3)", "title": {"text": "bytes a sequence"},
               "tickvals": list(range(5, 13)),
               "ticktext": ["100 KB", "1 MB", "10 MB", "100 MB", "1 GB", "10 GB", "100 GB",
                            "1 TB"]},
        yaxis={"range": [n - 0.5, -0.5], "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickvals": list(range(n)), "ticktext": [d.name for d in listed]}))
    bars, words, line = parts(listed, tokens, memory)
    fig.add_bar(orientation="h", width=0.6, name="what grows with the text", hoverinfo="skip",
                marker={"color": [OKABE_ITO["orange"] if i == n - 1 else OKABE_ITO["sky"]
                                  for i in range(n)], "line": {"width": 0}}, **bars)
    fig.add_scatter(mode="text", textposition="middle right", hoverinfo="skip", name="sizes",
                    showlegend=False, cliponaxis=False, **words)
    fig.add_scatter(mode="lines", name="free memory", hoverinfo="skip",
                    line={"color": NEUTRAL, "width": 2, "dash": "dash"}, **line)
    return Picture(fig, alt(listed, tokens), caption(listed, tokens, memory), COLUMNS,
                   table(listed, tokens, memory))


def parts(listed: Sequence[Design], tokens: int, memory: float) -> list[dict[str, Any]]:
    """Bars, the words behind them, the line of the memory. InputError for less than 1 token."""
    if tokens < 1:
        raise InputError(f"tokens is {tokens}: must be 1 or more")
    sizes = [d.bytes_a_token * tokens for d in listed]
    ends = [min(12.0, max(5.0, log10(size))) for size in sizes]
    rows = list(range(len(listed)))
    return [{"y": rows, "x": [end - 5 for end in ends], "base": [5.0] * len(rows)},
            {"y": rows, "x": ends, "text": [" " + told(size) for size in sizes]},
            {"x": [log10(memory)] * 2, "y": [-0.5, len(rows) - 0.5]}]


def told(size: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


COLUMNS = ("design", "bytes a token", "a sequence", "sequences in the free memory", "rule")


def table(listed: Sequence[Design], tokens: int, memory: float) -> tuple[tuple[Any, ...], ...]:
    return tuple((d.name, f"{d.bytes_a_token:,.0f}", told(d.bytes_a_token * tokens),
                  f"{int(memory // (d.bytes_a_token * tokens)):,}", d.rule) for d in listed)


def caption(listed: Sequence[Design], tokens: int, memory: float) -> str:
    first, last = listed[0], listed[-1]
    return (f"{tokens:,} tokens: {told(last.bytes_a_token * tokens)} in {last.name}, "
            f"{first.bytes_a_token / last.bytes_a_token:.1f} times less than in {first.name}. "
            f"{told(memory)} hold {int(memory // (last.bytes_a_token * tokens)):,} such sequences.")


def alt(listed: Sequence[Design], tokens: int) -> str:
    return f"Bars of bytes a sequence of {tokens:,} tokens, logarithmic: " + ", ".join(
        f"{d.name} {told(d.bytes_a_token * tokens)}" for d in listed) + "."
