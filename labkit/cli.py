"""The command `labkit`.

A command is a short function: it takes words from the command line, imports what it needs inside
itself (so that `labkit --help` stays quick) and prints. Everything it does is done by a function
of the package that a notebook can call too. Errors that are the user's to mend derive from
LabError; they and Ctrl-C are handled in one place, `_Commands`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from labkit import __version__
from labkit.cli_course import progress
from labkit.cli_training import ablate, export, train, train_draft, train_plain
from labkit.errors import LabError


class _Commands(TyperGroup):
    """Turns a LabError into one sentence on standard error and Ctrl-C into exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LabError as error:
            typer.echo(f"labkit: {error}", err=True)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            typer.echo("labkit: stopped", err=True)
            raise typer.Exit(130) from interrupt


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the console script; leaves through SystemExit."""
    app(prog_name="labkit")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"labkit {__version__}")
        raise typer.Exit()


@app.callback()
def labkit(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and stop."),
    ] = False,
) -> None:
    """DeepSeek-V4.1-Flash, understood by running it.

    \b
    Examples:
      labkit doctor
      labkit COMMAND --help
    """


# ---- the machine ----------------------------------------------------------------------------


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what this machine offers the lab: versions, memory, threads, browser, disk, data.

    Exit code 1 when something that the lab needs is missing.

    \b
    Examples:
      labkit doctor
      labkit doctor --json
    """
    from labkit import doctor as examination

    findings = examination.examine()
    typer.echo(examination.as_json(findings) if as_json else examination.as_text(findings))
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)


# ---- the model ------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to be continued.")],
    model: Annotated[str, typer.Option(help="A preset or a checkpoint folder.")] = "mini",
    max_new_tokens: Annotated[int, typer.Option(help="Stop after so many tokens.")] = 100,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Share of the likeliest mass kept.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="How many of the likeliest are kept; 0: all.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text to stop before; may be given several times.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run; default: drawn.")] = None,
    prefill: Annotated[str, typer.Option(
        help="full, or ced: the decoder reads the prompt's last window only.")] = "full",
    halo: Annotated[str, typer.Option(
        help="With ced: window, or exact (reads enough to equal full).")] = "window",
    cut: Annotated[str, typer.Option(
        help="With ced: cut inside the last KV source, or after it.")] = "inside",
    cache_form: Annotated[str | None, typer.Option(
        help="How the cache is stored: packed (default), fp8, bf16 or plain.")] = None,
    chunk: Annotated[int | None, typer.Option(
        help="Read the prompt in passes of so many tokens; default: in one.")] = None,
    speculative: Annotated[bool, typer.Option(
        "--speculative", help="Draft several tokens a step and verify them in one pass.")] = False,
    draft_slots: Annotated[int | None, typer.Option(
        help="Tokens drafted a step, 0 to 16; default: as trained.")] = None,
    min_survival: Annotated[float | None, typer.Option(
        help="Verify only drafts that survive with this probability.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, ids and stats.")] = False,
) -> None:
    """Continue a text: prints what the model adds as it comes, then a note on standard error.

    Ctrl-C stops it there (exit code 130).

    \b
    Examples:
      labkit generate "It is a truth universally acknowledged" --max-new-tokens 60
      labkit generate "She was" --temperature 0 --stop . --json
      labkit generate "$(cat letter.txt)" --prefill ced --halo exact --cut after --chunk 512
      labkit generate "She was" --cache-form fp8
      labkit generate "It is a truth" --speculative --temperature 0
      labkit generate "It is a truth" --speculative --draft-slots 3 --min-survival 0.4
    """
    import json
    import warnings

    from tqdm import tqdm

    from labkit.engine.scheduling import Threshold
    from labkit.errors import InputError
    from labkit.lab import load

    if not speculative and (draft_slots is not None or min_survival is not None):
        raise InputError("--draft-slots and --min-survival go with --speculative: add that, or "
                         "leave them out")
    policy = None if min_survival is None else Threshold(min_survival)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", UserWarning)
        lab = load(model)
    for notice in notices:
        typer.echo(f"labkit: {notice.message}", err=True)
    generation = lab.stream(
        prompt, max_new_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop,
        seed=seed, prefill=prefill, halo=halo, cut=cut, cache_form=cache_form, chunk=chunk,
        speculative=speculative, draft_slots=draft_slots, policy=policy,
    )
    passes = 1 if chunk is None else -(-len(generation.prompt) // chunk)
    bar = tqdm(total=len(generation.prompt), desc="reading", unit=" tokens", leave=False,
               disable=True if passes == 1 else None)  # None: disabled unless on a terminal

    def read(tokens: int) -> None:
        bar.update(tokens)
        if bar.total is not None and bar.n >= bar.total:  # gone before the first word is printed
            bar.close()

    generation.progress = read
    shown = 0  # characters; Ctrl-C may come between a token and its printing
    try:
        for event in generation:
            if not as_json:
                typer.echo(event.text, nl=False)
            shown += len(event.text)
    except KeyboardInterrupt:
        bar.close()
        generation.interrupt()
        if not as_json:
            typer.echo(generation.text[shown:], nl=False)
    result = generation.result()
    typer.echo(json.dumps(result.to_dict(), ensure_ascii=False) if as_json else "")
    stats = result.stats
    speed = "" if stats.tokens_per_second is None else f", {stats.tokens_per_second:.1f} tokens/s"
    why = {"eos": "the text ended", "stop": "stop string met", "interrupted": "interrupted"}.get(
        str(stats.stop_reason), "max-new-tokens reached")
    typer.echo(f"labkit: {stats.new_tokens} tokens{speed}; {why}; seed {stats.seed}", err=True)
    if stats.speculation is not None:
        typer.echo(f"labkit: {stats.speculation.line()}", err=True)
    if stats.stop_reason == "interrupted":
        raise typer.Exit(130)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A preset, a checkpoint folder, or: cache.")],
    tensor: Annotated[str | None, typer.Option(help="Show this tensor's values.")] = None,
    model: Annotated[str, typer.Option(help="cache: the model that talks.")] = "mini",
    turns: Annotated[int, typer.Option(help="cache: turns of the conversation.")] = 6,
    wait: Annotated[
        list[float] | None, typer.Option(help="cache: seconds before a turn, in rotation.")
    ] = None,
    form: Annotated[str | None, typer.Option(help="cache: packed, fp8, bf16 or plain.")] = None,
    replay: Annotated[str, typer.Option(help="cache: bounded or exact.")] = "bounded",
    store: Annotated[str | None, typer.Option(help="cache: folder for the disk tier.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="cache: print the timeline.")] = False,
) -> None:
    """List what a checkpoint holds: its numbers, the role of each layer, its tensors.

    With `cache`: play a conversation over held-out text and show its cache, part by part, and
    turn by turn what was found, read again, evicted. Pauses are simulated.

    \b
    Examples:
      labkit inspect flash
      labkit inspect mini --tensor layers.0.attn.attn_sink
      labkit inspect cache --turns 8 --wait 30 --wait 600
      labkit inspect cache --store runs/pages --replay exact --json
    """
    if source == "cache":
        import json

        from labkit.engine.cache_view import conversation_view, talk
        from labkit.lab import load

        lab = load(model)
        conversation = talk(lab.model, lab.tokenizer, turns, wait or [30.0, 600.0], form, replay,
                            store)
        typer.echo(json.dumps([turn.to_dict() for turn in conversation.turns], ensure_ascii=False)
                   if as_json else conversation_view(conversation))
        return
    from labkit.checkpoint.files import find_tensors
    from labkit.config import PRESETS, ModelConfig
    from labkit.engine.inspection import describe, read_tensor, tensor_report
    from labkit.lab import model_folder

    if tensor is not None:
        value, remark = read_tensor(find_tensors(model_folder(source)), tensor)
        typer.echo(tensor_report(tensor, value, remark))
    elif source in PRESETS:
        typer.echo(describe(ModelConfig.preset(source)))
    else:
        folder = model_folder(source)
        config = ModelConfig.from_file(folder)
        # A folder with a config alone is still worth a look: its layout follows from that.
        stored = find_tensors(folder) if any(folder.glob("*.safetensors*")) else None
        typer.echo(describe(config, stored))


@app.command()
def accounting(
    source: Annotated[str, typer.Argument(help="A preset or a folder with a config.json.")],
    full: Annotated[bool, typer.Option("--full", help="List every tensor.")] = False,
) -> None:
    """Derive every tensor of a checkpoint from its config: counts and bytes, by part.

    \b
    Examples:
      labkit accounting flash
      labkit accounting mini --full
    """
    from labkit.checkpoint.report import accounting_text
    from labkit.config import PRESETS, ModelConfig

    config = ModelConfig.preset(source) if source in PRESETS else ModelConfig.from_file(source)
    typer.echo(accounting_text(config, full))


# ---- training -------------------------------------------------------------------------------

app.command()(train)
app.command("train-draft")(train_draft)
app.command()(export)
app.command("train-plain")(train_plain)
app.command()(ablate)
app.command()(progress)


@app.command()
def mutants(
    names: Annotated[
        list[str] | None, typer.Argument(help="Only these, each with all that is known of it.")
    ] = None,
) -> None:
    """Break the model on purpose, fault by fault, and say which checks notice.

    Each mutant is a bug that somebody published. Exit code 1 when one survives.

    \b
    Examples:
      labkit mutants
      labkit mutants relu_after_sum transposed_comb
    """
    from labkit import mutants as faults

    def progress(name: str) -> None:
        typer.echo(f"labkit: {name}", err=True)

    rows = faults.table(names or None, progress)
    for row in rows if names else ():
        typer.echo(faults.describe(row) + "\n")
    typer.echo(faults.main_text(rows))
    if not all(row.killed for row in rows):
        raise typer.Exit(1)


@app.command("eval")
def evaluate(
    source: Annotated[str, typer.Argument(help="mini or a checkpoint folder.")] = "mini",
    quick: Annotated[bool, typer.Option(
        "--quick", help="A rough look: little of everything, in under a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures and samples.")] = False,
    strict: Annotated[bool, typer.Option(
        "--strict", help="Exit code 1 if any target is not reached.")] = False,
) -> None:
    """Measure a model: every figure with its target beside it, reached or missed.

    Bits per byte of held-out text, needle recall by distance, attention that the selection keeps,
    what Engram, rounding, replay and the draft do, each with its controls. Takes minutes.

    \b
    Examples:
      labkit eval mini
      labkit eval mini --quick
      labkit eval mini --strict --json
    """
    import json
    import time

    from labkit.lab import load
    from labkit.train.figure_tables import figures_text
    from labkit.train.figures import FULL, QUICK, measure
    from labkit.train.targets import missed, targets

    begun = time.monotonic()
    figures = measure(load(source), QUICK if quick else FULL)
    typer.echo(json.dumps(figures.to_dict(), ensure_ascii=False) if as_json
               else figures_text(figures))
    typer.echo(f"labkit: measured in {time.monotonic() - begun:.0f} s", err=True)
    if strict and missed(targets(figures)):
        raise typer.Exit(1)


@app.command(context_settings={
    # All that follows the name is the benchmark's, --help too.
    "allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False})
def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which one; without it they are listed.")] = (
        None),
) -> None:
    """Measure something: run a benchmark of the source tree, with its own options.

    What follows the name goes to the benchmark. Benchmarks print; they never fail on a time.

    \b
    Examples:
      labkit bench
      labkit bench cache --help
      labkit bench cache --quick
      labkit bench prefill --tokens 512 --parts
    """
    import runpy
    import sys

    from labkit import paths

    found = paths.benchmarks()
    if name is None:
        width = max(map(len, found))
        for known, script in found.items():
            typer.echo(f"{known:<{width}}  {paths.first_line(script)}")
        return
    if name not in found:
        raise LabError(f"there is no benchmark {name!r}: choose one of {', '.join(found)}")
    before = sys.argv
    sys.argv = [f"labkit bench {name}", *context.args]  # what argparse reads
    try:
        runpy.run_path(str(found[name]), run_name="__main__")
    finally:
        sys.argv = before


@app.command()
def rebuild() -> None:
    """Make everything anew that depends on data/mini: figures, record, notebooks, pictures.

    Works in a clone of the repository; run it after `labkit export runs/mini data/mini`.

    \b
    Examples:
      labkit rebuild
    """
    from labkit.train.rebuild import rebuild as make_anew

    make_anew(typer.echo)
