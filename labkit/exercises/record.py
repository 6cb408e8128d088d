"""What an exercise consists of, and where all of them are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from labkit.errors import InputError

if TYPE_CHECKING:
    from labkit.lab import Lab


@dataclass(frozen=True)
class Case:
    """One call that the checker makes: what it is about, in the learner's words, and its arguments.

    property   what must hold, as a sentence that fits behind "checks that"
    """

    property: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Mistake:
    """A wrong solution that people have really written.

    function   gives what it gave
    says       what the learner is told: the misconception and the way out, in a sentence or two
    seen       where it was made (a mutant of labkit, a public port, a test's trap)
    """

    function: Callable[..., Any]
    says: str
    seen: str


@dataclass(frozen=True)
class Exercise:
    """One module of `labkit.exercises.tasks`, by its names.

    id          name of the module
    number      "2.1": its notebook and its place there
    function    name of the function that the learner writes
    minutes, difficulty, importance   of the last two, 1 to 5
    objective   what is to be written and why, Markdown
    help        three texts, each telling more: orientation, key step, almost the code
    after       what it showed, and what the check cannot see
    tolerance   largest difference as a share of the span; 0: exactly equal
    """

    id: str
    number: str
    title: str
    function: str
    minutes: int
    difficulty: int
    importance: int
    objective: str
    help: tuple[str, str, str]
    after: str
    tolerance: float
    solution: Callable[..., Any]
    alternative: Callable[..., Any]
    mistakes: tuple[Mistake, ...]
    cases: Callable[[Lab], Iterable[Case]]

    @property
    def notebook(self) -> int:
        """Number of the notebook that it stands in."""
        return int(self.number.partition(".")[0])


# Field of an Exercise -> the module's name of it.
NAMES = {"number": "NUMBER", "title": "TITLE", "function": "FUNCTION", "minutes": "MINUTES",
         "difficulty": "DIFFICULTY", "importance": "IMPORTANCE", "objective": "OBJECTIVE",
         "help": "HELP", "after": "AFTER", "tolerance": "TOLERANCE", "solution": "solution",
         "alternative": "alternative", "mistakes": "MISTAKES", "cases": "cases"}


def _read(module: ModuleType) -> Exercise:
    return Exercise(module.__name__.rpartition(".")[2],
                    **{field: getattr(module, name) for field, name in NAMES.items()})


@lru_cache(maxsize=1)
def exercises() -> tuple[Exercise, ...]:
    """All of them, in the order of the course."""
    from labkit.exercises import tasks

    found = [_read(importlib.import_module(f"{tasks.__name__}.{info.name}"))
             for info in pkgutil.iter_modules(tasks.__path__)]
    return tuple(sorted(found, key=lambda e: tuple(map(int, e.number.split(".")))))


def find(id: str) -> Exercise:
    """The exercise of that name. InputError with the nearest names if there is none."""
    from difflib import get_close_matches

    known = {e.id: e for e in exercises()}
    if id not in known:
        near = get_close_matches(id, known, n=3) or sorted(known)
        raise InputError(f"there is no exercise {id!r}: did you mean {', '.join(near)}?")
    return known[id]
