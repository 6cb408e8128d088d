"""Exercises: a stub, help in three steps, a checker that knows the usual mistakes.

Each exercise is one module in `labkit.exercises.tasks`. Its solution is the only place where the
answer stands: stub, solution cell and checker are made from it, and its mistakes are functions
that a learner with that misconception could have written, so they test the checker too.
"""

from labkit.exercises.judge import NotStarted, Passed, Wrong, check
from labkit.exercises.record import Case, Exercise, Mistake, exercises, find

__all__ = ["Case", "Exercise", "Mistake", "NotStarted", "Passed", "Wrong", "check", "exercises",
           "find"]
