"""What `labkit train` and `labkit export` do."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from labkit.checkpoint.layout import parameters
from labkit.checkpoint.writer import write_checkpoint
from labkit.config import ModelConfig
from labkit.engine.calibration import FILE as CALIBRATION
from labkit.errors import CheckpointError, InputError
from labkit.lab import load
from labkit.paths import data_dir
from labkit.text.tokenizer import Tokenizer
from labkit.train.loop import (
    FROM_NOTHING,
    FROM_WEIGHTS,
    Options,
    Stage,
    Trainer,
    fitted,
)
from labkit.train.run import TrainingRun
from labkit.train.state import read_weights

TRAINABLE = ("nano", "mini")
# What lies beside a checkpoint because of its draft.
DRAFT_FILES = (CALIBRATION, "draft_figures.json", "draft_log.jsonl", "draft_run.json")


def preset_tokenizer(preset: str) -> tuple[ModelConfig, Tokenizer]:
    """Configuration and vocabulary of a preset that can be trained here."""
    if preset not in TRAINABLE:
        raise InputError(
            f"preset {preset!r} cannot be trained here: choose {' or '.join(TRAINABLE)}")
    return ModelConfig.preset(preset), Tokenizer.from_file(data_dir() / preset)


def train_preset(run: Path, preset: str, fresh: bool, start: Path | None = None,
                 **options: Any) -> None:
    """Start or continue the run in folder `run`; log and state stay there.

    start: a checkpoint of the preset's shape whose weights it starts from, instead of random ones.
    """
    config, tokenizer = preset_tokenizer(preset)
    usual = FROM_NOTHING if start is None else FROM_WEIGHTS
    if preset == "nano":  # its 512 tokens join words, where synthetic text must be cut
        options.setdefault("stages", (Stage(1.0, 512, 128, "index", {"novels": 1.0}),))
    options.setdefault("alike", start is not None and preset != "nano")
    options.setdefault("stages", fitted(usual, config.max_position_embeddings))
    check_sizes(config, options, ("steps",), max(stage.length for stage in options["stages"]))
    if fresh:
        forget(run)
    first = None if start is None else load(start, device="cpu").model
    if first is not None and shapes(first.config) != shapes(config):
        raise InputError(f"{start} is no checkpoint of preset {preset}: its tensors have other "
                         "names or shapes")
    trainer = Trainer(config, tokenizer, run, Options(**options), first)
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{preset}: {count:,} parameters, from step {trainer.step} to {trainer.options.steps}, "
          f"in {run}", flush=True)
    run_to_end(trainer)
    result = trainer.look()
    trainer.log({"step": trainer.step, "seconds": round(trainer.seconds, 1),
                 "heldout_bits_per_byte_all": round(result, 4)})
    print(f"held-out text: {result:.4f} bits per byte, rounded as shipped")


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of all parameters of the backbone, by checkpoint key."""
    return {name: shape for name, shape in parameters(config) if not name.startswith("mtp.")}


def check_sizes(config: ModelConfig, options: Mapping[str, Any], names: Iterable[str],
                length: int) -> None:
    """InputError unless these options are 1 or more and a sequence fits the context."""
    for name in names:
        if options[name] < 1:
            raise InputError(f"{name} is {options[name]}: must be at least 1")
    if length > config.max_position_embeddings:
        raise InputError(f"length {length} exceeds the context of the model, "
                         f"{config.max_position_embeddings}")


def forget(run: Path) -> None:
    """Remove what a run has left in its folder, and nothing else."""
    for name in ("state.safetensors", "state.safetensors.part", "log.jsonl"):
        (run / name).unlink(missing_ok=True)


def run_to_end(trainer: TrainingRun) -> None:
    """Run; after Ctrl-C say where it stopped and pass the interrupt on."""
    with _stopping_cleanly(trainer):
        trainer.run()
    if trainer.stopping:
        print(f"stopped at step {trainer.step}: saved, the same command goes on from here")
        raise KeyboardInterrupt


@contextlib.contextmanager
def _stopping_cleanly(trainer: TrainingRun) -> Iterator[None]:
    """Inside, the first Ctrl-C (or SIGTERM) ends the run after its step, a second one at once.

    A run in the background often starts with Ctrl-C ignored; this hears it all the same.
    """
    def hear(number: int, frame: FrameType | None) -> None:
        if trainer.stopping:
            raise KeyboardInterrupt
        trainer.stop()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def export_run(run: Path, out: Path, preset: str, form: str) -> list[Path]:
    """Weights of a run, with config.json and tokenizer.json, in folder `out`.

    A draft joins the checkpoint in `out` that it was trained for, in that one's form. A draft
    that lies there already is lost when another backbone is written.
    """
    if form not in ("released", "plain"):
        raise InputError(f"form is {form!r}: choose released or plain")
    state, facts = read_weights(run)
    if all(name.startswith("mtp.") for name in state):
        from labkit.train.draft_command import export_draft

        return export_draft(run, out, state, facts)
    config, tokenizer = preset_tokenizer(preset)
    if not (run / "log.jsonl").is_file():
        raise CheckpointError(f"{run / 'log.jsonl'} is missing: the log of the run belongs to it")
    try:
        written = write_checkpoint(out, config, state, form=form, dtype=torch.bfloat16,  # type: ignore[arg-type]
                                   engram_digest=tokenizer.digest())
    except CheckpointError as error:
        raise CheckpointError(f"the run in {run} is not one of preset {preset}: {error}") from error
    for stale in DRAFT_FILES:
        (out / stale).unlink(missing_ok=True)
    # How it was made travels with it: the log of the run, its options and length.
    shutil.copyfile(run / "log.jsonl", out / "log.jsonl")
    (out / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    source, target = data_dir() / preset / "tokenizer.json", out / "tokenizer.json"
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)
    described = tokenizer.describe(out, config.max_position_embeddings)
    return [*written, target, described, out / "log.jsonl", out / "run.json"]
