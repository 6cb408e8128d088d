"""The part of `TRAINING.md` that is about the draft: how it was made and what it reached."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.config import ModelConfig
from labkit.train.calibration import BINS
from labkit.train.draft_figures import DraftFigures


@dataclass(frozen=True)
class DraftRecord:
    """What lies beside a checkpoint because of its draft."""

    facts: dict[str, Any]           # draft_run.json: step, seconds, options; before: earlier runs
    log: list[dict[str, Any]]       # draft_log.jsonl
    figures: DraftFigures           # draft_figures.json


def read_draft_record(folder: Path) -> DraftRecord | None:
    """The record of the draft in a folder; None where its files are not."""
    paths = [folder / name for name in ("draft_run.json", "draft_log.jsonl", "draft_figures.json")]
    if not all(path.is_file() for path in paths):
        return None
    facts, log, figures = (path.read_text(encoding="utf-8") for path in paths)
    return DraftRecord(json.loads(facts), [json.loads(line) for line in log.splitlines()],
                       DraftFigures.from_dict(json.loads(figures)))


def draft_section(config: ModelConfig, record: DraftRecord) -> list[str]:
    """Lines of Markdown."""
    c, f, facts = config, record.figures, record.facts
    o = facts["options"]
    slots = range(1, len(f.acceptance) + 1)
    defaults = {"batch": 2, "length": 1024, "anchors": 192, "seed": 0, "own_rows": 0,
                "cooldown": 0.5, "lr": 1.2e-2, "muon_lr": 4e-2}
    extra = "".join(f" --{k.replace('_', '-')} {o[k]}" for k, v in defaults.items()
                    if o.get(k, v) != v)
    extra += " --start CHECKPOINT" if o.get("start") else ""
    blocks = facts["step"] * o["batch"] * o["anchors"]
    stages = c.num_nextn_predict_layers

    def row(title: str, values: Sequence[float], digits: int = 3) -> str:
        return f"| {title} | " + " | ".join(f"{v:.{digits}f}" for v in values) + " |"

    return [
        "## The draft",
        "",
        f"- Architecture: DSpark, {f.parameters:,} parameters, {stages} "
        f"stage{'s' if stages > 1 else ''}, blocks of {c.dspark_block_size} slots, features of "
        f"layers {', '.join(map(str, c.dspark_target_layer_ids))}, {c.dspark_n_routed_experts} "
        f"experts of which {c.dspark_num_experts_per_tok} a token, Markov rank "
        f"{c.dspark_markov_rank}.",
        f"- Command: `labkit train-draft --steps {o['steps']}{extra}`, then "
        "`labkit export runs/draft data/mini`. The model above stays as it is, byte for byte.",
        f"- Length: {facts['step']:,} updates, {blocks:,} blocks, each with the text's own tokens "
        f"before its slots; {facts['cpu_seconds'] / 60:.0f} minutes of one processor "
        f"core, {facts['threads']} thread" + ("s." if facts["threads"] > 1 else "."),
        *_before(facts),
        *([f"- Half of the novels' rows were written by the model itself: {o['own_rows']} rows of "
           f"{o['length']} tokens at temperature 1."] if o.get("own_rows") else []),
        "- Loss: 0.1 cross-entropy + 0.9 total variation from the target + 1.0 confidence "
        "(entropy against 1 - total variation), slot k weighted exp(-(k-1)/n).",
        "- Options: `" + json.dumps(o) + "`.",
        "",
        f"On held-out text, {f.proposals:,} proposals behind every eighth token:",
        "",
        "| slot | " + " | ".join(map(str, slots)) + " |",
        "|---|" + "---|" * len(slots),
        row("accepted at temperature 1, behind the text's own tokens", f.acceptance),
        row("survived at temperature 1, behind the draft's own tokens", f.sampled),
        row("survived, greedy", f.greedy),
        row("temperature of the confidence", f.temperatures),
        row("calibration error of survival, before", f.ece_before, 4),
        row("the same, after", f.ece_after, 4),
        row("calibration error of greedy drafts, before", f.ece_greedy_before, 4),
        row("the same, after", f.ece_greedy_after, 4),
        "",
        f"A step verifies {c.dspark_block_size} drafts and keeps {f.sampled_length:.2f} of them at "
        f"temperature 1, {f.greedy_length:.2f} greedily; the target adds one token to them. "
        "Accepted is 1 - total "
        "variation; a slot survives if it and all before it are accepted. Temperatures are "
        "fitted at temperature 1 on one half of the rows of text, errors are of the other half "
        f"({BINS} bins of equal width).",
        *_of_code(f),
        "",
        "Total variation is of the training text; `draft_log.jsonl` has every twentieth update.",
        "",
        "| update | loss | cross-entropy | total variation | confidence | accepted by slot | "
        "held-out, 12 rows | rounding |",
        "|---|---|---|---|---|---|---|---|",
        *_curve(record.log),
        "",
    ]


def _before(facts: dict[str, Any]) -> list[str]:
    """What is known of the runs that the weights went through first."""
    if not facts["options"].get("start"):
        return []
    lines = ["- It started from the weights of an earlier draft."]
    for number, run in enumerate(facts.get("before", []), 1):
        o = run["options"]
        lines.append(
            f"  - Run {number}: {run['step']:,} updates of {o['batch']} rows of {o['length']} "
            f"tokens with {o['anchors']} blocks each, rates {o['lr']:g} and {o['muon_lr']:g} that "
            f"fall over the last {o['cooldown']:.0%} of {o['steps']:,}, "
            + (f"{o['own_rows']} rows written by the model, " if o.get("own_rows") else "")
            + f"{run['seconds'] / 60:.0f} minutes"
            + ("; for an earlier state of the model." if o["target"] != facts["options"]["target"]
               else "."))
    return lines


def draft_minutes(facts: dict[str, Any]) -> float:
    """Minutes of all runs behind a draft."""
    return float(sum(run["seconds"] for run in [*facts.get("before", []), facts])) / 60


def _of_code(f: DraftFigures) -> list[str]:
    if f.code_sampled_length is None:
        return []
    return ["", f"On held-out code, {f.code_proposals:,} proposals: {f.code_sampled_length:.2f} "
            f"drafts a step are kept at temperature 1, {f.code_greedy_length:.2f} greedily."]


def _curve(log: list[dict[str, Any]]) -> list[str]:
    steps = [entry for entry in log if "loss" in entry]
    every = max(1, len(steps) // 12)
    chosen = [e for i, e in enumerate(steps)
              if i % every == 0 or "heldout_acceptance" in e or e is steps[-1]]

    def slots(values: Sequence[float]) -> str:
        return " ".join(f"{v:.2f}" for v in values)

    return [f"| {e['step']} | {e['loss']:.3f} | {e['cross_entropy']:.3f} | "
            f"{e['total_variation']:.3f} | {e['confidence_loss']:.3f} | {slots(e['acceptance'])} | "
            f"{slots(e.get('heldout_acceptance', []))} | {'on' if e['rounding'] else 'off'} |"
            for e in chosen]
