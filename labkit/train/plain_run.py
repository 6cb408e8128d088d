"""Training what a V4.1 is compared with: the same rows, stages, optimisers and schedule."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from labkit.checkpoint.accounting import active_decode
from labkit.errors import InputError
from labkit.paths import data_dir
from labkit.text.tokenizer import Tokenizer
from labkit.train.command import check_sizes, forget, preset_tokenizer, run_to_end
from labkit.train.evaluate import bits_per_byte, heldout_window
from labkit.train.loop import Options, Stage
from labkit.train.losses import next_token_loss, weighted_mean
from labkit.train.optimizers import optimizers, schedule
from labkit.train.plain import PlainConfig, PlainTransformer, plain_config
from labkit.train.recall import distances, recall_accuracy, text_length
from labkit.train.staged import StagedRun

RECALL_COUNT = 32    # values at every distance


@dataclass(frozen=True)
class PlainOptions:
    """Everything that, with the code and the corpus, determines a run. Names as of `Options`."""

    steps: int
    model: PlainConfig
    stages: tuple[Stage, ...]
    row_seeds: tuple[int, ...]    # of every stage
    seed: int = 0
    lr: float = 2e-3
    muon_lr: float = 1e-2
    weight_decay: float = 0.1
    warmup: int = 60
    clip: float = 1.0
    cooldown: float = 0.5
    half: bool = True


class PlainRun(StagedRun):
    """Trains a plain transformer on the rows that a `Trainer` with these stages reads."""

    options: PlainOptions

    def __init__(self, tokenizer: Tokenizer, folder: Path, options: PlainOptions) -> None:
        super().__init__(folder, options, tokenizer, options.row_seeds)
        self.model = PlainTransformer(options.model, options.seed)
        self.resume(self.model, optimizers(self.model, options.lr, options.muon_lr,
                                           options.weight_decay))

    def one_step(self) -> dict[str, Any]:
        o = self.options
        number, within = self.stage(self.step)
        ids, targets, weights = self.batches[number](within)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=o.half):
            logits = self.model(ids).logits                               # [B,T,V]
        losses = next_token_loss(logits, targets)                         # [B,T]
        loss = weighted_mean(losses, weights)
        loss.backward()
        factor = schedule(self.step, o.steps, o.warmup, o.cooldown)
        norm = self.update(factor, o.clip)
        self.keep_losses(number, within, losses, weights)
        return {"step": self.step + 1, "tokens": self.tokens, "length": o.stages[number].length,
                "loss": round(loss.item(), 4), "gradient_norm": round(norm, 3), "lr": factor}

    def glance(self) -> dict[str, Any]:
        return {"heldout_bits_per_byte": round(heldout_bits(
            self.model, self.tokenizer, self.length, limit=24), 4)}

    def postfix(self, facts: dict[str, Any]) -> dict[str, str]:
        return {"loss": f"{facts['loss']:.3f}"}


# ---- what is measured ------------------------------------------------------------------------

def heldout_bits(model: nn.Module, tokenizer: Tokenizer, length: int, limit: int | None = None,
                 quiet: bool = True) -> float:
    """Held-out bits per byte in windows of `heldout_window` that overlap by half."""
    length = heldout_window(length)

    def bar(groups: list[Any]) -> Iterable[Any]:
        return tqdm(groups, desc="held-out text", unit="batch", disable=quiet, leave=False)

    return bits_per_byte(model, tokenizer, length=length, stride=length // 2, limit=limit,
                         progress=bar)


def recall_shares(model: nn.Module, tokenizer: Tokenizer, context: int,
                  at: Sequence[int] | None = None, count: int = RECALL_COUNT,
                  quiet: bool = True) -> dict[str, float]:
    """Share of values recalled whole, by distance, in the texts of `labkit.train.recall`.

    at: distances; None: those that its curve has for such a context.
    """
    def bar(distance: int) -> Callable[[range], Iterable[int]]:
        return lambda firsts: tqdm(firsts, desc=f"recall at {distance}", unit="batch",
                                   disable=quiet, leave=False)

    return {str(distance): recall_accuracy(
        model, tokenizer, distance, length=text_length(distance, context), count=count, batch=4,
        progress=bar(distance)) for distance in (distances(context) if at is None else at)}


# ---- the runs that it is to be compared with -------------------------------------------------

def read_facts(path: Path) -> list[dict[str, Any]]:
    """The runs that a run.json tells of, or that lie in a folder: its run.json or a saved state.

    InputError where there is none, or one from before training had stages.
    """
    file = path / "run.json" if path.is_dir() else path
    state = path / "state.safetensors"
    try:
        if file.is_file():
            raw = json.loads(file.read_text(encoding="utf-8"))
        elif state.is_file():
            with safe_open(state, framework="pt") as opened:
                raw = json.loads(opened.metadata()["facts"])
        else:
            raise InputError(f"{path} holds no run: give a run.json, or a folder with one or with "
                             "the state of a run")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is no JSON ({error}): give the run.json of a training run"
                         ) from error
    runs = raw if isinstance(raw, list) else [raw]
    if not all("stages" in run.get("options", {}) for run in runs):
        raise InputError(f"{path} says nothing of stages, so it is of an older form: give another "
                         "run, or only --steps")
    return runs


def joined(runs: Sequence[Mapping[str, Any]], model: PlainConfig, steps: int | None = None,
           seed: int | None = None) -> PlainOptions:
    """Options of one run that reads what these read, one after the other.

    runs: facts of the first, of that which started from its weights, and so on; one that was left
    early counts as far as it went. steps: another length, with the same shares of it.
    InputError unless each starts where the one before it ended.
    """
    parts: list[tuple[int, Stage, int]] = []             # first step after it, stage, seed of rows
    total = 0
    for number, facts in enumerate(runs):
        options = facts["options"]
        if bool(options.get("start")) != (number > 0):
            raise InputError("a run that starts from the weights of another reads the rest of its "
                             "rows: give all the runs, the first one first, once each")
        for place, raw in enumerate(options["stages"]):
            stage = Stage(**raw)
            end = total + min(facts["step"], round(stage.until * options["steps"]))
            if end > (parts[-1][0] if parts else 0):
                parts.append((end, stage, options["seed"] + place))
        total += min(facts["step"], options["steps"])
    if not parts:
        raise InputError("the run has no step behind it: give one that was trained")
    first, last = runs[0]["options"], runs[-1]["options"]
    return PlainOptions(
        steps=total if steps is None else steps, model=model,
        stages=tuple(dataclasses.replace(stage, until=end / total) for end, stage, _ in parts),
        row_seeds=tuple(row_seed for _, _, row_seed in parts),
        seed=first["seed"] if seed is None else seed,
        cooldown=last["cooldown"] * last["steps"] / total,
        **{name: first[name] for name in ("lr", "muon_lr", "weight_decay", "warmup", "clip",
                                          "half")})


def from_options(options: Options, model: PlainConfig) -> PlainOptions:
    """Options of a plain run that reads what a run with `options` reads."""
    raw = json.loads(json.dumps(dataclasses.asdict(options)))
    return joined([{"step": options.steps, "options": raw}], model)


# ---- the command -----------------------------------------------------------------------------

def train_plain(run: Path, preset: str, like: Sequence[Path], fresh: bool,
                steps: int | None = None, seed: int | None = None, head_dim: int = 32) -> Path:
    """Start or continue the run in folder `run`; at its end measure, and write `plain.json`.

    like: where the runs of the model to compare with are told, the first one first; none: in
    data/<preset>, or a new one.
    """
    config, tokenizer = preset_tokenizer(preset)
    model = plain_config(active_decode(config).counted, config.vocab_size,
                         config.num_hidden_layers, head_dim)
    options = _options(preset, like, model, steps, seed)
    check_sizes(config, dataclasses.asdict(options), ("steps",),
                max(stage.length for stage in options.stages))
    if fresh:
        forget(run)
        (run / "plain.json").unlink(missing_ok=True)
    trainer = PlainRun(tokenizer, run, options)
    print(f"plain transformer: {model.parameters:,} parameters, {model.active_parameters:,} "
          f"active ({preset}: {active_decode(config).counted:,}); {model.num_hidden_layers} "
          f"layers, hidden {model.hidden_size}, {model.num_attention_heads} heads, FFN "
          f"{model.intermediate_size}; from step {trainer.step} to {options.steps}, in {run}",
          flush=True)
    run_to_end(trainer)
    given = "".join(f" {name} {value}" for name, value in (
        ("--preset", preset if preset != "mini" else None), ("--steps", steps), ("--seed", seed),
        ("--head-dim", head_dim if head_dim != 32 else None)) if value is not None)
    command = "labkit train-plain" + given + "".join(f" --like {path}" for path in like)
    return write_plain(trainer, command, active_decode(config).counted)


def _options(preset: str, like: Sequence[Path], model: PlainConfig, steps: int | None,
             seed: int | None) -> PlainOptions:
    if like:
        return joined([run for path in like for run in read_facts(path)], model, steps, seed)
    if (data_dir() / preset / "run.json").is_file():
        try:
            runs = read_facts(data_dir() / preset)
        except InputError:
            runs = []                                    # of an older form
        if runs:
            return joined(runs, model, steps, seed)
    new = Options()
    return from_options(dataclasses.replace(
        new, steps=new.steps if steps is None else steps,
        seed=new.seed if seed is None else seed), model)


def write_plain(trainer: PlainRun, command: str, compared: int) -> Path:
    """Measure a finished run; its figures as `plain.json` beside its log.

    compared: active parameters of the model that it is compared with.
    """
    o, quiet = trainer.options, False
    bits = heldout_bits(trainer.model, trainer.tokenizer, trainer.length, quiet=quiet)
    recall = recall_shares(trainer.model, trainer.tokenizer, trainer.length, quiet=quiet)
    figures = {
        "parameters": o.model.parameters, "active_parameters": o.model.active_parameters,
        "compared_with_active_parameters": compared,
        "cache_bytes_a_token": o.model.cache_bytes_a_token,
        "tokens": trainer.tokens_after(trainer.step), "steps": trainer.step,
        "heldout_bits_per_byte": round(bits, 4), "recall": recall, "recall_count": RECALL_COUNT,
        "seconds": round(trainer.seconds, 1), "cpu_seconds": round(trainer.cpu_seconds, 1),
        "threads": torch.get_num_threads(), "seed": o.seed,
        "options": dataclasses.asdict(o), "command": command,
    }
    trainer.folder.mkdir(parents=True, exist_ok=True)
    path = trainer.folder / "plain.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    shares = " ".join(f"{distance}: {share:.0%}" for distance, share in recall.items())
    print(f"held-out text: {bits:.4f} bits per byte; recall {shares}; {path}")
    return path
