"""Where the lab's own files lie: corpus, tokenizers, the trained model, and the benchmarks."""

from __future__ import annotations

import ast
import os
from pathlib import Path

from labkit.errors import LabError

_PACKAGE = Path(__file__).resolve().parent


def data_dir() -> Path:
    """The data folder: `LABKIT_DATA`, else `_data` in the package (a wheel), else the clone's.

    Raises `LabError` when none of them is a folder.
    """
    override = os.environ.get("LABKIT_DATA")
    if override:
        path = Path(override).expanduser()
        if not path.is_dir():
            raise LabError(
                f"LABKIT_DATA names {path}, which is not a folder; set it to a folder that holds "
                "corpus/ and mini/, or unset it."
            )
        return path
    for path in (_PACKAGE / "_data", _PACKAGE.parent / "data"):
        if path.is_dir():
            return path
    raise LabError(
        f"No data folder beside or inside {_PACKAGE}; install labkit from its wheel or a clone, "
        "or set LABKIT_DATA to a folder that holds corpus/ and mini/."
    )


def benchmarks() -> dict[str, Path]:
    """Name -> script of every benchmark. LabError without a source tree, which alone has them."""
    folder = _PACKAGE.parent / "benchmarks"
    found = {path.stem: path for path in sorted(folder.glob("*.py"))}
    if not found:
        raise LabError(f"{folder} holds no benchmarks: they belong to the source tree and not to "
                       "an installed package, so run this in a clone of the repository.")
    return found


def first_line(script: Path) -> str:
    """The first line of a script's docstring, without running it."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]
