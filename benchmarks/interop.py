#!/usr/bin/env python3
"""Interoperability: the checkpoint in independent engines, their logits and greedy texts compared.

Each engine is installed from the package index into an environment of its own (about 3 GB for
nemo-automodel, 3.5 GB for ftllm, 1 GB for mlx-vlm), loads a copy of the checkpoint, and is
compared with labkit in the rounding mode that the engine really has. Environments and results
are kept, so that a run which was stopped goes on where it was. docs/interop.md says what the
tables mean.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import labkit
from labkit.config import ModelConfig
from labkit.errors import LabError
from labkit.lab import model_folder
from labkit.pages import between_markers
from labkit.text.prompts import prompts
from labkit.text.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))
from interop_engines import compare, lab_side  # noqa: E402
from interop_engines import environment as env  # noqa: E402
from interop_engines.report import Outcome, Text, Writing, report  # noqa: E402

EXAMPLES = """examples:
  labkit bench interop                               all engines, all modes (half an hour)
  labkit bench interop --engines mlx-vlm --quick     one engine, few and short texts
  labkit bench interop --model path/to/checkpoint --folder /tmp/engines
  labkit bench interop --write docs/interop.md       put the tables into the page
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini", help="mini or a folder (default mini)")
    parser.add_argument("--engines", nargs="+", choices=env.RECIPES, default=list(env.RECIPES),
                        metavar="NAME", help=f"of: {', '.join(env.RECIPES)} (default all)")
    parser.add_argument("--folder", type=Path, default=Path(".interop"),
                        help="environments, results and logs (default .interop)")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T",
                        help="tokens of the texts (default: from the config, see docs)")
    parser.add_argument("--prompts", type=int, default=20, help="greedy texts (default 20)")
    parser.add_argument("--steps", type=int, default=40, help="tokens of each (default 40)")
    parser.add_argument("--quick", action="store_true", help="2 texts, 4 prompts, 8 steps")
    parser.add_argument("--fresh", action="store_true", help="forget the results kept so far")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--write", type=Path, metavar="PAGE",
                        help="a page whose marked part gets the tables")
    options = parser.parse_args()
    for name in ("prompts", "steps", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give at least 1")
    if options.quick:
        options.prompts, options.steps = min(4, options.prompts), min(8, options.steps)
    if options.write is not None:  # told now, not after half an hour
        try:
            between_markers(options.write.read_text(encoding="utf-8"), "")
        except (OSError, LabError) as error:
            parser.error(f"--write {options.write}: {error}")
    torch.set_num_threads(options.threads)
    try:
        compared = run(parser, options)
    except KeyboardInterrupt:
        tell("stopped; what was finished is kept, run the same command to go on")
        sys.exit(130)
    print(compared)
    if options.write is not None:
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(between_markers(page, compared), encoding="utf-8")


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- what is asked --------------------------------------------------------------------------

@dataclass(frozen=True)
class Questions:
    """The same for every engine: texts to read, prompts to write on from."""

    config: ModelConfig
    texts: list[list[int]]
    prompts: list[list[int]]
    steps: int


def default_lengths(config: ModelConfig) -> list[int]:
    """Below the window; where the widest ratio selects; where the pool cuts; the whole context."""
    ratios = [r for r in config.compress_ratios[: config.num_hidden_layers] if r]
    window, context = config.sliding_window, config.max_position_embeddings
    pool = config.candidate_topk_blocks * config.candidate_block_size * min(ratios, default=1)
    wanted = [window - 4, config.index_topk * max(ratios, default=1) + window + 8,
              2 * pool + window + 24, context - 24]
    return sorted({min(length, context) for length in wanted if length >= 2})


def ask(parser: argparse.ArgumentParser, options: argparse.Namespace, folder: Path) -> Questions:
    config, tokenizer = ModelConfig.from_file(folder), Tokenizer.from_file(folder)
    lengths = options.lengths or default_lengths(config)
    if options.quick:
        lengths = lengths[:2]
    window, context = config.sliding_window, config.max_position_embeddings
    pool = config.candidate_topk_blocks * config.candidate_block_size
    sizes = [min(2 * window, context - options.steps), min(pool + window, context - options.steps)]
    if min(lengths) < 2 or max(lengths) > context or min(sizes) < 2:
        parser.error(f"lengths {lengths} with {options.steps} steps do not fit: texts have 2 to "
                     f"{context} tokens here, and prompts need room for --steps")
    asked: list[list[int]] = []
    for number in range(options.prompts):  # by turns prose and code, short and long
        domain, size = ("prose", "code")[number % 2], sizes[number // 2 % 2]
        asked += prompts(domain, tokenizer, 1, size, seed=number)
    return Questions(config, [prompts("prose", tokenizer, 1, n, seed=n)[0] for n in lengths],
                     asked, options.steps)


def chosen_rows(length: int, rows: int | None) -> list[int]:
    """All rows, or so many, evenly spread and the last among them."""
    if rows is None or rows >= length:
        return list(range(length))
    return [length * (i + 1) // rows - 1 for i in range(rows)]


# ---- labkit's side --------------------------------------------------------------------------

DEPENDS = ("lab.py", "config*.py", *(f"{floor}/*.py" for floor in (
    "cache", "checkpoint", "engine", "kernels", "model", "numerics", "text")))
"""The code that labkit's kept answers depend on; training and pictures are no part of it."""


NUDGES = (1, 2, 3)


@dataclass
class Ours:
    """labkit's answers, computed once for every mode and kept in files."""

    folder: Path
    questions: Questions
    results: Path
    made: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)

    def _kept(self, what: str, job: dict[str, Any],
              make: Callable[[], dict[str, Any]]) -> dict[str, np.ndarray]:
        package = Path(labkit.__file__).parent
        files = [*env.checkpoint_files(self.folder), Path(lab_side.__file__),
                 *(f for part in DEPENDS for f in sorted(package.glob(part)))]
        name = f"labkit-{env.digest(files, what, job, torch.__version__)}"
        if name not in self.made:
            path = self.results / f"{name}.npz"
            if not path.exists():
                tell(f"labkit: {what}")
                part = path.with_suffix(".part.npz")
                np.savez(part, **make())
                part.replace(path)
            with np.load(path) as stored:
                self.made[name] = dict(stored)
        return self.made[name]

    def logits(self, mode: env.Mode, dtype: torch.dtype | None = None,
               nudge: int | None = None) -> list[np.ndarray]:
        """Of every text; `dtype` and `nudge` as in `lab_side.load`."""
        texts = self.questions.texts
        job = mode.job(0) | {"texts": texts, "dtype": str(dtype), "nudge": nudge}

        def make() -> dict[str, Any]:
            lab = lab_side.load(self.folder, mode.job(0), dtype, nudge)
            return {str(n): lab_side.logits(lab, ids) for n, ids in enumerate(texts)}
        told = mode.name + (f", {str(dtype).removeprefix('torch.')}" if dtype else "") + (
            f", embeddings nudged ({nudge})" if nudge is not None else "")
        kept = self._kept(f"logits, {told}", job, make)
        return [kept[str(n)] for n in range(len(texts))]

    def floor(self, mode: env.Mode) -> list[list[np.ndarray]]:
        """The same of every text in finer arithmetic, and with nudged embeddings: samples of what
        rounding alone makes of last digits."""
        finer = torch.float64 if mode.arithmetic == "fp32" else torch.float32
        samples = [self.logits(mode, finer), *(self.logits(mode, nudge=n) for n in NUDGES)]
        return [list(text) for text in zip(*samples, strict=True)]

    def greedy(self, mode: env.Mode) -> tuple[list[list[int]], list[np.ndarray]]:
        asked, steps = self.questions.prompts, self.questions.steps
        job = mode.job(0) | {"prompts": asked, "steps": steps}

        def make() -> dict[str, Any]:
            lab = lab_side.load(self.folder, mode.job(0))
            made: dict[str, Any] = {}
            for n, prompt in enumerate(asked):
                tokens, logits = lab_side.greedy(lab, prompt, steps)
                made |= {f"tokens.{n}": np.array(tokens), f"steps.{n}": logits}
            return made
        kept = self._kept(f"greedy texts, {mode.name}", job, make)
        return ([kept[f"tokens.{n}"].tolist() for n in range(len(asked))],
                [kept[f"steps.{n}"] for n in range(len(asked))])


# ---- one engine in one mode -----------------------------------------------------------------

class Theirs:
    """An engine's answers to jobs, kept in files."""

    def __init__(self, recipe: env.Recipe, source: Path, options: argparse.Namespace) -> None:
        self.recipe, self.source, self.options = recipe, source, options

    def answer(self, mode: env.Mode, questions: dict[str, Any]) -> dict[str, np.ndarray]:
        recipe, folder = self.recipe, self.options.folder
        job = {"mode": mode.job(self.options.threads)} | {
            name: questions.get(name, []) for name in
            ("texts", "rows", "prompts", "steps", "given", "traces")}
        files = [*env.checkpoint_files(self.source), *env.worker_sources(recipe)]
        name = f"{recipe.name}-{env.digest(files, recipe.installs, job)}"
        result = folder / "results" / f"{name}.npz"
        if not result.exists():
            say: env.Tell = lambda text: tell(f"{recipe.name} ({mode.name}): {text}")  # noqa: E731
            python = env.prepare(recipe, folder / "environments" / recipe.name, say)
            (folder / "logs").mkdir(parents=True, exist_ok=True)
            with env.checkpoint_copy(self.source, folder / "work") as copy:
                path = copy / "interop_job.json"
                path.write_text(json.dumps(job | {"checkpoint": str(copy)}), encoding="utf-8")
                env.run(recipe, python.absolute(), path.absolute(), result.absolute(),
                        folder / "logs" / f"{name}.log", self.options.threads, say)
        with np.load(result) as stored:
            return dict(stored)


def compare_mode(theirs: Theirs, mode: env.Mode, ours: Ours) -> Outcome:
    """Logits of all texts, greedy texts, and the cause of what differs."""
    asked, recipe = ours.questions, theirs.recipe
    outcome = Outcome(recipe, mode, compare.ROUNDED if mode.rounded else compare.UNROUNDED)
    logits, (tokens, steps) = ours.logits(mode), ours.greedy(mode)
    rows = [chosen_rows(len(ids), recipe.rows) for ids in asked.texts]
    written = asked.prompts[: recipe.prompts]
    found = theirs.answer(mode, {
        "texts": asked.texts, "rows": rows, "prompts": written, "steps": asked.steps,
        "given": tokens if recipe.reads_off else []})
    outcome.version = str(found["version"])
    floor = ours.floor(mode)
    hidden = [asked.config.eos_token_id] if recipe.masks_eos else []

    def shown(array: np.ndarray) -> np.ndarray:
        return np.delete(array, hidden, axis=-1)
    for number, ids in enumerate(asked.texts):
        us = shown(logits[number][rows[number]])
        outcome.texts.append(Text(
            len(ids), rows[number],
            compare.distance(shown(found[f"logits.{number}"]), us, outcome.tolerance),
            compare.farthest([compare.distance(shown(sample[rows[number]]), us, outcome.tolerance)
                              for sample in floor[number]])))
    for number, prompt in enumerate(written):
        step = compare.parting(found[f"tokens.{number}"].tolist(), tokens[number])
        writing = Writing(number, len(prompt), step)
        if step is not None:
            them, us = shown(found[f"steps.{number}"][step]), shown(steps[number][step])
            writing.tokens = (int(found[f"tokens.{number}"][step]), tokens[number][step])
            writing.margins = (compare.margin(them), compare.margin(us))
            writing.apart = float(np.abs(them - us).max() / np.abs(us).max())
        outcome.writings.append(writing)
    if recipe.traces and mode.cache and mode.linear == "none":
        find_boundaries(theirs, mode, ours, outcome, tokens)
    return outcome


def find_boundaries(theirs: Theirs, mode: env.Mode, ours: Ours, outcome: Outcome,
                    tokens: Sequence[list[int]]) -> None:
    """Trace what differs in both, name the first boundary, hand labkit the engine's choices."""
    asked = ours.questions
    late: list[tuple[Text | Writing, list[int]]] = [
        (text, ids) for text, ids in zip(outcome.texts, asked.texts, strict=True)
        if text.apart.beyond]
    late += [(w, [*asked.prompts[w.number], *tokens[w.number][: w.step]])
             for w in outcome.writings if w.step is not None]
    if not late:
        return
    found = theirs.answer(mode, {"traces": [ids for _, ids in late], "steps": 0})
    lab = lab_side.load(ours.folder, mode.job(0))
    ratios = asked.config.compress_ratios[: asked.config.num_hidden_layers]
    for number, (item, ids) in enumerate(late):
        tell(f"labkit: forced to {outcome.recipe.name}'s choices, {len(ids)} tokens")
        prefix = f"trace.{number}."
        trace = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        us = lab_side.trace(lab, ids)
        row = item.apart.first if isinstance(item, Text) else len(ids) - 1
        assert row is not None
        item.boundary = compare.first_boundary(trace, us, ratios, row)
        forced = lab_side.forced(ours.folder, mode.job(0), ids, trace)
        item.forced = compare.distance(trace["logits"], forced, compare.UNROUNDED)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    source = model_folder(options.model)
    questions = ask(parser, options, source)
    results = options.folder / "results"
    if options.fresh:
        shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True, exist_ok=True)
    ours = Ours(source, questions, results)
    outcomes = []
    for name in options.engines:
        recipe = env.RECIPES[name]
        theirs = Theirs(recipe, source, options)
        for mode in recipe.modes:
            try:
                outcome = compare_mode(theirs, mode, ours)
            except env.EngineError as error:
                outcome = Outcome(recipe, mode, 0.0, failure=str(error))
            except (KeyError, ValueError) as error:  # answers that are cut short or of other shapes
                outcome = Outcome(recipe, mode, 0.0, failure=f"answers do not fit: {error}")
            tell(f"{name} ({mode.name}): {outcome.failure or outcome.verdict}")
            outcomes.append(outcome)
            ours.made.clear()  # logits of long texts: one mode at a time
    return report(options.model, source, questions.config, outcomes)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        tell(f"error: {error}")
        sys.exit(1)
