"""The training loop: resumable, interruptible, every number in a log."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from labkit.checkpoint.weights import fake_quantize_weight
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.text.engram_map import checked_classes
from labkit.text.tokenizer import Tokenizer
from labkit.trace import Taps
from labkit.train.balance import balance_experts
from labkit.train.batches import Batches
from labkit.train.evaluate import bits_per_byte
from labkit.train.losses import index_loss, next_token_loss, wanted_taps
from labkit.train.optimizers import optimizers, schedule
from labkit.train.state import load_run, save_run


@dataclass(frozen=True)
class Options:
    """Everything that, with the code and the corpus, determines a run."""

    steps: int = 2000
    batch: int = 2                # sequences a step
    length: int = 1024            # tokens a sequence
    seed: int = 0
    lr: float = 2e-3              # AdamW
    muon_lr: float = 1e-2
    weight_decay: float = 0.1
    warmup: int = 60
    clip: float = 1.0
    index_queries: int = 96       # positions a step at which the indexer is compared
    rounding_from: float = 0.8    # share of the steps after which cache and weights are rounded
    kernels: str = "train"
    half: bool = True             # matrix products in bf16


@contextlib.contextmanager
def rounded_weights(model: Transformer) -> Iterator[None]:
    """Inside, every matrix has the value that the released layout would store.

    The gradient found there is applied to the exact weight (straight-through).
    """
    exact: dict[str, torch.Tensor] = {}
    try:
        for name, p in model.named_parameters():
            if p.ndim == 2:
                exact[name] = p.data
                p.data = fake_quantize_weight(name, p.data)
        yield
    finally:
        for name, p in model.named_parameters():
            if name in exact:
                p.data = exact[name]


class Trainer:
    """One run in one folder: `log.jsonl`, `state.safetensors`."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, folder: Path,
                 options: Options) -> None:
        self.config, self.tokenizer, self.folder, self.options = config, tokenizer, folder, options
        self.model = Transformer(config, checked_classes(config, tokenizer), options.kernels, False)
        init_weights(self.model, options.seed)
        self.optimizers = optimizers(self.model, options.lr, options.muon_lr, options.weight_decay)
        self.batches = Batches(tokenizer, options.batch, options.length, options.seed)
        self.step, self.seconds = 0, 0.0
        self.stopping = False
        facts = load_run(folder, self.model, self.optimizers)
        if facts is not None:
            self._check_options(facts["options"])
            self.step, self.seconds = facts["step"], facts["seconds"]

    def _check_options(self, saved: dict[str, Any]) -> None:
        """A run goes on with the options that it began with; only its length may change."""
        for name, value in dataclasses.asdict(self.options).items():
            if name != "steps" and saved.get(name) != value:
                raise InputError(
                    f"the run in {self.folder} has {name} {saved.get(name)}, not {value}: give "
                    "the same value, another folder, or --fresh")

    def stop(self) -> None:
        """End after the step that is running: a step is done whole or not at all."""
        self.stopping = True

    def run(self, save_every: float = 300.0, look_every: int = 250, quiet: bool = False) -> None:
        """Train to the last step, or until `stop`; saves, and a later call goes on from there.

        Without a handler that calls `stop`, Ctrl-C leaves at once with the last saved state.
        """
        self.stopping = False
        bar = tqdm(total=self.options.steps, initial=self.step, unit="step", disable=quiet,
                   mininterval=5)
        saved = time.monotonic()
        try:
            while self.step < self.options.steps and not self.stopping:
                begun = time.monotonic()
                facts = self.one_step()
                self.step += 1
                self.seconds += time.monotonic() - begun
                facts["seconds"] = round(self.seconds, 1)
                if self.step % look_every == 0 or self.step == self.options.steps:
                    facts["heldout_bits_per_byte"] = round(self.look(limit=24), 4)
                if self.step % 10 == 0 or "heldout_bits_per_byte" in facts:
                    self.log(facts)
                bar.update()
                bar.set_postfix(loss=f"{facts['loss']:.3f}", index=f"{facts['index_loss']:.3f}")
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
            self.save()
        finally:
            bar.close()

    def one_step(self) -> dict[str, Any]:
        """Forward, backward, update; what the log records of it."""
        o = self.options
        ids, targets = self.batches(self.step)
        late = self.step >= o.rounding_from * o.steps
        self.model.cache_rounding = late
        taps = Taps(wanted_taps(self.config), keep_graph=True)
        rng = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        queries = torch.randperm(o.length, generator=rng)[: o.index_queries].sort().values
        with rounded_weights(self.model) if late else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.half):
                logits = self.model(ids, taps=taps).logits                # [B,T,V]
            loss = next_token_loss(logits, targets)
            distance = index_loss(self.config, taps, queries)
            (loss + distance).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.model.parameters() if p.grad is not None], o.clip)
        factor = schedule(self.step, o.steps, o.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        worst = balance_experts(self.model, taps)
        return {"step": self.step + 1, "loss": round(loss.item(), 4),
                "index_loss": round(distance.item(), 4), "gradient_norm": round(norm.item(), 3),
                "lr": factor, "expert_load_max": round(worst, 2), "rounding": late}

    def look(self, limit: int | None = None) -> float:
        """Held-out bits per byte of the model as it would be shipped: rounded weights and cache."""
        kernels, self.model.kernels = self.model.kernels, _exact_kernels()
        rounding, self.model.cache_rounding = self.model.cache_rounding, True
        try:
            with rounded_weights(self.model):
                return bits_per_byte(self.model, self.tokenizer, length=self.options.length,
                                     stride=self.options.length // 2, limit=limit)
        finally:
            self.model.kernels, self.model.cache_rounding = kernels, rounding

    def log(self, facts: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def save(self) -> None:
        save_run(self.folder, self.model, self.optimizers, {
            "step": self.step, "seconds": round(self.seconds, 1),
            "threads": torch.get_num_threads(),
            "options": dataclasses.asdict(self.options)})


def _exact_kernels() -> Any:
    from labkit import kernels

    return kernels.get("auto")
