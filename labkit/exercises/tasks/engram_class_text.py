"""Exercise 2.2: which texts share a class."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "2.2", "Which tokens read the same", "class_text"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 3
TOLERANCE = 0.0
OBJECTIVE = """
" The", "the" and "THE" are three entries of the vocabulary, and Engram should remember them
together. Write the text by which entries are compared, in this order: NFKC, then NFD (so that
an accent is a character of its own); leave out marks (Unicode categories Mn, Mc, Me); lower case
*character by character*; every run of space, tab and line break becomes one space; last, white
space at both ends goes, unless a single space is all there is.
"""
HELP = (
    """`unicodedata.normalize(form, text)` gives the normal forms and
    `unicodedata.category(character)` a category. Try your function on " Thé", and on "   ".""",
    """Lower case and marks go character by character, in one comprehension. The last step has two
    answers: for `" "` the text itself, for all else `text.strip()`.""",
    """```python
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(ch.lower() for ch in text if ...)
    text = re.sub("[ \\t\\r\\n]+", " ", text)
    return text if text == " " else ...
    ```""",
)
AFTER = """Run over the released vocabulary of 129,280 entries this gives 99,092 classes, and any
slip gives another number of them: 99,250 without the lone space, 99,510 with only Mn left out. The
check cannot see what happens to entries that are no whole character: they keep their raw bytes."""


def solution(text):
    """The text that two vocabulary entries must have in common to share a class."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    marks = ("Mn", "Mc", "Me")
    text = "".join(ch.lower() for ch in text if unicodedata.category(ch) not in marks)
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if text == " " else text.strip()


def alternative(text):
    """The rules of the package itself."""
    from labkit.text.engram_map import normalise

    return normalise(text)


def _steps(text, first="NFKC", marks=("Mn", "Mc", "Me"), lower=None, lone=True):
    text = unicodedata.normalize("NFD", unicodedata.normalize(first, text))
    text = "".join(ch for ch in text if unicodedata.category(ch) not in marks)
    text = "".join(ch.lower() for ch in text) if lower is None else lower(text)
    text = re.sub("[ \t\r\n]+", " ", text)
    return text if lone and text == " " else text.strip()


def strips_the_lone_space(text):
    return _steps(text, lone=False)


def only_nonspacing_marks(text):
    return _steps(text, marks=("Mn",))


def keeps_compatibility_forms(text):
    return _steps(text, first="NFC")


def lowers_the_whole_text(text):
    return _steps(text, lower=str.lower)


def folds_case(text):
    return _steps(text, lower=str.casefold)


MISTAKES = (
    Mistake(strips_the_lone_space, "a single space is stripped to nothing, but it stays: otherwise "
            "tokens of white space do not share a class (99,250 classes instead of 99,092).",
            "mutant `lone_space_lost`; public ports"),
    Mistake(only_nonspacing_marks, "only marks of category Mn are left out; Mc and Me go as well "
            "(99,510 classes otherwise).", "the accent-stripping recipe of many libraries"),
    Mistake(keeps_compatibility_forms, "compatibility forms are kept: NFKC comes first, it makes "
            "an ordinary letter of a full-width one and f + i of the ligature.", "NFC for NFKC"),
    Mistake(lowers_the_whole_text, "the whole text is lowered at once; Python then gives a sigma "
            "at the end of a word its final form. Lower each character by itself.",
            "str.lower on the text"),
    Mistake(folds_case, "case folding is not lower-casing: it makes ss of \u00df.", "str.casefold"),
)


def cases(lab: Lab) -> Iterator[Case]:
    for what, texts in (
            ("case and the space in front do not matter", (" The", "the", "THE")),
            ("accents go, also those inside a letter", ("caf\u00e9", "cafe\u0301", "\u00c5")),
            ("spacing and enclosing marks go too", ("\u0915\u093e", "a\u20dd")),
            ("compatibility forms become ordinary letters", ("\uff34\uff48\uff45", "\ufb01n")),
            ("each character is lowered by itself", ("\u039f\u0394\u039f\u03a3", "Stra\u00dfe")),
            ("runs of white space are one space", ("a \t\n b", "\n\n")),
            ("a lone space stays", (" ", "   "))):
        for text in texts:
            yield Case(f"{what}: {text!r}", (text,))
