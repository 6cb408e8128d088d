"""The engines' own environments: one virtual environment each, a copy of the checkpoint, a run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
MARK = "@@ "  # as in worker.py, which stands alone
READY = "ready.json"
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")

# Page faults on large temporaries cost the engines on torch a factor of 2 to 3 otherwise.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "30000000000",
          "MALLOC_ARENA_MAX": "1"}

Tell = Callable[[str], None]


class EngineError(Exception):
    """An engine that cannot be installed, or that fails; one sentence for the table."""


@dataclass(frozen=True)
class Mode:
    """One rounding mode of an engine, and how the engine is brought into it.

    name, how   for the tables
    arithmetic  "fp32" or "bf16", of the activations
    cache       window, compressed entries, index queries and keys are rounded
    linear      inputs of FP8 and FP4 linear layers rounded to FP8: "none", "inputs" (all but
                wo_a's, which the release multiplies in bf16) or "all"
    """

    name: str
    how: str
    arithmetic: str
    cache: bool
    linear: str

    @property
    def rounded(self) -> bool:
        return self.cache or self.linear != "none" or self.arithmetic != "fp32"

    def job(self, threads: int) -> dict[str, Any]:
        return {"arithmetic": self.arithmetic, "cache": self.cache, "linear": self.linear,
                "threads": threads}


@dataclass(frozen=True)
class Recipe:
    """An engine: what pip installs, one call each in this order, and what it is asked to do.

    rows      how many rows of a text are compared; None: all
    prompts   how many greedy texts at most; None: as many as are asked for
    reads_off its greedy texts are read off one pass over labkit's tokens (no cache)
    masks_eos told to write on behind EOS it lowers that logit out of sight: compared without it
    traces    rounded vectors and choices can be recorded
    """

    name: str
    version: str
    installs: tuple[tuple[str, ...], ...]
    worker: str
    modes: tuple[Mode, ...]
    rows: int | None = None
    prompts: int | None = None
    reads_off: bool = False
    masks_eos: bool = False
    traces: bool = True


def _unrounded(how: str) -> Mode:
    return Mode("nothing rounded", how, "fp32", cache=False, linear="none")


RECIPES = {recipe.name: recipe for recipe in (
    Recipe("nemo-automodel", "0.7.0", (("torch==2.13.0",), ("nemo-automodel==0.7.0",)),
           "nemo_worker.py",
           (_unrounded("`quantize_cache` replaced by the identity"),
            Mode("cache rounded", "as it is, with dtype float32", "fp32", True, "none")),
           reads_off=True),
    Recipe("mlx-vlm", "0.7.10", (("mlx-cpu", "mlx-vlm==0.7.10"),), "mlx_worker.py",
           (_unrounded("`fakequant.DISABLE = True`"),
            Mode("cache rounded", "rounding of linear layers' inputs replaced by the identity",
                 "fp32", True, "none"),
            Mode("cache and linear inputs rounded", "as it is, with `set_dtype(float32)`",
                 "fp32", True, "inputs"))),
    Recipe("ftllm", "1.9.0", (("ftllm==1.9.0",),), "ftllm_worker.py",
           (Mode("linear inputs rounded, bf16", "`FASTLLM_DSV41_DISABLE_FAKE_QUANT=1`", "bf16",
                 False, "inputs"),
            Mode("cache and all linear inputs rounded, bf16", "as it is", "bf16", True, "all")),
           # Confined to one core it writes a token a second.
           rows=8, prompts=6, masks_eos=True, traces=False),
)}


# ---- installing -----------------------------------------------------------------------------

def python_of(folder: Path, windows: bool = os.name == "nt") -> Path:
    return folder / ("Scripts/python.exe" if windows else "bin/python")


def is_ready(folder: Path, recipe: Recipe) -> bool:
    """Whether the environment was finished, and for this recipe."""
    try:
        made = json.loads((folder / READY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return made == _ready(recipe) and python_of(folder).exists()


def _ready(recipe: Recipe) -> dict[str, Any]:
    return {"installs": [list(words) for words in recipe.installs]}


def commands(recipe: Recipe, folder: Path, python: str = sys.executable) -> list[list[str]]:
    """What makes the environment, in order."""
    pip = [str(python_of(folder)), "-m", "pip", "install", "--quiet",
           "--disable-pip-version-check"]
    return [[python, "-m", "venv", str(folder)], *([*pip, *words] for words in recipe.installs)]


def prepare(recipe: Recipe, folder: Path, tell: Tell) -> Path:
    """Make the environment unless it is there; its python. EngineError if that fails.

    What was stopped half-way has no ready.json and is made anew.
    """
    if not is_ready(folder, recipe):
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        for words in commands(recipe, folder):
            tell("making its environment: " + " ".join(
                w for w in words[words.index("-m") + 1 :] if not w.startswith("--")))
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                raise EngineError(f"cannot be installed: {last_line(done.stderr)}; check the "
                                  "network or the Python version and run this again")
        (folder / READY).write_text(json.dumps(_ready(recipe)), encoding="utf-8")
    return python_of(folder)


def last_line(text: str) -> str:
    """The last line that says something; of pip's, the last error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:300]


# ---- running --------------------------------------------------------------------------------

@contextmanager
def checkpoint_copy(source: Path, folder: Path) -> Iterator[Path]:
    """A copy that an engine may write into, gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix="checkpoint-", ignore_cleanup_errors=True) as name:
        copy = Path(name)
        for file in checkpoint_files(source):
            shutil.copyfile(file, copy / file.name)
        yield copy


def checkpoint_files(source: Path) -> list[Path]:
    names = [source / "config.json", source / "tokenizer.json", source / "tokenizer_config.json"]
    return [f for f in names if f.exists()] + sorted(
        f for pattern in WEIGHTS for f in source.glob(pattern))


def digest(files: Sequence[Path], *parts: Any) -> str:
    """Of files' names and contents, and of anything that JSON can hold."""
    sha = hashlib.sha256()
    for file in files:
        sha.update(f"{file.name} {file.stat().st_size}\n".encode())
        sha.update(file.read_bytes())
    sha.update(json.dumps(parts, sort_keys=True).encode())
    return sha.hexdigest()[:20]


def worker_sources(recipe: Recipe) -> list[Path]:
    return [HERE / "worker.py", HERE / recipe.worker]


def run(recipe: Recipe, python: Path, job: Path, result: Path, log: Path, threads: int,
        tell: Tell) -> None:
    """One job in a process of its own; what it says goes to the log. EngineError if it fails."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environ |= MALLOC | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    words = [str(python), str(HERE / recipe.worker), str(job), str(result)]
    said = ""
    with log.open("w", encoding="utf-8") as written, subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=environ) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                written.write(line)
                if line.startswith(MARK):
                    tell(line[len(MARK) :].strip())
                elif line.strip():
                    said = line.strip()
            code = process.wait()
        except BaseException:  # Ctrl-C above all: no process and no half of a result stays
            process.kill()
            process.wait()
            result.with_suffix(".part.npz").unlink(missing_ok=True)
            raise
    if code or not result.exists():
        raise EngineError(f"failed (exit status {code}): {said[-300:] or 'no message'}; "
                          f"all it said is in {log.parent.name}/{log.name}")
