"""The draft's slots: what each guesses alone, and what the token before it changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from labkit.engine.sampling import distribution
from labkit.viz.palette import SLOT
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import pieces, visible

if TYPE_CHECKING:
    from labkit.lab import Lab

WIDTH, SHOWN = 760, 3


@dataclass(frozen=True)
class Guess:
    """A slot behind one anchor.

    previous    text of the token before the one that it guesses
    base, biased  [V] probabilities at temperature 1, without and with the Markov bias
    ids, texts  the likeliest of both, likeliest with the bias first
    """

    previous: str
    base: torch.Tensor
    biased: torch.Tensor
    ids: tuple[int, ...]
    texts: tuple[str, ...]

    @property
    def changed(self) -> bool:
        """Whether another token became the likeliest."""
        return int(self.base.argmax()) != int(self.biased.argmax())


def guesses(lab: Lab, ids: Sequence[int], anchor: int,
            previous: Sequence[int] | None = None) -> list[Guess]:
    """All slots behind the token at position `anchor` of ids.

    previous  ids of the token before each slot's; None: as drafted greedily, left to right
    """
    run, size = lab.draft(ids, [anchor], previous), lab.tokenizer.vocab_size
    found = []
    for k, before in enumerate(run["dspark.previous_token_ids"][0].tolist()):
        logits = run["dspark.base_logits"][0, k, :size]                     # [V]
        base = distribution(logits)
        biased = distribution(logits + run["dspark.markov_logits"][0, k, :size])
        shown = {i for p in (base, biased) for i in p.topk(SHOWN).indices.tolist()}
        order = sorted(shown, key=lambda i, p=biased: (-float(p[i]), i))    # type: ignore[misc]
        found.append(Guess(pieces(lab.tokenizer, [before])[0], base, biased, tuple(order),
                           tuple(pieces(lab.tokenizer, order))))
    return found


def draft_slots(lab: Lab, ids: Sequence[int], anchor: int,
                previous: Sequence[int] | None = None) -> Picture:
    """Bars of the likeliest tokens of every slot, with and without the Markov bias."""
    import plotly.graph_objects as go

    found = guesses(lab, ids, anchor, previous)
    names, wide, narrow, heads, row = [], [], [], [], 0
    for number, guess in enumerate(found, 1):
        heads.append((row, f"slot {number}, behind {visible(guess.previous)}"))
        row += 1
        for id_, text in zip(guess.ids, guess.texts, strict=True):
            names.append((row, visible(text)))
            wide.append((row, float(guess.base[id_])))
            narrow.append((row, float(guess.biased[id_])))
            row += 1
    fig = go.Figure(layout=base_layout(
        WIDTH, 90 + 19 * row, margin={"l": 170, "r": 90, "t": 40, "b": 46},
        xaxis={"range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": True,
               "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "fixedrange": True,
               "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "probability"}},
        yaxis={"range": [row - 0.4, -0.6], "tickvals": [r for r, _ in names], "fixedrange": True,
               "ticktext": [escape(n, quote=False) for _, n in names], "showgrid": False,
               "zeroline": False, "tickfont": {"family": "monospace", "size": 12}}))
    for mark, values, width in ((SLOT["base"], wide, 0.8), (SLOT["biased"], narrow, 0.36)):
        fig.add_bar(orientation="h", x=[p for _, p in values], y=[r for r, _ in values],
                    width=width, name=mark.label, hoverinfo="x",
                    marker={"color": mark.colour, "line": {"width": 0},
                            "pattern": {"shape": mark.pattern}})
    fig.add_scatter(x=[0.0] * len(heads), y=[r for r, _ in heads], mode="text", name="slots",
                    text=[f" {escape(t, quote=False)}" for _, t in heads],
                    textposition="middle right", hoverinfo="skip", showlegend=False,
                    textfont={"size": 12})
    return Picture(fig, _alt(found), caption(found), *_table(found))


def _best(guess: Guess, biased: bool) -> tuple[str, float]:
    p = guess.biased if biased else guess.base
    best = int(p.argmax())
    return visible(guess.texts[guess.ids.index(best)]), float(p[best])


def caption(found: Sequence[Guess]) -> str:
    """The finding: where the bias changes the likeliest token, and where it moves most."""
    moved = [float((g.base - g.biased).abs().sum()) / 2 for g in found]
    most = max(range(len(found)), key=moved.__getitem__)
    changed = [str(k) for k, g in enumerate(found, 1) if g.changed]
    where = ("slots " if len(changed) > 1 else "slot ") + ", ".join(changed) if changed else "none"
    return (f"The token before makes another token the likeliest in {len(changed)} of "
            f"{len(found)} slots ({where}). It moves most in slot {most + 1}: {moved[most]:.0%} of "
            "the probability.")


def _alt(found: Sequence[Guess]) -> str:
    told = []
    for k, guess in enumerate(found, 1):
        (one, p), (other, q) = _best(guess, False), _best(guess, True)
        told.append(f"slot {k} behind {visible(guess.previous)}: {one} {p:.0%} alone, {other} "
                    f"{q:.0%} with the bias")
    return f"Bars of the likeliest tokens of {len(found)} slots. {'; '.join(told)}."


def _table(found: Sequence[Guess]) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    rows = []
    for k, guess in enumerate(found, 1):
        (one, p), (other, q) = _best(guess, False), _best(guess, True)
        rows.append((str(k), visible(guess.previous), f"{one} {p:.0%}", f"{other} {q:.0%}"))
    return ("slot", "token before", "likeliest by base logits", "with the bias"), tuple(rows)
