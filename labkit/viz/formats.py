"""The number formats on a line: E2M1's sixteen codes with their ties, and all three at a glance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from labkit.numerics import formats
from labkit.viz.palette import NEUTRAL, OKABE_ITO
from labkit.viz.picture import Picture, base_layout

WIDTH = 900
LOWEST, HIGHEST = -18, 18       # powers of two that the comparison of formats shows


@dataclass(frozen=True)
class Tie:
    """A number halfway between two neighbours, and the one that it is rounded to."""

    at: float
    to: float


def ties() -> list[Tie]:
    """All numbers halfway between two E2M1 values; where they go is asked of the encoder."""
    values = sorted(set(formats.e2m1_values()))
    middles = [(a + b) / 2 for a, b in zip(values, values[1:], strict=False)]
    codes = formats.encode_e2m1(torch.tensor(middles))
    return [Tie(at, to) for at, to in zip(middles, formats.decode_e2m1(codes).tolist(),
                                          strict=True)]


def e2m1_line() -> Picture:
    """The sixteen codes where their values lie, and which way each tie falls."""
    import plotly.graph_objects as go

    values, halves = formats.e2m1_values(), ties()
    fig = go.Figure(layout=base_layout(
        WIDTH, 172, margin={"l": 16, "r": 16, "t": 42, "b": 24},
        xaxis={"range": [-6.6, 6.6], "tickvals": [], "fixedrange": True, "showgrid": False,
               "zeroline": False, "title": {"text": "value"}},
        yaxis={"range": [-1.5, 1.1], "visible": False, "fixedrange": True}))
    fig.add_scatter(x=[-6.5, 6.5], y=[0, 0], mode="lines", showlegend=False, hoverinfo="skip",
                    line={"color": NEUTRAL, "width": 1}, name="line")
    for name, odd, colour, symbol in (("even code", 0, OKABE_ITO["blue"], "square"),
                                      ("odd code", 1, OKABE_ITO["orange"], "circle")):
        codes = [code for code in range(16) if code % 2 == odd]
        fig.add_scatter(x=[values[code] for code in codes], y=[0] * len(codes), mode="markers",
                        marker={"color": colour, "symbol": symbol, "size": 13}, name=name,
                        customdata=codes, hovertemplate="code %{customdata}: %{x}<extra></extra>")
    for name, symbol, side in (("a tie falls to the left", "triangle-left", -1),
                               ("a tie falls to the right", "triangle-right", 1)):
        own = [tie for tie in halves if (tie.to - tie.at) * side > 0]
        fig.add_scatter(x=[tie.at for tie in own], y=[0] * len(own), mode="markers", name=name,
                        marker={"color": OKABE_ITO["vermilion"], "symbol": symbol, "size": 11},
                        customdata=[tie.to for tie in own],
                        hovertemplate="%{x} becomes %{customdata}<extra></extra>")
    shown = sorted(set(values))
    fig.add_scatter(x=shown, y=[0.62] * len(shown), mode="text", showlegend=False, name="values",
                    text=["\u00b10" if v == 0 else f"{v:g}".replace("-", "\u2212") for v in shown],
                    textfont={"size": 13}, hoverinfo="skip")
    fig.add_scatter(x=values, y=[-1.15 if code == 8 else -0.7 for code in range(16)], mode="text",
                    text=[f"{code:04b}" for code in range(16)], hoverinfo="skip", name="codes",
                    textfont={"size": 11, "family": "monospace"}, showlegend=False)
    steps = [b - a for a, b in zip(shown, shown[1:], strict=False)]
    up = sum(abs(tie.to) > abs(tie.at) for tie in halves)
    caption = (f"{len(values)} codes, {len(shown)} values from {shown[0]:g} to {shown[-1]:g}: zero "
               f"has two codes. The spacing grows from {min(steps):g} to {max(steps):g}. Of "
               f"{len(halves)} ties {up} grow and {len(halves) - up} shrink, each to an even code.")
    listed = ", ".join(f"{code:04b} {value:g}" for code, value in enumerate(values))
    return Picture(fig, f"A line with the values of the sixteen E2M1 codes: {listed}.", caption,
                   ("code", "sign, exponent, mantissa", "value"), _fields(values))


def _fields(values: list[float]) -> tuple[tuple[Any, ...], ...]:
    return tuple((code, f"{code >> 3} {code >> 1 & 3:02b} {code & 1}", f"{values[code]:g}")
                 for code in range(8))


# ------------------------------------------------------------------------------ all three
@dataclass(frozen=True)
class Range:
    """One format: its positive values, ascending, how many codes it has and what they hold."""

    name: str
    bits: str
    codes: int
    values: list[float]
    use: str
    colour: str
    symbol: str

    @property
    def spacing(self) -> float:
        """Largest ratio of two neighbours from 1 up."""
        return max(b / a for a, b in zip(self.values, self.values[1:], strict=False) if a >= 1)


def ranges() -> list[Range]:
    """E2M1, E4M3 and UE8M0 from their tables of values."""
    def positive(values: list[float]) -> list[float]:
        return sorted(v for v in values if v > 0 and math.isfinite(v))

    return [
        Range("E2M1", "1, 2, 1", 16, positive(formats.e2m1_values()),
              "elements of FP4", OKABE_ITO["orange"], "square"),
        Range("E4M3", "1, 4, 3", 256, positive(formats.e4m3_values()),
              "elements of FP8, scales of NVFP4", OKABE_ITO["blue"], "circle"),
        Range("UE8M0", "0, 8, 0", 256, positive(formats.ue8m0_values()),
              "scales of FP8 and MXFP4", OKABE_ITO["green"], "diamond"),
    ]


def three_formats() -> Picture:
    """Their positive values on a scale of powers of two."""
    import plotly.graph_objects as go

    found = ranges()
    ticks = list(range(LOWEST + 2, HIGHEST, 4))
    fig = go.Figure(layout=base_layout(
        WIDTH, 200, margin={"l": 70, "r": 16, "t": 40, "b": 46},
        xaxis={"range": [LOWEST - 0.5, HIGHEST + 0.5], "tickvals": ticks, "fixedrange": True,
               "ticktext": [f"2^{t}" for t in ticks], "showgrid": True, "zeroline": False,
               "gridcolor": "rgba(128,128,128,.3)",
               "title": {"text": "positive values, on a scale of doublings"}},
        yaxis={"range": [-0.6, len(found) - 0.4], "tickvals": list(range(len(found))),
               "ticktext": [one.name for one in reversed(found)], "fixedrange": True,
               "showgrid": False, "zeroline": False}))
    for row, one in enumerate(reversed(found)):
        inside = [v for v in one.values if 2.0**LOWEST <= v <= 2.0**HIGHEST]
        fig.add_scatter(x=[math.log2(v) for v in inside], y=[row] * len(inside), mode="markers",
                        name=f"{one.name}: {one.use}", customdata=inside,
                        marker={"color": one.colour, "symbol": one.symbol, "size": 6},
                        hovertemplate="%{customdata:.6g}<extra></extra>")
    e2m1, e4m3, ue8m0 = found
    caption = (f"E2M1 spans {math.log2(e2m1.values[-1] / e2m1.values[0]):.1f} doublings, E4M3 "
               f"{math.log2(e4m3.values[-1] / e4m3.values[0]):.1f}, UE8M0 "
               f"{math.log2(ue8m0.values[-1] / ue8m0.values[0]):.0f} (of which "
               f"{HIGHEST - LOWEST} are drawn), but UE8M0 holds powers of two alone.")
    rows = tuple((one.name, one.bits, one.codes, f"{one.values[0]:.4g}", f"{one.values[-1]:.4g}",
                  f"{one.spacing:.3g}") for one in found)
    alt = "Positive values of three formats on a logarithmic line: " + "; ".join(
        f"{one.name} {len(one.values)} values from {one.values[0]:.3g} to {one.values[-1]:.3g}"
        for one in found) + "."
    return Picture(fig, alt, caption,
                   ("format", "sign, exponent, mantissa bits", "codes", "smallest", "largest",
                    "widest step above 1 (ratio)"), rows)
