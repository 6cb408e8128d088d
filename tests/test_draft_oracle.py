"""Any draft of any target equals the oracle's, on a text and behind a session in pieces."""

import functools

import pytest
import torch
from helpers import KERNELS
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import configs, pieces

from labkit.engine.drafting import draft_at
from labkit.mutants import checks, properties_draft, properties_drafted
from labkit.mutants.models import random_ids, random_model
from labkit.mutants.oracle import Oracle
from labkit.mutants.oracle_draft import DraftOracle
from labkit.mutants.rules import FP64, close

checks.load()


@st.composite
def drafts(draw):
    """A target of any schedule with a draft of any size."""
    target = draw(configs())
    stages, experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    layers = draw(st.sets(st.integers(0, target.num_hidden_layers - 1), min_size=1, max_size=3))
    return target.replace(
        num_nextn_predict_layers=stages, compress_ratios=target.compress_ratios + (0,) * stages,
        dspark_block_size=draw(st.integers(1, 5)), dspark_noise_token_id=draw(st.integers(0, 63)),
        dspark_target_layer_ids=tuple(sorted(layers)), dspark_markov_rank=draw(st.integers(1, 5)),
        dspark_n_routed_experts=experts, dspark_num_experts_per_tok=draw(st.integers(1, experts)))


def must_be_close(name, expected, found):
    wrong = close(name, expected, found, FP64)
    assert wrong is None, wrong


@settings(max_examples=40)
@given(drafts(), st.integers(1, 14), st.integers(0, 10**6), st.booleans(),
       st.sampled_from(KERNELS), st.data())
def test_any_draft(config, length, seed, rounding, kernels, data):
    model = random_model(config, seed, cache_rounding=rounding, kernel_set=kernels)
    ids = random_ids(config, length + 1, seed=seed)
    oracle = Oracle(config, dict(model.named_parameters()), model.engram_classes.tolist(), rounding)
    by_hand = DraftOracle(oracle)
    features = by_hand.features(oracle.run(ids[0].tolist()))
    anchors = [data.draw(st.integers(0, length)), length]
    n = data.draw(st.integers(1, 7), label="slots")         # also longer than trained
    right = [by_hand.block(features, int(ids[0, a]), a, n) for a in anchors]
    taps = draft_at(model, ids, torch.tensor(anchors), slots=n)
    must_be_close("target_features", features[None], taps["dspark.target_features"])
    previous = taps["dspark.previous_token_ids"][0].tolist()
    raw = torch.cat([guess.raw_hidden for guess in right])
    logits = torch.cat([guess.base_logits for guess in right])
    bias = by_hand.markov(previous)
    for name, expected in (
            ("raw_hidden", raw), ("base_logits", logits), ("markov_logits", bias),
            ("normalized_hidden", torch.cat([guess.normalized_hidden for guess in right])),
            ("confidence_logits", by_hand.confidence(raw, previous))):
        must_be_close(name, expected[None], taps[f"dspark.{name}"])
    best = (logits + bias).argmax(-1).unflatten(0, (2, n)).tolist()
    assert previous == [i for a, row in zip(anchors, best, strict=True)
                        for i in [int(ids[0, a]), *row[:-1]]]

    # The same block from the windows of a session that read the text in pieces.
    cache, at = model.new_cache(), 0
    with torch.no_grad():
        for size in data.draw(pieces(length)):
            model(ids[:, at : at + size], cache=cache)
            at += size
        windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
        found = model.draft(ids[:, length], cache.lengths, windows, n)
    must_be_close("behind a session", right[1].raw_hidden[None], found.raw_hidden)


@functools.cache
def one_block(**changes):
    """A block of the properties' model whose features, anchor or position are as told."""
    _, by_hand = properties_draft.oracles()
    features, text = properties_draft.features().clone(), properties_draft.text()[0]
    at = changes.get("position", 13)
    if "feature" in changes:
        features[changes["feature"]] += 1.0
    return by_hand.block(features, changes.get("anchor", int(text[13])), at, 3,
                         changes.get("first", 0)).raw_hidden


def test_the_oracle_reads_the_window_before_the_anchor_and_nothing_else():
    """W = 4: features of positions 9..12 count behind an anchor at 13, by their distance."""
    for position in range(properties_draft.LENGTH):
        same = torch.equal(one_block(), one_block(feature=position))
        assert same == (position not in range(9, 13)), position
    assert not torch.equal(one_block(), one_block(anchor=3))
    assert not torch.equal(one_block(), one_block(position=12))
    assert torch.equal(one_block(), one_block(first=9))
    assert not torch.equal(one_block(), one_block(first=10))


def test_the_speculated_text_is_the_oracles_and_no_monotone():
    ids = properties_drafted._spoken()
    P = properties_drafted.PROMPT
    said = properties_draft.oracles()[0].run(ids)["logits"].argmax(-1).tolist()
    assert ids[P:] == said[P - 1 : -1] and len(set(ids[P:])) > 10


@pytest.mark.parametrize("name", ("draft", "draft_rounded", "proposal", "speculated",
                                  "draft_kept"))
def test_the_properties_say_what_is_wrong(name):
    """A model whose last norm is off in one channel is noticed by each of them, in words."""
    right = properties_draft.model(rounding=name.endswith("rounded"))
    assert checks.PROPERTIES[name].failure() is None
    with torch.no_grad():
        weight = right.mtp.last.norm.weight
        before = weight[3].clone()
        weight[3] += 0.1
    try:
        said = checks.PROPERTIES[name].failure()
    finally:
        with torch.no_grad():
            weight[3] = before
    assert said is not None and "off by" in said
    assert checks.PROPERTIES[name].failure() is None
