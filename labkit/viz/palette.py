"""Colours that stay apart for every reader, and the marks that go with them.

Classes take their colours from Okabe and Ito (2008), magnitudes cividis, signed values blue to
orange with white at zero. A colour never stands alone: every class also has a letter or a
pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

OKABE_ITO = {
    "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "yellow": "#F0E442",
    "blue": "#0072B2", "vermilion": "#D55E00", "purple": "#CC79A7", "black": "#000000",
}
MAGNITUDE = "cividis"
SIGNED = ((0.0, "#0072B2"), (0.5, "#FFFFFF"), (1.0, "#E69F00"))  # centre it on zero: cmid=0
NEUTRAL = "#808080"


@dataclass(frozen=True)
class Mark:
    """How one class is drawn: colour, a letter, and a fill pattern of plotly ("" = plain)."""

    label: str
    colour: str
    letter: str
    pattern: str = ""


ROLES = {  # kinds of `LayerRole`
    "window": Mark("window only", "#56B4E9", "W"),
    "full": Mark("Full", "#E69F00", "F"),
    "reindex": Mark("Reindex", "#F0E442", "I"),
    "reuse": Mark("Reuse", "#009E73", "U"),
}
FLOWS = {  # what is handed from layer to layer
    "kv": Mark("compressed KV and index keys", "#0072B2", "KV"),
    "selection": Mark("selection (top-k entries)", "#D55E00", "S"),
    "candidates": Mark("candidate pool", "#CC79A7", "P"),
    "engram": Mark("Engram memory", NEUTRAL, "E"),
}
ATTENTION = {  # where the attention of a query goes
    "window": Mark("window tokens", "#0072B2", "above the text"),
    "entries": Mark("selected compressed entries", "#E69F00", "below the text", "/"),
    "candidates": Mark("candidate pool", "#CC79A7", "line under the text"),
    "sink": Mark("sink", "#009E73", "in the bar only", "x"),
}
PROBABILITY = {
    "model": Mark("the model's probability", "#0072B2", "wide bar"),
    "sampled": Mark("after temperature, top-k, top-p", "#E69F00", "narrow bar", "/"),
}
SELECTION = {  # how entries are chosen
    "index": Mark("index", "#0072B2", "solid line, plain bar, circle"),
    "best": Mark("best possible", "#009E73", "dashed line, diamond"),
    "random": Mark("at random", "#CC79A7", "dotted line, triangle"),
    "left": Mark("left out by the index", "#E69F00", "hatched bar", "/"),
}
DESIGNS = {  # who scores entries
    "all": Mark("every layer reads all entries", "#E69F00", "dotted line"),
    "own": Mark("every layer has its own index", "#D55E00", "dashed line"),
    "shared": Mark("index sources only", "#56B4E9", "solid line"),
    "pool": Mark("index sources and pool", "#009E73", "solid line, circles"),
}
ROUNDING = {  # the recipes of `labkit.numerics.blocks`, by what they round
    "fp8": Mark("FP8: window", "#0072B2", "E4M3, block 32", "/"),
    "mxfp4": Mark("MXFP4: index", "#CC79A7", "E2M1, block 32", "x"),
    "nvfp4": Mark("NVFP4: entries", "#E69F00", "E2M1, block 16", "-"),
}
ORDERS = {  # n-grams by their order
    2: Mark("2-gram", "#0072B2", "2"),
    3: Mark("3-gram", "#E69F00", "3", "/"),
    4: Mark("4-gram", "#009E73", "4", "x"),
    5: Mark("5-gram", "#CC79A7", "5", "-"),
    6: Mark("6-gram", "#000000", "6", "|"),
}
MUTED = {  # what a token costs when a part is switched off
    "more": Mark("costs more when muted", "#E69F00", "above the text", "/"),
    "less": Mark("costs less when muted", "#0072B2", "below the text"),
}
DRAFTING = {  # a token that a draft proposes, in the eyes of draft and target
    "target": Mark("target: p_t", "#0072B2", "wide bar"),
    "draft": Mark("draft: p_d", "#E69F00", "narrow bar", "/"),
    "survival": Mark("survival a, as expected", "#009E73", "diamond"),
}
SLOT = {  # the distribution of a slot, before and after it knows the token before its own
    "base": Mark("base logits alone", "#56B4E9", "wide bar"),
    "biased": Mark("with the Markov bias of the token before", "#D55E00", "narrow bar", "/"),
}
EMITTED = {  # where the probability of an emitted token comes from
    "kept": Mark("drafted and kept: min(p_d, p_t)", "#56B4E9", "first part"),
    "replaced": Mark("put in for a rejected one: max(0, p_t - p_d)", "#D55E00", "second part",
                     "/"),
    "target": Mark("p_t", "#000000", "bracket"),
}
CALIBRATION = {
    "before": Mark("as the head says it", "#E69F00", "square"),
    "after": Mark("with the temperatures", "#0072B2", "circle"),
}
POLICIES = {  # letters are the marker shapes of the figure
    "none": Mark("no draft", "#000000", "square"),
    "fixed": Mark("all slots", "#D55E00", "triangle-up"),
    "threshold": Mark("a \u2265 0.5", "#56B4E9", "triangle-down"),
    "scheduler": Mark("prefix scheduler", "#009E73", "diamond"),
    "delayed": Mark("delayed budget", "#E69F00", "circle"),
}

# Machado, Oliveira, Fernandes (2009), severity 1: what is left of a colour, on linear RGB.
COLOUR_VISION = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
                   (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
                     (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602),
                   (0.004733, 0.691367, 0.303900)),
}
_TO_XYZ = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750),
           (0.0193339, 0.1191920, 0.9503041))
_WHITE = (0.95047, 1.0, 1.08883)


def _apply(matrix, vector):  # type: ignore[no-untyped-def]
    return tuple(sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix)


def linear_rgb(colour: str) -> tuple[float, float, float]:
    """"#RRGGBB" -> linear RGB, 0..1 each."""
    values = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return r, g, b


def lab(rgb: tuple[float, float, float]) -> tuple[float, float, float]:
    """Linear RGB -> CIE L*a*b* (D65)."""
    xyz = (x / w for x, w in zip(_apply(_TO_XYZ, rgb), _WHITE, strict=True))
    x, y, z = (v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(first: str, second: str, vision: str | None = None) -> float:
    """CIE76 colour difference (about 2 is just noticeable), as seen with `vision`.

    vision  a key of COLOUR_VISION, or None for all three cones
    """
    seen = []
    for colour in (first, second):
        rgb = linear_rgb(colour)
        if vision is not None:
            rgb = tuple(min(max(v, 0.0), 1.0) for v in _apply(COLOUR_VISION[vision], rgb))
        seen.append(lab(rgb))
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


def smallest_distance(colours: list[str]) -> tuple[float, str, str, str]:
    """The two colours of a set that are hardest to tell apart: (difference, a, b, vision)."""
    return min(
        (distance(a, b, vision), a, b, vision or "all cones")
        for vision in (None, *COLOUR_VISION)
        for i, a in enumerate(colours) for b in colours[i + 1 :]
    )


def contrast(first: str, second: str) -> float:
    """WCAG contrast ratio of two colours, 1 to 21."""
    dark, light = sorted(_apply(_TO_XYZ, linear_rgb(c))[1] for c in (first, second))
    return (light + 0.05) / (dark + 0.05)
