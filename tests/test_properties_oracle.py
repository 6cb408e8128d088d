"""Any allowed schedule of layers equals the oracle, in one pass and in pieces; rotation; taps."""

import functools

import pytest
import torch
from helpers import KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import configs, pieces

from labkit.model.rope import rotate, rotation
from labkit.mutants import checks, rules
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.oracle import Oracle
from labkit.mutants.schedules import in_chunks, one_pass
from labkit.trace import Taps

LONG = settings(settings.get_profile("long"))
checks.load()


def against_oracle(config, length, seed, rounding, sizes, kernels):
    model = random_model(config, seed, cache_rounding=rounding, kernel_set=kernels)
    ids = random_ids(config, length, seed=seed)
    oracle = Oracle(config, dict(model.named_parameters()), model.engram_classes.tolist(), rounding)
    expected = {name: value[None] for name, value in oracle.run(ids[0].tolist()).items()}
    for taps in (one_pass(model, ids), in_chunks(model, ids, sizes)):
        missing = set(expected) - set(taps)
        assert not missing, f"not computed: {missing}"
        wrong = rules.same_run(expected, taps, rules.FP64)
        assert wrong is None, wrong


@settings(max_examples=50)
@given(configs(), st.integers(1, 18), st.integers(0, 10**6), st.booleans(),
       st.sampled_from(KERNELS), st.data())
def test_any_schedule(config, length, seed, rounding, kernels, data):
    against_oracle(config, length, seed, rounding, data.draw(pieces(length)), kernels)


@pytest.mark.slow
@LONG
@given(configs(), st.integers(1, 40), st.integers(0, 10**6), st.booleans(),
       st.sampled_from(KERNELS), st.data())
def test_any_schedule_many_times(config, length, seed, rounding, kernels, data):
    against_oracle(config, length, seed, rounding, data.draw(pieces(length)), kernels)


@pytest.mark.parametrize("name", checks.PROPERTIES)
def test_the_properties_that_kill_mutants(name):
    said = checks.PROPERTIES[name].failure()
    assert said is None, said


# ---------------------------------------------------------------------------- taps
@functools.cache
def small(rounding):
    return random_model(small_config(), 4, torch.float32, rounding)


@given(st.integers(1, 30), st.booleans(),
       st.sampled_from([None, [], ["logits"], ["*.topk_indices", "layers.4.*"]]))
def test_taps_change_no_bit(length, rounding, patterns):
    model = small(rounding)
    ids = random_ids(model.config, length, seed=length)
    with torch.no_grad():
        plain = model(ids).logits
        taps = Taps(patterns)
        tapped = model(ids, taps=taps).logits
    assert torch.equal(plain, tapped)
    if patterns is not None:
        assert all(taps.wants(name) for name in taps)
    if patterns != []:
        assert len(taps) > 0


# ---------------------------------------------------------------------------- rotation
@given(st.integers(0, 4000), st.integers(0, 4000), st.integers(0, 90), st.booleans())
def test_a_product_of_rotated_vectors_depends_on_the_distance_alone(a, b, distance, compressed):
    config = small_config()
    made = torch.Generator().manual_seed(a)
    q, k = torch.randn(2, 32, generator=made, dtype=torch.float64)

    def product(position):
        at = torch.tensor([position + distance, position])
        cos, sin = rotation(config, compressed, at, torch.float64)
        return rotate(q, (cos[0], sin[0])) @ rotate(k, (cos[1], sin[1]))

    assert abs(float(product(a) - product(b))) < 1e-9


@given(st.integers(0, 4000), st.booleans())
def test_the_inverse_rotation_undoes_it_and_lengths_stay(position, compressed):
    config = small_config()
    x = torch.randn(3, 32, dtype=torch.float64)
    turns = rotation(config, compressed, torch.tensor(position), torch.float64)
    turned = rotate(x, turns)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-12)
    assert torch.allclose(rotate(turned, turns, inverse=True), x, atol=1e-12)
    assert torch.equal(turned[:, :-8], x[:, :-8]), "channels before the last R stay"


@given(st.integers(1, 1500), st.integers(0, 1000))
def test_the_same_text_further_on_differs_by_rounding_alone(offset, seed):
    """Values are rotated with the keys; turned back at the query, only distances are left."""
    config = small_config(
        num_hidden_layers=2, compress_ratios=(0, 0), kv_source_layer_ids=(),
        index_source_layer_ids=(), candidate_source_layer_id=-1, engram_layer_ids=(1,))
    model = random_model(config, 1)
    text, past = random_ids(config, 16, seed=seed), random_ids(config, offset, seed=seed + 1)
    # Two windows of 4 and an n-gram of 3 reach back 8 tokens: the first 10 are left out.
    with torch.no_grad():
        near = model(text).logits[:, 10:]
        far = model(torch.cat([past, text], dim=1)).logits[:, offset + 10 :]
    wrong = rules.close("logits", near, far, rules.FP64)
    assert wrong is None, wrong
