"""One place of a text under verification: how kept and replaced tokens add up to p_t."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import torch

from labkit.engine.verification import acceptance, residual
from labkit.viz.palette import EMITTED
from labkit.viz.picture import Picture, base_layout

WIDTH = 700


@dataclass(frozen=True)
class Place:
    """Probabilities [V]: of being drafted and kept, and of replacing a rejected token.

    They come from the engine's rules, so a fault in these is in the picture too.
    """

    target: torch.Tensor
    draft: torch.Tensor
    kept: torch.Tensor
    replaced: torch.Tensor

    @property
    def emitted(self) -> torch.Tensor:
        return self.kept + self.replaced

    @property
    def rejected(self) -> float:
        return 1.0 - float(self.kept.sum())


def place(p_t: torch.Tensor, p_d: torch.Tensor) -> Place:
    """What comes of a token drawn from p_d [V] where the target says p_t [V]."""
    p_t, p_d = p_t.double(), p_d.double()
    kept = torch.tensor([float(q) * acceptance(p_t, p_d, v) if q > 0 else 0.0
                         for v, q in enumerate(p_d)], dtype=torch.float64)
    return Place(p_t, p_d, kept, (1 - kept.sum()) * residual(p_t, p_d))


def one_place(p_t: torch.Tensor, p_d: torch.Tensor, names: Sequence[str],
              ids: Sequence[int] | None = None) -> Picture:
    """Two bars a token: what was drafted, and below it what is emitted against p_t.

    ids: which tokens are drawn; None: all. names: theirs.
    """
    import plotly.graph_objects as go

    found = place(p_t, p_d)
    shown = list(range(len(p_t))) if ids is None else list(ids)
    kept, replaced, wanted = (EMITTED[key] for key in ("kept", "replaced", "target"))
    top = max(0.1, float(torch.stack([found.emitted, found.target, found.draft]).max()) * 1.08)
    rows = range(len(shown))
    ticks = [i * 0.1 for i in range(11) if i * 0.1 <= top]
    fig = go.Figure(layout=base_layout(
        WIDTH, 100 + 46 * len(shown), margin={"l": 120, "r": 40, "t": 56, "b": 46},
        xaxis={"range": [0, top], "tickvals": ticks, "showgrid": True,
               "ticktext": [f"{100 * t:.0f} %" for t in ticks], "fixedrange": True,
               "gridcolor": "rgba(128,128,128,.3)",
               "zeroline": False, "title": {"text": "probability"}},
        yaxis={"range": [len(shown) - 0.4, -0.6], "tickvals": list(rows), "fixedrange": True,
               "ticktext": [escape(n, quote=False) for n in names], "showgrid": False,
               "zeroline": False, "tickfont": {"family": "monospace", "size": 13}}))
    values = {name: [float(getattr(found, name)[i]) for i in shown]
              for name in ("target", "draft", "kept", "replaced")}
    bar = {"orientation": "h", "hoverinfo": "x"}
    fig.add_bar(x=values["draft"], y=[r - 0.24 for r in rows], width=0.3, name="drafted: p_d",
                marker={"color": "#E69F00", "pattern": {"shape": "."}, "line": {"width": 0}},
                **bar)
    fig.add_bar(x=values["kept"], y=[r + 0.14 for r in rows], width=0.36, name=kept.label,
                marker={"color": kept.colour, "line": {"width": 0}}, **bar)
    fig.add_bar(x=values["replaced"], y=[r + 0.14 for r in rows], width=0.36, base=values["kept"],
                marker={"color": replaced.colour, "pattern": {"shape": replaced.pattern},
                        "line": {"width": 0}}, name=replaced.label, **bar)
    x: list[float | None] = []
    y: list[float | None] = []
    for row, p in zip(rows, values["target"], strict=True):
        x += [p, p, None]
        y += [row - 0.1, row + 0.38, None]
    fig.add_scatter(x=x, y=y, mode="lines", name=wanted.label, hoverinfo="skip",
                    line={"color": wanted.colour, "width": 3})
    off = float((found.emitted - found.target).abs().sum()) / 2
    # Rounding alone is no finding.
    says = "p_t exactly" if off < 1e-12 else f"not p_t: off by {off:.1%} of the probability"
    caption = (f"A draft is rejected with {found.rejected:.1%}. What is emitted is {says}.")
    told = "; ".join(
        f"{name}: drafted {values['draft'][i]:.1%}, kept {values['kept'][i]:.1%}, put in "
        f"{values['replaced'][i]:.1%}, target {values['target'][i]:.1%}"
        for i, name in enumerate(names))
    table = tuple((name, *(f"{values[key][i]:.1%}" for key in ("draft", "kept", "replaced")),
                   f"{values['kept'][i] + values['replaced'][i]:.1%}", f"{values['target'][i]:.1%}")
                  for i, name in enumerate(names))
    return Picture(fig, f"Bars of {len(shown)} tokens. {told}.", caption,
                   ("token", "p_d", "kept", "put in", "emitted", "p_t"), table)
