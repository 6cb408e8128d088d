"""The commands that train, registered in `labkit.cli`: `train`, `train-draft`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    run: Annotated[Path, typer.Option(help="Folder of the run: its state and its log.")] = Path(
        "runs/mini"),
    preset: Annotated[str, typer.Option(help="Configuration to train.")] = "mini",
    steps: Annotated[int, typer.Option(help="Length of the whole run.")] = 2400,
    seed: Annotated[int, typer.Option(help="Of weights, batches and samples.")] = 0,
    start: Annotated[Path | None, typer.Option(
        help="Checkpoint folder whose weights the run starts from.")] = None,
    cooldown: Annotated[float, typer.Option(
        help="Share of the steps in which the learning rates fall; 0: another run follows.")] = 0.5,
    rounding_from: Annotated[float, typer.Option(
        help="Share of the steps after which all is rounded as shipped.")] = 0.85,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run there.")] = False,
) -> None:
    """Train a preset on novels and synthetic text; the same command goes on where it stopped.

    It begins on short rows without selection and ends with the whole context, the selection, and
    weights and cache rounded as shipped. From the weights of another run it goes on with the last.

    Ctrl-C saves and stops. `labkit export` writes the result as a checkpoint.

    \b
    Examples:
      labkit train
      labkit train --run runs/try --steps 200 --fresh
      labkit train --run runs/more --steps 500 --start /tmp/mini-bf16
    """
    from labkit.train.command import train_preset

    train_preset(run, preset, fresh, start, steps=steps, seed=seed, cooldown=cooldown,
                 rounding_from=rounding_from)


def train_draft(
    run: Annotated[Path, typer.Option(help="Folder of the run: its state and its log.")] = Path(
        "runs/draft"),
    model: Annotated[str, typer.Option(help="mini or a checkpoint folder: the target.")] = "mini",
    steps: Annotated[int, typer.Option(help="Length of the whole run.")] = 1600,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 1024,
    anchors: Annotated[int, typer.Option(help="Blocks drafted in each sequence.")] = 192,
    seed: Annotated[int, typer.Option(help="Of weights, batches and anchors.")] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run there.")] = False,
) -> None:
    """Train the draft (DSpark) of a checkpoint, whose own weights stay as they are.

    The same command goes on where it stopped. `labkit export` puts the result into the checkpoint.

    \b
    Examples:
      labkit train-draft
      labkit train-draft --run runs/try --steps 50 --fresh
    """
    from labkit.train.draft_command import train_draft

    train_draft(run, model, fresh, steps=steps, batch=batch, length=length, anchors=anchors,
                seed=seed)


def export(
    run: Annotated[Path, typer.Argument(help="Folder of a training run.")],
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    preset: Annotated[str, typer.Option(help="Configuration of the run.")] = "mini",
    form: Annotated[str, typer.Option(help="released (quantised) or plain (bf16).")] = "released",
) -> None:
    """Write the weights of a training run as a checkpoint that `labkit.load` opens.

    A draft joins the checkpoint that it was trained for, in that one's form; it is then measured
    and calibrated on held-out text.

    \b
    Examples:
      labkit export runs/mini data/mini
      labkit export runs/draft data/mini
      labkit export runs/mini /tmp/mini-bf16 --form plain
    """
    from labkit.train.command import export_run

    for path in export_run(run, out, preset, form):
        typer.echo(f"{path}  {path.stat().st_size:,} bytes")
