"""What `labkit train-draft` does, and `labkit export` with a run of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from labkit.checkpoint.draft import write_draft
from labkit.engine.calibration import FILE as CALIBRATION
from labkit.engine.calibration import save_calibration, target_digest
from labkit.errors import CheckpointError, InputError
from labkit.lab import load, model_folder
from labkit.train.command import check_sizes, forget, run_to_end
from labkit.train.draft_figures import DraftFigures, measure_draft
from labkit.train.drafter import DraftOptions, DraftTrainer, draft_config
from labkit.train.own_text import FILE as OWN_TEXT


def train_draft(run: Path, source: str, fresh: bool, start: Path | None = None,
                **options: Any) -> None:
    """Start or continue a run in folder `run` that trains the draft of a checkpoint.

    start: a checkpoint whose draft it starts from, also one of another target of the same shape.
    """
    lab = load(model_folder(source), device="cpu")      # as all of training
    config = draft_config(lab.config)
    check_sizes(config, options, ("steps", "batch", "length", "anchors"),
                options["length"])
    if options["length"] <= config.dspark_block_size:
        raise InputError(f"length is {options['length']}: must be more than the draft's block of "
                         f"{config.dspark_block_size} slots")
    if fresh:
        forget(run)
        for name in (OWN_TEXT, BEFORE):
            (run / name).unlink(missing_ok=True)
    first = None if start is None else load(start, device="cpu").model
    if first is not None and first.config.replace(quantized=config.quantized) != config:
        raise InputError(f"{start} has another configuration than {source}: its draft does not fit")
    trainer = DraftTrainer(lab, run, DraftOptions(**options), first)
    if start is not None and not (run / BEFORE).exists():
        run.mkdir(parents=True, exist_ok=True)
        (run / BEFORE).write_text(json.dumps(runs_of(start), indent=1) + "\n", encoding="utf-8")
    count = sum(p.numel() for p in trainer.trained.parameters())
    print(f"draft of {source}: {count:,} parameters in {config.num_nextn_predict_layers} stages, "
          f"from step {trainer.step} to {trainer.options.steps}, in {run}", flush=True)
    run_to_end(trainer)
    found = trainer.look()
    trainer.log({"step": trainer.step, "seconds": round(trainer.seconds, 1),
                 "heldout_acceptance_all": [round(a, 4) for a in found]})
    print("held-out text, acceptance by slot (1 - total variation, rounded as shipped): "
          + " ".join(f"{a:.3f}" for a in found))


BEFORE = "before.json"   # in a run's folder: the runs that its first weights come from


def runs_of(folder: Path) -> list[dict[str, Any]]:
    """Facts of all runs behind the draft of a checkpoint, the first one first; [] if unknown."""
    path = folder / "draft_run.json"
    if not path.is_file():
        return []
    facts = json.loads(path.read_text(encoding="utf-8"))
    return [*facts.pop("before", []), facts]


def export_draft(run: Path, out: Path, state: dict[str, torch.Tensor],
                 facts: dict[str, Any]) -> list[Path]:
    """The draft of a run into the checkpoint in `out`; measured and calibrated there."""
    target = load(out, device="cpu").model
    if target_digest(target) != facts["options"]["target"]:
        raise CheckpointError(f"the draft in {run} was trained for another model than the one in "
                              f"{out}: a draft fits the weights that it saw only")
    if not (run / "log.jsonl").is_file():
        raise CheckpointError(f"{run / 'log.jsonl'} is missing: the log of the run belongs to it")
    (out / CALIBRATION).unlink(missing_ok=True)  # of another draft: loading would refuse it
    written = write_draft(out, state)
    shutil.copyfile(run / "log.jsonl", out / "draft_log.jsonl")
    if (run / BEFORE).is_file():
        facts = facts | {"before": json.loads((run / BEFORE).read_text(encoding="utf-8"))}
    (out / "draft_run.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return [written, out / "draft_log.jsonl", out / "draft_run.json", *measure_there(out)]


def measure_there(folder: Path) -> list[Path]:
    """Measure the draft of a checkpoint; write its figures and its calibration beside it."""
    figures, calibration = measure_draft(load(folder, device="cpu"))
    path = folder / "draft_figures.json"
    path.write_text(json.dumps(figures.to_dict(), indent=1) + "\n", encoding="utf-8")
    print(figures_text(figures))
    return [path, save_calibration(folder, calibration)]


def figures_text(f: DraftFigures) -> str:
    """The figures as lines for a terminal."""
    def line(title: str, values: tuple[float, ...], digits: int = 3) -> str:
        return f"{title:<52}" + " ".join(f"{v:.{digits}f}" for v in values)

    return "\n".join([
        f"draft of {f.parameters:,} parameters, {f.proposals:,} proposals on held-out text",
        line("acceptance by slot, 1 - total variation", f.acceptance),
        line("slots that survived, temperature 1", f.sampled),
        line("slots that survived, greedy", f.greedy),
        f"accepted drafts a step: {f.sampled_length:.3f} at temperature 1, "
        f"{f.greedy_length:.3f} greedy",
        *([f"  on code: {f.code_sampled_length:.3f} at temperature 1, "
           f"{f.code_greedy_length:.3f} greedy"] if f.code_proposals else []),
        line("temperatures of the confidence", f.temperatures),
        line("calibration error of the survival, before", f.ece_before, 4),
        line("  after", f.ece_after, 4),
        line("  of greedy drafts, before", f.ece_greedy_before, 4),
        line("  after", f.ece_greedy_after, 4),
    ])
