"""Where the lab's own data lies: the corpus, the presets' tokenizers, the trained model."""

from __future__ import annotations

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
