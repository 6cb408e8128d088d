#!/usr/bin/env python3
"""Builds notebooks/*.ipynb from notebooks/src/*.py; with --check only says what has drifted.

A source is percent-format Python. Every cell begins with a line such as

    # %% id="load"                     a code cell
    # %% [markdown] id="question"      a text cell, each line behind "# "
    # %% id="facts" tags=["nbval-check-output"]
    # %% exercise="engram_rows"        the cells of an exercise (tools/exercise_cells.py)

The id is required and stays when the cell's text changes, so that a diff of the notebook shows
what changed and nothing else. Two notebooks are made of a source: the learner's, with stubs and
no outputs, and notebooks/solutions/*.ipynb, with the solutions, which tools/run_solutions.py runs
and whose outputs are kept. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import exercise_cells  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
HEAD = re.compile(r'# %%(?P<text> \[markdown\])? id="(?P<id>[A-Za-z0-9_-]{1,64})"'
                  r'(?: tags=(?P<tags>\[.*\]))?$')
EXERCISE = re.compile(r'# %% exercise="(?P<id>[a-z0-9_]+)"$')


def cells(source: str, name: str = "the source", solved: bool = False) -> list[dict[str, Any]]:
    """The cells of a percent-format text; ValueError names a line that is no cell head.

    solved: with the solutions of the exercises instead of the stubs.
    """
    found: list[dict[str, Any]] = []
    seen = set()
    for number, line in enumerate(source.splitlines(), 1):
        exercise = EXERCISE.match(line)
        if exercise:
            own = exercise_cells.cells(exercise["id"], solved)
            if seen & {cell["id"] for cell in own}:
                raise ValueError(f"{name}, line {number}: the exercise stands here twice: {line}")
            seen |= {cell["id"] for cell in own}
            found += own
        elif line.startswith("# %%"):
            head = HEAD.match(line)
            if head is None or head["id"] in seen:
                why = "is used twice" if head else "is missing or malformed"
                raise ValueError(f"{name}, line {number}: the cell's id {why}: {line}")
            seen.add(head["id"])
            found.append({
                "cell_type": "markdown" if head["text"] else "code", "id": head["id"],
                "metadata": {"tags": json.loads(head["tags"])} if head["tags"] else {},
                "source": [],
            })
        elif found and found[-1]["id"].startswith("ex-"):
            if line:
                raise ValueError(f"{name}, line {number}: text behind an exercise, whose cells are "
                                 f"made from its module: {line}")
        elif found:
            found[-1]["source"].append(line)
        elif line and not line.startswith("#"):
            raise ValueError(f"{name}, line {number}: text before the first cell: {line}")
    for cell in found:
        if not cell["id"].startswith("ex-"):
            cell["source"] = _body(cell, name)
        if cell["cell_type"] == "code":
            cell |= {"execution_count": None, "outputs": []}
    return found


def _body(cell: dict[str, Any], name: str) -> list[str]:
    lines = cell["source"]
    if cell["cell_type"] == "markdown":
        wrong = [line for line in lines if line and line != "#" and not line.startswith("# ")]
        if wrong:
            raise ValueError(f"{name}, cell {cell['id']}: a text line without '# ': {wrong[0]}")
        lines = [line[2:] for line in lines]
    text = "\n".join(lines).strip("\n")
    return text.splitlines(keepends=True)


def notebook(source: str, name: str = "the source", solved: bool = False) -> str:
    """The notebook's JSON text: nbformat 4.5, kernel python3, no outputs."""
    content = {
        "cells": [dict(sorted(cell.items())) for cell in cells(source, name, solved)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4, "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def targets(root: Path = ROOT) -> list[tuple[Path, Path, bool]]:
    """(source, notebook, solved) for both notebooks of every source."""
    folder = root / "notebooks"
    return [(source, place / f"{source.stem}.ipynb", solved)
            for source in sorted((folder / "src").glob("*.py"))
            for place, solved in ((folder, False), (folder / "solutions", True))]


def wanted(source: Path, solved: bool) -> str:
    return notebook(source.read_text(encoding="utf-8"), source.name, solved)


def without_outputs(text: str) -> str:
    """A notebook's JSON as it was before it ran; "" where it is no notebook."""
    try:
        content = json.loads(text)
        for cell in content["cells"]:
            if cell["cell_type"] == "code":
                cell |= {"execution_count": None, "outputs": []}
    except (ValueError, KeyError, TypeError):
        return ""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def is_current(source: Path, target: Path, solved: bool) -> bool:
    """Whether a notebook is what its source says; outputs of solutions are not looked at."""
    if not target.is_file():
        return False
    text = target.read_text(encoding="utf-8")
    return (without_outputs(text) if solved else text) == wanted(source, solved)


def drifted(root: Path = ROOT) -> list[Path]:
    """Notebooks that are not what their source says, and notebooks without a source."""
    known = targets(root)
    found = [target for source, target, solved in known if not is_current(source, target, solved)]
    there = {*(root / "notebooks").glob("*.ipynb"), *(root / "notebooks/solutions").glob("*.ipynb")}
    return found + sorted(there - {target for _, target, _ in known})


def main(words: list[str]) -> int:
    if "--check" in words:
        for path in drifted():
            print(f"{path.relative_to(ROOT)} is not what its source says: "
                  "run python3 tools/build_notebooks.py")
        return 1 if drifted() else 0
    for source, target, solved in targets():
        if not is_current(source, target, solved):   # a solution keeps its outputs otherwise
            target.parent.mkdir(exist_ok=True)
            target.write_text(wanted(source, solved), encoding="utf-8")
            print(target.relative_to(ROOT), "(run tools/run_solutions.py)" if solved else "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
