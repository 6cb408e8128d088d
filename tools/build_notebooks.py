#!/usr/bin/env python3
"""Builds notebooks/*.ipynb from notebooks/src/*.py; with --check only says what has drifted.

A source is percent-format Python. Every cell begins with a line such as

    # %% id="load"                     a code cell
    # %% [markdown] id="question"      a text cell, each line behind "# "
    # %% id="facts" tags=["nbval-check-output"]

The id is required and stays when the cell's text changes, so that a diff of the notebook shows
what changed and nothing else. Learner notebooks hold no outputs. Standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = re.compile(r'# %%(?P<text> \[markdown\])? id="(?P<id>[A-Za-z0-9_-]{1,64})"'
                  r'(?: tags=(?P<tags>\[.*\]))?$')


def cells(source: str, name: str = "the source") -> list[dict[str, Any]]:
    """The cells of a percent-format text; ValueError names a line that is no cell head."""
    found: list[dict[str, Any]] = []
    seen = set()
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith("# %%"):
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
        elif found:
            found[-1]["source"].append(line)
        elif line and not line.startswith("#"):
            raise ValueError(f"{name}, line {number}: text before the first cell: {line}")
    for cell in found:
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


def notebook(source: str, name: str = "the source") -> str:
    """The notebook's JSON text: nbformat 4.5, kernel python3, no outputs."""
    content = {
        "cells": [dict(sorted(cell.items())) for cell in cells(source, name)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4, "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def pairs(root: Path = ROOT) -> list[tuple[Path, Path]]:
    """(source, notebook) for every source."""
    sources = sorted((root / "notebooks" / "src").glob("*.py"))
    return [(source, root / "notebooks" / f"{source.stem}.ipynb") for source in sources]


def drifted(root: Path = ROOT) -> list[Path]:
    """Notebooks that are not what their source says, and notebooks without a source."""
    found = []
    known = set()
    for source, target in pairs(root):
        known.add(target)
        wanted = notebook(source.read_text(encoding="utf-8"), source.name)
        if not target.is_file() or target.read_text(encoding="utf-8") != wanted:
            found.append(target)
    return found + sorted(set((root / "notebooks").glob("*.ipynb")) - known)


def main(words: list[str]) -> int:
    if "--check" in words:
        for path in drifted():
            print(f"{path.relative_to(ROOT)} is not what its source says: "
                  "run python3 tools/build_notebooks.py")
        return 1 if drifted() else 0
    for source, target in pairs():
        target.write_text(notebook(source.read_text(encoding="utf-8"), source.name),
                          encoding="utf-8")
        print(target.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
