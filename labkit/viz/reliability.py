"""Do drafts survive as often as the draft says? A reliability diagram before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.engine.calibration import calibrated
from labkit.train.calibration import Bin, reliability, survival_errors
from labkit.viz.palette import CALIBRATION, NEUTRAL
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.train.draft_figures import Trials

SIZE, BINS = 520, 10


def diagrams(trials: Trials, temperatures: Sequence[float], slot: int | None = None,
             bins: int = BINS) -> dict[str, list[Bin]]:
    """Bins of predicted survival a against observed, "before" and "after" the temperatures.

    slot 0..n-1; None: all slots together.
    """
    found = {}
    for name, own in (("before", [1.0] * len(temperatures)), ("after", list(temperatures))):
        a = calibrated(trials.confidence_logits, own).cumprod(-1)           # [N,n]
        survived = trials.survived
        if slot is not None:
            a, survived = a[:, slot : slot + 1], survived[:, slot : slot + 1]
        found[name] = reliability(a.flatten(), survived.flatten(), bins)
    return found


def reliability_diagram(trials: Trials, temperatures: Sequence[float],
                        slot: int | None = None) -> Picture:
    """Observed survival over predicted; a vertical line spans two standard errors both ways."""
    import plotly.graph_objects as go

    found = diagrams(trials, temperatures, slot)
    ticks = [0, 0.25, 0.5, 0.75, 1]
    axis = {"range": [-0.03, 1.03], "tickvals": ticks, "showgrid": True, "fixedrange": True,
            "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "zeroline": False,
            "gridcolor": "rgba(128,128,128,.3)"}
    fig = go.Figure(layout=base_layout(
        SIZE + 40, SIZE, margin={"l": 70, "r": 20, "t": 56, "b": 50},
        xaxis={**axis, "title": {"text": "survival that the draft expects (mean of the bin)"}},
        yaxis=axis,
        annotations=[{"x": 0.01, "y": 1.0, "text": "share that survived", "showarrow": False,
                      "xanchor": "left", "font": {"size": 12}}]))
    fig.add_scatter(x=[0, 1], y=[0, 1], mode="lines", name="true frequencies", hoverinfo="skip",
                    line={"color": NEUTRAL, "width": 1, "dash": "dash"})
    for name, mark in CALIBRATION.items():
        bars = [b for b in found[name] if b.predicted is not None and b.observed is not None]
        x: list[float | None] = []
        y: list[float | None] = []
        for b in bars:
            low, high = _span(b)
            x += [b.predicted, b.predicted, None]
            y += [low, high, None]
        fig.add_scatter(x=x, y=y, mode="lines", showlegend=False, hoverinfo="skip",
                        name=f"{name}: standard errors", line={"color": mark.colour, "width": 2})
        fig.add_scatter(x=[b.predicted for b in bars], y=[b.observed for b in bars],
                        mode="markers", name=mark.label, customdata=[b.count for b in bars],
                        marker={"color": mark.colour, "symbol": mark.letter, "size": 10},
                        hovertemplate="expected %{x:.0%}, survived %{y:.0%}, "
                                      "%{customdata} slots<extra></extra>")
    words = caption(trials, temperatures, found, slot)
    told = "; ".join(f"{name}: " + ", ".join(
        f"{b.predicted:.0%} became {b.observed:.0%}" for b in found[name] if b.count)
        for name in found)
    return Picture(fig, f"Points of expected and observed survival. {told}.", words,
                   *table(trials, temperatures))


def _span(b: Bin) -> tuple[float, float]:
    """Two standard errors of a share, within 0..1."""
    assert b.observed is not None
    error = 2 * (b.observed * (1 - b.observed) / b.count) ** 0.5
    return max(0.0, b.observed - error), min(1.0, b.observed + error)


def pooled_error(bins: Sequence[Bin]) -> float:
    """Expected calibration error of one diagram."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs((b.predicted or 0.0) - (b.observed or 0.0)) for b in bins) / total


def caption(trials: Trials, temperatures: Sequence[float], found: dict[str, list[Bin]],
            slot: int | None) -> str:
    """The finding: both errors, over how many proposals."""
    before, after = (pooled_error(found[name]) for name in ("before", "after"))
    what = "all slots together" if slot is None else f"slot {slot + 1}"
    return (f"{len(trials.survived):,} proposals, {what}: expected and observed survival differ by "
            f"{before:.1%} as the head says it and by {after:.1%} with the temperatures "
            f"(expected calibration error, {BINS} bins).")


def table(trials: Trials, temperatures: Sequence[float]
          ) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """By slot: what was expected, what survived, the error of both."""
    before = survival_errors(trials.confidence_logits, trials.survived)
    after = survival_errors(trials.confidence_logits, trials.survived, temperatures)
    ones = calibrated(trials.confidence_logits, [1.0]).cumprod(-1).mean(0)          # [n]
    own = calibrated(trials.confidence_logits, temperatures).cumprod(-1).mean(0)    # [n]
    seen = trials.survived.to(torch.float64).mean(0)                                # [n]
    rows = tuple((str(j + 1), f"{seen[j]:.1%}", f"{ones[j]:.1%}", f"{own[j]:.1%}",
                  f"{temperatures[j]:.2f}", f"{before[j]:.1%}", f"{after[j]:.1%}")
                 for j in range(len(seen)))
    return ("slot", "survived", "expected by the head", "with temperatures", "temperature",
            "error before", "error after"), rows
