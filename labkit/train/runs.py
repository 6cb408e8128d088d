"""What lies beside a checkpoint about how it was made: its runs, their log, a comparison.

`run.json` is one run or a list of runs, each begun from the weights of the one before; a run has
`step`, `seconds`, `threads` and `options`. The lines of `log.jsonl` are of all runs, one after
the other; with more than one, each says its `run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import CheckpointError

Run = Mapping[str, Any]


def read_runs(folder: Path) -> list[Run]:
    """The runs of a checkpoint, first to last; none where it has no record."""
    path = folder / "run.json"
    if not path.is_file():
        return []
    raw = json.loads(path.read_text(encoding="utf-8"))
    return [_in_stages(run) for run in (raw if isinstance(raw, list) else [raw])]


def _in_stages(run: Run) -> Run:
    """A run recorded before runs had stages: novels alone, in rows of one length."""
    options = dict(run["options"])
    if "stages" not in options:
        options["stages"] = [{"until": 1.0, "tokens": options["batch"] * options["length"],
                              "length": options["length"], "selecting": "index",
                              "shares": {"novels": 1.0}}]
    return {**run, "options": options}


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def logs_of(runs: Sequence[Run], log: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The lines of every run, with the tokens read by then.

    CheckpointError where the log tells of another number of runs.
    """
    numbers = list(dict.fromkeys(line.get("run") for line in log))
    if len(numbers) != len(runs):
        raise CheckpointError(f"run.json tells of {len(runs)} runs and log.jsonl of "
                              f"{len(numbers)}: each line of the log must have the number of its "
                              "\"run\"")
    return [[{"tokens": tokens_read(run, line["step"]), **line} for line in log
             if line.get("run") == number] for number, run in zip(numbers, runs, strict=True)]


def stage_steps(run: Run, step: int | None = None) -> list[int]:
    """How many steps of every stage were made by `step`, by default the run's last."""
    step = run["step"] if step is None else step
    begin, found = 0, []
    for stage in run["options"]["stages"]:
        end = round(stage["until"] * run["options"]["steps"])
        found.append(max(0, min(step, end) - begin))
        begin = end
    return found


def tokens_read(run: Run, step: int | None = None) -> int:
    """By `step`, by default the run's last."""
    return sum(steps * stage["tokens"] for steps, stage in
               zip(stage_steps(run, step), run["options"]["stages"], strict=True))


# ---- the comparison ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """What a plain transformer reached on as many tokens; `plain.json` beside a checkpoint."""

    parameters: int
    tokens: int
    steps: int
    heldout_bits_per_byte: float
    seconds: float
    command: str


def read_plain(folder: Path) -> Plain | None:
    """None where nothing was measured. CheckpointError for a file that lacks something."""
    path = folder / "plain.json"
    if not path.is_file():
        return None
    raw = json.loads(path.read_text(encoding="utf-8"))
    missing = [name for name in Plain.__dataclass_fields__ if name not in raw]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}: write it anew with `labkit "
                              "train-plain`")
    return Plain(**{name: raw[name] for name in Plain.__dataclass_fields__})
