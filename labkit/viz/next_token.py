"""The distribution over the next token, as bars."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError
from labkit.viz.palette import PROBABILITY
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import visible

if TYPE_CHECKING:
    from labkit.engine.transcript import Candidate, Event

WIDTH = 620


def next_token_bars(candidates: Sequence[Candidate] | Event, drawn: int | None = None) -> Picture:
    """The likeliest next tokens, what sampling makes of them, and which one was drawn.

    candidates  what `Lab.stream(..., candidates=8)` puts into an event, or the event itself
    drawn       the id that was drawn (an event knows its own)
    """
    import plotly.graph_objects as go

    shown = bars(candidates, drawn)
    n = len(shown)
    mark, after = PROBABILITY["model"], PROBABILITY["sampled"]
    fig = go.Figure(layout=base_layout(
        WIDTH, 100 + 26 * n, margin={"l": 130, "r": 90, "t": 40, "b": 46},
        xaxis={"range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": True,
               "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "fixedrange": True,
               "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "probability"}},
        yaxis={"range": [n - 0.5, -0.5], "tickvals": list(range(n)),
               "ticktext": [escape(bar["label"], quote=False) for bar in shown],
               "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickfont": {"family": "monospace", "size": 13}},
    ))
    rows = list(range(n))
    fig.add_bar(orientation="h", x=[b["probability"] for b in shown], y=rows, width=0.76,
                marker={"color": mark.colour, "line": {"width": 0}}, name=mark.label,
                customdata=[b["id"] for b in shown], hoverinfo="x")
    fig.add_bar(orientation="h", x=[b["sampled"] for b in shown], y=rows, width=0.34,
                marker={"color": after.colour, "pattern": {"shape": after.pattern},
                        "line": {"width": 0}},
                name=after.label, customdata=[b["id"] for b in shown], hoverinfo="x")
    fig.add_scatter(x=[max(b["probability"], b["sampled"]) for b in shown], y=rows, mode="text",
                    text=[" " + b["note"] for b in shown], textposition="middle right",
                    hoverinfo="skip", showlegend=False, cliponaxis=False, name="labels",
                    customdata=[b["id"] for b in shown])
    return Picture(fig, _alt(shown), _caption(shown),
                   ("token", "model", "after sampling rules"),
                   tuple((b["label"], f"{b['probability']:.1%}", f"{b['sampled']:.1%}")
                         for b in shown))


def bars(candidates: Sequence[Candidate] | Event, drawn: int | None = None) -> list[dict[str, Any]]:
    """What is drawn: label, id, probability, sampled, note; the drawn id always among them."""
    from labkit.engine.transcript import Event

    listed: list[Any]
    if isinstance(candidates, Event):
        drawn, listed = candidates.id, list(candidates.candidates)
        if listed and drawn not in [c.id for c in listed]:
            listed.append(candidates)
    else:
        listed = list(candidates)
    if not listed:
        raise InputError("no candidates were recorded: ask for them with "
                         "lab.stream(..., candidates=8)")
    return [{"id": c.id, "label": visible(c.text) or f"id {c.id}", "probability": c.probability,
             "sampled": c.sampled,
             "note": f"{c.probability:.1%}" + " \u25c0 drawn" * (c.id == drawn)} for c in listed]


def _caption(shown: list[dict[str, Any]]) -> str:
    best = max(shown, key=lambda b: b["probability"])
    total = sum(b["probability"] for b in shown)
    text = (f"Likeliest next token: {best['label']} with {best['probability']:.1%}. The "
            f"{len(shown)} tokens shown hold {total:.1%} of the probability.")
    ids = [b for b in shown if b["note"].endswith("drawn")]
    return text + "".join(f" Drawn: {b['label']}." for b in ids)


def _alt(shown: list[dict[str, Any]]) -> str:
    listed = ", ".join(f"{b['label']} {b['probability']:.1%}" for b in shown)
    return f"Bars of next-token probabilities: {listed}."
