"""The rule by which logits agree, the boundary at which roundings part, and the tables.

Numpy and the standard library only; nothing here knows an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

UNROUNDED, ROUNDED = 1e-3, 5e-3
"""Tolerances as a share of the span, the largest absolute logit of labkit's."""

AGREES = "agrees"
BOUNDARIES = "agrees up to rounding boundaries"
FLOOR = "no farther from labkit than labkit from itself"
DISAGREES = "disagrees"

SITES = {  # in the order in which a layer comes to them
    "attn.window": "window vector (FP8)",
    "attn.compressed_kv": "compressed entry (NVFP4)",
    "attn.index_keys": "index key (MXFP4)",
    "attn.index_queries": "index query (MXFP4)",
    "attn.candidates": "candidate pool",
    "attn.topk_indices": "selection (top-k)",
    "ffn.picked": "experts picked",
}


@dataclass(frozen=True)
class Distance:
    """How far logits lie apart, row by row: the largest difference of a row over the span."""

    rows: int
    worst: float
    median: float
    beyond: int
    """Rows farther apart than the tolerance."""
    first: int | None
    """The first of them, as an index of a row."""
    same: float
    """Share of rows with the same likeliest token."""


def distance(theirs: np.ndarray, ours: np.ndarray, tolerance: float) -> Distance:
    """[N,V] and [N,V] -> Distance; rows that hold no number count as infinitely far."""
    if theirs.shape != ours.shape:
        raise ValueError(f"logits have shape {theirs.shape}, labkit's {ours.shape}")
    span = float(np.abs(ours).max())
    apart = np.abs(theirs.astype(np.float64) - ours).max(axis=-1) / span
    apart = np.where(np.isfinite(apart), apart, np.inf)
    beyond = np.flatnonzero(apart > tolerance)
    return Distance(len(apart), float(apart.max()), float(np.median(apart)), len(beyond),
                    int(beyond[0]) if len(beyond) else None,
                    float((theirs.argmax(-1) == ours.argmax(-1)).mean()))


def farthest(found: Sequence[Distance]) -> Distance:
    """Of distances of one text, the largest and the largest median, with the rows of the former."""
    far = max(found, key=lambda d: d.worst)
    return replace(far, median=max(d.median for d in found))


def verdict(found: Sequence[Distance], forced: Sequence[Distance] = (),
            floor: Sequence[Distance] = ()) -> str:
    """What the distances of one mode say together.

    forced  distances left, for every text that was beyond the tolerance, when labkit is handed
            the engine's own rounded vectors and choices: they must keep the unrounded tolerance
    floor   labkit's distances from itself when last digits differ, text by text
    """
    late = [d for d in found if d.beyond]
    if not late:
        return AGREES
    if len(forced) >= len(late) and all(d.worst <= UNROUNDED for d in forced):
        return BOUNDARIES
    if len(floor) == len(found) and all(
            d.median <= 2 * f.median and d.worst <= 2 * max(f.worst for f in floor)
            for d, f in zip(found, floor, strict=True)):
        return FLOOR
    return DISAGREES


# ---- rounding boundaries --------------------------------------------------------------------

@dataclass(frozen=True)
class Boundary:
    """The first place, layer by layer, where two traces hold different codes or choices."""

    layer: int
    site: str
    position: int
    """Of the token at which it happens; for an entry, of the token that completes it."""
    places: int
    """Elements that differ, in all layers, up to the row that was asked for."""

    def __str__(self) -> str:
        return f"layer {self.layer}, {SITES[self.site]}, position {self.position}"


def padded(selection: np.ndarray, width: int) -> np.ndarray:
    """[T,k] entry numbers -> int64 [T,width], ascending, then -1."""
    beyond = np.iinfo(np.int64).max
    rows = np.full((len(selection), width), beyond, dtype=np.int64)
    rows[:, : selection.shape[1]] = selection
    rows[rows < 0] = beyond
    rows.sort(axis=1)
    rows[rows == beyond] = -1
    return rows


def first_boundary(theirs: Mapping[str, np.ndarray], ours: Mapping[str, np.ndarray],
                   ratios: Sequence[int], row: int) -> Boundary | None:
    """What parts first among all that the token at `row` may depend on; None: nothing does.

    Values that were rounded to the same code are equal bit for bit, so any difference is a
    boundary that was crossed. ratios: tokens an entry of each layer stands for.
    """
    found: tuple[int, str, int] | None = None
    places = 0
    for layer, ratio in enumerate(ratios):
        for site in SITES:
            name = f"layers.{layer}.{site}"
            if name not in ours or name not in theirs:
                continue
            apart, position = _differences(site, theirs[name], ours[name], ratio)
            apart = apart[position <= row]
            if apart.any():
                places += int(apart.sum())
                if found is None:
                    first = int(np.flatnonzero(apart)[0])
                    found = layer, site, int(position[first])
    return None if found is None else Boundary(*found, places)


def _differences(site: str, theirs: np.ndarray, ours: np.ndarray,
                 ratio: int) -> tuple[np.ndarray, np.ndarray]:
    """Differing elements of every row, and the rows' positions."""
    position = np.arange(len(ours))
    if site in ("attn.compressed_kv", "attn.index_keys"):
        position = (position + 1) * ratio - 1
    if site in ("attn.topk_indices", "ffn.picked"):
        width = max(theirs.shape[1], ours.shape[1])
        theirs, ours = padded(theirs, width), padded(ours, width)
    if site == "attn.candidates":  # engines differ in what they say of entries not yet there
        visible = np.arange(ours.shape[1]) < ((position + 1) // ratio)[:, None]
        theirs, ours = theirs & visible, ours & visible
    apart = (theirs.reshape(len(ours), -1) != ours.reshape(len(ours), -1)).sum(axis=1)
    return apart, position


# ---- greedy texts ---------------------------------------------------------------------------

def parting(theirs: Sequence[int], ours: Sequence[int]) -> int | None:
    """The first step at which two texts differ; None: they are the same."""
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a != b:
            return step
    return None


def margin(row: np.ndarray) -> float:
    """Logits [V] -> how far the best lies above the second."""
    second, best = np.partition(row.astype(np.float64), -2)[-2:]
    return float(best - second)


# ---- tables ---------------------------------------------------------------------------------

def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, its columns padded so that it reads well as plain text, too."""
    cells = [[c.replace("|", "\\|") for c in row] for row in (head, *rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
             for row in cells]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
