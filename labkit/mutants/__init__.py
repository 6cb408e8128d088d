"""Mutants: deliberate faults, each one a bug that somebody published, and what notices them.

`active(name)` switches one on for a block of code; `table()` runs the checks on each of them and
says which noticed it. In the course a learner is given a mutant and has to find it.
"""

from __future__ import annotations

from labkit.mutants import (  # noqa: F401
    faults_attention,
    faults_draft,
    faults_layers,
    faults_memory,
    faults_prefill,
    faults_reuse,
    faults_speculation,
)
from labkit.mutants.kill import Row, describe, judge, main_text, table
from labkit.mutants.record import MUTANTS, Mutant, active, find

__all__ = ["MUTANTS", "Mutant", "Row", "active", "describe", "find", "judge", "main_text",
           "table"]
