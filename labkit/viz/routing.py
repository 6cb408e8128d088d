"""Which experts the tokens of a text visited, from the picks that a run recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labkit.errors import InputError
from labkit.viz.palette import NEUTRAL, OKABE_ITO
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab

WIDTH = 900
MARKS = ((OKABE_ITO["blue"], ""), (OKABE_ITO["orange"], "/"), (OKABE_ITO["green"], "x"))


@dataclass(frozen=True)
class Visits:
    """Of several texts: shares [texts,layers,E] of the visits that each expert had.

    tokens: of each text. A token makes `per_token` visits in every layer.
    """

    names: tuple[str, ...]
    tokens: tuple[int, ...]
    per_token: int
    shares: torch.Tensor

    def load(self, text: int, layer: int) -> float:
        """The fullest expert's visits over the mean: 1 is perfect balance."""
        own = self.shares[text, layer]
        return float(own.max() * len(own))


def visits(lab: Lab, texts: dict[str, str | Sequence[int]]) -> Visits:
    """Run the model over each text once. InputError for more than three texts, or none."""
    if not 1 <= len(texts) <= len(MARKS):
        raise InputError(f"{len(texts)} texts: give one to {len(MARKS)}")
    c, rows, tokens = lab.config, [], []
    for text in texts.values():
        ids = lab.encode(text)
        taps = lab.trace(ids, patterns=["layers.*.ffn.picked"])
        picked = torch.stack([taps[f"layers.{i}.ffn.picked"][0].cpu()
                              for i in range(c.num_hidden_layers)])            # [L,T,k]
        counts = torch.stack([torch.bincount(one.flatten(), minlength=c.n_routed_experts)
                              for one in picked]).double()                     # [L,E]
        rows.append(counts / counts.sum(-1, keepdim=True))
        tokens.append(len(ids))
    return Visits(tuple(texts), tuple(tokens), c.num_experts_per_tok, torch.stack(rows))


def routing_picture(found: Visits, layer: int) -> Picture:
    """Bars of each expert's share in one layer, side by side for the texts; a line at equal."""
    import plotly.graph_objects as go

    E, n = found.shares.shape[-1], len(found.names)
    top = float(found.shares.max()) * 1.1
    ticks = [i / 10 for i in range(11) if i / 10 <= top]
    fig = go.Figure(layout=base_layout(
        WIDTH, 300, margin={"l": 60, "r": 20, "t": 40, "b": 46},
        xaxis={"range": [-0.6, E - 0.4], "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickvals": list(range(E)), "ticktext": [str(i) for i in range(E)],
               "title": {"text": "routed expert"}},
        yaxis={"range": [0, top], "fixedrange": True, "showgrid": True, "zeroline": False,
               "gridcolor": "rgba(128,128,128,.3)", "tickvals": ticks,
               "ticktext": [f"{t:.0%}" for t in ticks]}))
    width = 0.8 / n
    for number, values in enumerate(routing_parts(found, layer)):
        colour, pattern = MARKS[number]
        fig.add_bar(x=list(range(E)), width=width, offset=-0.4 + number * width,
                    name=found.names[number],
                    marker={"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}},
                    **values)
    fig.add_scatter(x=[-0.6, E - 0.4], y=[1 / E, 1 / E], mode="lines", name="equal load",
                    line={"color": NEUTRAL, "width": 2, "dash": "dash"}, hoverinfo="skip")
    return Picture(fig, routing_alt(found, layer), routing_caption(found, layer), COLUMNS,
                   routing_table(found, layer))


COLUMNS = ("text", "tokens", "fullest expert", "its share", "over equal load")


def routing_parts(found: Visits, layer: int) -> list[dict[str, Any]]:
    return [{"y": found.shares[i, layer].tolist()} for i in range(len(found.names))]


def routing_table(found: Visits, layer: int) -> tuple[tuple[Any, ...], ...]:
    return tuple((name, f"{found.tokens[i]:,}", str(int(found.shares[i, layer].argmax())),
                  f"{float(found.shares[i, layer].max()):.0%}", f"{found.load(i, layer):.2f}")
                 for i, name in enumerate(found.names))


def routing_caption(found: Visits, layer: int) -> str:
    listed = ", ".join(f"{found.load(i, layer):.2f} on {name}"
                       for i, name in enumerate(found.names))
    return f"Layer {layer}: the fullest expert's load over the mean is {listed}."


def routing_alt(found: Visits, layer: int) -> str:
    return f"Bars of the shares of visits to each expert in layer {layer}. " + " ".join(
        f"{name}: " + ", ".join(f"{s:.0%}" for s in found.shares[i, layer].tolist()) + "."
        for i, name in enumerate(found.names))
