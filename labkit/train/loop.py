"""Training the backbone: what a step is, and what it reached on held-out text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.checkpoint.weights import fake_quantize_weight
from labkit.config import ModelConfig
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
from labkit.train.run import TrainingRun


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
def rounded_weights(model: nn.Module) -> Iterator[None]:
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


class Trainer(TrainingRun):
    """Trains a model of random weights on the corpus."""

    options: Options

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, folder: Path,
                 options: Options) -> None:
        super().__init__(folder, options)
        self.config, self.tokenizer = config, tokenizer
        self.model = Transformer(config, checked_classes(config, tokenizer), options.kernels, False)
        init_weights(self.model, options.seed)
        self.batches = Batches(tokenizer, options.batch, options.length, options.seed)
        self.resume(self.model, optimizers(self.model, options.lr, options.muon_lr,
                                           options.weight_decay))

    def one_step(self) -> dict[str, Any]:
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
        factor = schedule(self.step, o.steps, o.warmup)
        norm = self.update(factor, o.clip)
        worst = balance_experts(self.model, taps)
        return {"step": self.step + 1, "loss": round(loss.item(), 4),
                "index_loss": round(distance.item(), 4), "gradient_norm": round(norm, 3),
                "lr": factor, "expert_load_max": round(worst, 2), "rounding": late}

    def look(self, limit: int | None = None) -> float:
        """Held-out bits per byte of the model as it would be shipped: rounded weights and cache."""
        kernels, self.model.kernels = self.model.kernels, exact_kernels()
        rounding, self.model.cache_rounding = self.model.cache_rounding, True
        try:
            with rounded_weights(self.model):
                return bits_per_byte(self.model, self.tokenizer, length=self.options.length,
                                     stride=self.options.length // 2, limit=limit)
        finally:
            self.model.kernels, self.model.cache_rounding = kernels, rounding

    def glance(self) -> dict[str, Any]:
        return {"heldout_bits_per_byte": round(self.look(limit=24), 4)}

    def postfix(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"loss": f"{facts['loss']:.3f}", "index": f"{facts['index_loss']:.3f}"}


def exact_kernels() -> Any:
    """The kernels that a model is measured with, whatever it was trained with."""
    from labkit import kernels

    return kernels.get("auto")
