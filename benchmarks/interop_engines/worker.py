"""What every engine's worker shares: a job comes in as JSON, arrays go out as .npz.

Runs in the engine's own environment, where labkit is not installed: numpy and the standard
library only. A worker gives `serve` a function that loads an engine; an engine has

    version                  as its package tells it
    logits(ids, rows)        -> [len(rows), V] fp32, what follows the ids up to each row
    greedy(prompt, steps, given) -> tokens [steps], their logits [steps, V]
    trace(ids)               -> arrays by name, as labkit's trace names them, or None
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MARK = "@@ "  # begins the lines that are progress, not an engine's talk


def say(text: str) -> None:
    print(f"{MARK}{text}", flush=True)


def write(path: Path, arrays: dict[str, Any]) -> None:
    """Whole or not at all: a run that is stopped leaves no half of a result."""
    part = path.with_suffix(".part.npz")
    np.savez(part, **arrays)
    os.replace(part, path)


def serve(load: Callable[[Path, dict[str, Any]], Any]) -> None:
    """Do the job that the command line names: `worker.py JOB.json RESULT.npz`."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    say("loading the checkpoint")
    engine = load(Path(job["checkpoint"]), job["mode"])
    arrays: dict[str, Any] = {"version": np.array(engine.version)}
    for number, (ids, rows) in enumerate(zip(job["texts"], job["rows"], strict=True)):
        say(f"logits of {len(ids)} tokens ({number + 1} of {len(job['texts'])})")
        arrays[f"logits.{number}"] = engine.logits(ids, rows)
    for number, prompt in enumerate(job["prompts"]):
        say(f"greedy text {number + 1} of {len(job['prompts'])}")
        given = job["given"][number] if job["given"] else None
        tokens, logits = engine.greedy(prompt, job["steps"], given)
        arrays[f"tokens.{number}"] = np.asarray(tokens, dtype=np.int64)
        arrays[f"steps.{number}"] = np.asarray(logits, dtype=np.float32)
    for number, ids in enumerate(job["traces"]):
        say(f"trace of {len(ids)} tokens ({number + 1} of {len(job['traces'])})")
        for name, array in engine.trace(ids).items():
            arrays[f"trace.{number}.{name}"] = array
    write(Path(sys.argv[2]), arrays)
    # Engines with threads of their own may hang at the interpreter's end.
    sys.stdout.flush()
    os._exit(0)
