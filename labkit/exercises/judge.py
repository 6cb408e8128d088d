"""Judging an attempt: case by case against the solution, then against the known mistakes."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.exercises.compare import difference
from labkit.exercises.progress import note
from labkit.exercises.record import Case, Exercise, find

if TYPE_CHECKING:
    from labkit.lab import Lab


class _Told(Exception):
    """Shown in a notebook as its message alone, without the frames of the checker."""

    def _render_traceback_(self) -> list[str]:
        return str(self).split("\n")


class NotStarted(_Told, NotImplementedError):
    """The stub is still as it was."""


class Wrong(_Told, AssertionError):
    """An attempt that fails, with what a learner can do about it.

    said   the misconception's sentence where the attempt does what a known mistake does
    """

    def __init__(self, message: str, said: str = "") -> None:
        super().__init__(message)
        self.said = said


@dataclass(frozen=True)
class Passed:
    """An attempt that holds in every case; shows itself in a notebook."""

    exercise: Exercise
    cases: int

    def __str__(self) -> str:
        return (f"\u2713 {self.exercise.number} {self.exercise.title}: {self.cases} cases.\n"
                f"{self.exercise.after}")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        head, _, after = str(self).partition("\n")
        return {"text/plain": str(self),
                "text/html": f"<p><strong>{escape(head)}</strong></p><p>{escape(after)}</p>"}


def check(id: str, attempt: Callable[..., Any], lab: Lab | None = None) -> Passed:
    """Judge an attempt at an exercise and note it in the learner's progress.

    lab: whose numbers the cases are made of; default: `mini`. Raises NotStarted for the stub and
    Wrong for what fails; InputError for an unknown exercise.
    """
    exercise = find(id)
    try:
        passed = judge(exercise, attempt, lab or _mini())
    except Wrong:
        note(exercise.id, passed=False)
        raise
    note(exercise.id, passed=True)
    return passed


@lru_cache(maxsize=1)
def _mini() -> Lab:
    from labkit.lab import load

    return load("mini", device="cpu")


def judge(exercise: Exercise, attempt: Callable[..., Any], lab: Lab) -> Passed:
    """As `check`, without keeping anything."""
    count = 0
    for case in exercise.cases(lab):
        count += 1
        expected = exercise.solution(*copy.deepcopy(case.args))
        args = copy.deepcopy(case.args)
        try:
            actual = attempt(*args)
        except NotImplementedError as error:
            raise NotStarted(f"{exercise.number} {exercise.title}: not started. {error}") from None
        except Exception as error:
            raise Wrong(_told(exercise, case, _raised(error))) from None
        if difference(list(args), list(case.args)):
            raise Wrong(_told(exercise, case, "the function changes its arguments in place: work "
                              "on copies, or use operations that return new tensors"))
        found = difference(actual, expected, exercise.tolerance)
        if found:
            said = misconception(exercise, case, actual)
            raise Wrong(_told(exercise, case, found, said), said)
    return Passed(exercise, count)


def misconception(exercise: Exercise, case: Case, actual: Any) -> str:
    """The sentence of the known mistake that gives the same; "" where none does."""
    for mistake in exercise.mistakes:
        try:
            theirs = mistake.function(*copy.deepcopy(case.args))
        except Exception:  # noqa: S112  (a mistake may fail where the attempt does not)
            continue
        if difference(actual, theirs, exercise.tolerance) is None:
            return mistake.says
    return ""


def _told(exercise: Exercise, case: Case, found: str, said: str = "") -> str:
    lines = [f"\u2717 {exercise.number} {exercise.title}",
             f"  Checked: {case.property}.", f"  Found: {found}."]
    if said:
        lines.append(f"  Likely cause: {said}")
    lines.append("  The help below the cell has three steps; open one at a time.")
    return "\n".join(lines)


def _raised(error: Exception) -> str:
    """What an attempt raised, and in which of its lines."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "labkit/exercises/judge" not in f.filename.replace("\\", "/")]
    line = f" in line {own[0].lineno} ({(own[0].line or '').strip()})" if own else ""
    return f"{type(error).__name__}{line}: {error}"
