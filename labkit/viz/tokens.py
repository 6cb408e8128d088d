"""Tokens as a reader sees them: visible white space, and lines of limited width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from labkit.text.tokenizer import Tokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each id; bytes that are no whole character as <E2>, BOS and EOS as words."""
    short = {tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>", tokenizer.pad_id: "<pad>"}
    out = []
    for id_, text in zip(ids, tokenizer.decode_each(ids), strict=True):
        if id_ in short:
            text = short[id_]
        elif "\ufffd" in text:
            text = "".join(f"<{byte:02X}>" for byte in tokenizer.token_bytes(id_))
        out.append(text)
    return out


def visible(text: str) -> str:
    """White space that a reader can see: a space as U+2423, a line end as U+23CE."""
    return text.translate({13: None, 10: "\u23ce", 32: "\u2423", 9: "\u21e5"})


@dataclass(frozen=True)
class Placed:
    """Where token number `index` stands: line, first column and width, in characters."""

    index: int
    line: int
    column: int
    width: int
    text: str


def lay_out(texts: Sequence[str], columns: int = 96) -> list[Placed]:
    """Tokens into lines of at most `columns` characters; a line end in a token ends the line."""
    placed: list[Placed] = []
    line = column = 0
    for index, text in enumerate(texts):
        shown = text.translate({13: None, 10: "\u23ce", 9: "\u21e5"})[:columns]
        width = max(1, len(shown))
        if column + width > columns:
            line, column = line + 1, 0
        placed.append(Placed(index, line, column, width, shown))
        column += width
        if "\n" in text:
            line, column = line + 1, 0
    return placed
