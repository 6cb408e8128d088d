"""What came of the comparison, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from labkit.config import ModelConfig

from .compare import DISAGREES, Boundary, Distance, table, verdict
from .environment import Mode, Recipe, checkpoint_files, digest


@dataclass
class Text:
    """One text read by both."""

    tokens: int
    rows: list[int]
    apart: Distance
    floor: Distance
    """labkit from itself, in finer arithmetic."""
    boundary: Boundary | None = None
    forced: Distance | None = None
    """What is left when labkit is handed the engine's rounded vectors and choices."""


@dataclass
class Writing:
    """One greedy text written by both; without `step` they are the same."""

    number: int
    prompt: int
    step: int | None
    tokens: tuple[int, int] = (0, 0)
    margins: tuple[float, float] = (0.0, 0.0)
    """Best less second-best logit at that step: the engine's, labkit's."""
    apart: float = 0.0
    boundary: Boundary | None = None
    forced: Distance | None = None


@dataclass
class Outcome:
    """An engine in a mode; with `failure` nothing was compared."""

    recipe: Recipe
    mode: Mode
    tolerance: float
    failure: str = ""
    version: str = ""
    texts: list[Text] = field(default_factory=list)
    writings: list[Writing] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        if self.failure:
            return "not compared"
        return verdict([t.apart for t in self.texts],
                       [t.forced for t in self.texts if t.forced is not None],
                       [t.floor for t in self.texts])

    @property
    def greedy(self) -> str:
        """How many texts are the same, and how many of the others are explained."""
        parted = [w for w in self.writings if w.step is not None]
        said = f"{len(self.writings) - len(parted)} of {len(self.writings)}"
        named = sum(w.boundary is not None for w in parted)
        return f"{said}, {named} part behind a named boundary" if named else said


def report(model: str, source: Path, config: ModelConfig, outcomes: Sequence[Outcome]) -> str:
    """Markdown: one table of verdicts, one of distances, one of texts that part."""
    c = config
    parts = [
        f"Checkpoint `{model}` (digest {digest(checkpoint_files(source))}): hidden size "
        f"{c.hidden_size}, {c.num_hidden_layers} layers, window {c.sliding_window}, top-k "
        f"{c.index_topk}, pool of {c.candidate_topk_blocks} blocks of {c.candidate_block_size}, "
        f"context {c.max_position_embeddings:,}. labkit on torch {torch.__version__}.",
        table(("engine", "rounding mode", "how", "greedy texts equal", "verdict"), [
            (f"{o.recipe.name} {o.version or o.recipe.version}", o.mode.name, o.mode.how,
             "-" if o.failure else o.greedy, o.failure or o.verdict) for o in outcomes])]
    parts += [DISTANCES, table(DISTANCE_HEAD, [
        _distance_row(o, t) for o in outcomes for t in o.texts])]
    parted = [(o, w) for o in outcomes for w in o.writings if w.step is not None]
    if parted:
        parts += [PARTED, table(PARTED_HEAD, [_parted_row(o, w) for o, w in parted])]
    return "\n\n".join(parts)


DISTANCES = (
    "Largest and median difference of a row's logits, as a share of the span. \"Beyond\": rows "
    "over the tolerance. \"Itself\": labkit from labkit in finer arithmetic (float64, or float32 "
    "for bf16) and with embeddings moved by one unit in the last place (three times), largest "
    "and median of all these. \"Forced\": the largest difference left when labkit is handed the "
    "engine's rounded vectors and choices.")
DISTANCE_HEAD = ("engine", "rounding mode", "tokens", "rows", "largest", "median", "tolerance",
                 "beyond", "same best", "itself", "first boundary before the first row beyond",
                 "forced")


def _distance_row(o: Outcome, t: Text) -> tuple[str, ...]:
    d = t.apart
    return (o.recipe.name, o.mode.name, f"{t.tokens:,}", f"{d.rows:,}", f"{d.worst:.1e}",
            f"{d.median:.1e}", f"{o.tolerance:.0e}", f"{d.beyond:,}", f"{d.same:.1%}",
            f"{t.floor.worst:.1e}, {t.floor.median:.1e}", _named(t.boundary, d.beyond > 0, o),
            "-" if t.forced is None else f"{t.forced.worst:.1e}")


PARTED = ("Greedy texts that part: at which step, the two tokens, how far the best logit lies "
          "above the second in each, and how far the logits of that step are apart.")
PARTED_HEAD = ("engine", "rounding mode", "prompt", "its tokens", "step", "token, labkit's",
               "margin, labkit's", "apart / span", "first boundary before it", "forced")


def _parted_row(o: Outcome, w: Writing) -> tuple[str, ...]:
    return (o.recipe.name, o.mode.name, str(w.number + 1), str(w.prompt), str(w.step),
            f"{w.tokens[0]}, {w.tokens[1]}", f"{w.margins[0]:.3f}, {w.margins[1]:.3f}",
            f"{w.apart:.1e}", _named(w.boundary, True, o),
            "-" if w.forced is None else f"{w.forced.worst:.1e}")


def _named(boundary: Boundary | None, wanted: bool, outcome: Outcome) -> str:
    if boundary is not None:
        return f"{boundary} ({boundary.places:,} places in all)"
    if not wanted:
        return "-"
    return "none" if outcome.verdict == DISAGREES else "not traced in this mode"
