"""Beginnings of texts by domain, for measurements in which the kind of text matters.

`counting` is kept apart from the others everywhere: a draft that has learnt to count is right
almost always, so an average that holds it says nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from labkit.errors import InputError
from labkit.text.corpus import load_corpus
from labkit.text.synthetic import function
from labkit.text.tokenizer import Tokenizer


def prompts(domain: str, tokenizer: Tokenizer, count: int, length: int,
            seed: int = 0) -> list[list[int]]:
    """`count` prompts of exactly `length` ids, BOS first; the same seed gives the same ones.

    domain: one of `DOMAINS`. prose: held-out text of the corpus, evenly spread; code: small
    functions; counting: numbers in a row. InputError for another domain or sizes below 1.
    """
    if domain not in DOMAINS:
        raise InputError(f"domain is {domain!r}: choose one of {', '.join(DOMAINS)}")
    if count < 1 or length < 2:
        raise InputError(f"count is {count} and length {length}: at least 1 prompt of 2 tokens")
    assert tokenizer.bos_id is not None
    found = DOMAINS[domain](tokenizer, count, length - 1, random.Random(f"{domain} {seed}"))
    return [[tokenizer.bos_id, *ids] for ids in found]


def _prose(tokenizer: Tokenizer, count: int, length: int, rng: random.Random) -> list[list[int]]:
    texts = [tokenizer.encode(text) for text in load_corpus("heldout").values()]
    found = []
    for number in range(count):
        ids = texts[number % len(texts)]
        room = len(ids) - length
        if room < 0:
            raise InputError(f"a held-out text has {len(ids)} tokens, fewer than {length}")
        found.append(ids[(at := rng.randrange(room + 1)) : at + length])
    return found


def _written(line: Callable[[random.Random], str], tokenizer: Tokenizer, count: int, length: int,
             rng: random.Random) -> list[list[int]]:
    """Lines until there are enough tokens."""
    found = []
    for _ in range(count):
        text, ids = "", []  # type: ignore[var-annotated]
        while len(ids) < length:
            text += line(rng)
            ids = tokenizer.encode(text)
        found.append(ids[:length])
    return found


def _code(tokenizer: Tokenizer, count: int, length: int, rng: random.Random) -> list[list[int]]:
    return _written(function, tokenizer, count, length, rng)


def _counting(tokenizer: Tokenizer, count: int, length: int,
              rng: random.Random) -> list[list[int]]:
    found = []
    for _ in range(count):
        number = iter(range(rng.randrange(1, 50), 10**9))
        found += _written(lambda rng, number=number: f"{next(number)}, ",  # type: ignore[misc]
                          tokenizer, 1, length, rng)
    return found


DOMAINS = {"prose": _prose, "code": _code, "counting": _counting}
"""By name, what writes the prompts of a domain."""
