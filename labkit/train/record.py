"""`data/mini/TRAINING.md`: how the model that ships was made and what it reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.pages import plain_marks
from labkit.text.synthetic import KINDS
from labkit.train.draft_record import DraftRecord, draft_section
from labkit.train.figure_tables import tables
from labkit.train.figures import Figures
from labkit.train.loop import BLIND
from labkit.train.runs import Run, logs_of, stage_steps, tokens_read
from labkit.train.samples import TEMPERATURES


def training_record(config: ModelConfig, runs: Sequence[Run], log: Sequence[Mapping[str, Any]],
                    figures: Figures, draft: DraftRecord | None = None) -> str:
    """The record as Markdown. runs: `labkit.train.runs.read_runs`; log: the lines of all."""
    f, c = figures, config
    kinds = " ".join(f"{r.layer}:{r.kind}" + (f"/{r.ratio}" if r.ratio else "") for r in c.roles)
    read = {kind for run in runs for stage in run["options"]["stages"]
            for kind, share in stage["shares"].items() if share}
    written = [kind for kind in KINDS if kind in read and kind != "novels"]
    lines = [
        "# How this model was trained",
        "",
        "Written by `labkit rebuild` from the log and fresh measurements.",
        "",
        f"- Architecture: DeepSeek-V4.1, {f.parameters:,} parameters, {c.num_hidden_layers} "
        f"layers ({kinds}), hidden size {c.hidden_size}, {c.hc_mult} streams, "
        f"{c.n_routed_experts} experts of which {c.num_experts_per_tok} a token, Engram "
        f"at layers {', '.join(map(str, c.engram_layer_ids))}, window "
        f"{c.sliding_window}, top-k {c.index_topk}, pool of "
        f"{c.candidate_topk_blocks} blocks of {c.candidate_block_size}.",
        "- Data: six novels by Jane Austen (`data/corpus`), the last 5 % of each held out"
        + (f", and text written by code (`labkit/text/synthetic.py`): {', '.join(written)}."
           if written else "."),
        "- The same seeds, code and machine repeat a run; another processor rounds differently and "
        "gives another, equally good model. `training/README.md` says what of the runs below was "
        "made by older code.",
        "- Afterwards: `labkit export runs/mini data/mini` and `labkit rebuild`.",
        f"- Shipped in the released quantised layout, {f.file_bytes:,} bytes"
        + (", the draft included." if draft else "."),
        "",
        "## What it read",
        "",
    ]
    for number, run in enumerate(runs, 1):
        lines += _run_section(run, number, len(runs))
    lines += ["## What it reached", ""]
    for table in tables(f):
        lines += table.markdown()
    lines += ["## The curve", "", "Losses in nats a token on the training text; held-out bits per "
              "byte on 24 windows. Answers are those of needles, and count in their kind as well; "
              "`log.jsonl` has more.", ""]
    for number, part in enumerate(logs_of(runs, log), 1):
        lines += ([f"Run {number}:", ""] if len(runs) > 1 else []) + _curve(part)
    lines += [*(draft_section(config, draft) if draft else []), "## Samples", ""]
    for temperature in TEMPERATURES:
        lines += [f"### Temperature {temperature}", ""]
        for s in f.samples:
            if s.temperature == temperature:
                lines += [f"> **{_quoted(s.prompt)}**{_quoted(s.text)}", ""]
    return "\n".join(lines)


# ---- the runs ----------------------------------------------------------------------------------

USUAL = {"seed": 0, "cooldown": 0.5, "rounding_from": 0.85}  # what `labkit train` takes by default

# Column -> field of a stage, what it is in most, how it is written.
MORE_OF_A_STAGE: dict[str, tuple[str, float, Callable[[float], str]]] = {
    "weight of an answer's tokens": ("answers", 1.0, "{:g}".format),
    "weight of the attention left out": ("left_out", 0.0, "{:g}".format),
    "steps with a blind encoder": ("blind", 0.0, "{:.0%}".format),
}


def _run_section(run: Run, number: int, count: int) -> list[str]:
    options = run["options"]
    kinds = [kind for kind in KINDS if any(stage["shares"].get(kind) for stage
                                           in options["stages"])]
    threads = run["threads"]
    more = {title: (field, usual, shown) for title, (field, usual, shown) in MORE_OF_A_STAGE.items()
            if any(stage.get(field, usual) != usual for stage in options["stages"])}
    lines = [
        *([f"### Run {number}", ""] if count > 1 else []),
        f"- Command: `{command(run)}`" + (", starting from the run before." if number > 1 else "."),
        f"- Length: {run['step']:,} steps, {tokens_read(run):,} tokens, "
        f"{run['seconds'] / 60:.0f} minutes on a CPU, {threads} "
        f"thread{'s' if threads > 1 else ''}" + (
            f"; {run['cpu_seconds'] / 60:.0f} minutes of processor time."
            if "cpu_seconds" in run else "."),
        "- Options: `" + json.dumps({k: v for k, v in options.items() if k != "stages"}) + "`.",
        "",
        "| stage | steps | tokens a step | tokens a row | who selects | "
        + " | ".join([*kinds, *more]) + " |",
        "|" + "---|" * (5 + len(kinds) + len(more)),
    ]
    for place, (stage, steps) in enumerate(
            zip(options["stages"], stage_steps(run), strict=True), 1):
        shares = [f"{share:.0%}" if (share := stage["shares"].get(kind)) else "" for kind in kinds]
        shares += [shown(stage.get(field, usual)) for field, usual, shown in more.values()]
        lines.append(f"| {place} | {steps:,} | {stage['tokens']:,} | {stage['length']:,} | "
                     f"{stage['selecting']} | " + " | ".join(shares) + " |")
    return [*lines, ""]


def command(run: Run) -> str:
    """What was typed, as far as the options tell."""
    options = run["options"]
    words = ["labkit train", f"--steps {options['steps']}"]
    words += [f"--{name.replace('_', '-')} {options[name]}" for name, usual in USUAL.items()
              if options.get(name, usual) != usual]
    if options.get("start"):
        words.append("--start CHECKPOINT")
    return " ".join(words)


def _curve(log: Sequence[Mapping[str, Any]]) -> list[str]:
    """About twenty lines of a run, and all at which held-out text was looked at."""
    steps = [entry for entry in log if "loss" in entry]
    every = max(1, len(steps) // 16)
    chosen = [e for i, e in enumerate(steps)
              if i % every == 0 or "heldout_bits_per_byte" in e or e is steps[-1]]
    kinds = [kind for kind in (*KINDS, "answers", f"answers{BLIND}")
             if any(kind in e.get("loss_by_kind", {}) for e in chosen)]
    head = ["step", "tokens", "loss", *kinds, "index loss", "held-out bits per byte",
            "fullest expert / mean", "rounding"]

    def row(e: Mapping[str, Any]) -> str:
        by_kind = e.get("loss_by_kind", {})
        return " | ".join([
            str(e["step"]), f"{e['tokens']:,}", f"{e['loss']:.3f}",
            *(f"{by_kind[kind]:.2f}" if kind in by_kind else "" for kind in kinds),
            f"{e['index_loss']:.4f}", str(e.get("heldout_bits_per_byte", "")),
            str(e["expert_load_max"]), "on" if e["rounding"] else "off"])

    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head),
            *(f"| {row(e)} |" for e in chosen), ""]


def _quoted(text: str) -> str:
    """One line, with what Markdown would read as marks made plain."""
    return " / ".join(plain_marks(text).split("\n"))
