"""Which layers read which tokens of a prompt, from the counters of a prefill that really ran.

A prefill computes the end of a prompt in every layer: all of it in the encoder, with CED only the
tail in the decoder. What a Full layer stores is counted apart: the decoder's one source stores an
entry for every token, though it computes queries for the tail alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labkit.config import ModelConfig
from labkit.model.work import Work, counting
from labkit.train.agreement import Agreement
from labkit.viz.palette import FLOWS, ROLES
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab

WIDTH = 900
THICK = 0.62            # of a layer's bar, in layers
STORED = 0.16           # of the bar of stored tokens below it

MODES: dict[str, dict[str, Any]] = {   # name -> arguments of `Session.prefill`
    "full": {"mode": "full"},
    "CED, last window": {"mode": "ced"},
    "CED, exact halo": {"mode": "ced", "halo": "exact"},
    "CED, cut after the source": {"mode": "ced", "cut": "after"},
}


@dataclass(frozen=True)
class Prefill:
    """One prefill of `tokens` tokens: what it computed, how long it took, what came of it.

    logits [V]: of the prompt's last token. seconds: of the pass alone, not of the counting.
    """

    mode: str
    tokens: int
    work: Work
    seconds: float
    logits: torch.Tensor

    def computed(self, layer: int) -> int:
        """Tokens whose queries the layer computed: the last ones of the prompt."""
        return self.work.passes[layer]


def prefill(lab: Lab, ids: Sequence[int], mode: str) -> Prefill:
    """Read a prompt once with a stopwatch and once more with counters. mode: one of `MODES`."""
    started = time.perf_counter()
    logits = lab.session(draft=False).prefill(list(ids), True, **MODES[mode])       # [1,1,V]
    seconds = time.perf_counter() - started
    with counting(lab.model) as work:
        lab.session(draft=False).prefill(list(ids), True, **MODES[mode])
    return Prefill(mode, len(ids), work, seconds, logits[0, 0].float())


def kl(expected: Prefill, found: Prefill) -> float:
    """KL(expected || found) of the next token behind the prompt, in nats."""
    agreement = Agreement()
    agreement.add(expected.logits[None], found.logits[None])
    return agreement.mean


def passes_map(config: ModelConfig, run: Prefill, full: Prefill, longest: int) -> Picture:
    """Layers from top to bottom, tokens from left to right; bars where something was computed.

    full: the same prompt read in full, for comparison. longest: tokens that the axis holds.
    """
    import plotly.graph_objects as go

    L = config.num_hidden_layers
    fig = go.Figure(layout=base_layout(
        WIDTH, 110 + 34 * L, margin={"l": 150, "r": 20, "t": 40, "b": 46},
        xaxis={"range": [0, longest], "fixedrange": True, "zeroline": False, "showgrid": True,
               "gridcolor": "rgba(128,128,128,.3)", "title": {"text": "token of the prompt"},
               "tickvals": list(range(0, longest + 1, max(1, longest // 8)))},
        yaxis={"range": [L - 0.4, -0.6], "fixedrange": True, "showgrid": False,
               "zeroline": False, "tickvals": list(range(L)),
               "ticktext": [_name(config, layer) for layer in range(L)]}))
    for number, values in enumerate(parts(config, run)):
        mark = list(ROLES.values())[number] if number < len(ROLES) else FLOWS["kv"]
        stored = number == len(ROLES)
        fig.add_bar(orientation="h", width=STORED if stored else THICK, name=(
            "entries stored" if stored else f"{mark.label}: computed"),
            offset=None if not stored else THICK / 2 + 0.02,
            marker={"color": mark.colour, "line": {"width": 0 if stored else 1, "color": "#444"},
                    "pattern": {"shape": "/" if stored else ""}},
            hovertemplate="%{customdata}<extra></extra>", **values)
    fig.add_scatter(x=[0, longest], y=[config.encoder_layers - 0.5] * 2, mode="lines",
                    name="encoder above, decoder below", line={"color": "#888", "width": 2,
                                                               "dash": "dash"}, hoverinfo="skip")
    return Picture(fig, alt(config, run), caption(run, full), COLUMNS, table(config, run, full))


def parts(config: ModelConfig, run: Prefill) -> list[dict[str, Any]]:
    """What changes with the run: one dict for each kind of layer, then what is stored."""
    found = []
    for kind in ROLES:
        layers = [r.layer for r in config.roles if r.kind == kind]
        found.append(_bars(layers, [run.computed(i) for i in layers], run.tokens, "computes"))
    sources = list(config.kv_source_layer_ids)
    return [*found, _bars(sources, [run.work.stored[i] for i in sources], run.tokens, "stores")]


def _bars(layers: list[int], counts: list[int], tokens: int, verb: str) -> dict[str, Any]:
    return {"y": layers, "x": counts, "base": [tokens - n for n in counts],
            "customdata": [f"layer {i} {verb} {n:,} of {tokens:,} tokens"
                           for i, n in zip(layers, counts, strict=True)]}


def _name(config: ModelConfig, layer: int) -> str:
    role = config.roles[layer]
    return f"{layer} {ROLES[role.kind].label}" + (f", r = {role.ratio}" if role.ratio else "")


COLUMNS = ("", "this prefill", "full", "ratio")


def table(config: ModelConfig, run: Prefill, full: Prefill) -> tuple[tuple[Any, ...], ...]:
    rows: list[tuple[Any, ...]] = []
    for name, of in (("layer-token passes", lambda p: p.work.passes.total()),
                     ("multiply-adds", lambda p: p.work.total()),
                     ("of them in the decoder", lambda p: p.work.total(side="decoder"))):
        rows.append((name, f"{of(run):,}", f"{of(full):,}", f"{of(run) / of(full):.2f}"))
    rows.append(("seconds, here", f"{run.seconds:.3f}", f"{full.seconds:.3f}",
                 f"{run.seconds / full.seconds:.2f}"))
    rows.append(("next token, KL from full", f"{kl(full, run):.1e}", "0", ""))
    return tuple(rows)


def caption(run: Prefill, full: Prefill) -> str:
    share = run.work.passes.total() / full.work.passes.total()
    work = run.work.total() / full.work.total()
    return (f"{run.mode}: {run.tokens:,} tokens cost {run.work.passes.total():,} layer-token "
            f"passes, {share:.0%} of a full prefill's, and {work:.0%} of its multiply-adds.")


def alt(config: ModelConfig, run: Prefill) -> str:
    E, L = config.encoder_layers, config.num_hidden_layers
    encoder = {run.computed(i) for i in range(E)}
    decoder = {run.computed(i) for i in range(E, L)}

    def told(counts: set[int]) -> str:
        return " or ".join(f"{n:,}" for n in sorted(counts))
    return (f"Layers and tokens of a prefill ({run.mode}). Layers 0 to {E - 1} compute "
            f"{told(encoder)} of {run.tokens:,} tokens, layers {E} to {L - 1} compute "
            f"{told(decoder)}. Entries are stored by layers "
            + ", ".join(f"{i} ({run.work.stored[i]:,} tokens)"
                        for i in config.kv_source_layer_ids) + ".")
