"""The commands of the course, registered in `labkit.cli`: `progress`."""

from __future__ import annotations

from typing import Annotated

import typer


def progress(
    forget: Annotated[bool, typer.Option(
        "--reset", help="Forget all that was done, and begin anew.")] = False,
) -> None:
    """Show which exercises of the course are done.

    Every check in a notebook is noted in one small file on this machine (LABKIT_PROGRESS names
    another one); nothing leaves it.

    \b
    Examples:
      labkit progress
      labkit progress --reset
    """
    from labkit.exercises import exercises
    from labkit.exercises.progress import progress_file, read, reset, table

    if forget:
        typer.echo("forgotten" if reset() else f"nothing to forget: {progress_file()} is not there")
        return
    typer.echo(table(exercises(), read()))
