"""The Engram class map: token ids that read the same share one class.

Engram looks up rows by the last few tokens. " The", "the" and "THE" should find the same
row, so ids are first mapped to classes: the decoded text of every vocabulary entry,
normalised, numbered by first appearance. The released vocabulary of 129,280 entries has
99,092 classes (released config, engram_compressed_vocab_size).
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labkit.errors import ConfigError, InputError
from labkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import tokenizers

# Unicode's White_Space property. str.strip() would also take the control characters
# U+001C..U+001F, which the property leaves out.
_WHITE_SPACE = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009"
    "\u200a\u2028\u2029\u202f\u205f\u3000"
)
_RUN = re.compile("[ \t\r\n]+")


@dataclass(frozen=True)
class ClassRules:
    """The rules of the map that implementations got wrong, one switch each."""

    # Removed Unicode categories: Mn, Mc and Me. Mn alone gives 99,510 classes.
    marks: tuple[str, ...] = ("Mn", "Mc", "Me")
    # A lone space survives the final strip. Without this there are 99,250 classes: each
    # text of nothing but white space then keeps its own.
    lone_space: bool = True
    # A piece of a character decodes to U+FFFD; all pieces would share a class by their text.
    raw_undecodable: bool = True


RULES = ClassRules()


def normalise(text: str, rules: ClassRules = RULES) -> str:
    """What two texts must have in common to share a class ("" where nothing is left).

    In order: NFKC, NFD, marks removed, lower case character by character (a final sigma
    stays an ordinary one), runs of space, tab and line break to one space, strip.
    """
    if text.isascii():  # neither normal form changes ASCII, and it has no marks
        text = text.lower()
    else:
        text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
        marks = rules.marks
        text = "".join(c.lower() for c in text if unicodedata.category(c) not in marks)
    text = _RUN.sub(" ", text)
    if text == " " and rules.lone_space:
        return text
    return text.strip(_WHITE_SPACE)


def engram_classes(
    tokenizer: Tokenizer | tokenizers.Tokenizer,
    vocab_size: int | None = None,
    rules: ClassRules = RULES,
) -> tuple[Tensor, int]:
    """The class of every id: int64 [V], and the number of classes.

    `vocab_size` is the model's V where it exceeds the tokenizer's: the padding entries have
    no text and share the class of the empty text. Raises `InputError` when V is too small.
    """
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = Tokenizer(tokenizer)
    known = tokenizer.vocab_size
    size = known if vocab_size is None else vocab_size
    if size < known:
        raise InputError(
            f"vocab_size is {size}, but the tokenizer has {known} entries; "
            "use the tokenizer.json that belongs to the model."
        )
    texts = tokenizer.decode_each(range(known)) + [""] * (size - known)
    numbers: dict[str, int] = {}
    classes = []
    for id_, text in enumerate(texts):
        if "\ufffd" in text and rules.raw_undecodable:
            key = tokenizer.token_string(id_)
        else:
            key = normalise(text, rules) or text
        classes.append(numbers.setdefault(key, len(numbers)))
    return torch.tensor(classes, dtype=torch.int64), len(numbers)


def class_digest(classes: Tensor) -> str:
    """SHA-256 of the map (little-endian int64), hexadecimal."""
    return hashlib.sha256(classes.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def checked_classes(config: Any, tokenizer: Tokenizer, digest: str | None = None) -> Tensor:
    """The map of `tokenizer` for a model with `config`: int64 [V].

    Raises `ConfigError` unless the number of classes is `engram_compressed_vocab_size` and,
    where a `digest` was stored with the weights, the map is that one.
    """
    classes, count = engram_classes(tokenizer, config.vocab_size)
    expected = config.engram_compressed_vocab_size
    if count != expected:
        raise ConfigError(
            f"engram_compressed_vocab_size is {expected}, but the tokenizer {tokenizer.source} "
            f"gives {count} classes; use the tokenizer.json that belongs to the model."
        )
    if digest is not None and class_digest(classes) != digest:
        raise ConfigError(
            f"The tokenizer {tokenizer.source} gives another Engram class map than the one the "
            "model was trained with (same count, other digest); use the model's tokenizer.json."
        )
    return classes
