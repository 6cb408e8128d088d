"""However a text is fed (whole, in pieces, by token, in a batch), the numbers are the same."""

import functools

import pytest
import torch
from helpers import KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import pieces, ragged_batches, texts_in_pieces

from labkit.errors import InputError
from labkit.mutants import golden, rules
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.schedules import in_chunks, in_ragged_chunks, one_pass, row

# Over 41 tokens: chunks that end inside groups, single tokens, both.
SPLITS = {"7+13+21": [7, 13, 21], "1*41": [1] * 41, "20+1*21": [20] + [1] * 21, "2+39": [2, 39]}
LONG = settings(settings.get_profile("long"))


@functools.cache
def small(dtype=torch.float64, rounding=False, kernels="reference", ratio=2):
    """Window 4, candidate pool full after 6 entries, groups of `ratio` (then of 1)."""
    config = small_config(compress_ratios=(0, ratio, ratio, ratio, 1, 1, 1))
    return random_model(config, 1, dtype, rounding, kernels)


@functools.cache
def nano(rounding=False, kernels="reference", dtype=torch.float32):
    """The vectors' model: window 8, pool of 12 entries."""
    model = golden.model("text", rounding, kernels)
    return model if dtype == torch.float32 else golden.build(
        model.config, {n: p.to(dtype) for n, p in model.state_dict().items()}, rounding, kernels)


def nano_ids(length):
    return golden.case("long").ids[:, :length]


def agree(expected, actual, of_span):
    wrong = rules.same_run(expected, actual, of_span)
    assert wrong is None, wrong


def agree_fp32(expected, actual):
    """The Engram gate takes a root, which magnifies fp32 errors near zero: its stream is judged."""
    agree({n: v for n, v in expected.items() if not n.endswith("engram.gate")}, actual, rules.FP32)


def agree_rounded(expected, actual):
    """fp32 noise differs between schedules and flips roundings; float64 is the strict test."""
    for name in expected:
        if name in actual and not name.endswith(("ffn.picked", "ffn.weights", "engram.gate")):
            first = name.startswith("layers.2.") and name.endswith(("compressed_kv", "index_keys"))
            rule = rules.close_but_flips if first else rules.mostly
            wrong = rule(name, expected[name], actual[name])
            assert wrong is None, wrong


# ---------------------------------------------------------------------------- any pieces
@given(texts_in_pieces(st.integers(1, 48)), st.sampled_from([1, 2, 3, 4]))
def test_any_pieces_in_float64(text, ratio):
    length, sizes = text
    model = small(ratio=ratio)
    ids = random_ids(model.config, length, seed=length)
    agree(one_pass(model, ids), in_chunks(model, ids, sizes), rules.FP64)


@given(texts_in_pieces(st.integers(1, 48)))
def test_any_pieces_with_rounding_in_float64(text):
    """In float64 two schedules differ far below the rounding step: nothing flips."""
    length, sizes = text
    model = small(rounding=True)
    ids = random_ids(model.config, length, seed=length)
    agree(one_pass(model, ids), in_chunks(model, ids, sizes), rules.FP64)


# 1..3, odd lengths, the window (8) and one to each side, the pool (12) and beyond, far beyond.
LENGTHS = st.sampled_from([1, 2, 3, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 25, 26, 61, 100])


@given(texts_in_pieces(LENGTHS), st.sampled_from(KERNELS))
def test_any_pieces_in_fp32(text, kernels):
    length, sizes = text
    model = nano(kernels=kernels)
    ids = nano_ids(length)
    agree_fp32(one_pass(model, ids), in_chunks(model, ids, sizes))


@pytest.mark.slow
@LONG
@given(texts_in_pieces(st.integers(1, 100)), st.sampled_from([1, 2, 3, 4, 5]), st.booleans())
def test_any_pieces_many_times(text, ratio, rounding):
    length, sizes = text
    model = small(rounding=rounding, ratio=ratio)
    ids = random_ids(model.config, length, seed=length)
    agree(one_pass(model, ids), in_chunks(model, ids, sizes), rules.FP64)


@pytest.mark.parametrize("length", (1, 2, 3, 7, 8, 9, 12, 13, 27))
def test_token_by_token(length):
    model = nano(dtype=torch.float64)
    ids = nano_ids(length)
    agree(one_pass(model, ids), in_chunks(model, ids, [1] * length), rules.FP64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("split", SPLITS)
class TestKnownSplits:
    def test_float64(self, split, kernels):
        model = nano(kernels=kernels, dtype=torch.float64)
        whole = one_pass(model, nano_ids(41))
        agree(whole, in_chunks(model, nano_ids(41), SPLITS[split]), rules.FP64)

    def test_float64_rounded(self, split, kernels):
        model = nano(True, kernels, torch.float64)
        whole = one_pass(model, nano_ids(41))
        agree(whole, in_chunks(model, nano_ids(41), SPLITS[split]), rules.FP64)

    def test_fp32(self, split, kernels):
        model = nano(kernels=kernels)
        whole = one_pass(model, nano_ids(41))
        agree_fp32(whole, in_chunks(model, nano_ids(41), SPLITS[split]))

    def test_fp32_rounded(self, split, kernels):
        model = nano(True, kernels)
        whole = one_pass(model, nano_ids(41))
        agree_rounded(whole, in_chunks(model, nano_ids(41), SPLITS[split]))

    def test_ratio_three(self, split, kernels):
        model = small(kernels=kernels, ratio=3)
        ids = random_ids(model.config, 41, seed=2)
        agree(one_pass(model, ids), in_chunks(model, ids, SPLITS[split]), rules.FP64)


def test_the_kernel_sets_agree():
    ids = nano_ids(100)
    agree(one_pass(nano(dtype=torch.float64), ids),
          one_pass(nano(kernels="cpu", dtype=torch.float64), ids), rules.FP64)


def test_last_only_is_the_last_live_row_of_all():
    model = small()
    ids, lengths = random_ids(model.config, 19, rows=3), torch.tensor([19, 1, 8])
    with torch.no_grad():
        whole = model(ids, lengths).logits
        last = model(ids, lengths, last_only=True).logits
    assert last.shape == (3, 1, model.config.vocab_size)
    for b, n in enumerate(lengths.tolist()):
        assert rules.close("last", whole[b, n - 1], last[b, 0], rules.FP64) is None


# ---------------------------------------------------------------------------- ragged batches
class Counted:
    """Counts the forwards of a model's layers; a batch must take one, however ragged."""

    def __init__(self, model):
        self.calls = 0
        self.hook = model.layers[0].register_forward_hook(self._count)

    def _count(self, *_):
        self.calls += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.hook.remove()


@given(ragged_batches())
def test_ragged_batches_equal_single_rows(batch):
    lengths, counts = batch
    model = small()
    ids = random_ids(model.config, max(lengths), rows=len(lengths), seed=sum(lengths))
    with Counted(model) as counted:
        padded = one_pass(model, ids, torch.tensor(lengths))
    assert counted.calls == 1, "one forward per batch"
    with Counted(model) as counted:
        continued = in_ragged_chunks(model, ids, counts)
    assert counted.calls == len(counts)
    for b, n in enumerate(lengths):
        alone = one_pass(model, ids[b : b + 1, :n])
        agree(alone, row(padded, b, n, model.config), rules.FP64)
        agree(alone, continued[b], rules.FP64)


@given(st.data())
def test_what_stands_behind_a_row_s_end_is_void(data):
    """Padding is a length, never an id: any ids behind it give the same numbers before it."""
    model = small()
    lengths = torch.tensor([11, 4])
    ids = random_ids(model.config, 11, rows=2, seed=1)
    other = ids.clone()
    fill = st.integers(0, model.config.vocab_size - 1)
    other[1, 4:] = torch.tensor(data.draw(st.lists(fill, min_size=7, max_size=7)))
    with torch.no_grad():
        a, b = model(ids, lengths).logits, model(other, lengths).logits
    assert rules.close("the short row", a[1, :4], b[1, :4], rules.FP64) is None
    assert rules.close("the other row", a[0], b[0], rules.FP64) is None


@pytest.mark.parametrize("kernels", KERNELS)
def test_ragged_batch_in_fp32_with_rounding(kernels):
    model = nano(True, kernels)
    ids, lengths = golden.case("padded").ids, [45, 30, 7]
    padded = one_pass(model, ids, torch.tensor(lengths))
    for b, n in enumerate(lengths):
        agree_rounded(one_pass(model, ids[b : b + 1, :n]), row(padded, b, n, model.config))


# ---------------------------------------------------------------------------- causality
@given(st.integers(2, 40), st.data())
def test_a_later_token_changes_nothing_before_it(length, data):
    model = small()
    at = data.draw(st.integers(1, length - 1))
    ids = random_ids(model.config, length, seed=length)
    other = ids.clone()
    other[0, at] = (other[0, at] + data.draw(st.integers(1, 63))) % 64
    a, b = one_pass(model, ids), one_pass(model, other)
    for name in ("logits", "layers.6.attn.topk_indices"):
        wrong = rules.same_values(name, a[name][:, :at], b[name][:, :at], rules.FP64)
        assert wrong is None, wrong
    if at + 1 < length:  # and something after it: the test can see a change
        assert not torch.equal(a["logits"][:, at], b["logits"][:, at])


# ---------------------------------------------------------------------------- saved states
@given(st.integers(1, 30), st.integers(1, 20), pieces(14), st.integers(0, 10**6))
def test_a_restored_state_continues_as_if_nothing_had_followed(before, other, after, seed):
    model = small()
    ids = random_ids(model.config, before + 14, seed=seed)
    whole = one_pass(model, ids)["logits"][:, before:]
    cache = model.new_cache()
    one_pass(model, ids[:, :before], cache=cache)
    saved = cache.fork()
    one_pass(model, random_ids(model.config, other, seed=seed + 1), cache=cache)
    found = in_chunks(model, ids[:, before:], after, cache=saved)["logits"]
    assert rules.close("logits", whole, found, rules.FP64) is None


@pytest.mark.parametrize("layer", range(7))
def test_an_interrupted_pass_changes_nothing(layer):
    model = small()
    ids = random_ids(model.config, 10)
    cache = model.new_cache()
    one_pass(model, ids[:, :4], cache=cache)

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    hook = model.layers[layer].ffn.register_forward_pre_hook(stop)  # its attention has written
    with pytest.raises(Stop):
        model(ids[:, 4:], cache=cache)
    hook.remove()
    whole = one_pass(model, ids)["logits"][:, 4:]
    assert rules.close("logits", whole, one_pass(model, ids[:, 4:], cache=cache)["logits"],
                       rules.FP64) is None


def test_refused_input_leaves_the_cache_as_it_was():
    model = small()
    ids = random_ids(model.config, 10)
    cache = model.new_cache()
    one_pass(model, ids[:, :5], cache=cache)
    for bad in (torch.tensor([[64]]), torch.tensor([[-1]]), torch.zeros(1, 0, dtype=torch.int64),
                torch.zeros(2, 3, dtype=torch.int64), torch.zeros(1, 5000, dtype=torch.int64),
                torch.zeros(1, 2)):
        with pytest.raises(InputError):
            model(bad, cache=cache)
    for lengths in ([0], [6], [1, 1]):
        with pytest.raises(InputError, match="lengths"):
            model(ids[:, 5:], torch.tensor(lengths), cache=cache)
    found = one_pass(model, ids[:, 5:], cache=cache)["logits"]
    whole = one_pass(model, ids)["logits"][:, 5:]
    assert rules.close("logits", whole, found, rules.FP64) is None
