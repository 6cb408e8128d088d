"""Exercise 10.1: bytes a token, from a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.config import ModelConfig
from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "10.1", "What a token leaves behind", "bytes_a_token"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 5
TOLERANCE = 1e-9
OBJECTIVE = """
Compute the bytes that a token of a long text adds to the packed cache. `ratios` holds r of every
layer that *publishes* entries: it stores one entry and one index key for r tokens. An entry has
`d` values in FP4 (half a byte each) and one byte of scale for 16 of them; a key has `di` values
in FP4 and one byte of scale for 32.
"""
HELP = (
    """Two questions, one after the other: how many bytes are one entry and its key, and how many
    of them does a token add over all the layers that publish?""",
    """An entry and its key are d/2 + d/16 + di/2 + di/32 bytes. A layer of ratio r adds 1/r of
    that for each token.""",
    """```python
    entry = d / 2 + ...
    key = ...
    return sum((entry + key) / r for r in ratios)
    ```""",
)
AFTER = """With the released numbers this is 890. The check cannot see what does not grow: windows,
remainders and drafts are a few megabytes a request, whatever the text."""


def solution(ratios, d, di):
    """Bytes a token, float.

    ratios: r of each layer that publishes entries; d, di: widths of an entry and a key.
    """
    entry = d / 2 + d / 16
    key = di / 2 + di / 32
    return sum((entry + key) / r for r in ratios)


def alternative(ratios, d, di):
    """In bits, entries a token first."""
    entries = sum(1 / r for r in ratios)
    return entries * (4 * d + 8 * d / 16 + 4 * di + 8 * di / 32) / 8


def one_scale_size(ratios, d, di):
    return sum((d / 2 + d / 32 + di / 2 + di / 32) / r for r in ratios)


def without_keys(ratios, d, di):
    return sum((d / 2 + d / 16) / r for r in ratios)


def ratios_forgotten(ratios, d, di):
    return len(ratios) * solution([1], d, di)


def keys_and_values_apart(ratios, d, di):
    return sum((2 * (d / 2 + d / 16) + di / 2 + di / 32) / r for r in ratios)


MISTAKES = (
    Mistake(one_scale_size, "an entry has a scale for every 16 values; 32 is the block of the "
            "index keys.", "press: FP4 blocks of 32"),
    Mistake(without_keys, "the index keys are missing; they are stored beside the entries.",
            "cache calculators for dense attention"),
    Mistake(ratios_forgotten, "a layer of ratio r stores one entry for r tokens, not for each.",
            "compression left out"),
    Mistake(keys_and_values_apart, "keys and values are counted apart, but one vector is both.",
            "formulas of ordinary attention"),
)


def cases(lab: Lab) -> Iterator[Case]:
    for what, c in (("this model", lab.config),
                    ("the released model", ModelConfig.preset("flash"))):
        yield Case(what, ([c.compress_ratios[i] for i in c.kv_source_layer_ids], c.head_dim,
                          c.index_head_dim))
    yield Case("a model without entries", ([], 512, 128))
