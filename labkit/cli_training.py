"""The commands that train, registered in `labkit.cli`: `train`, `train-draft`, `export`,
`train-plain`, `ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Option(help="Folder of the run: its state and its log.")]
Steps = Annotated[int, typer.Option(help="Length of the whole run.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget an earlier run there.")]


def train(
    run: Run = Path("runs/mini"),
    preset: Annotated[str, typer.Option(help="Configuration to train.")] = "mini",
    steps: Steps = 3500,
    seed: Annotated[int, typer.Option(help="Of weights, batches and samples.")] = 0,
    start: Annotated[Path | None, typer.Option(
        help="Checkpoint folder whose weights the run starts from.")] = None,
    cooldown: Annotated[float, typer.Option(
        help="Share of the steps in which the learning rates fall; 0: another run follows.")] = 0.5,
    rounding_from: Annotated[float, typer.Option(
        help="Share of the steps after which all is rounded as shipped.")] = 0.85,
    fresh: Fresh = False,
) -> None:
    """Train a preset on novels and synthetic text; the same command goes on where it stopped.

    It begins on short rows without selection and ends with the whole context, the selection, and
    weights and cache rounded as shipped. From the weights of another run it begins with the
    decoder recalling alone, then goes on with the selection.

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
    run: Run = Path("runs/draft"),
    model: Annotated[str, typer.Option(help="mini or a checkpoint folder: the target.")] = "mini",
    steps: Steps = 1600,
    batch: Annotated[int, typer.Option(help="Sequences a step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens a sequence.")] = 1024,
    anchors: Annotated[int, typer.Option(help="Blocks drafted in each sequence.")] = 192,
    seed: Annotated[int, typer.Option(help="Of weights, batches and anchors.")] = 0,
    start: Annotated[Path | None, typer.Option(
        help="Checkpoint folder whose draft it starts from, also of an earlier target.")] = None,
    own_rows: Annotated[int, typer.Option(
        help="Sequences that the target writes itself first, for half of the novels.")] = 0,
    cooldown: Annotated[float, typer.Option(
        help="Share of the steps in which the learning rates fall.")] = 0.5,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1.2e-2,
    muon_lr: Annotated[float, typer.Option(help="Of Muon, which trains the matrices.")] = 4e-2,
    fresh: Fresh = False,
) -> None:
    """Train the draft (DSpark) of a checkpoint, whose own weights stay as they are.

    The same command goes on where it stopped. `labkit export` puts the result into the checkpoint.

    \b
    Examples:
      labkit train-draft
      labkit train-draft --run runs/try --steps 50 --fresh
      labkit train-draft --run runs/more --steps 500 --start /tmp/mini-before --lr 5e-3
    """
    from labkit.train.draft_command import train_draft

    train_draft(run, model, fresh, start, steps=steps, batch=batch, length=length,
                anchors=anchors, seed=seed, own_rows=own_rows, cooldown=cooldown, lr=lr,
                muon_lr=muon_lr)


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


def train_plain(
    run: Run = Path("runs/plain"),
    like: Annotated[list[Path] | None, typer.Option(
        help="Run to compare with, a run.json or a folder; several in order where one began with "
             "the weights of another. Default: that of the shipped model.")] = None,
    preset: Annotated[str, typer.Option(help="Configuration to compare with.")] = "mini",
    steps: Annotated[int | None, typer.Option(
        help="Another length, with the same shares of it for every stage.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the weights; default: as the run.")] = None,
    head_dim: Annotated[int, typer.Option(help="Of an attention head: 32 or 64.")] = 32,
    fresh: Fresh = False,
) -> None:
    """Train a plain transformer of as many active parameters on the rows that the model read.

    The same command goes on where it stopped; Ctrl-C saves and stops. At the end it is measured on
    held-out text; the figures go to plain.json in the folder of the run.

    \b
    Examples:
      labkit train-plain
      labkit train-plain --like runs/mini --like runs/more
      labkit train-plain --run runs/try --steps 100 --fresh
    """
    from labkit.train.plain_run import train_plain

    train_plain(run, preset, like or [], fresh, steps, seed, head_dim)


def ablate(
    only: Annotated[list[str] | None, typer.Option(
        help="Variant to train; may be given several times. Default: all.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of every variant.")] = 2,
    tokens: Annotated[int, typer.Option(help="Read by every run, at least.")] = 2_000_000,
    runs: Annotated[Path, typer.Option(help="Folder of the runs, a folder each.")] = Path(
        "runs/ablations"),
    results: Annotated[Path | None, typer.Option(
        help="Folder of the results. Default: ablations in the data folder.")] = None,
    only_table: Annotated[bool, typer.Option(
        "--table", help="Train nothing: print the table of the saved results.")] = False,
    fresh: Annotated[bool, typer.Option(
        "--fresh", help="Forget earlier runs and results of these variants.")] = False,
) -> None:
    """Train small models that differ in one part each, and print what every part is worth.

    Runs that have a result are skipped, unfinished ones go on; Ctrl-C saves and stops.

    \b
    Examples:
      labkit ablate --table
      labkit ablate
      labkit ablate --only base --only no-engram --seeds 3
      labkit ablate --tokens 20000 --runs runs/try --results runs/try --seeds 1
    """
    from labkit.paths import data_dir
    from labkit.train.ablation_table import read_results, table
    from labkit.train.ablations import ablate
    from labkit.train.command import preset_tokenizer

    folder = results or data_dir() / "ablations"
    if not only_table:
        ablate(runs, folder, preset_tokenizer("mini")[1], only=only or (), seeds=seeds,
               tokens=tokens, fresh=fresh, say=typer.echo)
    typer.echo(table(read_results(folder)))
