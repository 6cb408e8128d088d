"""A block of real values under the three recipes, side by side, while one outlier grows.

    fp8     ▌ ▂▄ ▅▂   32 bars: what is stored; a hollow mark on each: what was computed
    mxfp4   ▌         under each bar its code; one outlier sets the scale of its whole block
    nvfp4   ▌  ▅▂     two blocks of 16, so that only one of them suffers

`stored` turns values into numbers, `block_picture` draws them, and the explorer replaces them in
the drawn figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labkit.numerics import dequantize, quantize, relative_rms
from labkit.numerics.blocks import FORMATS, block_format
from labkit.numerics.formats import decode_e4m3, decode_ue8m0
from labkit.train.controls import cache_rounding
from labkit.viz.palette import NEUTRAL, OKABE_ITO, ROUNDING
from labkit.viz.picture import Picture, base_layout

if TYPE_CHECKING:
    from labkit.lab import Lab

CHANNELS = 32           # as many as the longest block
WIDTH = 900
PANEL = 130             # pixels of a recipe's panel
STEP = 3.0              # its height in units of the largest value shown
ORDER = ("fp8", "mxfp4", "nvfp4")


@dataclass(frozen=True)
class Tensor:
    """Vectors of one kind as the model computed them, before any rounding.

    rows [n, width]; recipe: how the model rounds them
    """

    name: str
    recipe: str
    rows: torch.Tensor


@dataclass(frozen=True)
class Stored:
    """CHANNELS values under one recipe.

    values [CHANNELS] as read back; codes: of the elements; scales: what the scale codes mean;
    error: relative error (rms) of all values but the outlier; zeros: how many of those, not zero
    before, are stored as zero
    """

    recipe: str
    values: torch.Tensor
    codes: list[int]
    scale_codes: list[int]
    scales: list[float]
    error: float
    zeros: int


def unrounded(lab: Lab, text: str | Sequence[int], max_tokens: int | None = None,
              ) -> dict[str, Tensor]:
    """One run without cache rounding: what each recipe gets to see, by name."""
    ids = lab.encode(text)[:max_tokens]
    owners = [role.layer for role in lab.config.roles if role.kind == "full"]
    with cache_rounding(lab.model, False):
        run = lab.trace(ids, patterns=["*.window", "*.compressed_kv", "*.index_keys"])
    found = []
    for layer in owners:
        found += [Tensor(f"entry of layer {layer}", "nvfp4",
                         run[f"layers.{layer}.attn.compressed_kv"][0]),
                  Tensor(f"index key of layer {layer}", "mxfp4",
                         run[f"layers.{layer}.attn.index_keys"][0]),
                  Tensor(f"window key of layer {layer}", "fp8",
                         run[f"layers.{layer}.attn.window"][0, lab.config.sliding_window:])]
    return {tensor.name: tensor for tensor in found}


def with_outlier(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, int]:
    """x [CHANNELS] with its largest magnitude multiplied, and where that is."""
    at = int(x.abs().argmax())
    grown = x.clone()
    grown[at] *= factor
    return grown, at


def stored(x: torch.Tensor, outlier: int, recipe: str) -> Stored:
    """x [CHANNELS] quantised and read back."""
    q = quantize(x, recipe)
    values = dequantize(q)
    others = torch.arange(len(x)) != outlier
    decode = decode_ue8m0 if block_format(recipe).scale == "ue8m0" else decode_e4m3
    return Stored(recipe, values, q.codes.tolist(), q.scales.tolist(), decode(q.scales).tolist(),
                  relative_rms(x[others], values[others]),
                  int(((values == 0) & (x != 0) & others).sum()))


def block_picture(tensors: Mapping[str, Tensor], name: str, row: int, first: int = 0,
                  factor: float = 1.0) -> Picture:
    """Channels first..first+31 of one row, its largest value multiplied by `factor`."""
    import plotly.graph_objects as go

    view = look(tensors, name, row, first, factor)
    fig = go.Figure(data=_empty_traces(go), layout=_layout())
    for trace, values in zip(fig.data, view["parts"], strict=True):
        trace.update(values)
    return Picture(fig, view["alt"], view["caption"], view["columns"], view["rows"])


def look(tensors: Mapping[str, Tensor], name: str, row: int, first: int,
         factor: float) -> dict[str, Any]:
    """Everything that depends on the controls: parts of the traces, alt, caption, table."""
    tensor = tensors[name]
    exact = tensor.rows[row, first : first + CHANNELS]
    grown, at = with_outlier(exact, factor)
    found = [stored(grown, at, recipe) for recipe in ORDER]
    scale = float(exact.abs().max()) or 1.0
    columns = ("recipe", "scales", "code of the outlier", "error of the others",
               "others stored as zero")
    own = tuple((ROUNDING[s.recipe].label + (" (used here)" if s.recipe == tensor.recipe else ""),
                 ", ".join(f"{v:g}" for v in s.scales), f"{s.codes[at]:X}", f"{s.error:.1%}",
                 f"{s.zeros} of {CHANNELS - 1}") for s in found)
    caption = _caption(tensor, row, first, factor, float(grown[at]), at, found)
    return {"parts": _parts(grown, at, found, scale), "columns": columns, "rows": own,
            "caption": caption, "found": found, "alt": (
                f"{CHANNELS} values and what three recipes store of them. " + "; ".join(
                    f"{r[0]}: scales {r[1]}, error of the others {r[3]}, zeros {r[4]}"
                    for r in own) + ".")}


def _caption(tensor: Tensor, row: int, first: int, factor: float, value: float, at: int,
             found: list[Stored]) -> str:
    text = (f"{tensor.name}, row {row}, channels {first} to {first + CHANNELS - 1}, as computed. "
            if factor == 1 else
            f"{tensor.name}, row {row}: channel {first + at} is multiplied by {factor:g} and is "
            f"{value:.4g} now. ")
    listed = ", ".join(f"{s.error:.1%} in {s.recipe.upper()}" for s in found)
    worst = max(found, key=lambda s: s.zeros)
    text += f"Error of the {CHANNELS - 1} other values: {listed}."
    if worst.zeros:
        text += f" {worst.recipe.upper()} stores {worst.zeros} of them as zero."
    return text


# ---------------------------------------------------------------------------------- drawing
def _empty_traces(go: Any) -> list[Any]:
    traces = []
    for recipe in ORDER:
        mark = ROUNDING[recipe]
        traces.append(go.Bar(
            name=f"stored in {mark.label.split(':')[0]} ({mark.letter})", width=0.72,
            marker={"color": mark.colour, "pattern": {"shape": mark.pattern},
                    "line": {"width": 0}},
            hovertemplate="channel %{x}: %{customdata[0]:.4g} stored as %{customdata[1]:.4g}"
                          "<extra></extra>"))
    traces.append(go.Scatter(name="as computed", mode="markers", hoverinfo="skip",
                             marker={"symbol": "diamond-open", "size": 7, "color": "#444"}))
    traces.append(go.Scatter(name="outside the picture", mode="markers+text",
                             marker={"color": OKABE_ITO["vermilion"], "size": 10},
                             textposition="middle right", textfont={"size": 11},
                             hoverinfo="skip"))
    traces.append(go.Scatter(name="codes", mode="text", showlegend=False, hoverinfo="skip",
                             textfont={"family": "monospace", "size": 10}))
    return traces


def _layout() -> dict[str, Any]:
    lines = [{"type": "line", "x0": -0.6, "x1": CHANNELS - 0.4, "y0": -STEP * i, "y1": -STEP * i,
              "line": {"color": NEUTRAL, "width": 1}} for i in range(len(ORDER))]
    for i, recipe in enumerate(ORDER):
        for edge in range(0, CHANNELS + 1, FORMATS[recipe].block):
            lines.append({"type": "line", "x0": edge - 0.5, "x1": edge - 0.5,
                          "y0": -STEP * i - 1.15, "y1": -STEP * i + 1.15,
                          "line": {"color": NEUTRAL, "width": 1, "dash": "dot"}})
    return base_layout(
        WIDTH, PANEL * len(ORDER) + 56, margin={"l": 64, "r": 12, "t": 50, "b": 6}, shapes=lines,
        xaxis={"range": [-0.7, CHANNELS - 0.3], "visible": False, "fixedrange": True},
        yaxis={"range": [-STEP * (len(ORDER) - 1) - 1.75, 1.3], "fixedrange": True,
               "tickvals": [-STEP * i for i in range(len(ORDER))], "showgrid": False,
               "zeroline": False,
               "ticktext": [ROUNDING[recipe].label.split(":")[0] for recipe in ORDER]})


def _parts(x: torch.Tensor, outlier: int, found: list[Stored], scale: float,
           ) -> list[dict[str, Any]]:
    """One dict a trace. Heights in units of the largest value before the outlier grew."""
    channels = list(range(len(x)))
    bars: list[dict[str, Any]] = []
    marks: dict[str, Any] = {"x": [], "y": [], "customdata": []}
    outside: dict[str, Any] = {"x": [], "y": [], "text": [], "customdata": [],
                               "marker.symbol": "triangle-up" if x[outlier] > 0
                               else "triangle-down",
                               "textposition": "middle right" if outlier < 22 else "middle left"}
    codes: dict[str, Any] = {"x": [], "y": [], "text": [], "customdata": []}
    for i, one in enumerate(found):
        base, digits = -STEP * i, FORMATS[one.recipe].element_bits // 4
        heights = [max(-1.1, min(1.1, v / scale)) for v in one.values.tolist()]
        bars.append({"x": channels, "y": heights, "base": [base] * len(x), "customdata": [
            [a, b] for a, b in zip(x.tolist(), one.values.tolist(), strict=True)]})
        for channel, value in enumerate(x.tolist()):
            if abs(value) <= 1.1 * scale:
                marks["x"].append(channel)
                marks["y"].append(base + value / scale)
                marks["customdata"].append(value)
            else:
                outside["x"].append(channel)
                outside["y"].append(base + (1.2 if value > 0 else -1.2))
                outside["text"].append(f"{value:.4g} stored as {one.values[channel]:.4g}")
                outside["customdata"].append(value)
        codes["x"] += channels
        codes["y"] += [base - 1.5] * len(x)
        codes["text"] += [f"{code:0{digits}X}" for code in one.codes]
        codes["customdata"] += one.codes
    return [*bars, marks, outside, codes]
