"""What the forms of the cache weigh and what they change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from labkit.cache import Cache
from labkit.cache.filled import fill
from labkit.config import ModelConfig
from labkit.numerics.rows import FORMS
from labkit.train.agreement import Agreement
from labkit.viz.palette import OKABE_ITO
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab

WIDTH = 900


@dataclass(frozen=True)
class Weight:
    """Bytes a token of one form, from the storages of full pages, and what reading it changes.

    kl, kl_max  KL(packed || form) in nats of a model's next-token distributions; same: share of
                positions with the same likeliest token
    """

    form: str
    global_kv: float
    index_keys: float
    kl: float
    kl_max: float
    same: float

    @property
    def total(self) -> float:
        return self.global_kv + self.index_keys


def bytes_a_token(config: ModelConfig, form: str, pages: int = 2) -> dict[str, float]:
    """Bytes a token of global KV and index keys: stores are filled and their storages counted."""
    cache = Cache(config, form=form)
    tokens = pages * cache.page_tokens
    fill(cache, tokens)
    used = cache.nbytes()
    assert used["reserved"] == 0, "whole pages have no slack"
    return {part: used[part] / tokens for part in ("global_kv", "index_keys")}


def weigh(config: ModelConfig, lab: Lab, ids: Sequence[int]) -> list[Weight]:
    """Bytes at the widths of `config`; changes of what `lab` says about `ids`."""
    expected = lab.session("packed").prefill(ids)[0]
    found = []
    for form in FORMS:
        agreement = Agreement()
        agreement.add(expected, expected if form == "packed"
                      else lab.session(form).prefill(ids)[0])
        found.append(Weight(form, **bytes_a_token(config, form), kl=agreement.mean,
                            kl_max=max(agreement.kl), same=agreement.same / len(agreement.kl)))
    return found


def stores_picture(found: Sequence[Weight], sizes: str, text: str) -> Picture:
    """Bars of bytes a token; sizes: whose widths, text: what was read."""
    import plotly.graph_objects as go

    rows = list(range(len(found)))
    most = max(one.total for one in found)
    fig = go.Figure(layout=base_layout(
        WIDTH, 96 + 30 * len(found), margin={"l": 80, "r": 250, "t": 40, "b": 46},
        xaxis={"range": [0, most], "fixedrange": True, "showgrid": True, "zeroline": False,
               "tickvals": list(range(0, round(most) + 1, 1000)),
               "gridcolor": "rgba(128,128,128,.3)",
               "title": {"text": f"bytes a token at the sizes of {sizes}"}},
        yaxis={"range": [len(found) - 0.5, -0.5], "tickvals": rows, "fixedrange": True,
               "ticktext": [one.form for one in found], "showgrid": False, "zeroline": False}))
    start = [0.0] * len(found)
    for name, part, colour, pattern in (("compressed entries", "global_kv", "orange", "/"),
                                        ("index keys", "index_keys", "purple", "x")):
        values = [getattr(one, part) for one in found]
        fig.add_bar(orientation="h", x=values, y=rows, base=list(start), width=0.62, name=name,
                    marker={"color": OKABE_ITO[colour], "pattern": {"shape": pattern},
                            "line": {"width": 0}}, customdata=values, hoverinfo="x")
        start = [a + b for a, b in zip(start, values, strict=True)]
    labels = [f"{one.total:,.1f} B, " + ("the reference" if one is found[0] else
                                         f"KL {_told(one.kl)}") for one in found]
    fig.add_scatter(x=[one.total for one in found], y=rows, mode="text", text=[
        f"\u00a0{label}" for label in labels], textposition="middle right", hoverinfo="skip",
        showlegend=False, cliponaxis=False, name="labels", customdata=start)
    packed = found[0]
    worst = max(found, key=lambda one: one.kl)
    caption = (f"Packed takes {packed.total:,.1f} bytes a token at the sizes of {sizes}, plain "
               f"fp32 {most / packed.total:.1f} times that. On {text}, {worst.form} differs most: "
               f"KL {worst.kl:.1e} nats on average, at most {worst.kl_max:.1e}.")
    return Picture(fig, "Bars of bytes a token by form of the cache: " + "; ".join(
        f"{one.form} {label}" for one, label in zip(found, labels, strict=True)) + ".", caption,
        ("form", "entries, bytes", "index keys, bytes", "together", "KL mean, nats", "KL max",
         "same likeliest token"),
        tuple((one.form, f"{one.global_kv:,.1f}", f"{one.index_keys:,.1f}", f"{one.total:,.1f}",
               _told(one.kl), _told(one.kl_max), f"{one.same:.1%}") for one in found))


def _told(nats: float) -> str:
    return f"{nats:.1e}" if nats else "0"
