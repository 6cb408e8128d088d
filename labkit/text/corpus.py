"""The training text: six novels by Jane Austen, and the part of each that is never trained on."""

from __future__ import annotations

import gzip
from functools import cache
from typing import Literal

from labkit.errors import InputError, LabError
from labkit.paths import data_dir

Split = Literal["train", "heldout"]


def split_point(text: str) -> int:
    """Index of the first held-out character: 95 % of the characters, then the next paragraph.

    Whole paragraphs on both sides keep the first held-out sentence readable by itself, and
    `text[:k] + text[k:]` loses nothing. A text without a later blank line is cut at the next
    line, and one without a later line exactly at 95 %.
    """
    target = len(text) * 19 // 20
    for boundary in ("\n\n", "\n"):
        found = text.find(boundary, target)
        if found >= 0 and found + len(boundary) < len(text):
            return found + len(boundary)
    return target


@cache
def _novels() -> dict[str, str]:
    folder = data_dir() / "corpus"
    files = sorted(folder.glob("*.txt.gz"))
    if not files:
        raise LabError(
            f"No *.txt.gz in {folder}; restore data/corpus from the repository, or point "
            "LABKIT_DATA at a folder that has it."
        )
    novels = {}
    for file in files:
        try:
            novels[file.name.removesuffix(".txt.gz")] = gzip.decompress(file.read_bytes()).decode()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise LabError(
                f"{file} cannot be read ({error}); restore it from the repository."
            ) from error
    return novels


def load_corpus(split: Split = "train") -> dict[str, str]:
    """Novel name -> its text, in alphabetical order of the names.

    "heldout" is the last 5 % of every novel, cut at a paragraph (`split_point`); "train" is
    the rest. Together they are the whole novel, character for character.
    """
    if split not in ("train", "heldout"):
        raise InputError(f'split is {split!r}; it must be "train" or "heldout".')
    parts = {}
    for name, text in _novels().items():
        cut = split_point(text)
        parts[name] = text[:cut] if split == "train" else text[cut:]
    return parts
