"""`data/mini/TRAINING.md`: how the model that ships was made and what it reached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from labkit.config import ModelConfig
from labkit.train.draft_record import DraftRecord, draft_section
from labkit.train.figures import SAMPLE_TOKENS, TEMPERATURES, Figures


def training_record(config: ModelConfig, log: list[dict[str, Any]], facts: dict[str, Any],
                    figures: Figures, size: int, draft: DraftRecord | None = None) -> str:
    """The record as Markdown. log: lines of the run; facts: its options; size: bytes shipped,
    with the draft."""
    options = facts["options"]
    tokens = options["batch"] * options["length"]
    kinds = " ".join(f"{r.layer}:{r.kind}" + (f"/{r.ratio}" if r.ratio else "")
                     for r in config.roles)
    f = figures
    defaults = {"batch": 2, "length": 1024, "seed": 0}
    extra = "".join(f" --{k} {options[k]}" for k, v in defaults.items() if options[k] != v)
    lines = [
        "# How this model was trained",
        "",
        "Written by `labkit rebuild` from the run's log and fresh measurements.",
        "",
        f"- Architecture: DeepSeek-V4.1, {f.parameters:,} parameters, {config.num_hidden_layers} "
        f"layers ({kinds}), hidden size {config.hidden_size}, {config.hc_mult} streams, "
        f"{config.n_routed_experts} experts of which {config.num_experts_per_tok} a token, Engram "
        f"at layers {', '.join(map(str, config.engram_layer_ids))}, window "
        f"{config.sliding_window}, top-k {config.index_topk}, pool of "
        f"{config.candidate_topk_blocks} blocks of {config.candidate_block_size}.",
        "- Data: six novels by Jane Austen (`data/corpus`), the last 5 % of each held out.",
        f"- Command: `labkit train --steps {options['steps']}{extra}`, then "
        "`labkit export runs/mini data/mini` and `labkit rebuild`.",
        f"- Length: {facts['step']:,} steps of {tokens:,} tokens = {facts['step'] * tokens:,} "
        f"tokens, {facts['seconds'] / 60:.0f} minutes of training on a CPU, "
        f"{facts['threads']} thread" + ("s." if facts["threads"] > 1 else "."),
        "- Seed: " + str(options["seed"]) + ". The same seed, code and machine repeat the run; "
        "another processor rounds differently and gives another, equally good model.",
        "- Options: `" + json.dumps(options) + "`.",
        f"- Shipped in the released quantised layout, {size:,} bytes"
        + (", the draft included." if draft else "."),
        "",
        "## What it reached",
        "",
        "| held-out text | bits per byte |",
        "|---|---|",
        f"| as shipped (weights and cache rounded) | {f.bits_per_byte:.3f} |",
        f"| cache not rounded | {f.bits_per_byte_unrounded_cache:.3f} |",
        f"| Engram muted | {f.bits_per_byte_engram_muted:.3f} |",
        f"| gzip -9 after reading the training text | {f.bits_per_byte_gzip:.3f} |",
        f"| equal odds for every token | {f.bits_per_byte_equal_odds:.3f} |",
        "",
        "| index source | attention mass on its selection | on a random selection |",
        "|---|---|---|",
        *[f"| {name} | {value:.3f} | {f.attention_recall_random[name]:.3f} |"
          for name, value in f.attention_recall.items()],
        "",
        "Measured on queries that see more entries than they may select. The target of the "
        "indexer is the attention of its own layer over all visible entries; layers that reuse "
        "the selection were not asked.",
        "",
        f"Of the words in {SAMPLE_TOKENS}-token samples at temperature 0.8, {f.known_words:.1%} "
        "occur in the training text; the longest run of words copied from it, at any "
        f"temperature, is {f.copied_run}.",
        "",
        "## The curve",
        "",
        "Loss in nats a token on the training text; held-out bits per byte on 24 windows. "
        "`log.jsonl` has every tenth step.",
        "",
        "| step | loss | index loss | held-out bits per byte | fullest expert / mean | rounding |",
        "|---|---|---|---|---|---|",
        *_curve(log),
        "",
        *(draft_section(config, draft) if draft else []),
        "## Samples",
        "",
    ]
    for temperature in TEMPERATURES:
        lines += [f"### Temperature {temperature}", ""]
        for s in f.samples:
            if s.temperature == temperature:
                lines += [f"> **{_quoted(s.prompt)}**{_quoted(s.text)}", ""]
    return "\n".join(lines)


def _curve(log: list[dict[str, Any]]) -> list[str]:
    steps = [entry for entry in log if "loss" in entry]
    every = max(1, len(steps) // 16)
    chosen = [e for i, e in enumerate(steps)
              if i % every == 0 or "heldout_bits_per_byte" in e or e is steps[-1]]
    return [
        f"| {e['step']} | {e['loss']:.3f} | {e['index_loss']:.4f} | "
        f"{e.get('heldout_bits_per_byte', '')} | {e['expert_load_max']} | "
        f"{'on' if e['rounding'] else 'off'} |"
        for e in chosen
    ]


def _quoted(text: str) -> str:
    """One line, with what Markdown would read as marks made plain."""
    for mark in "\\`*_<>[]#|":
        text = text.replace(mark, "\\" + mark)
    return " / ".join(text.split("\n"))


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
