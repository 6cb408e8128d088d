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
