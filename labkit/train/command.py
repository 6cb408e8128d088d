"""What `labkit train` and `labkit export` do."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from labkit.checkpoint.writer import write_checkpoint
from labkit.config import ModelConfig
from labkit.errors import CheckpointError, InputError
from labkit.paths import data_dir
from labkit.text.tokenizer import Tokenizer
from labkit.train.loop import Options, Trainer
from labkit.train.state import read_weights

TRAINABLE = ("nano", "mini")


def preset_tokenizer(preset: str) -> tuple[ModelConfig, Tokenizer]:
    """Configuration and vocabulary of a preset that can be trained here."""
    if preset not in TRAINABLE:
        raise InputError(
            f"preset {preset!r} cannot be trained here: choose {' or '.join(TRAINABLE)}")
    return ModelConfig.preset(preset), Tokenizer.from_file(data_dir() / preset)


def train_preset(run: Path, preset: str, fresh: bool, **options: Any) -> None:
    """Start or continue the run in folder `run`; log and state stay there."""
    config, tokenizer = preset_tokenizer(preset)
    for name in ("steps", "batch", "length"):
        if options[name] < 1:
            raise InputError(f"{name} is {options[name]}: must be at least 1")
    if options["length"] > config.max_position_embeddings:
        raise InputError(f"length {options['length']} exceeds the context of {preset}, "
                         f"{config.max_position_embeddings}")
    if fresh:
        for name in ("state.safetensors", "state.safetensors.part", "log.jsonl"):
            (run / name).unlink(missing_ok=True)
    trainer = Trainer(config, tokenizer, run, Options(**options))
    if trainer.batches.steps_per_epoch < 1:
        raise InputError(f"batch {options['batch']} is more than the {trainer.batches.pieces} "
                         f"pieces of {options['length']} tokens that the corpus gives")
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{preset}: {count:,} parameters, {trainer.batches.steps_per_epoch} steps an epoch, "
          f"from step {trainer.step} to {trainer.options.steps}, in {run}", flush=True)
    with _stopping_cleanly(trainer):
        trainer.run()
    if trainer.stopping:
        print(f"stopped at step {trainer.step}: saved, the same command goes on from here")
        raise KeyboardInterrupt
    result = trainer.look()
    trainer.log({"step": trainer.step, "seconds": round(trainer.seconds, 1),
                 "heldout_bits_per_byte_all": round(result, 4)})
    print(f"held-out text: {result:.4f} bits per byte, rounded as shipped")


@contextlib.contextmanager
def _stopping_cleanly(trainer: Trainer) -> Iterator[None]:
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
    """Weights of a run, with config.json and tokenizer.json, in folder `out`."""
    if form not in ("released", "plain"):
        raise InputError(f"form is {form!r}: choose released or plain")
    config, tokenizer = preset_tokenizer(preset)
    state, facts = read_weights(run)
    if not (run / "log.jsonl").is_file():
        raise CheckpointError(f"{run / 'log.jsonl'} is missing: the log of the run belongs to it")
    try:
        written = write_checkpoint(out, config, state, form=form, dtype=torch.bfloat16,  # type: ignore[arg-type]
                                   engram_digest=tokenizer.digest())
    except CheckpointError as error:
        raise CheckpointError(f"the run in {run} is not one of preset {preset}: {error}") from error
    # How it was made travels with it: the log of the run, its options and length.
    shutil.copyfile(run / "log.jsonl", out / "log.jsonl")
    (out / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    source, target = data_dir() / preset / "tokenizer.json", out / "tokenizer.json"
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)
    return [*written, target, out / "log.jsonl", out / "run.json"]
