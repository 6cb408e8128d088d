#!/usr/bin/env python3
"""Runs notebooks/solutions/*.ipynb and keeps their outputs, for readers without a kernel.

Explorers show their static pictures there (LABKIT_STATIC), since a saved widget shows nothing
without its kernel. Names on the command line choose notebooks; --check only says which have not
been run. Times and memory are not kept, so that a second run changes what it computes alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks" / "solutions"
WIDGET = "application/vnd.jupyter.widget-view+json"
DROPPED = ("text/latex",)              # of source code: as long as the code, and never shown
LARGEST = 300 * 1024


def solutions(names: list[str]) -> list[Path]:
    """All of them, or those whose names begin so; ValueError for a name that none has."""
    found = sorted(FOLDER.glob("*.ipynb"))
    for name in names:
        if not any(path.name.startswith(name) for path in found):
            raise ValueError(f"no solution begins with {name}: "
                             f"choose of {', '.join(path.stem for path in found)}")
    return [p for p in found if not names or any(p.name.startswith(n) for n in names)]


def has_run(path: Path) -> bool:
    """Whether every code cell was run, in order, and none ended in an error."""
    cells = [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    return ([c.execution_count for c in cells] == list(range(1, len(cells) + 1))
            and not any(o.output_type == "error" for c in cells for o in c.outputs))


def run(path: Path) -> None:
    """Run a notebook in its folder and write it back with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=120, kernel_name="python3", record_timing=False,
                   resources={"metadata": {"path": str(ROOT / "notebooks")}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [kept for o in cell.outputs if (kept := _kept(o)) is not None]
    notebook.metadata.pop("widgets", None)
    notebook.metadata.language_info = {"name": "python"}
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > LARGEST:
        raise ValueError(f"{path.name} has {len(text.encode()):,} bytes with its outputs, more "
                         f"than {LARGEST:,}: show less in it")
    path.write_text(text, encoding="utf-8")


def _kept(output: Any) -> Any:
    """An output without what nobody can see later; None where nothing is left, or stderr."""
    if output.output_type == "stream" and output.name == "stderr":
        return None
    data = output.get("data")
    if data is not None:
        if WIDGET in data:
            return None
        for kind in DROPPED:
            data.pop(kind, None)
    return output


def main(words: list[str]) -> int:
    paths = solutions([w for w in words if not w.startswith("--")])
    if "--check" in words:
        stale = [path for path in paths if not has_run(path)]
        for path in stale:
            print(f"{path.relative_to(ROOT)} has not been run: python3 tools/run_solutions.py")
        return 1 if stale else 0
    os.environ["LABKIT_STATIC"] = "1"
    for path in paths:
        run(path)
        print(path.relative_to(ROOT), f"{path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
