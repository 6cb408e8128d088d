"""The draft: golden vectors stage by stage, and the same block from a session's windows."""

import helpers
import pytest
import torch

from labkit.errors import InputError
from labkit.mutants import golden, rules
from labkit.trace import Taps

NAMES = ("target_features", "raw_hidden", "normalized_hidden", "base_logits", "markov_logits",
         "confidence_logits")


@pytest.fixture(scope="module", autouse=True)
def _folders():
    yield
    helpers.remove_folders()


def drafted(rounding, kernels):
    vector = golden.case("text")
    lab = helpers.lab("text", rounding, kernels)
    whole = vector.rounded if rounding else vector.unrounded
    return whole, lab.draft(vector.ids, whole["dspark.anchor_positions"],
                            whole["dspark.previous_token_ids"])


@pytest.mark.parametrize("kernels", helpers.KERNELS)
@pytest.mark.parametrize("rounding", (False, True), ids=("exact", "rounded"))
@pytest.mark.parametrize("name", NAMES)
def test_vector(name, rounding, kernels):
    expected, actual = drafted(rounding, kernels)
    name = f"dspark.{name}"
    rule = rules.rounded if rounding else rules.unrounded
    assert rule(name, expected[name], actual[name]) is None


def test_every_tensor_of_the_vectors_is_compared():
    whole = golden.case("text").unrounded
    found = {name.removeprefix("dspark.") for name in whole if name.startswith("dspark.")}
    assert found == {*NAMES, "anchor_positions", "previous_token_ids"}


@pytest.fixture(scope="module")
def model():
    return golden.in_float64(golden.model("text"))


def block_of(model, cache, anchors, slots=5):
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    with torch.no_grad():
        return model.draft(anchors, cache.lengths, windows, slots)


@pytest.mark.parametrize("length", (1, 2, 7, 8, 9, 16, 17, 33))
def test_a_sessions_windows_give_the_block_that_a_pass_over_the_text_gives(model, length):
    """Short texts, a window that is just full, rings that wrapped; two rows at once."""
    ids = golden.case("text").ids
    cache = model.new_cache(2)
    taps = Taps(["mtp.*.attn.window"])
    with torch.no_grad():
        for at in range(0, length, 6):
            model(ids[:, at : min(length, at + 6)], cache=cache)
        model(ids, cache=model.new_cache(2), taps=taps)
    from labkit.model.dspark import windows_at

    anchors = torch.full((2, 1), length)
    rows = [taps[f"mtp.{s}.attn.window"] for s in range(3)]
    with torch.no_grad():
        expected = model.draft(ids[:, length], anchors[:, 0], windows_at(rows, anchors, 8), 5)
    actual = block_of(model, cache, ids[:, length])
    assert (expected.base_logits - actual.base_logits).abs().max() < 1e-9
    assert (expected.raw_hidden - actual.raw_hidden).abs().max() < 1e-9


def test_rows_of_different_length_draft_as_if_alone(model):
    ids = golden.case("text").ids
    counts = torch.tensor([3, 14])
    cache = model.new_cache(2)
    with torch.no_grad():
        model(ids[:, :14], counts, cache=cache)
    together = block_of(model, cache, ids[[0, 1], counts])
    for b, n in enumerate(counts.tolist()):
        alone = model.new_cache(1)
        with torch.no_grad():
            model(ids[b : b + 1, :n], cache=alone)
        one = block_of(model, alone, ids[b, n : n + 1])
        assert (together.base_logits[b] - one.base_logits[0]).abs().max() < 1e-9


def test_later_slots_are_seen_by_earlier_ones(model):
    """No causal mask inside a block: a longer block changes its first slots."""
    ids = golden.case("text").ids
    cache = model.new_cache(2)
    with torch.no_grad():
        model(ids[:, :9], cache=cache)
    short, long = (block_of(model, cache, ids[:, 9], n) for n in (2, 5))
    assert (short.base_logits - long.base_logits[:, :2]).abs().max() > 1e-3


@pytest.mark.parametrize("cut", ("inside", "after"))
@pytest.mark.parametrize("chunks", ([20], [8, 12], [12, 8], [19, 1]))
def test_after_a_cut_prefill_the_draft_sees_the_decoders_tail_only(model, cut, chunks):
    """Features come from decoder layers, so they exist where those layers ran, and no further."""
    ids = golden.case("text").ids
    tail, total = 5, sum(chunks)
    cache = model.new_cache(2)
    with torch.no_grad():
        at = 0
        for number, n in enumerate(chunks):
            last = number == len(chunks) - 1
            model(ids[:, at : at + n], cache=cache, tail=tail if last else 0, cut=cut)
            at += n
    seen = min(tail, chunks[-1])
    for ring in cache.draft_windows:
        _, known = ring.read(cache.lengths)
        assert known.tolist() == [seen, seen]
    assert torch.isfinite(block_of(model, cache, ids[:, total]).base_logits).all()


def test_features_are_streams_that_enter_a_layer_after_its_engram_update():
    vector = golden.case("text")
    lab = helpers.lab("text", False)
    taps = lab.trace(vector.ids)
    found = lab.draft(vector.ids, [3])["dspark.target_features"]
    expected = torch.cat([taps[f"layers.{i}.streams_after_engram"].mean(2)
                          for i in lab.config.dspark_target_layer_ids], -1)
    assert torch.equal(found, expected)


def test_greedy_previous_tokens_follow_the_drafted_ones():
    vector = golden.case("text")
    found = helpers.lab("text", False).draft(vector.ids, [4, 20])
    logits = (found["dspark.base_logits"] + found["dspark.markov_logits"]).unflatten(1, (2, 5))
    previous = found["dspark.previous_token_ids"].unflatten(1, (2, 5))
    assert torch.equal(previous[:, :, 0], vector.ids[:, [4, 20]])
    assert torch.equal(previous[:, :, 1:], logits.argmax(-1)[:, :, :-1])


@pytest.mark.parametrize("anchors, previous, slots, said", [
    ([45], None, None, "0..44"), ([-1], None, None, "0..44"), ([], None, None, "shape"),
    ([1.5], None, None, "whole numbers"), ([3], [1, 2], None, "one a slot"),
    ([3], [0, 1, 2, 3, 512], None, "0..511"), ([3], None, 0, "at least one slot"),
    ([3], None, 17, "to 16"), ([3], None, "five", "whole number"),
])
def test_bad_input_is_one_sentence(anchors, previous, slots, said):
    ids = golden.case("text").ids[:1]
    with pytest.raises(InputError, match=said):
        helpers.lab("text", False).draft(ids, anchors, previous, slots)


def test_more_slots_than_trained_are_computed():
    found = helpers.lab("text", False).draft(golden.case("text").ids, [3, 9], slots=9)
    assert found["dspark.base_logits"].shape == (2, 18, 512)


def test_a_cache_with_a_drafts_windows_needs_a_model_with_a_draft(model):
    state = {n: p for n, p in model.state_dict().items() if not n.startswith("mtp.")}
    bare = golden.build(model.config, state, class_map=model.engram_classes)
    with pytest.raises(InputError, match="lacks"):
        bare(torch.tensor([[1, 2]]), cache=model.new_cache(1))
