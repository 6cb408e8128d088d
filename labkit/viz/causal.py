"""What of a run changes when one token of the text changes: everything from there on, or more.

A model is causal if nothing before the changed token moves by a bit. Then what is stored of a
prefix serves every text that begins with it. The comparison is exact: two runs, bit for bit.
`both_ways` makes an encoder of the usual kind, which sees what follows a token as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.viz.palette import ATTENTION, OKABE_ITO
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab
    from labkit.model.transformer import Transformer

WIDTH = 900
SAME, CHANGED = OKABE_ITO["sky"], ATTENTION["entries"].colour


@dataclass(frozen=True)
class Change:
    """A text in which the token at `position` was replaced.

    first   for every layer the first position at which what enters the layer behind it differs;
            T where nothing does
    logits  the same of the logits
    """

    position: int
    tokens: int
    first: tuple[int, ...]
    logits: int

    @property
    def reusable(self) -> int:
        """Tokens whose state no layer changed: what a cache may keep of them is still right."""
        return min(*self.first, self.logits)


@contextmanager
def both_ways(model: Transformer) -> Iterator[None]:
    """Inside, windows of the encoder are centred on their token: half of what it sees follows it.

    For one pass over a whole text; the weights were not trained for it.
    """
    layers: Any = model.layers
    own = [layers[i].attn for i in range(model.config.encoder_layers)]
    ahead = model.config.sliding_window // 2
    for attention in own:
        attention.key_values = _shifted(attention.key_values, ahead)
    try:
        yield
    finally:
        for attention in own:
            del attention.key_values


def _shifted(key_values: Callable[..., torch.Tensor], ahead: int) -> Callable[..., torch.Tensor]:
    """Key [B,T,d] of token t+ahead in the place of token t; the last ones see to the end."""
    def shifted(*args: Any) -> torch.Tensor:
        keys = key_values(*args)
        place = torch.arange(keys.shape[1]) + ahead
        return keys[:, place.clamp(max=keys.shape[1] - 1)]
    return shifted


def streams(lab: Lab, ids: Sequence[int], both: bool = False) -> list[torch.Tensor]:
    """What leaves every layer [T,C,D], then the logits [T,V]. both: inside `both_ways`."""
    L = lab.config.num_hidden_layers
    with both_ways(lab.model) if both else nullcontext():
        taps = lab.trace(list(ids), patterns=[*(f"layers.{i}.streams_in" for i in range(1, L)),
                                              f"layers.{L - 1}.attn.out", "logits"])
    # Of the last layer what its attention gives: its streams enter no other layer.
    names = [*(f"layers.{i}.streams_in" for i in range(1, L)), f"layers.{L - 1}.attn.out", "logits"]
    return [taps[name][0] for name in names]


def change(before: list[torch.Tensor], after: list[torch.Tensor], position: int) -> Change:
    """The first difference in every layer, bit for bit."""
    def first(a: torch.Tensor, b: torch.Tensor) -> int:
        different = (a != b).flatten(1).any(-1).nonzero()[:, 0]                 # positions
        return int(different[0]) if len(different) else len(a)
    found = [first(a, b) for a, b in zip(before, after, strict=True)]
    return Change(position, len(before[-1]), tuple(found[:-1]), found[-1])


def replaced(ids: Sequence[int], position: int, other: int) -> list[int]:
    """The ids with another one at a position. InputError where it is the same, or not there."""
    if not 0 <= position < len(ids):
        raise InputError(f"position is {position}: the text has positions 0 to {len(ids) - 1}")
    if ids[position] == other:
        raise InputError(f"position {position} holds id {other} already: choose another one")
    return [*ids[:position], other, *ids[position + 1 :]]


def causal_map(config: ModelConfig, found: Change) -> Picture:
    """Layers from top to bottom, tokens from left to right: the same in blue, changed in orange."""
    import plotly.graph_objects as go

    L = config.num_hidden_layers
    fig = go.Figure(layout=base_layout(
        WIDTH, 130 + 26 * (L + 1), margin={"l": 110, "r": 20, "t": 40, "b": 46},
        xaxis={"range": [0, found.tokens], "fixedrange": True, "zeroline": False,
               "showgrid": False, "title": {"text": "token of the text"},
               "tickvals": list(range(0, found.tokens + 1, max(1, found.tokens // 8)))},
        yaxis={"range": [L + 0.6, -0.6], "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickvals": list(range(L + 1)),
               "ticktext": [*(f"layer {i}" for i in range(L)), "logits"]}))
    names = ("the same, bit for bit", "changed", "the changed token")
    for name, colour, pattern, values in zip(names, (SAME, CHANGED), ("", "/"), parts(found),
                                             strict=False):
        fig.add_bar(orientation="h", width=0.7, name=name, hoverinfo="skip",
                    marker={"color": colour, "line": {"width": 0}, "pattern": {"shape": pattern}},
                    **values)
    fig.add_scatter(mode="lines", name=names[2], line={"color": "#888", "width": 2, "dash": "dash"},
                    hoverinfo="skip", **parts(found)[2])
    return Picture(fig, alt(found), caption(found), COLUMNS, table(found))


def parts(found: Change) -> list[dict[str, Any]]:
    """What changes with the position: bars that stay, bars that do not, the line of the token."""
    firsts = [*found.first, found.logits]
    rows = list(range(len(firsts)))
    return [{"y": rows, "x": firsts, "base": [0] * len(rows)},
            {"y": rows, "x": [found.tokens - n for n in firsts], "base": firsts},
            {"x": [found.position] * 2, "y": [-0.5, len(firsts) - 0.5]}]


COLUMNS = ("layer", "first changed token", "tokens before the changed one that moved")


def table(found: Change) -> tuple[tuple[Any, ...], ...]:
    rows = [(str(i), n) for i, n in enumerate(found.first)] + [("logits", found.logits)]
    return tuple((name, n, max(0, found.position - n)) for name, n in rows)


def caption(found: Change) -> str:
    early = found.position - found.reusable
    if early <= 0:
        return (f"Token {found.position} of {found.tokens} was replaced. Nothing before it moved "
                f"by a bit: what is stored of these {found.reusable} tokens serves both texts.")
    return (f"Token {found.position} of {found.tokens} was replaced, and {early} tokens before it "
            f"moved: what was stored of them is wrong for the new text. Only {found.reusable} "
            "tokens can be kept.")


def alt(found: Change) -> str:
    return (f"Bars of layers over tokens. Token {found.position} was replaced; the first changed "
            "position is " + ", ".join(f"{n} behind layer {i}" for i, n in enumerate(found.first))
            + f", {found.logits} in the logits.")
