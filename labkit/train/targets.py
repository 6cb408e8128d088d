"""What a trained model should reach, and whether it does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from labkit.train.attention_mass import ANSWERS, Mass
from labkit.train.attention_mass import NOVELS as PROSE
from labkit.train.figures import Figures
from labkit.train.kinds import MEMORISED, NOVELS
from labkit.train.recall import AS_SHIPPED, NEAR

DIRECTIONS: dict[str, Callable[[float, float], bool]] = {
    "<=": lambda value, bound: value <= bound, "<": lambda value, bound: value < bound,
    ">=": lambda value, bound: value >= bound, ">": lambda value, bound: value > bound,
}


@dataclass(frozen=True)
class Target:
    """A figure and its bound: reached if `value direction bound` holds, and never if either is
    not known.

    measured   how, in words; why not, where the value is None
    aim        what is hoped for and told, but not asked for
    """

    name: str
    value: float | None
    direction: str           # one of DIRECTIONS
    bound: float | None
    measured: str
    aim: bool = False

    @property
    def reached(self) -> bool:
        if self.value is None or self.bound is None or math.isnan(self.value):
            return False
        return DIRECTIONS[self.direction](self.value, self.bound)

    @property
    def verdict(self) -> str:
        if self.reached:
            return "reached"
        return "not measured" if self.value is None or self.bound is None else "missed"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def missed(found: list[Target]) -> list[Target]:
    """Those that are not reached, measured or not; without mere aims."""
    return [target for target in found if not target.reached and not target.aim]


def targets(f: Figures) -> list[Target]:
    """All, in the order in which the figures are told."""
    return [*_of_text(f), *_of_recall(f), *_of_attention(f), *_of_engram(f),
            Target("bounded replay, mean KL in nats", f.replay.mean, "<=", 0.02,
                   f"{f.replay.positions:,} tokens behind {f.replay.hit} known ones"),
            *_of_draft(f)]


def _of_text(f: Figures) -> list[Target]:
    plain = f.plain
    return [
        Target("bits per byte of the held-out novels", f.bits_per_byte, "<=", 1.75,
               "as shipped: weights and cache rounded"),
        Target("what rounding the cache costs, bits per byte",
               f.bits_per_byte - f.bits_per_byte_unrounded_cache, "<=", 0.01,
               "the same text with FP4 and FP8 rounding of the cache and without"),
        Target("below a plain transformer, bits per byte", f.bits_per_byte, "<",
               None if plain is None else plain.heldout_bits_per_byte,
               "plain.json is absent: `labkit train-plain` makes it" if plain is None else
               f"its {plain.parameters:,} parameters read {plain.tokens:,} tokens; active here: "
               f"{f.active_parameters:,}"),
    ]


def _of_recall(f: Figures) -> list[Target]:
    shipped = [point for point in f.recall if point.control == AS_SHIPPED]
    found = []
    for name, points, aim in (
            (f"needle recall at every distance up to {NEAR}",
             [p for p in shipped if p.distance <= NEAR], False),
            ("needle recall at every distance", shipped, True)):
        worst = min(points, key=lambda p: (p.share, -p.distance), default=None)
        if worst is None:
            found.append(Target(name, None, ">=", 0.95, "this vocabulary or context sets no "
                                "distances", aim))
            continue
        low, high = worst.interval
        found.append(Target(name, worst.share, ">=", 0.95,
                            f"worst distance {worst.distance}: {worst.right} of {worst.count}, "
                            f"95 % interval {low:.3f} to {high:.3f}", aim))
    return found


def _of_attention(f: Figures) -> list[Target]:
    found = []
    for text, name in ((PROSE, "held-out novels"), (ANSWERS, "needle answers")):
        rows: list[Mass] = [mass for mass in f.attention_mass if mass.text == text]
        worst = min(rows, key=lambda mass: mass.kept, default=None)
        found.append(Target(
            f"attention mass kept, {name}", None if worst is None else worst.kept, ">=", 0.9,
            "no query sees more than it may select" if worst is None else
            f"of the mass on all keys, worst layer {worst.layer}; the best selection of this size "
            f"keeps {worst.kept_best:.3f}, a random one {worst.kept_random:.3f}"))
    return found


def _of_engram(f: Figures) -> list[Target]:
    more = {kind.kind: kind.more for kind in f.kinds}
    memorised = more.pop(MEMORISED, None)
    largest = max(more, key=lambda kind: more[kind])
    return [
        Target("muting Engram, novels, bits per byte more", more[NOVELS], ">", 0.01,
               "the held-out novels again with its value projection at zero"),
        Target("muting Engram, verbatim facts, more than on all else",
               None if memorised is None else memorised - more[largest], ">", 0.0,
               "bits per byte; not measured" if memorised is None else
               f"bits per byte: {memorised:.3f} more on facts that were trained on, "
               f"{more[largest]:.3f} on {largest}"),
    ]


def _of_draft(f: Figures) -> list[Target]:
    d = f.draft
    names = [("tokens a step with drafts, prose", 2.2, "held-out novels"),
             ("tokens a step with drafts, code", 3.0, "held-out code")]
    ece = "calibration error of the confidence, worst slot"
    if d is None:
        return [*(Target(name, None, ">=", bound, "no draft") for name, bound, _ in names),
                Target(ece, None, "<=", 0.05, "no draft")]
    lengths = [(d.sampled_length, d.greedy_length), (d.code_sampled_length, d.code_greedy_length)]
    return [*(Target(name, None, ">=", bound, "not measured")
              if accepted is None or greedy is None else
              Target(name, accepted + 1, ">=", bound,
                     f"{on}, temperature 1: {accepted:.2f} drafts and the target's own token; "
                     f"greedy {greedy + 1:.2f}")
              for (name, bound, on), (accepted, greedy) in zip(names, lengths, strict=True)),
            Target(ece, max(d.ece_after), "<=", 0.05,
                   "survival at temperature 1, text that was not fitted on")]
