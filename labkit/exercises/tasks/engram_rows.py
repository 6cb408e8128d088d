"""Exercise 2.1: from the last tokens to the rows of an Engram table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.text.engram_hash import engram_multipliers, engram_offsets, engram_primes

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "2.1", "From the last tokens to rows", "rows_of"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 3, 5
TOLERANCE = 0.0
OBJECTIVE = """
Write the hash of one Engram layer. For token t and order n (2 to N) it mixes the classes of the
last n tokens, the newest with the first multiplier:

    mix = c[t]*m[0] XOR c[t-1]*m[1] XOR ... XOR c[t-n+1]*m[n-1]

The row is `mix` modulo the table's prime plus the table's offset; all tables of an order see the
same mix. A look-back before the start of the text meets `pad_class`.
"""
HELP = (
    """Work with whole columns: the class t-back of *every* token is one shifted tensor.
    Begin with the mix of order 1 (the token itself) and add one token of look-back at a time:
    each order's mix is the one before it, XOR one more product.""",
    """`^` is XOR on int64 tensors, and the products stay below 2^63, so nothing overflows as long
    as nothing passes through a float. Shift by putting `back` copies of `pad_class` in front and
    cutting the same number off the end.""",
    """```python
    mix, out = classes * multipliers[0], []
    for back in range(1, len(multipliers)):
        past = torch.cat([classes.new_full((back,), pad_class), classes[:-back]])
        mix = ...                                      # one more product
        out.append(mix[:, None] % ... + ...)           # [T,E] of order back+1
    return torch.stack(out, dim=1)
    ```
    (`classes[:-back]` is empty for texts shorter than `back`; cut the joined tensor to T.)""",
)
AFTER = """Your rows are those that the model reads, number for number. The check uses one text at a
time and one layer: it cannot see whether a look-back would survive the end of a chunk or the step
from prefill to decoding, where ports lose it."""


def solution(classes, multipliers, primes, offsets, pad_class):
    """Rows of one Engram layer, int64 [T, N-1, E].

    classes int64 [T], of the tokens; multipliers int64 [N], the newest token's first;
    primes, offsets int64 [N-1, E], of every order and head.
    """
    mix, out = classes * multipliers[0], []
    for back in range(1, len(multipliers)):
        start = classes.new_full((back,), pad_class)
        past = torch.cat([start, classes])[: len(classes)]     # class of token t-back
        mix = mix ^ (past * multipliers[back])
        out.append(mix[:, None] % primes[back - 1] + offsets[back - 1])
    return torch.stack(out, dim=1)


def alternative(classes, multipliers, primes, offsets, pad_class):
    """Token by token in Python's own integers."""
    T, N = len(classes), len(multipliers)
    out = torch.zeros(T, *primes.shape, dtype=torch.int64)
    for t in range(T):
        for n in range(2, N + 1):
            mix = 0
            for back in range(n):
                own = int(classes[t - back]) if t >= back else int(pad_class)
                mix ^= own * int(multipliers[back])
            for e in range(primes.shape[1]):
                out[t, n - 2, e] = mix % int(primes[n - 2, e]) + int(offsets[n - 2, e])
    return out


def _with(classes, multipliers, primes, offsets, pad_class, *, join=torch.bitwise_xor,
          newest_first=True, cast=torch.int64, shift=True):
    orders = []
    for n in range(2, len(multipliers) + 1):
        mix = torch.zeros_like(classes)
        for back in range(n):
            start = classes.new_full((back,), pad_class)
            past = torch.cat([start, classes])[: len(classes)]
            number = multipliers[back if newest_first else n - 1 - back]
            mix = join(mix, (past.to(cast) * number.to(cast)).to(torch.int64))
        orders.append(mix[:, None] % primes[n - 2] + (offsets[n - 2] if shift else 0))
    return torch.stack(orders, dim=1)


def oldest_first(*args):
    return _with(*args, newest_first=False)


def summed(*args):
    return _with(*args, join=torch.add)


def through_floats(*args):
    return _with(*args, cast=torch.float64)


def without_offsets(*args):
    return _with(*args, shift=False)


def zero_before_the_start(classes, multipliers, primes, offsets, pad_class):
    return _with(classes, multipliers, primes, offsets, 0)


MISTAKES = (
    Mistake(oldest_first, "the multipliers are counted from the oldest token of the n-gram, but "
            "the first one belongs to the newest, so that each order continues the mix before it.",
            "reversed n-grams, a usual first attempt"),
    Mistake(summed, "the products are added, but they are joined by XOR (a sum of two products "
            "also passes 2^63 and wraps).", "additive hashes of earlier n-gram embeddings"),
    Mistake(through_floats, "the products passed through a 64-bit float, which holds 53 bits, but "
            "they reach 63. Stay in int64.", "numbers of JSON and JavaScript, numpy's default"),
    Mistake(without_offsets, "the offsets are missing, so all tables of a layer share their first "
            "rows.", "tables looked up one by one, then laid into one"),
    Mistake(zero_before_the_start, "before the start of the text stands class 0, but it is the "
            "class of the padding id.", "zero-initialised buffers; mutant `pad_id_not_class`"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    classes = lab.model.engram_classes.cpu()
    pad = int(classes[c.engram_pad_id])
    for layer, text, what in (
            (0, "It is a truth universally acknowledged", "all orders inside a text"),
            (1, "that a single man in possession", "another layer has other multipliers"),
            (0, "It", "a text shorter than the longest n-gram looks back to padding alone")):
        number = c.engram_layer_ids[layer]
        shape = (c.engram_max_ngram_size - 1, c.engram_n_heads)
        yield Case(what, (
            classes[torch.tensor(lab.encode(text))],
            torch.tensor(engram_multipliers(number, c.engram_compressed_vocab_size,
                                            c.engram_max_ngram_size)),
            torch.tensor(engram_primes(c)[layer]).view(shape),
            torch.tensor(engram_offsets(c)[layer]).view(shape), pad))
