"""Training the draft: three heads of loss against a target that stays as it is.

A step reads whole sequences with the frozen target, once and without gradient, and drafts behind
many anchors in them at once. The tokens before each slot are those of the text, so nothing has
to be drawn left to right.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from labkit.config import ModelConfig
from labkit.engine.calibration import target_digest
from labkit.errors import InputError
from labkit.lab import Lab
from labkit.model.dspark import windows_at
from labkit.model.init import init_weights
from labkit.model.run import Run
from labkit.model.transformer import Transformer
from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import Tokenizer
from labkit.trace import Taps
from labkit.train.balance import balance_experts
from labkit.train.batches import Batches
from labkit.train.controls import changed
from labkit.train.loop import backbone, exact_kernels, rounded_weights
from labkit.train.losses import draft_loss, total_variation
from labkit.train.optimizers import optimizers, schedule
from labkit.train.own_text import own_text
from labkit.train.run import TrainingRun

# More prose than the model reads: there a draft has most to learn.
SHARES = {"novels": 0.76, "code": 0.08, "needle": 0.05, "pairs": 0.03, "facts": 0.04,
          "arithmetic": 0.04}
EARLY_SHARE = 16  # one anchor in so many lies within the first window, where windows are short


@dataclass(frozen=True)
class DraftOptions:
    """Everything that, with the code, the corpus and the target, determines a run."""

    steps: int = 1600
    batch: int = 2                # sequences a step
    length: int = 1024            # tokens a sequence
    anchors: int = 192            # blocks drafted in each sequence
    seed: int = 0
    lr: float = 1.2e-2            # AdamW; with muon_lr about the best of a short search
    muon_lr: float = 4e-2
    weight_decay: float = 0.1
    warmup: int = 40
    clip: float = 1.0
    rounding_from: float = 0.8    # share of the steps after which weights are rounded as shipped
    kernels: str = "train"
    half: bool = True             # matrix products in bf16
    balance: float = 5e-3         # step of the gates' biases towards equal load
    updates: int = 2              # updates for one pass of the target, each with other anchors
    shares: dict[str, float] = field(default_factory=lambda: dict(SHARES))
    own_rows: int = 0             # rows that the target writes itself, for half of the novels'
    cooldown: float = 0.5         # share of the steps in which the learning rates fall
    target: str = ""              # digest of the target, filled in by the trainer
    start: str = ""               # of the model whose draft it starts from; "": random weights


@dataclass
class Reading:
    """What one pass of the target over B sequences of T tokens leaves for the draft."""

    ids: torch.Tensor            # [B,T+1]; the last one was not read, it is a token to be guessed
    features: torch.Tensor       # [B,T,targets*D]
    logits: torch.Tensor         # [B,T,V]


@dataclass
class Drafted:
    """N = B*A blocks of n slots, the tokens before each slot taken from the text."""

    logits: torch.Tensor             # [N,n,V]
    confidence_logits: torch.Tensor  # [N,n]


@torch.no_grad()
def read(model: Transformer, ids: torch.Tensor) -> Reading:
    """One pass of the target over all but the last of ids [B,T+1]."""
    taps = Taps(["dspark.target_features"])
    cache = model.new_cache(len(ids), "plain", draft=True)
    logits = model(ids[:, :-1], cache=cache, taps=taps).logits
    return Reading(ids, taps["dspark.target_features"], logits)


def draft_blocks(model: Transformer, reading: Reading, anchors: torch.Tensor, slots: int,
                 taps: Taps | None = None) -> Drafted:
    """Draft behind anchors [B,A], positions of the sequences read, with gradient for `mtp.*`."""
    assert model.mtp is not None
    c, ids = model.config, reading.ids
    B, T = reading.logits.shape[:2]
    start = torch.zeros(B, dtype=torch.int64)
    run = Run(c, model.new_cache(0, "plain", draft=False), model.kernels, start, start + T, T,
              model.dtype, model.cache_rounding)
    rows = [F.pad(run.round(kv, "fp8"), (0, 0, c.sliding_window, 0))    # [B,W+T,d]
            for kv in model.mtp.key_values(reading.features, run)]
    found = model.draft(ids.gather(1, anchors).flatten(), anchors.flatten(),
                        windows_at(rows, anchors, c.sliding_window), slots, taps)
    previous = behind(ids, anchors, slots, 0)                           # [N,n]
    return Drafted(found.base_logits + model.mtp.markov_logits(previous),
                   model.mtp.confidence_logits(found.raw_hidden, previous))


def behind(rows: torch.Tensor, anchors: torch.Tensor, slots: int, first: int) -> torch.Tensor:
    """rows [B,T,...] at positions a+first .. a+first+slots-1 of anchors [B,A]: [B*A,slots,...]."""
    place = anchors[:, :, None] + first + torch.arange(slots)           # [B,A,n]
    batch = torch.arange(len(rows))[:, None, None]
    return rows[batch, place].flatten(0, 1)


def sample_anchors(batch: int, length: int, count: int, slots: int, window: int,
                   generator: torch.Generator) -> torch.Tensor:
    """Positions of anchors [batch,count] in sequences of which `length` tokens were read.

    All slots of a block have a target, and one anchor in `EARLY_SHARE` lies in the first window.
    """
    last = length - slots                                       # its last slot guesses token T
    early = count // EARLY_SHARE
    rows = []
    for _ in range(batch):
        near = torch.randint(1, min(window, last) + 1, (early,), generator=generator)
        rest = torch.randint(1, last + 1, (count - early,), generator=generator)
        rows.append(torch.cat([near, rest]))
    return torch.stack(rows)


def draft_config(config: ModelConfig) -> ModelConfig:
    """The config itself; InputError if it describes no draft."""
    if not config.num_nextn_predict_layers:
        raise InputError("the config of this model has no draft (num_nextn_predict_layers is 0): "
                         "give its config.json the stages and the dspark_* fields first")
    return config


def with_new_draft(lab: Lab, kernel_set: str, seed: int) -> Transformer:
    """The lab's model, frozen, beside a draft of random weights that is not."""
    config = draft_config(lab.config)
    model = Transformer(config, lab.model.engram_classes, kernel_set, True, draft=True)
    init_weights(model, seed)
    missing = model.load_state_dict(backbone(lab.model), strict=False).missing_keys
    assert all(name.startswith("mtp.") for name in missing), missing
    assert model.mtp is not None
    trainable = {n for n, p in model.named_parameters() if n.startswith("mtp.") and p.requires_grad}
    for name, p in model.named_parameters():    # the gates' biases are moved by the balancing
        p.requires_grad_(name in trainable)
    return model


def draft_of(model: Transformer) -> dict[str, torch.Tensor]:
    """Weights of the draft by checkpoint key. InputError where there is none."""
    found = {name: p for name, p in model.state_dict().items() if name.startswith("mtp.")}
    if not found:
        raise InputError("the checkpoint to start from has no draft: give one that `labkit export` "
                         "put a draft into")
    return found


class DraftTrainer(TrainingRun):
    """Trains `mtp.*` of a lab's model, whose weights stay as they are."""

    options: DraftOptions
    log_every = 20

    def __init__(self, lab: Lab, folder: Path, options: DraftOptions,
                 start: Transformer | None = None) -> None:
        """start: a model of the same shapes; the weights of its draft are copied."""
        model = with_new_draft(lab, options.kernels, options.seed)
        if start is not None:
            model.load_state_dict(draft_of(start), strict=False)
            options = replace(options, start=target_digest(start))
        super().__init__(folder, replace(options, target=target_digest(model)))
        self.config, self.tokenizer, self.model = lab.config, lab.tokenizer, model
        self.batches = Batches(lab.tokenizer, options.batch, options.length, options.seed,
                               options.shares)
        self._reading: tuple[int, Reading] | None = None
        self.own: torch.Tensor | None = None
        if options.own_rows:
            with changed(model, kernels=exact_kernels()):
                self.own = own_text(folder, model, lab.tokenizer, options.own_rows, options.length,
                                    options.seed, lambda steps: tqdm(
                                        steps, desc="the target writes", leave=False))
        # Under its checkpoint names: mtp.0.attn.wq_a.weight ...
        trained = nn.ModuleDict({"mtp": cast(nn.Module, model.mtp)})
        self.resume(trained, optimizers(trained, options.lr, options.muon_lr,
                                        options.weight_decay))

    def one_step(self) -> dict[str, Any]:
        o, c = self.options, self.config
        late = self.step >= o.rounding_from * o.steps
        rng = torch.Generator().manual_seed(o.seed * 1_000_003 + self.step)
        anchors = sample_anchors(o.batch, o.length, o.anchors, c.dspark_block_size,
                                 c.sliding_window, rng)                 # [B,A]
        taps = Taps(["mtp.*.ffn.picked"])
        half = torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.half)
        with rounded_weights(self.trained) if late else contextlib.nullcontext():
            with half:
                reading = self.reading()
                found = draft_blocks(self.model, reading, anchors, c.dspark_block_size, taps)
            n = c.dspark_block_size
            loss = draft_loss(found.logits, behind(reading.logits, anchors, n, 0),
                              behind(reading.ids, anchors, n, 1), found.confidence_logits)
            loss.total.backward()
        factor = schedule(self.step, o.steps, o.warmup, o.cooldown)
        norm = self.update(factor, o.clip)
        worst = balance_experts(self.model, taps, o.balance)
        return {"step": self.step + 1, "loss": round(loss.total.item(), 4),
                "cross_entropy": round(loss.cross_entropy.item(), 4),
                "total_variation": round(loss.total_variation.item(), 4),
                "confidence_loss": round(loss.confidence.item(), 4),
                "acceptance": [round(1 - d, 3) for d in loss.by_slot.tolist()],
                "gradient_norm": round(norm, 3), "lr": factor,
                "expert_load_max": round(worst, 2), "rounding": late}

    def reading(self) -> Reading:
        """What the target says about the text of this step; the same for `updates` steps."""
        number = self.step // self.options.updates
        if self._reading is None or self._reading[0] != number:
            ids, targets, _ = self.batches(number)
            rows = torch.cat([ids, targets[:, -1:]], dim=1)             # [B,T+1]
            for row, (kind, place) in enumerate(self.batches.kinds(number)):
                if self.own is not None and kind == "novels" and place % 2:
                    rows[row] = self.own[place // 2 % len(self.own)]
            self._reading = number, read(self.model, rows)
        return self._reading[1]

    def look(self, limit: int | None = None) -> list[float]:
        """Held-out acceptance by slot, of the draft as it would be shipped."""
        before, self.model.kernels = self.model.kernels, exact_kernels()
        try:
            with rounded_weights(self.trained):
                return acceptance(self.model, self.tokenizer, self.options.length, limit)
        finally:
            self.model.kernels = before

    def glance(self) -> dict[str, Any]:
        return {"heldout_acceptance": [round(a, 4) for a in self.look(limit=12)]}

    def postfix(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"loss": f"{facts['loss']:.3f}", "accepted": " ".join(
            f"{a:.2f}" for a in facts["acceptance"])}


def heldout_rows(tokenizer: Tokenizer, length: int, limit: int | None = None) -> torch.Tensor:
    """Pieces of the held-out text that do not overlap, each behind BOS: ids [rows,length+1].

    limit: so many of them, evenly spread.
    """
    assert tokenizer.bos_id is not None
    rows = []
    for text in load_corpus("heldout").values():
        ids = tokenizer.encode(text)
        rows += [[tokenizer.bos_id, *ids[i : i + length]]
                 for i in range(0, len(ids) - length + 1, length)]
    if limit is not None and limit < len(rows):
        rows = [rows[i * len(rows) // limit] for i in range(limit)]
    return torch.tensor(rows)


@torch.no_grad()
def acceptance(model: Transformer, tokenizer: Tokenizer, length: int, limit: int | None = None,
               every: int = 7) -> list[float]:
    """Mean of 1 - total variation on held-out text by slot: how often a drawn draft is accepted.

    At temperature 1, with the tokens before each slot taken from the text; every seventh position
    is an anchor. limit: rows of text at most.
    """
    n = model.config.dspark_block_size
    anchors = torch.arange(1, length - n + 1, every)
    total, count = torch.zeros(n), 0
    for rows in heldout_rows(tokenizer, length, limit).split(max(1, 2048 // length)):
        places = anchors.expand(len(rows), -1)
        reading = read(model, rows)
        found = draft_blocks(model, reading, places, n)
        target = behind(reading.logits, places, n, 0)
        distance = total_variation(found.logits.softmax(-1), target.softmax(-1))    # [N,n]
        total += (1 - distance).sum(0)
        count += len(distance)
    return (total / count).tolist()
