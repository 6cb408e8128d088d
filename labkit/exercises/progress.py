"""What a learner has done: one small JSON file, on this machine alone."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from labkit.errors import LabError
from labkit.exercises.record import Exercise

FILE = "progress.json"


def progress_file() -> Path:
    """`LABKIT_PROGRESS`, else .labkit/progress.json in the home folder."""
    named = os.environ.get("LABKIT_PROGRESS")
    return Path(named).expanduser() if named else Path.home() / ".labkit" / FILE


def read() -> dict[str, dict[str, Any]]:
    """Exercise -> attempts (that were judged) and the day on which one first passed, or None.

    LabError where the file is not what `note` writes.
    """
    path = progress_file()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        found = json.loads(text)
        assert all({"attempts", "passed"} <= set(one) for one in found.values())
    except (ValueError, AttributeError, TypeError, AssertionError) as error:
        raise LabError(f"{path} is not a record of progress: move it away, or run labkit progress "
                       "--reset") from error
    return dict(found)


def note(id: str, passed: bool) -> None:
    """One more attempt. A file that cannot be read or written never stops a learner."""
    try:
        known = read()
        entry = known.setdefault(id, {"attempts": 0, "passed": None})
        entry["attempts"] += 1
        if passed and entry["passed"] is None:
            entry["passed"] = date.today().isoformat()
        _write(known)
    except (OSError, LabError):
        return


def reset() -> bool:
    """Forget everything; whether there was anything."""
    try:
        progress_file().unlink()
    except FileNotFoundError:
        return False
    return True


def _write(known: dict[str, dict[str, Any]]) -> None:
    path = progress_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def table(exercises: Sequence[Exercise], known: dict[str, dict[str, Any]]) -> str:
    """For a terminal: every exercise, done or not, and the sum of each notebook."""
    lines: list[str] = []
    for number in sorted({e.notebook for e in exercises}):
        own = [e for e in exercises if e.notebook == number]
        done = sum(bool(known.get(e.id, {}).get("passed")) for e in own)
        minutes = sum(e.minutes for e in own)
        lines.append(f"notebook {number:02d}: {done} of {len(own)} done, {minutes} minutes in all")
        for e in own:
            entry = known.get(e.id, {"attempts": 0, "passed": None})
            state = (f"done {entry['passed']}, {_times(entry['attempts'])}" if entry["passed"]
                     else f"{_times(entry['attempts'])} so far" if entry["attempts"]
                     else "not started")
            mark = "\u2713" if entry["passed"] else "\u00b7"
            lines.append(f"  {mark} {e.number:5} {e.title:52} {e.minutes:3} min  {state}")
    total = sum(bool(known.get(e.id, {}).get("passed")) for e in exercises)
    return "\n".join([*lines, f"{total} of {len(exercises)} exercises done"])


def _times(count: int) -> str:
    return f"{count} attempt" + "s" * (count != 1)
