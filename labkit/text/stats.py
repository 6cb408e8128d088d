"""Measures of a written text against the training corpus, and the compression baseline."""

from __future__ import annotations

import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from labkit.errors import InputError
from labkit.text.corpus import load_corpus

_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


def words(text: str) -> list[str]:
    """The words in lower case, without signs and digits: "Don't," -> "don't"."""
    return _WORD.findall(text.replace("\u2019", "'").lower())


@dataclass(frozen=True)
class WordIndex:
    """Where each word stands in a set of texts.

    Words are numbered; `sequence` is all texts' word numbers one after the other, with -2
    after each text so that no run crosses from one into the next. Positions of word w:
    `positions[starts[w]:starts[w+1]]`.
    """

    numbers: dict[str, int]
    sequence: np.ndarray  # int64 [words + texts]
    positions: np.ndarray  # int64, grouped by word
    starts: np.ndarray  # int64 [vocabulary + 1]

    @classmethod
    def build(cls, texts: Mapping[str, str]) -> WordIndex:
        numbers: dict[str, int] = {}
        sequence: list[int] = []
        for text in texts.values():
            sequence += [numbers.setdefault(word, len(numbers)) for word in words(text)]
            sequence.append(-2)
        array = np.asarray(sequence, dtype=np.int64)
        order = np.argsort(array, kind="stable")
        starts = np.searchsorted(array[order], np.arange(len(numbers) + 1))
        return cls(numbers, array, order, starts)

    def longest_run(self, text: str) -> list[str]:
        """The longest run of words of `text` that stands word for word in the indexed texts.

        For each start the positions of its word are narrowed down to those that go on in
        the same way; the list shrinks by about the frequency of a word at every step.
        """
        given = words(text)
        ids = [self.numbers.get(word, -1) for word in given]
        best_start, best = 0, 0
        for start, first in enumerate(ids):
            if first < 0 or len(ids) - start <= best:
                continue
            places = self.positions[self.starts[first] : self.starts[first + 1]]
            run = 1
            while start + run < len(ids):
                # In range: a place left in the list never reaches the -2 that ends its text.
                places = places[self.sequence[places + run] == ids[start + run]]
                if len(places) == 0:
                    break
                run += 1
            if run > best:
                best_start, best = start, run
        return given[best_start : best_start + best]


@cache
def corpus_index() -> WordIndex:
    """The index of the training part of the corpus (built once, in well under a second)."""
    return WordIndex.build(load_corpus("train"))


def corpus_words() -> frozenset[str]:
    """Every word of the training part, in lower case."""
    return frozenset(corpus_index().numbers)


def share_of_known_words(text: str) -> float:
    """Share of the words of `text` that occur in the training part, 0..1 (0 without words)."""
    given = words(text)
    known = corpus_index().numbers
    return sum(word in known for word in given) / len(given) if given else 0.0


def longest_copied_run(text: str) -> int:
    """Words in the longest run that stands word for word in the training part.

    Case, punctuation and line breaks do not count, so this is never less than the longest
    run copied literally.
    """
    return len(corpus_index().longest_run(text))


def gzip_bits_per_byte(
    heldout: Mapping[str, str] | None = None,
    dictionary: Mapping[str, str] | None = None,
    per_novel: bool = False,
) -> float:
    """Bits per byte of `heldout` under gzip -9 that has just read `dictionary`.

    size(dictionary + heldout) - size(dictionary), over the bytes of the held-out texts. All
    texts are joined first, or with `per_novel` each is compressed after its own novel: gzip
    sees the last 32 KiB only, so that is a little better. Defaults: the corpus's held-out
    and training parts, 2.85 (per novel 2.80). Zlib's successors may differ slightly.
    """
    heldout = load_corpus("heldout") if heldout is None else heldout
    dictionary = load_corpus("train") if dictionary is None else dictionary
    total = sum(len(text.encode()) for text in heldout.values())
    if total == 0:
        raise InputError("There is no held-out text to compress; pass at least one novel.")
    if per_novel:
        pairs = [(dictionary.get(name, ""), text) for name, text in heldout.items()]
    else:
        pairs = [("".join(dictionary.values()), "".join(heldout.values()))]
    added = sum(
        _gzip_size((known + text).encode()) - _gzip_size(known.encode()) for known, text in pairs
    )
    return 8 * added / total


def _gzip_size(data: bytes) -> int:
    return len(gzip.compress(data, compresslevel=9, mtime=0))
