"""Engram addresses: exact against the vectors and against arithmetic with Python's integers."""

import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import ModelConfig
from labkit.text import Tokenizer, engram_classes, engram_hash
from labkit.text.engram_hash import (
    addresses,
    engram_multipliers,
    engram_offsets,
    engram_primes,
    engram_rows,
    next_history,
)

VECTORS = json.loads(
    (Path(__file__).parent / "golden/primitives/engram_addresses.json").read_text(encoding="utf-8")
)
FLASH = ModelConfig.preset("flash")
REAL = Tokenizer.deepseek()
REAL_CLASSES = engram_classes(REAL)[0]


def small_config(N: int = 4, classes: int = 17, layers: tuple[int, ...] = (1, 4)):
    return SimpleNamespace(
        engram_layer_ids=layers,
        engram_vocab_size=101,
        engram_n_heads=2,
        engram_max_ngram_size=N,
        engram_pad_id=2,
        engram_compressed_vocab_size=classes,
    )


def by_hand(config, classes, ids, blocked):
    """One row, token by token, from the definition: [T][layers][(N-1)*heads]."""
    primes, N = engram_primes(config), config.engram_max_ngram_size
    out = []
    for t in range(len(ids)):
        out.append([])
        for layer, moduli in zip(config.engram_layer_ids, primes, strict=True):
            m = engram_multipliers(layer, config.engram_compressed_vocab_size, N)
            rows, offset, table = [], 0, iter(moduli)
            for order in range(2, N + 1):
                mixed, open_ = 0, True
                for back in range(order):
                    open_ = open_ and t - back >= 0 and not blocked[t - back]
                    id_ = ids[t - back] if open_ else config.engram_pad_id
                    product = classes[id_] * m[back]
                    assert product < 2**63
                    mixed ^= product
                for _ in range(config.engram_n_heads):
                    prime = next(table)
                    rows.append(mixed % prime + offset)
                    offset += prime
            out[-1].append(rows)
    return out


# -- the released tables --------------------------------------------------------------------


def test_released_primes_rows_and_multipliers():
    assert engram_primes(FLASH) == [VECTORS["primes"][str(i)] for i in FLASH.engram_layer_ids]
    assert engram_rows(FLASH) == [384_006_168, 384_016_682]
    for layer in FLASH.engram_layer_ids:
        found = engram_multipliers(layer, VECTORS["compressed_vocab"], 4)
        assert found == [int(m) for m in VECTORS["multipliers"][str(layer)]]


@pytest.mark.parametrize("case", VECTORS["cases"], ids=[c["text"][:20] for c in VECTORS["cases"]])
def test_released_addresses(case):
    ids = torch.tensor([case["input_ids"]])
    assert REAL.encode(case["text"], bos=True) == case["input_ids"]
    assert REAL_CLASSES[ids][0].tolist() == case["classes"]
    rows = addresses(FLASH, REAL_CLASSES, ids)  # [1,T,2,24]
    assert rows.dtype == torch.int64
    assert rows[0, :, 0].tolist() == case["layer_1"]
    assert rows[0, :, 1].tolist() == case["layer_14"]


def test_released_addresses_against_whole_integers():
    ids = np.random.default_rng(5).integers(0, 129_280, 60).tolist()
    blocked = [t in (20, 21, 40) for t in range(60)]
    found = addresses(FLASH, REAL_CLASSES, torch.tensor([ids]), torch.tensor([blocked]))
    assert found[0].tolist() == by_hand(FLASH, REAL_CLASSES.tolist(), ids, blocked)


# -- primes, offsets, multipliers -----------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5000), st.integers(1, 3), st.integers(2, 5), st.integers(1, 5))
def test_primes_are_prime_unused_and_the_next_ones(start, layers, N, heads):
    config = small_config(N, layers=tuple(range(layers)))
    config.engram_vocab_size, config.engram_n_heads = start, heads
    sieve = np.ones(start + 2000, dtype=bool)
    sieve[:2] = False
    for p in range(2, math.isqrt(len(sieve)) + 1):
        sieve[p * p :: p] = False
    primes = engram_primes(config)
    flat = [p for layer in primes for p in layer]
    # Distinct, and since every order starts again from the same place, without a gap.
    assert flat == (start + np.flatnonzero(sieve[start:])[: len(flat)]).tolist()
    assert all(len(layer) == (N - 1) * heads for layer in primes)
    for layer, offsets, rows in zip(
        primes, engram_offsets(config), engram_rows(config), strict=True
    ):
        assert offsets == [sum(layer[:k]) for k in range(len(layer))] and rows == sum(layer)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 2**40), st.integers(2, 6))
def test_products_of_multipliers_fit_in_63_bits(layer, classes, N):
    found = engram_multipliers(layer, classes, N)
    assert len(found) == N and all(type(m) is int and m % 2 == 1 for m in found)
    assert all((classes - 1) * m < 2**63 for m in found)


def test_released_multipliers_do_not_fit_in_a_float():
    # Rounding to a float changes products, and with them rows: they must never pass one.
    m = engram_multipliers(1, 99_092, 4)[0]
    assert int(float(99_091 * m)) != 99_091 * m and 99_091 * m > 2**60


# -- addresses ------------------------------------------------------------------------------


@st.composite
def requests(draw):
    """A config, a class map, ids [B,T], blocked [B,T] and lengths [B]."""
    N = draw(st.integers(2, 5))
    V = draw(st.integers(3, 30))
    # Classes need not be small or dense: up to 2**40 of them exercises the whole width.
    count = draw(st.sampled_from([V, 99_092, 2**40]))
    classes = draw(st.lists(st.integers(0, count - 1), min_size=V, max_size=V))
    B, T = draw(st.integers(1, 3)), draw(st.integers(0, 14))
    ids = [[draw(st.integers(0, V - 1)) for _ in range(T)] for _ in range(B)]
    blocked = [[draw(st.sampled_from([0, 0, 0, 1])) == 1 for _ in range(T)] for _ in range(B)]
    lengths = [draw(st.integers(0, T)) for _ in range(B)]
    shape = (B, T)
    return (
        small_config(N, count),
        torch.tensor(classes),
        torch.tensor(ids, dtype=torch.int64).view(shape),
        torch.tensor(blocked, dtype=torch.bool).view(shape),
        torch.tensor(lengths),
    )


def with_padding(blocked, lengths):
    return blocked | (torch.arange(blocked.shape[1]) >= lengths[:, None])


def agrees_with_hand(function, request) -> bool:
    config, classes, ids, blocked, lengths = request
    blocked = with_padding(blocked, lengths)
    found = function(config, classes, ids, blocked)
    expected = [
        by_hand(config, classes.tolist(), row, mask)
        for row, mask in zip(ids.tolist(), blocked.tolist(), strict=True)
    ]
    return found.tolist() == expected


@settings(max_examples=150, deadline=None)
@given(requests())
def test_addresses_follow_the_definition(request_):
    assert agrees_with_hand(addresses, request_)


@settings(max_examples=150, deadline=None)
@given(requests())
def test_rows_stay_inside_their_own_table(request_):
    config, classes, ids, blocked, _ = request_
    rows = addresses(config, classes, ids, blocked)
    first = torch.tensor(engram_offsets(config))
    size = torch.tensor(engram_primes(config))
    assert bool(((rows >= first) & (rows < first + size)).all())


@settings(max_examples=150, deadline=None)
@given(requests(), st.data())
def test_chunks_with_history_equal_one_pass(request_, data):
    config, classes, ids, blocked, lengths = request_
    T = ids.shape[1]
    blocked = with_padding(blocked, lengths)
    whole = addresses(config, classes, ids, blocked)
    cuts = sorted(data.draw(st.lists(st.integers(0, T), max_size=5)))
    history, pieces = None, []
    for start, end in zip([0, *cuts], [*cuts, T], strict=True):
        ids_, blocked_ = ids[:, start:end], blocked[:, start:end]
        pieces.append(addresses(config, classes, ids_, blocked_, history))
        history = next_history(config, classes, ids_, None, blocked_, history)
    assert torch.equal(torch.cat(pieces, 1), whole)


@settings(max_examples=150, deadline=None)
@given(requests(), st.data())
def test_rows_of_different_lengths_continue_each_from_its_own_end(request_, data):
    config, classes, ids, blocked, lengths = request_
    B, T = ids.shape
    rest = data.draw(st.integers(1, 5))
    more = torch.randint(len(classes), (B, rest), generator=torch.Generator().manual_seed(T))
    first = with_padding(blocked, lengths)
    history = next_history(config, classes, ids, lengths, first)
    for _ in range(2):  # a step in which no row advances changes nothing
        history = next_history(
            config, classes, more, torch.zeros(B, dtype=torch.int64), None, history
        )
    found = addresses(config, classes, more, None, history)
    for b, live in enumerate(lengths.tolist()):
        row = torch.cat([ids[b, :live], more[b]])[None]
        mask = torch.cat([blocked[b, :live], torch.zeros(rest, dtype=torch.bool)])[None]
        assert torch.equal(found[b], addresses(config, classes, row, mask)[0, live:])


def test_what_stands_at_a_blocked_position_does_not_matter():
    config, classes = small_config(), torch.arange(17)
    blocked = torch.tensor([[False, True, False, False]])
    one = addresses(config, classes, torch.tensor([[3, 4, 5, 6]]), blocked)
    other = addresses(config, classes, torch.tensor([[3, -7, 5, 6]]), blocked)
    assert torch.equal(one, other)
    kept = [
        next_history(config, classes, torch.tensor([[3, i, 5, 6]]), None, blocked) for i in (4, -7)
    ]
    assert torch.equal(*kept) and kept[0].tolist() == [[-1, 5, 6]]


def test_the_padding_id_inside_a_text_blocks_nothing():
    config, classes = small_config(), torch.arange(17)
    pad = config.engram_pad_id
    written = addresses(config, classes, torch.tensor([[9, pad, 5]]))
    masked = addresses(
        config, classes, torch.tensor([[9, pad, 5]]), torch.tensor([[False, True, False]])
    )
    # The bigram at the last token reads the same class either way, the trigram does not:
    # behind the mask the 9 is blocked too.
    assert torch.equal(written[0, 2, :, :2], masked[0, 2, :, :2])
    assert not torch.equal(written[0, 2, :, 2:4], masked[0, 2, :, 2:4])


def test_no_tokens_and_no_engram_layers():
    empty = torch.empty((2, 0), dtype=torch.int64)
    assert addresses(small_config(), torch.arange(17), empty).shape == (2, 0, 2, 6)
    assert next_history(small_config(), torch.arange(17), empty).tolist() == [[-1] * 3] * 2
    assert addresses(small_config(layers=()), torch.arange(17), empty).shape == (2, 0, 0, 6)


# -- faults that this file must notice ------------------------------------------------------

FAULTS = {
    "pad id instead of its class": (
        "pad_class = classes[config.engram_pad_id]",
        "pad_class = torch.tensor(config.engram_pad_id)",
    ),
    "a block hides one slot only": ("open_ = open_ & (slot >= 0)", "open_ = slot >= 0"),
    "blocking decided from classes": ("(slot >= 0)", "(slot >= 0) & (slot != pad_class)"),
    "multipliers through a float": (
        "multipliers[:, back]",
        "multipliers[:, back].double().long()",
    ),
    "products through a float": (
        "(filled[..., None] * multipliers[:, back])",
        "(filled[..., None].double() * multipliers[:, back].double()).long()",
    ),
    "sum instead of XOR": ("mixed ^ (filled", "mixed + (filled"),
    "look-back reversed": ("multipliers[:, back]", "multipliers[:, N - 1 - back]"),
    "head-major rows": ("torch.stack(rows, dim=3)", "torch.stack(rows, dim=4)"),
    "offsets forgotten": (" + offsets[:, order]", ""),
    "look-back one token short": ("N - 1 - back : N - 1 - back", "N - back : N - back"),
}


def battery():
    """Fixed requests, wide and small, with blocks and padding ids inside."""
    generator = torch.Generator().manual_seed(11)
    for count in (17, 2**40):
        classes = torch.randint(count, (17,), generator=generator)
        ids = torch.randint(17, (4, 40), generator=generator)
        ids[:, ::7] = 2
        blocked = torch.rand((4, 40), generator=generator) < 0.15
        yield small_config(4, count), classes, ids, blocked, torch.tensor([40, 1, 0, 23])


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault):
    right, wrong = FAULTS[fault]
    source = inspect.getsource(addresses)
    assert source.count(right) == 1, "the fault no longer matches the code"
    names = dict(vars(engram_hash))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), names)
    assert all(agrees_with_hand(addresses, request_) for request_ in battery())
    try:
        noticed = not all(agrees_with_hand(names["addresses"], request_) for request_ in battery())
    except RuntimeError:  # a shape that no longer fits
        noticed = True
    assert noticed


def test_a_forgotten_history_is_noticed():
    config, classes, ids, blocked, _ = next(battery())
    whole = addresses(config, classes, ids, blocked)
    assert not torch.equal(addresses(config, classes, ids[:, 5:], blocked[:, 5:]), whole[:, 5:])
