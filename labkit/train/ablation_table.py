"""The table of the ablations, from saved results alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import InputError
from labkit.train.ablations import VARIANTS

Result = Mapping[str, Any]
SAME = ("base", "tokens", "recall_count")    # of all results of a table
OWN_OPTIONS = ("seed", "sinks")              # options in which they may differ


@dataclass(frozen=True)
class Figure:
    """A figure of a row over its seeds."""

    mean: float
    spread: float        # largest less smallest; 0 of one seed
    seeds: int


@dataclass(frozen=True)
class Row:
    name: str
    title: str
    parameters: int
    active_parameters: int
    cache_bytes_a_token: float
    bits: Figure
    recall: dict[str, Figure]    # by distance


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every result in a folder. InputError for none, or for results that compare nothing: another
    base, other tokens or options."""
    files = sorted(folder.glob("*-seed*.json")) if folder.is_dir() else []
    if not files:
        raise InputError(f"{folder} holds no results of ablations: run `labkit ablate` first, or "
                         "name their folder with --results")
    found: list[dict[str, Any]] = []
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            known = _conditions(result)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} is no result of an ablation ({error!r}): delete it and run "
                             "`labkit ablate` again") from error
        if found and known != _conditions(found[0]):
            raise InputError(f"{file} and {files[0]} are not of one set, their base, tokens or "
                             "options differ: give each set a folder of its own")
        found.append(result)
    return found


def _conditions(result: Result) -> dict[str, Any]:
    options = {k: v for k, v in result["options"].items() if k not in OWN_OPTIONS}
    return {**{name: result[name] for name in SAME}, "options": options,
            "distances": list(result["recall"])}


def figure(values: Sequence[float]) -> Figure:
    return Figure(sum(values) / len(values), max(values) - min(values), len(values))


def rows(results: Sequence[Result]) -> list[Row]:
    """One row a variant, in the order of `VARIANTS`, unknown ones last."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result["name"], []).append(result)
    order = [*(n for n in VARIANTS if n in groups), *(n for n in groups if n not in VARIANTS)]
    found = []
    for name in order:
        group = groups[name]
        first = group[0]
        found.append(Row(
            name, first["title"], first["parameters"], first["active_parameters"],
            first["cache_bytes_a_token"], figure([r["heldout_bits_per_byte"] for r in group]),
            {d: figure([r["recall"][d] for r in group]) for d in first["recall"]}))
    return found


def noise(figures: Sequence[Figure]) -> float | None:
    """The largest spread between the seeds of any row: what chance alone can do. None where no
    row has two seeds. With two seeds a row's own spread is often small by luck, the largest of
    all rows is not."""
    spreads = [f.spread for f in figures if f.seeds > 1]
    return max(spreads) if spreads else None


def difference(own: Figure, base: Figure, chance: float | None) -> float | None:
    """Mean less the base's mean; None where chance can do as much, or is not known."""
    found = own.mean - base.mean
    return None if chance is None or abs(found) <= chance else found


def table(results: Sequence[Result]) -> str:
    """The table as Markdown, and what its figures are."""
    found = rows(results)
    base = next((row for row in found if row.name == "base"), None)
    distances = list(found[0].recall)
    bits_noise = noise([row.bits for row in found])
    recall_noise = {d: noise([row.recall[d] for row in found]) for d in distances}
    heads = ["variant", "parameters", "active", "cache bytes a token", "bits per byte",
             "difference", *(text for d in distances for text in (f"recall at {d}", "difference"))]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in found:
        cells = [row.title, f"{row.parameters:,}", f"{row.active_parameters:,}",
                 f"{row.cache_bytes_a_token:,.1f}", _shown(row.bits, lambda x: f"{x:.4f}"),
                 _difference(row, base, lambda r: r.bits, bits_noise, lambda x: f"{x:+.4f}")]
        for d in distances:
            cells += [_shown(row.recall[d], lambda x: f"{x:.0%}"),
                      _difference(row, base, lambda r, d=d: r.recall[d],  # type: ignore[misc]
                                  recall_noise[d], lambda x: f"{100 * x:+.0f} points")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *_notes(results, bits_noise, recall_noise)])


def _shown(f: Figure, text: Callable[[float], str]) -> str:
    return text(f.mean) + (f" ± {text(f.spread / 2)}" if f.seeds > 1 else "")


def _difference(row: Row, base: Row | None, of: Callable[[Row], Figure], chance: float | None,
                text: Callable[[float], str]) -> str:
    if base is None or row is base:
        return ""
    if chance is None:
        return "one seed"
    found = difference(of(row), of(base), chance)
    return "none" if found is None else text(found)


def _notes(results: Sequence[Result], bits_noise: float | None,
           recall_noise: Mapping[str, float | None]) -> list[str]:
    first = results[0]
    seeds = sorted({r["seed"] for r in results})
    hours = sum(r["cpu_seconds"] for r in results) / 3600
    notes = [f"{len(results)} runs of {first['tokens']:,} tokens each, seeds "
             f"{', '.join(map(str, seeds))}; {hours:.1f} hours of processor time together.",
             "Bits per byte of the held-out novels; recall of "
             f"{first['recall_count']} values a run, by distance in tokens. ± is half of the "
             "distance between the seeds."]
    if bits_noise is not None:
        chances = ", ".join(f"{100 * s:.0f} points at {d}" for d, s in recall_noise.items()
                            if s is not None)
        notes.append("A difference from the base is called none where it is no larger than the "
                     f"largest distance between the seeds of any row: {bits_noise:.4f} bits per "
                     f"byte; recall {chances}.")
    for r in results:
        if r["active_not_counted"]:
            more = ", ".join(f"{name} {n:,}" for name, n in r["active_not_counted"].items())
            notes.append("Active parameters as `labkit accounting` counts them; not counted in "
                         f"the {r['title']}: {more}.")
            break
    return notes
