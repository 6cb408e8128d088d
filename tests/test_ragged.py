"""Passes whose rows differ in length: padding is not computed, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reuse_helpers import must_be_close, same_state, text

from labkit.cache.rows import join
from labkit.config import ModelConfig
from labkit.model.run import Run
from labkit.model.work import counting
from labkit.mutants import golden, rules
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.trace import Taps

BY_ROW = ("attn.scores", "attn.values", "indexer.scores", "indexer.sum", "compressor.pool")
"""What looks at a sequence: keys of all rows are as many as those of the fullest."""


@pytest.fixture(scope="module")
def model():
    return random_model(small_config(), seed=1)


def run_of(model, counts, length, start=0):
    B = len(counts)
    return Run(model.config, model.new_cache(B), model.kernels, torch.full((B,), start),
               torch.tensor(counts), length, model.dtype)


# ---------------------------------------------------------------------------- packing
@given(st.lists(st.integers(0, 5), min_size=1, max_size=5), st.integers(5, 7))
def test_packed_tokens_are_the_live_ones_in_order(counts, length):
    model = random_model(small_config())
    run = run_of(model, counts, length)
    x = torch.arange(len(counts) * length * 2).reshape(len(counts), length, 2)
    live = [x[b, :n] for b, n in enumerate(counts)]
    if all(n == length for n in counts):
        assert run.pack(x) is x and run.unpack(x) is x and run.rows(x) is x and run.tokens(x) is x
        return
    packed = run.pack(x)
    assert torch.equal(packed[0], torch.cat(live))
    rows = run.unpack(packed)
    for b, n in enumerate(counts):
        assert torch.equal(rows[b, :n], live[b]) and not rows[b, n:].any()
    taken = run.rows(packed)
    assert torch.equal(run.tokens(taken), packed)
    short = length <= model.config.sliding_window
    assert taken.shape[:2] == ((sum(counts), 1) if short else (len(counts), length))


def test_gradients_pass_through_packing(model):
    run = run_of(model, [3, 1], 4)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    run.unpack(run.pack(x)).square().sum().backward()
    assert torch.equal(x.grad, 2 * x * run.live[..., None])


def test_training_on_ragged_rows_gives_the_gradients_of_the_rows_alone():
    model = random_model(small_config(), seed=2)
    ids, counts = random_ids(model.config, 11, 3, seed=3), [11, 2, 7]

    def gradients(passes):
        model.zero_grad()
        for rows, lengths in passes:
            logits = model(rows, lengths).logits
            for b in range(len(rows)):
                n = int(lengths[b]) if lengths is not None else rows.shape[1]
                logits[b, :n].square().sum().backward(retain_graph=True)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    together = gradients([(ids, torch.tensor(counts))])
    alone = gradients([(ids[b : b + 1, :n], None) for b, n in enumerate(counts)])
    assert together.keys() == alone.keys() and len(together) > 100
    for name, expected in alone.items():
        must_be_close(name, expected, together[name])


# ---------------------------------------------------------------------------- the same numbers
def live_taps(taps, counts):
    """Of each row what is live, by name; what belongs to the cache is left to `same_state`."""
    skip = ("attn.window", "compressed_kv", "index_keys")
    return [{name: value[b : b + 1, :n] for name, value in taps.items() if not name.endswith(skip)}
            for b, n in enumerate(counts)]


@given(st.lists(st.tuples(st.integers(0, 17), st.integers(1, 9)), min_size=2, max_size=5),
       st.booleans())
def test_a_ragged_pass_equals_its_rows_alone_in_every_tensor(rows, keep):
    """(past, new) of each row; windows are of 4, so both short and long passes occur."""
    model = random_model(small_config(), seed=1)
    texts = [text(model, past + new, seed) for seed, (past, new) in enumerate(rows)]
    past, counts = [p for p, _ in rows], [n for _, n in rows]
    caches = [model.new_cache(page_tokens=4) for _ in rows]
    with torch.no_grad():
        for row, n, cache in zip(texts, past, caches, strict=True):
            if n:
                model(torch.tensor([row[:n]]), cache=cache)
        cache, taps = join(caches), Taps()
        ids = torch.full((len(rows), max(counts)), 3)
        for b, row in enumerate(texts):
            ids[b, : counts[b]] = torch.tensor(row[past[b] :])
        found = model(ids, torch.tensor(counts), cache=cache, taps=taps, keep=keep).logits
        silent = join(caches)
        quiet = model(ids, torch.tensor(counts), cache=silent, keep=keep).logits
        assert torch.equal(found, quiet)                # taps change no bit
        for b, own in enumerate(live_taps(taps, counts)):
            alone = Taps()
            model(torch.tensor([texts[b][past[b] :]]), cache=caches[b], taps=alone)
            (expected,) = live_taps(alone, counts[b : b + 1])
            for name, value in expected.items():
                if name.endswith("candidates"):         # as wide as the fullest row's entries
                    assert not own[name][..., value.shape[-1] :].any()
                    own[name] = own[name][..., : value.shape[-1]]
            wrong = rules.same_run(expected, own, rules.FP64)
            assert wrong is None, wrong
            assert not found[b, counts[b] :].any()
            same_state(caches[b], cache, [(0, b)])
            same_state(caches[b], silent, [(0, b)])


@pytest.mark.parametrize("kernels", ("reference", "cpu"))
@pytest.mark.parametrize("tail, cut", ((4, "inside"), (4, "after"), (7, "inside"), (0, "after")))
def test_a_ragged_cut_prefill_equals_its_rows_alone(kernels, tail, cut):
    model = random_model(small_config(), seed=1, kernel_set=kernels)
    ids, counts = random_ids(model.config, 21, 4, seed=4), [21, 2, 5, 9]
    together = model.new_cache(4, page_tokens=4)
    with torch.no_grad():
        logits = model(ids, torch.tensor(counts), cache=together, tail=tail, cut=cut).logits
        assert logits.shape[:2] == (4, tail)
        for b, n in enumerate(counts):
            alone = model.new_cache(page_tokens=4)
            # A row no longer than the tail is not cut.
            expected = model(ids[b : b + 1, :n], cache=alone, tail=tail, cut=cut).logits[0]
            must_be_close(f"row {b}", expected, logits[b, : min(n, tail)])
            same_state(alone, together, [(0, b)])


@pytest.mark.parametrize("length", (4, 9))
def test_last_logits_of_ragged_rows(model, length):
    ids, counts = random_ids(model.config, length, 3, seed=5), [length, 1, 3]
    with torch.no_grad():
        every = model(ids, torch.tensor(counts)).logits
        last = model(ids, torch.tensor(counts), last_only=True).logits
    assert last.shape[1] == 1
    for b, n in enumerate(counts):
        must_be_close(f"row {b}", every[b, n - 1], last[b, 0])


@pytest.mark.parametrize("form", ("packed", "fp8", "bf16", "plain"))
def test_rounded_rows_follow_the_rule_of_rounded_schedules(form):
    """fp32 sums in another order may flip a rounding, which travels; no more than that."""
    model = golden.model("text", True)
    ids, counts = golden.case("long").ids, [5, 1, 3, 1]
    whole = ids.shape[1] - 8
    caches = [model.new_cache(form=form) for _ in counts]
    new = torch.zeros(4, 5, dtype=torch.int64)
    with torch.no_grad():
        for b, cache in enumerate(caches):
            model(ids[:1, b : whole + b], cache=cache)
            new[b, : counts[b]] = ids[0, whole + b : whole + b + counts[b]]
        found = model(new, torch.tensor(counts), cache=join(caches)).logits
        for b, cache in enumerate(caches):
            expected = model(new[b : b + 1, : counts[b]], cache=cache).logits
            wrong = rules.mostly(f"row {b}", expected, found[b : b + 1, : counts[b]])
            assert wrong is None, wrong


# ---------------------------------------------------------------------------- the work
@pytest.mark.parametrize("past, counts", (
    ([0, 0, 0], [41, 1, 20]), ([9, 30, 2], [6, 1, 1]), ([8, 8, 8, 8], [1, 6, 3, 1]),
    ([5, 12], [2, 3])), ids=str)
@pytest.mark.parametrize("name", ("small", "nano"))
def test_work_is_that_of_the_live_tokens(name, past, counts):
    """Multiply-adds of a ragged pass, part by part, against its rows alone."""
    config = small_config() if name == "small" else ModelConfig.preset("nano")
    model = random_model(config, 1, torch.float32, True)
    c, T, n = config, max(counts), sum(counts)

    @torch.no_grad()
    def work(rows):
        cache = model.new_cache(len(rows))
        filled = [b for b in rows if past[b]]
        ids = random_ids(config, 64, len(past), seed=3)
        if filled:
            assert filled == list(rows)
            model(ids[list(rows), : max(past[b] for b in rows)],
                  torch.tensor([past[b] for b in rows]), cache=cache)
        with counting(model) as counted:
            model(ids[list(rows), -max(counts[b] for b in rows):],
                  torch.tensor([counts[b] for b in rows]), cache=cache)
        return counted

    together, alone = work(range(len(past))), [work([b]) for b in range(len(past))]
    sums = sum((w.macs for w in alone), start=type(together.macs)())
    assert set(together.passes.values()) == {n} and set(together.stored.values()) == {n}
    short = T <= c.sliding_window
    for (layer, part), found in together.macs.items():
        if part == "indexer" and c.roles[layer].kind == "full":
            # Index keys are made for places of groups, of which short rows fill fewer.
            r, key = c.roles[layer].ratio, c.head_dim * c.index_head_dim
            places = len(past) * ((T + r - 1) // r) - sum((k + r - 1) // r for k in counts)
            assert found == sums[layer, part] + places * key, (layer, part)
        elif part not in BY_ROW or (part.startswith("attn") and short):
            assert found == sums[layer, part] > 0, (layer, part)
        else:
            assert found >= sums[layer, part]
    if short:  # one query a row: no row computes another's padding, only its keys
        for layer, role in enumerate(c.roles):
            if role.kind in ("full", "reindex"):
                S = max((p + k) // role.ratio for p, k in zip(past, counts, strict=True))
                assert together.macs[layer, "indexer.sum"] == n * c.index_n_heads * S
    everything = sum(w.total() for w in alone)
    print(f"{name} {past} {counts}: {together.total() / everything:.3f} of the rows alone; "
          f"padded it would be {len(past) * T / n:.2f}")
    assert together.total() < everything * (1.0 + 0.5 * (len(past) * T / n - 1))
