"""The kill table: which property and which vector notices each mutant."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from labkit.errors import InputError
from labkit.mutants import checks
from labkit.mutants.record import MUTANTS, active, find


@dataclass(frozen=True)
class Row:
    """A mutant and the first check of each kind that fails on it; None: all of them pass.

    vector_check is None too when the golden vectors are not at hand (`vectors_run` False).
    no_vector says why no vector can notice this mutant; it then lives or dies by properties.
    """

    id: str
    fault: str
    property_check: str | None
    property_says: str | None
    vector_check: str | None
    vector_says: str | None
    vectors_run: bool
    no_vector: str | None = None

    @property
    def killed(self) -> bool:
        """By every kind of check that was run."""
        return self.property_check is not None and (
            self.vector_check is not None or self.no_vector is not None
            or not self.vectors_run)


def judge(name: str, vectors: bool) -> Row:
    """Run the checks with that fault active, in order, until one of each kind fails."""
    checks.load()
    chosen = find(name)
    _warm(vectors)
    with active(name):
        by_property = _first_failure(checks.PROPERTIES.values())
        by_vector = _first_failure(checks.VECTORS.values()) if vectors else (None, None)
    return Row(name, chosen.fault, *by_property, *by_vector, vectors_run=vectors,
               no_vector=chosen.no_vector)


def failures(vectors: bool) -> dict[str, str]:
    """What the checks say of the right code: nothing, or the lab itself is at fault."""
    checks.load()
    run = [*checks.PROPERTIES.values(), *(checks.VECTORS.values() if vectors else ())]
    return {check.name: said for check in run if (said := check.failure())}


def table(names: Iterable[str] | None = None, progress: Callable[[str], None] | None = None
          ) -> list[Row]:
    """One `Row` per mutant (all of them by default), with vectors where they are at hand.

    progress is called with each name before its turn. InputError for an unknown name, and when
    a check fails on the right code: then a kill would prove nothing.
    """
    from labkit.mutants import golden

    chosen = [find(name).id for name in (names if names is not None else MUTANTS)]
    vectors, threads, rows = golden.available(), torch.get_num_threads(), []
    torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other
    try:
        wrong = failures(vectors)
        if wrong:
            first = next(iter(wrong))
            raise InputError(f"{len(wrong)} checks fail without any mutant, first {first} "
                             f"({wrong[first]}): repair the model before judging mutants")
        for name in chosen:
            if progress:
                progress(name)
            rows.append(judge(name, vectors))
    finally:
        torch.set_num_threads(threads)
    return rows


def describe(row: Row) -> str:
    """One mutant in full: what is wrong, whose bug it was, where to look, what the checks say."""
    mutant = find(row.id)
    lines = [("mutant", mutant.id), ("part", mutant.mechanism), ("fault", mutant.fault),
             ("seen in", mutant.source), ("look at", mutant.look)]
    for kind, check, said in (("property", row.property_check, row.property_says),
                              ("vector", row.vector_check, row.vector_says)):
        lines.append((kind, f"{check}: {said}" if check else "none fails"))
    if mutant.no_vector:
        lines.append(("no vector", mutant.no_vector))
    return "\n".join(
        textwrap.fill(text, 96, initial_indent=f"{label:10}", subsequent_indent=" " * 10)
        for label, text in lines)


def main_text(rows: list[Row] | None = None) -> str:
    """The table as text; the last line says how many mutants survived."""
    from labkit.mutants import golden

    rows = table() if rows is None else rows
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    left = max(len(row.id) for row in rows)
    out = [f"{'mutant':{left}}  {'killed by property':20}  killed by vector"]
    for row in rows:
        vector = row.vector_check or ("no vector" if row.no_vector else
                                      "SURVIVES" if row.vectors_run else "not run")
        out.append(f"{row.id:{left}}  {row.property_check or 'SURVIVES':20}  {vector}")
        text = row.fault
        if row.no_vector and not row.vector_check:
            text += f" No vector: {row.no_vector}."
        out += textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")
    if not golden.available():
        out.append("The golden vectors are in tests/golden of the source tree, which is not here: "
                   "only properties were run.")
    alive = [row.id for row in rows if not row.killed]
    alone = sum(row.killed and row.no_vector is not None and not row.vector_check for row in rows)
    if alone:
        out.append(f"{alone} of them by a property alone, as no golden vector can notice them")
    out.append(f"{len(rows)} mutants, all killed" if not alive
               else f"{len(rows)} mutants, {len(alive)} SURVIVE: {', '.join(alive)}")
    return "\n".join(out)


def _first_failure(found: Iterable[checks.Check]) -> tuple[str | None, str | None]:
    for check in found:
        said = check.failure()
        if said:
            return check.name, said
    return None, None


def _warm(vectors: bool) -> None:
    """What checks keep between runs must be computed by right code: do it before any fault."""
    from labkit.mutants import (
        golden,
        properties,
        properties_draft,
        properties_drafted,
        properties_reuse,
    )

    properties.oracle_answers(False)
    properties.oracle_answers(True)
    properties_reuse.warm()
    properties_draft.warm()
    properties_drafted.warm()
    if vectors:
        for name in ("text", "padded", "long", "ratio4", "no_candidates", "bf16"):
            golden.model(name)
