"""Passages of the novels of stated lengths in tokens, cut where a cut does not change the ids."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

from labkit.errors import InputError
from labkit.text.corpus import Split, load_corpus
from labkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Novel:
    ids: list[int]
    cuts: list[int]
    """Indices of ids that are a space and a letter: there a word starts, and no token of
    these vocabularies runs across, so that both sides keep their ids by themselves."""


@lru_cache(maxsize=4)
def _novels(tokenizer: Tokenizer, split: Split) -> tuple[_Novel, ...]:
    starts = [len(b) > 1 and b[:1] == b" " and b[1:2].isalpha()
              for b in map(tokenizer.token_bytes, range(tokenizer.vocab_size))]
    found = []
    for text in load_corpus(split).values():
        ids = tokenizer.encode(text)
        found.append(_Novel(ids, [at for at, id_ in enumerate(ids) if starts[id_]]))
    return tuple(found)


@lru_cache(maxsize=4)
def words(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Words that are one token with the space before them, frequent ones first."""
    each = (tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size))
    found = tuple(b.decode() for b in each
                  if b.isascii() and b[:1] == b" " and b[1:].isalpha())
    if not found:
        raise InputError(f"the vocabulary {tokenizer.source} has no token that is a whole word")
    return found


def filler(tokenizer: Tokenizer, split: Split, size: int, rng: random.Random) -> list[str]:
    """Words (with their spaces and stops) of one run of a novel, `size` tokens together.

    From a random word on, the first run whose end is a word's start too.
    """
    if size == 0:
        return []
    novels = _novels(tokenizer, split)
    first = rng.randrange(len(novels))
    for number in range(len(novels)):
        novel = novels[(first + number) % len(novels)]
        last = bisect_right(novel.cuts, novel.cuts[-1] - size)  # beyond it a run has no end
        begin = rng.randrange(last) if last else 0
        for tried in range(last):
            low = (begin + tried) % last
            high = bisect_left(novel.cuts, novel.cuts[low] + size)
            if novel.cuts[high] == novel.cuts[low] + size:
                bounds = novel.cuts[low : high + 1]
                return [tokenizer.decode(novel.ids[a:b])
                        for a, b in zip(bounds, bounds[1:], strict=False)]
    raise InputError(f"no {split} novel has a run of {size} tokens to fill a gap with; ask for "
                     "a shorter length")


@lru_cache(maxsize=4)
def _passages(tokenizer: Tokenizer, split: Split, length: int) -> list[tuple[int, int, int]]:
    """(novel, begin, end) in ids, at most `length` long, cut at words; all of every novel."""
    found = []
    for number, novel in enumerate(_novels(tokenizer, split)):
        begin = 0
        while begin < len(novel.ids):
            end = len(novel.ids)
            if end - begin > length:
                end = novel.cuts[bisect_right(novel.cuts, begin + length) - 1]
            found.append((number, begin, end))
            begin = end
    return found


def passage(tokenizer: Tokenizer, split: Split, seed: int, index: int, length: int) -> list[int]:
    """Every passage once before any comes again, each time in another order."""
    passages = _passages(tokenizer, split, length)
    epoch, place = divmod(index, len(passages))
    order = random.Random(f"novels {split} {seed} {epoch}").sample(range(len(passages)),
                                                                    len(passages))
    number, begin, end = passages[order[place]]
    return _novels(tokenizer, split)[number].ids[begin:end]
