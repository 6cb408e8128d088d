"""Throughput of a step over the tokens that it reads, and where each policy stops."""

from __future__ import annotations

import math
from typing import Any

from labkit.viz.load_data import DELAY, STEPS, Choice, Load, mean
from labkit.viz.palette import NEUTRAL, POLICIES
from labkit.viz.picture import Picture, base_layout

WIDTH, HEIGHT = 760, 430
Choices = dict[str, list[Choice]]


def throughput(load: Load, kind: str, requests: int, step: int,
               highest: float | None = None) -> Picture:
    """The curve of one step of so many requests; step DELAY..STEPS-1 of a load.

    highest: end of the fixed axis; None: `Load.highest`.
    """
    import plotly.graph_objects as go

    choices = load.choices(kind, requests)
    across = load.rates.largest * (1 + load.slots)
    marks, highest = [round(across * i / 6) for i in range(7)], highest or load.highest
    ticks = _ticks(highest)
    fig = go.Figure(layout=base_layout(
        WIDTH, HEIGHT, margin={"l": 70, "r": 20, "t": 60, "b": 50},
        xaxis={"range": [0, across + 1], "tickvals": marks, "showgrid": True, "fixedrange": True,
               "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "B: tokens that the step reads"}},
        yaxis={"range": [0, highest], "tickvals": ticks,
               "fixedrange": True, "showgrid": True, "gridcolor": "rgba(128,128,128,.3)",
               "zeroline": False},
        annotations=[{"x": 0.5, "y": highest * 0.97, "text": "tokens a second, expected",
                      "showarrow": False, "xanchor": "left", "font": {"size": 12}}]))
    fig.add_scatter(mode="lines", name="best slots first: tau * SPS(B)", hoverinfo="x+y",
                    line={"color": NEUTRAL, "width": 2})
    for size, (_, mark) in zip((13, 17, 15, 15, 9), POLICIES.items(), strict=True):
        fig.add_scatter(mode="markers", name=mark.label, hoverinfo="x+y+name",
                        marker={"color": mark.colour, "symbol": mark.letter, "size": size,
                                "line": {"color": "#FFF", "width": 1}})
    for trace, values in zip(fig.data, parts(load, choices, kind, requests, step), strict=True):
        trace.update(values)
    return Picture(fig, alt(choices, kind, requests, step),
                   caption(choices, kind, requests, step), *table(choices, step))


def _ticks(highest: float) -> list[float]:
    """Four to eight round numbers from 0 on."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    each = max(m * power for m in (1, 2, 5) if m * power <= highest / 4)
    return [i * each for i in range(int(highest / each) + 1)]


def parts(load: Load, choices: Choices, kind: str, requests: int, step: int
          ) -> list[dict[str, Any]]:
    """What changes with the controls: one dict for each trace, in order."""
    curve = load.curve(kind, requests, step)
    return [{"x": [b for b, _ in curve], "y": [y for _, y in curve]},
            *({"x": [choices[name][step].tokens], "y": [choices[name][step].throughput]}
              for name in POLICIES)]


# ---------------------------------------------------------------------------------- in words
def caption(choices: Choices, kind: str, requests: int, step: int) -> str:
    """The finding: what the scheduler admits in this step, and who is best over all of them."""
    own, means = choices["scheduler"][step], {k: mean(c) for k, c in choices.items()}
    most = sum(choices["fixed"][step].lengths)
    best = max(means, key=lambda name: means[name].expected)
    ratio = means["scheduler"].expected / means["none"].expected
    return (f"R = {requests}, {kind}: in this step the scheduler verifies {sum(own.lengths)} of "
            f"{most} slots (B = {own.tokens}). Over {STEPS - DELAY} steps the best policy is "
            f"\u201c{POLICIES[best].label}\u201d; the scheduler gives {ratio:.2f} of what plain "
            "decoding gives.")


def alt(choices: Choices, kind: str, requests: int, step: int) -> str:
    told = "; ".join(f"{mark.label}: B {choices[name][step].tokens}, "
                     f"{choices[name][step].throughput:.0f} tokens a second"
                     for name, mark in POLICIES.items())
    return (f"Curve of tokens a second over tokens read, {requests} requests of {kind}, step "
            f"{step}. {told}.")


def table(choices: Choices, step: int) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """This step, then the means over all; tokens a second."""
    plain = mean(choices["none"]).expected
    rows = []
    for name, mark in POLICIES.items():
        one, over = choices[name][step], mean(choices[name])
        rows.append((mark.label, str(sum(one.lengths)), f"{one.throughput:.0f}",
                     f"{over.slots:.1f}", f"{over.expected:.0f}", f"{over.observed:.0f}",
                     f"{over.expected / plain:.2f}"))
    return ("policy", "slots, this step", "tokens/s, this step", "slots a request, mean",
            "tokens/s, mean", "as it was", "of no draft"), tuple(rows)
