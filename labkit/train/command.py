"""What `labkit train` and `labkit export` do."""

from __future__ import annotations

import json
import shutil
import signal
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
    if options["length"] > config.max_position_embeddings:
        raise InputError(f"length {options['length']} exceeds the context of {preset}, "
                         f"{config.max_position_embeddings}")
    if fresh and (run / "state.safetensors").exists():
        shutil.rmtree(run)
    trainer = Trainer(config, tokenizer, run, Options(**options))
    count = sum(p.numel() for p in trainer.model.parameters())
    print(f"{preset}: {count:,} parameters, {trainer.batches.steps_per_epoch} steps an epoch, "
          f"from step {trainer.step} to {trainer.options.steps}, in {run}", flush=True)
    # A run in the background often starts with Ctrl-C ignored: stop cleanly for both signals.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    trainer.run()
    result = trainer.look()
    trainer.log({"step": trainer.step, "seconds": round(trainer.seconds, 1),
                 "heldout_bits_per_byte_all": round(result, 4)})
    print(f"held-out text: {result:.4f} bits per byte, rounded as shipped")


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def export_run(run: Path, out: Path, preset: str, form: str) -> list[Path]:
    """Weights of a run, with config.json and tokenizer.json, in folder `out`."""
    if form not in ("released", "plain"):
        raise InputError(f"form is {form!r}: choose released or plain")
    config, _ = preset_tokenizer(preset)
    state, facts = read_weights(run)
    try:
        written = write_checkpoint(out, config, state, form=form, dtype=torch.bfloat16)  # type: ignore[arg-type]
    except CheckpointError as error:
        raise CheckpointError(f"the run in {run} is not one of preset {preset}: {error}") from error
    # How it was made travels with it: the log of the run, its options and length.
    shutil.copyfile(run / "log.jsonl", out / "log.jsonl")
    (out / "run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    source, target = data_dir() / preset / "tokenizer.json", out / "tokenizer.json"
    if source.resolve() != target.resolve():
        shutil.copyfile(source, target)
    return [*written, target, out / "log.jsonl", out / "run.json"]
