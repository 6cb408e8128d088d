"""Training the backbone: what a step is, and what it reached on held-out text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.checkpoint.weights import fake_quantize_weight
from labkit.config import ModelConfig
from labkit.engine.calibration import target_digest
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.text.engram_map import checked_classes
from labkit.text.tokenizer import Tokenizer
from labkit.trace import Taps
from labkit.train.balance import balance_experts
from labkit.train.controls import cache_rounding, changed, selecting
from labkit.train.evaluate import bits_per_byte
from labkit.train.losses import next_token_loss, selection_loss, wanted_taps, weighted_mean
from labkit.train.optimizers import optimizers, schedule
from labkit.train.staged import StagedRun

# Parts of the rows. The novels are the text; the rest has a structure that can be examined.
SHARES = {"novels": 0.45, "needle": 0.25, "pairs": 0.06, "code": 0.11, "facts": 0.08,
          "arithmetic": 0.05}

BLIND = ", encoder blind"   # behind the kind of a loss in the log


@dataclass(frozen=True)
class Stage:
    """A part of a run: up to which share of its steps, what it reads, who selects."""

    until: float
    tokens: int = 2048            # a step
    length: int = 2048            # tokens a row
    selecting: str = "index"      # `labkit.model.indexer.SELECTING`
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    answers: float = 1.0          # weight of a needle's answer in the loss; of other tokens 1
    left_out: float = 0.0         # weight of attention's mass outside the selection
    blind: float = 0.0            # share of the steps in which the encoder sees its windows alone
    balance: float = 1e-3         # step of the gates' biases towards equal load


# Copying comes first and alone: from few words, looking back for what followed is learnt within
# some 250 steps. The one run that was begun with everything at once had not learnt it after a
# million tokens. An index that has learnt nothing selects at random, and what is not selected is
# not learnt: so the first stages are dense, and the index learns what attention looks at (a dense
# warm-up, as DeepSeek-V3.2's). The selection and the whole context come last.
FROM_NOTHING = (
    # Tokens so alike all pick the same experts; a bias that moves would move them all at once.
    Stage(4 / 35, 1024, 128, "all", {"copy": 1.0}, balance=0.0),
    Stage(17 / 35, 2048, 256, "all", {"novels": 0.35, "needle": 0.2, "pairs": 0.2, "copy": 0.03,
                                      "code": 0.1, "facts": 0.08, "arithmetic": 0.04}),
    Stage(43 / 70, 2048, 512, "index", {"novels": 0.4, "needle": 0.25, "pairs": 0.1,
                                        "copy": 0.02, "code": 0.1, "facts": 0.08,
                                        "arithmetic": 0.05}),
    Stage(1.0),
)
# What is left to learn from weights is to be exact. Of a needle row's tokens a twenty-fifth are
# answers, and most of the others cannot be guessed; so answers weigh more. The selection has to
# hold what attention looks at, so attention pays for what it leaves out. Recall had been learnt
# by the encoder alone; where that is blind, the decoder has to do it too.
MORE_RECALL = {"novels": 0.36, "needle": 0.32, "pairs": 0.08, "code": 0.1, "facts": 0.09,
               "arithmetic": 0.05}
FROM_WEIGHTS = (
    Stage(0.07, 2048, 256, "all", {"recite": 0.3, "needle": 0.3, "pairs": 0.1, "novels": 0.3},
          answers=16.0, blind=1.0),
    Stage(0.667, 2048, 1024, "index", MORE_RECALL, answers=16.0, left_out=0.1, blind=0.25),
    Stage(1.0, 4096, 2048, "index", MORE_RECALL, answers=16.0, left_out=0.1, blind=0.25),
)


def fitted(stages: tuple[Stage, ...], context: int) -> tuple[Stage, ...]:
    """The same stages with rows no longer than a context."""
    return tuple(replace(stage, length=min(stage.length, context)) for stage in stages)


@dataclass(frozen=True)
class Options:
    """Everything that, with the code and the corpus, determines a run."""

    steps: int = 3500
    seed: int = 0
    lr: float = 2e-3              # AdamW
    muon_lr: float = 1e-2
    table_lr: float = 1e-2        # rows of the Engram tables
    tables_by: str = "adamw"      # or "momentum": the published rule (`labkit.train.tables`)
    weight_decay: float = 0.1
    warmup: int = 60
    clip: float = 1.0
    index_queries: int = 192      # tokens a step at which the indexer is compared
    rounding_from: float = 0.85   # share of the steps after which cache and weights are rounded
    cooldown: float = 0.5         # share of the steps in which the learning rates fall
    stages: tuple[Stage, ...] = FROM_NOTHING
    kernels: str = "train"
    half: bool = True             # matrix products in bf16
    start: str = ""               # digest of the weights that it starts from; "": random ones
    alike: bool = False           # later Full layers begin as copies of the first (`begin_alike`)


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


class Trainer(StagedRun):
    """Trains a model on the corpus, from random weights or from those of another."""

    options: Options

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, folder: Path,
                 options: Options, start: Transformer | None = None) -> None:
        """start: of the same shape; its weights are copied."""
        if start is not None:
            options = replace(options, start=target_digest(start))
        super().__init__(folder, options, tokenizer)
        self.config = config
        self.model = Transformer(config, checked_classes(config, tokenizer), options.kernels, False)
        init_weights(self.model, options.seed)
        if start is not None:
            self.model.load_state_dict(backbone(start))
        if options.alike:
            begin_alike(self.model)
        self.resume(self.model, optimizers(self.model, options.lr, options.muon_lr,
                                           options.weight_decay, options.table_lr,
                                           options.tables_by))

    def one_step(self) -> dict[str, Any]:
        o = self.options
        number, within = self.stage(self.step)
        stage = o.stages[number]
        ids, targets, weights = self.batches[number](within)
        late = self.step >= o.rounding_from * o.steps
        self.model.cache_rounding, self.model.selecting = late, stage.selecting
        self.model.blind = "encoder" if blind(within, stage.blind) else ""
        taps = Taps(wanted_taps(self.config), keep_graph=True)
        rng = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        queries = torch.randperm(stage.length, generator=rng)
        queries = queries[: max(1, o.index_queries * stage.length // stage.tokens)].sort().values
        with rounded_weights(self.model) if late else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.half):
                logits = self.model(ids, taps=taps).logits                # [B,T,V]
            losses = next_token_loss(logits, targets)                     # [B,T]
            loss = weighted_mean(losses, weights)
            selection = selection_loss(self.config, taps, queries)
            (loss + selection.index + stage.left_out * selection.left_out).backward()
        factor = schedule(self.step, o.steps, o.warmup, o.cooldown)
        norm = self.update(factor, o.clip)
        worst = balance_experts(self.model, taps, stage.balance)
        self.keep_losses(number, within, losses, weights,
                         BLIND if self.model.blind else "")
        return {"step": self.step + 1, "tokens": self.tokens, "length": stage.length,
                "loss": round(loss.item(), 4),
                "index_loss": round(selection.index.item(), 4),
                "left_out": round(selection.left_out.item(), 4), "gradient_norm": round(norm, 3),
                "lr": factor, "expert_load_max": round(worst, 2), "rounding": late}

    def look(self, limit: int | None = None) -> float:
        """Held-out bits per byte of the model as it would be shipped: rounded weights and cache."""
        with measured(self.model), rounded_weights(self.model):
            return bits_per_byte(self.model, self.tokenizer, length=self.length,
                                 stride=self.length // 2, limit=limit)

    def glance(self) -> dict[str, Any]:
        return {"heldout_bits_per_byte": round(self.look(limit=24), 4)}

    def postfix(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"loss": f"{facts['loss']:.3f}", "index": f"{facts['index_loss']:.3f}"}


@torch.no_grad()
def begin_alike(model: Transformer) -> None:
    """The attention of every later Full layer becomes that of the first, where shapes agree.

    What the encoder has learnt to look for, the decoder then looks for as well. Left to itself it
    did not begin to: with the encoder blind it copied nothing beyond its window after 180 steps.
    """
    first, *later = model.config.kv_source_layer_ids
    for layer in later:
        of_first = dict(model.layers[first].named_parameters())
        for name, p in model.layers[layer].named_parameters():
            if name.startswith("attn") and of_first[name].shape == p.shape:
                p.copy_(of_first[name])


def blind(step: int, share: float) -> bool:
    """Whether a step is one of this share, evenly spread."""
    return int((step + 1) * share) > int(step * share)


def backbone(model: Transformer) -> dict[str, torch.Tensor]:
    """Weights by checkpoint key, without those of a draft."""
    return {n: p for n, p in model.state_dict().items() if not n.startswith("mtp.")}


@contextlib.contextmanager
def measured(model: Transformer) -> Iterator[None]:
    """Inside, the model computes as a reader of its checkpoint would, however it is trained."""
    with changed(model, kernels=exact_kernels(), blind=""), cache_rounding(model, True), \
            selecting(model, "index"):
        yield


def exact_kernels() -> Any:
    """The kernels that a model is measured with, whatever it was trained with."""
    from labkit import kernels

    return kernels.get("auto")
