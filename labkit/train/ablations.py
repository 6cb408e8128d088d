"""What each part is worth: small models that differ in one thing, trained on equal tokens.

A base model, variants of it, two seeds each. Every run has a folder of its own and goes on where
it stopped; its figures become a small JSON file, and the table is printed from those alone
(`labkit.train.ablation_table`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.cache import Cache
from labkit.checkpoint.accounting import active_decode
from labkit.config import ModelConfig, RopeScaling
from labkit.errors import InputError
from labkit.primes import engram_rows
from labkit.text.engram_map import engram_classes
from labkit.text.tokenizer import Tokenizer
from labkit.train.command import forget, run_to_end
from labkit.train.loop import FROM_NOTHING, Options, Stage, Trainer, measured, rounded_weights
from labkit.train.plain import plain_config
from labkit.train.plain_run import PlainRun, from_options, heldout_bits, recall_shares
from labkit.train.run import TrainingRun

NO_SINK = -1e9       # a logit whose share of any softmax is 0, and finite as kernels expect
DISTANCES = (32, 128, 400)   # of the recall, where rows are this long and ROOM longer
ROOM = 64
RECALL_COUNT = 100

# The stages of the shipped model but for the last, whose rows these models cannot take; copying
# has a larger share of fewer steps, and answers weigh more from the start.
STAGES = tuple(dataclasses.replace(stage, until=until, answers=16.0)
               for stage, until in zip(FROM_NOTHING, (0.32, 0.7, 1.0), strict=False))


@dataclass(frozen=True)
class AblationOptions(Options):
    """As `Options`, and what no configuration can say."""

    sinks: bool = True   # False: they take no share of the attention and are not trained


@dataclass(frozen=True)
class Variant:
    """One row of the table: the base but for `changes` (fields of `ModelConfig`)."""

    name: str
    title: str
    changes: dict[str, Any] = field(default_factory=dict)
    sinks: bool = True
    plain: bool = False


VARIANTS = {variant.name: variant for variant in (
    Variant("base", "base"),
    Variant("no-engram", "without Engram", {"engram_layer_ids": ()}),
    Variant("no-pool", "without candidate pool", {
        "candidate_source_layer_id": -1, "candidate_topk_blocks": 0, "candidate_block_size": 1}),
    Variant("all-full", "every layer behind the first Full", {
        "kv_source_layer_ids": tuple(range(1, 6)), "index_source_layer_ids": tuple(range(1, 6))}),
    # One stream has nothing to balance: more iterations divide 1 by 1, and a compiler that inlines
    # them all takes twice as long for each.
    Variant("one-stream", "one stream instead of four", {"hc_mult": 1, "hc_sinkhorn_iters": 1}),
    Variant("ratio-4", "encoder ratio 4 instead of 2", {"compress_ratios": (0, 4, 4, 1, 1, 1)}),
    Variant("no-sink", "without sink", sinks=False),
    Variant("plain", "plain dense transformer", plain=True),
)}


def base_config(tokenizer: Tokenizer) -> ModelConfig:
    """The smallest V4.1 with every kind of layer: window only, Full of ratio 2, Reuse, Full of
    ratio 1 (which publishes the pool), Reuse, Reindex (which draws from it)."""
    classes = engram_classes(tokenizer)[1]
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=128, moe_intermediate_size=64,
        num_hidden_layers=6, num_attention_heads=4, head_dim=64, qk_rope_head_dim=32,
        q_lora_rank=64, o_lora_rank=64, o_groups=2, n_routed_experts=4, num_experts_per_tok=2,
        sliding_window=32, compress_ratios=(0, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 3),
        index_source_layer_ids=(1, 3, 5), index_n_heads=4, index_head_dim=32, index_topk=32,
        max_position_embeddings=512, candidate_source_layer_id=3, candidate_topk_blocks=16,
        candidate_block_size=8,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=32),
        engram_layer_ids=(1, 3), engram_vocab_size=2000, engram_n_heads=2, engram_head_dim=32,
        engram_compressed_vocab_size=classes)
    return config.replace(engram_num_embeddings=tuple(engram_rows(config)))


def variant_config(variant: Variant, base: ModelConfig) -> ModelConfig:
    """The base with this variant's changes, and what follows from them."""
    changed = dataclasses.replace(base, **variant.changes)
    return changed.replace(engram_num_embeddings=tuple(engram_rows(changed)))


def differences(config: ModelConfig, base: ModelConfig) -> dict[str, list[Any]]:
    """Fields in which a configuration differs from the base: [base's, its own]."""
    one, other = (json.loads(json.dumps(dataclasses.asdict(c))) for c in (base, config))
    return {name: [one[name], other[name]] for name in one if one[name] != other[name]}


def options_for(variant: Variant, seed: int, tokens: int,
                stages: tuple[Stage, ...] = STAGES, **changes: Any) -> AblationOptions:
    """So many steps that a run reads `tokens` tokens or a few more."""
    a_step, begin = 0.0, 0.0
    for stage in stages:
        a_step += stage.tokens * (stage.until - begin)
        begin = stage.until
    steps = max(1, round(tokens / a_step))
    options = AblationOptions(steps=steps, seed=seed, stages=stages, sinks=variant.sinks,
                              **changes)
    counted = sum(stage.tokens * n for stage, n in zip(stages, _steps_of(options), strict=True))
    missing = -(-max(0, tokens - counted) // stages[-1].tokens)
    return dataclasses.replace(options, steps=steps + missing)


def _steps_of(options: Options) -> list[int]:
    ends = [round(stage.until * options.steps) for stage in options.stages]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


class AblationRun(Trainer):
    """A `Trainer` that can do without sinks; nothing is measured before the end."""

    options: AblationOptions

    def resume(self, trained: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if not self.options.sinks:
            for name, p in trained.named_parameters():
                if name.endswith("attn.attn_sink"):
                    p.data.fill_(NO_SINK)
                    p.requires_grad_(False)              # no gradient: no optimiser moves it
        super().resume(trained, optimizers)

    def glance(self) -> dict[str, Any]:
        return {}


class PlainAblation(PlainRun):
    def glance(self) -> dict[str, Any]:
        return {}


def new_run(variant: Variant, base: ModelConfig, tokenizer: Tokenizer, folder: Path,
            options: AblationOptions) -> AblationRun | PlainAblation:
    """The run of a variant, from what its folder holds or from nothing."""
    if variant.plain:
        model = plain_config(active_decode(base).counted, base.vocab_size, base.num_hidden_layers)
        return PlainAblation(tokenizer, folder, from_options(options, model))
    return AblationRun(variant_config(variant, base), tokenizer, folder, options)


def cache_bytes_a_token(config: ModelConfig) -> float:
    """Global KV and index keys that a token adds, packed: the bytes of the rows really stored."""
    stores = Cache(config).stores
    return sum((store.kv_codec.nbytes + store.key_codec.nbytes) / config.compress_ratios[layer]
               for layer, store in stores.items())


def figures(run: AblationRun | PlainAblation, quiet: bool = True,
            limit: int | None = None, count: int = RECALL_COUNT) -> dict[str, Any]:
    """Sizes, and what was reached: the model as it would be shipped, weights and cache rounded
    (a plain one as it is). limit: held-out windows at most."""
    def reached() -> dict[str, Any]:
        bits = heldout_bits(run.model, run.tokenizer, run.length, limit, quiet)
        at = [d for d in DISTANCES if d + ROOM <= run.length]
        return {"heldout_bits_per_byte": round(bits, 5), "recall_count": count,
                "recall": recall_shares(run.model, run.tokenizer, run.length, at, count, quiet)}

    if isinstance(run, PlainRun):
        c = run.options.model
        return {"parameters": c.parameters, "active_parameters": c.active_parameters,
                "active_not_counted": {}, "cache_bytes_a_token": c.cache_bytes_a_token,
                **reached()}
    active = active_decode(run.config)
    with measured(run.model), rounded_weights(run.model):
        found = reached()
    return {"parameters": sum(p.numel() for p in run.model.parameters()),
            "active_parameters": active.counted, "active_not_counted": active.not_counted,
            "cache_bytes_a_token": cache_bytes_a_token(run.config), **found}


def result_file(results: Path, name: str, seed: int) -> Path:
    return results / f"{name}-seed{seed}.json"


def ablate(runs: Path, results: Path, tokenizer: Tokenizer, *, only: Sequence[str] = (),
           seeds: int = 2, tokens: int = 2_000_000, fresh: bool = False,
           base: ModelConfig | None = None, stages: tuple[Stage, ...] = STAGES,
           say: Callable[[str], None] = print, limit: int | None = None,
           count: int = RECALL_COUNT, **changes: Any) -> None:
    """Train what has no result yet, one after the other: all variants with seed 0, then seed 1 ...

    A finished run is skipped, an unfinished one goes on. Ctrl-C stops after a whole step.
    InputError for unknown names, and for a result of other options or another base.
    """
    base = base or base_config(tokenizer)
    for number, name in ((seeds, "seeds"), (tokens, "tokens")):
        if number < 1:
            raise InputError(f"{name} is {number}: must be at least 1")
    variants = [named(name) for name in only] or list(VARIANTS.values())
    for seed in range(seeds):
        for variant in variants:
            options = options_for(variant, seed, tokens, stages, **changes)
            file, folder = result_file(results, variant.name, seed), runs / f"{variant.name}-{seed}"
            if fresh:
                forget(folder)
                file.unlink(missing_ok=True)
            facts = run_facts(variant, base, options)
            if file.is_file():
                check_result(file, facts)
                say(f"{variant.title}, seed {seed}: done, {file}")
                continue
            # Compiled for other shapes: what a run before this one left would count as retries.
            torch._dynamo.reset()
            run = new_run(variant, base, tokenizer, folder, options)
            say(f"{variant.title}, seed {seed}: step {run.step} of {options.steps}, in {folder}")
            run_to_end(run)
            found = figures(run, quiet=False, limit=limit, count=count)
            save_result(file, facts, run, found)
            say(f"  {found['heldout_bits_per_byte']:.4f} bits per byte, "
                f"{run.seconds:,.0f} s; {file}")


def named(name: str) -> Variant:
    if name not in VARIANTS:
        raise InputError(f"there is no ablation {name!r}: choose of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def run_facts(variant: Variant, base: ModelConfig, options: AblationOptions) -> dict[str, Any]:
    """What a result says of its run, known before it begins."""
    changes = {} if variant.plain else differences(variant_config(variant, base), base)
    facts = {"name": variant.name, "title": variant.title, "plain": variant.plain,
             "changes": changes, "seed": options.seed, "options": dataclasses.asdict(options),
             "base": base.to_dict()["text_config"]}
    return json.loads(json.dumps(facts))  # type: ignore[no-any-return]


def check_result(file: Path, facts: dict[str, Any]) -> None:
    saved = json.loads(file.read_text(encoding="utf-8"))
    for name, value in facts.items():
        known = saved.get(name)
        if name == "options" and isinstance(known, dict):
            # An option that came later leaves a run as it was, by its default.
            value = {option: v for option, v in value.items() if option in known}
            known = {option: v for option, v in known.items() if option in value}
        if known != value:
            raise InputError(f"{file} is of a run with other {name}: give the same tokens, another "
                             "folder for the results, or --fresh")


def save_result(file: Path, facts: dict[str, Any], run: TrainingRun, found: dict[str, Any]) -> None:
    assert isinstance(run, AblationRun | PlainAblation)
    file.parent.mkdir(parents=True, exist_ok=True)
    staging = file.with_suffix(".part")
    staging.write_text(json.dumps({
        **facts, "steps": run.step, "tokens": run.tokens_after(run.step),
        "seconds": round(run.seconds, 1), "cpu_seconds": round(run.cpu_seconds, 1),
        "threads": torch.get_num_threads(), **found}, indent=1) + "\n", encoding="utf-8")
    staging.replace(file)
