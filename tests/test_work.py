"""Counted work against torch's counter of FLOP, and what counting must not change."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit.checkpoint.weights import target_dtype
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.kernels import reference
from labkit.model import block, hyper, transformer
from labkit.model.engram import gated_update
from labkit.model.work import ELEMENTWISE, PARTS, SIDES, Work, counting
from labkit.mutants.models import random_ids, random_model, small_config

CONFIGS = {"small": small_config(), "nano": ModelConfig.preset("nano")}
LENGTH = 41  # odd, and more than any window here


def model_of(name, kernels="reference"):
    return random_model(CONFIGS[name], 1, torch.float32, True, kernels)


def ced(model):
    return {"tail": model.config.sliding_window}


def in_bf16(model):
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(target_dtype(name, model.config, torch.bfloat16))
    return model


def full_pass(model):
    model(random_ids(model.config, LENGTH, 2, seed=1))


def ced_pass(model):
    model(random_ids(model.config, LENGTH, 2, seed=2), **ced(model))


def ragged_pass(model):
    model(random_ids(model.config, LENGTH, 3, seed=3), torch.tensor([LENGTH, 1, 20]))


def ragged_ced_pass(model):
    model(random_ids(model.config, LENGTH, 3, seed=4), torch.tensor([LENGTH, 2, 20]), **ced(model))


def last_token_pass(model):
    model(random_ids(model.config, LENGTH, seed=5), last_only=True)


def first_token(model):
    model(random_ids(model.config, 1, seed=6))


PASSES = (full_pass, ced_pass, ragged_pass, ragged_ced_pass, last_token_pass, first_token)


@torch.no_grad()
def both_counts(model, work):
    """Our count and torch's, as {module name: FLOP}, of the same pass."""
    with counting(model) as ours, FlopCounterMode(display=False) as theirs:
        work(model)
    flops = {name: sum(by_operation.values())
             for name, by_operation in theirs.get_flop_counts().items()}
    return ours, flops


def check_layers(model, ours, flops, cut=-1):
    """Torch's per-module counts, taken apart until only our parts are left; FLOP = 2 macs."""
    for layer in range(len(model.layers)):
        def torchs(name, layer=layer):
            return flops.get(f"Transformer.layers.{layer}{name}", 0)

        def macs(part, layer=layer):
            return ours.macs[layer, part]

        def same(part, flop, layer=layer):
            assert 2 * ours.macs[layer, part] == flop, (layer, part)

        projections = sum(torchs(f".attn.{w}") for w in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
        assert projections and torchs(".ffn.shared_experts")
        index = sum(torchs(f".attn.indexer.{w}") for w in ("wq_b", "weights_proj"))
        same("attn.projections", projections)
        same("compressor", torchs(".attn.compressor"))
        same("indexer", index + torchs(".attn.indexer.wk"))
        same("indexer.scores", torchs(".attn.indexer") - index)
        attention = torchs(".attn") - projections - torchs(".attn.indexer")
        if layer != cut:  # at the cut entries are stored before attention is entered
            attention -= torchs(".attn.compressor") + torchs(".attn.indexer.wk")
        assert 2 * (macs("attn.scores") + macs("attn.values")) == attention, layer
        assert macs("attn.scores") == macs("attn.values")
        same("gate", torchs(".ffn.gate"))
        same("shared_expert", torchs(".ffn.shared_experts"))
        same("experts", torchs(".ffn") - torchs(".ffn.gate") - torchs(".ffn.shared_experts"))
        same("engram", torchs(".engram"))
        if layer != cut:  # there the layer is called in two steps, not as one module
            assert 2 * ours.products(layer) == torchs(""), layer
            same("hyper", torchs("") - torchs(".engram") - torchs(".attn") - torchs(".ffn"))


@pytest.mark.parametrize("work", PASSES, ids=lambda w: w.__name__)
@pytest.mark.parametrize("name", CONFIGS)
def test_all_products_are_half_of_torchs_flop_in_every_layer(name, work):
    model = model_of(name)
    ours, flops = both_counts(model, work)
    cut = model.config.encoder_layers if "ced" in work.__name__ else -1
    check_layers(model, ours, flops, cut)
    assert 2 * ours.products() == flops["Global"] > 0
    assert ours.total() == ours.products() + sum(map(ours.total, ELEMENTWISE))
    assert not ours.total("other")
    print(f"{name}, {work.__name__}: {flops['Global']:,} FLOP = 2 x {ours.products():,}; "
          f"elementwise {ours.total() - ours.products():,} more")


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_one_token_at_a_time(name):
    """Each step over a cache that grows, with groups left unfinished in between."""
    model = model_of(name)
    cache, ids = model.new_cache(), random_ids(model.config, 31, seed=7)
    with torch.no_grad():
        model(ids[:, :25], cache=cache)
    for step in range(25, 31):
        ours, flops = both_counts(model, lambda m, s=step: m(ids[:, s : s + 1], cache=cache))
        check_layers(model, ours, flops)
        assert 2 * ours.products() == flops["Global"] > 0
        assert set(ours.passes.values()) == {1} and len(ours.passes) == len(model.layers)


def test_a_bf16_model_with_its_fp32_parameters():
    """Products of cast copies of weights count as those of the weights themselves."""
    model = in_bf16(model_of("small"))
    ours, flops = both_counts(model, full_pass)
    check_layers(model, ours, flops)
    assert 2 * ours.products() == flops["Global"]


@pytest.mark.parametrize("name", CONFIGS)
def test_elementwise_parts_have_the_size_of_their_tensors(name):
    model, c = model_of(name), CONFIGS[name]
    ours, _ = both_counts(model, full_pass)
    tokens, streams = 2 * LENGTH, c.hc_mult * c.hidden_size
    for role in c.roles:
        n = role.layer
        assert ours.macs[n, "hyper.write"] == 2 * tokens * streams
        assert ours.macs[n, "engram.gate"] == (2 * tokens * streams if role.engram else 0)
        groups = 2 * -(-LENGTH // max(role.ratio, 1))                  # an unfinished one too
        pooled = role.kind == "full" and role.ratio > 1
        assert ours.macs[n, "compressor.pool"] == pooled * groups * role.ratio * c.head_dim
        assert ours.macs[n, "indexer.sum"] * c.index_head_dim == ours.macs[n, "indexer.scores"]
    assert all(ours.total(part) > 0 for part in ELEMENTWISE)


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_token_passes_of_a_full_and_a_ced_prefill(name):
    model, c = model_of(name), CONFIGS[name]
    E, L, W = c.encoder_layers, c.num_hidden_layers, c.sliding_window
    full, _ = both_counts(model, full_pass)
    assert dict(full.passes) == dict.fromkeys(range(L), 2 * LENGTH)
    cut, _ = both_counts(model, ced_pass)
    assert dict(cut.passes) == {n: 2 * (LENGTH if n < E else W) for n in range(L)}
    assert cut.passes.total() == 2 * (LENGTH * E + W * (L - E))
    everything = dict.fromkeys(c.kv_source_layer_ids, 2 * LENGTH)
    assert dict(full.stored) == dict(cut.stored) == everything  # entries of all tokens in both
    for part in PARTS:
        assert cut.total(part, "encoder") == full.total(part, "encoder"), part
    assert cut.total(side="decoder") < full.total(side="decoder")
    print(f"{name}: CED computes {cut.total() / full.total():.3f} of the multiply-adds")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_cpu_kernels_count_as_the_reference_and_compute_no_less(name):
    """Blocks of W queries see 2W window columns: more products, for the sake of the caches."""
    for work in PASSES:
        needed, flops = both_counts(model_of(name, kernels="reference"), work)
        assert 2 * needed.products() == flops["Global"]
        fast, flops = both_counts(model_of(name, kernels="cpu"), work)
        assert fast.macs == needed.macs and fast.passes == needed.passes
        computed = flops["Global"] / 2
        assert computed >= needed.products(), work.__name__
        if work is full_pass:
            assert computed > needed.products()
        print(f"{name}, {work.__name__}: the cpu set computes "
              f"{computed / needed.products():.3f} of what is needed")


# ---------------------------------------------------------------------- nothing else changes
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", CONFIGS)
def test_counting_changes_no_bit_of_the_results(name, kernels):
    model = model_of(name, kernels=kernels)
    ids = random_ids(model.config, LENGTH + 3, seed=8)

    @torch.no_grad()
    def logits():
        cache = model.new_cache()
        found = [model(ids[:, :LENGTH], cache=cache, **ced(model)).logits]
        return found + [model(i, cache=cache).logits for i in ids[:, LENGTH:].split(1, dim=1)]

    plain = logits()
    with counting(model):
        watched = logits()
    assert all(map(torch.equal, plain, watched))


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_everything_is_taken_off_again_also_after_an_error():
    model = model_of("small")
    assert hooks_of(model) == 0

    def is_plain():
        return (hooks_of(model) == 0 and model.kernels is reference
                and block.collapse is hyper.collapse and transformer.collapse is hyper.collapse)

    with counting(model):
        assert hooks_of(model) > 50 and model.kernels is not reference
        assert model.kernels.__name__ == reference.__name__
        assert block.collapse is not hyper.collapse
    assert is_plain()
    with pytest.raises(InputError), counting(model):
        model(torch.tensor([[99999]]))
    assert is_plain()
    with pytest.raises(RuntimeError, match="in the middle"):
        with counting(model):
            model.layers[2].ffn.register_forward_pre_hook(fail_once)
            full_pass(model)
    model.layers[2].ffn._forward_pre_hooks.clear()
    assert is_plain()


def fail_once(module, args):
    module._forward_pre_hooks.clear()
    raise RuntimeError("in the middle")


def test_a_pass_that_was_cut_short_leaves_no_trace_in_the_next():
    model = model_of("small")
    expected, _ = both_counts(model, full_pass)
    with torch.no_grad(), counting(model) as work:
        handle = model.layers[2].attn_norm.register_forward_pre_hook(fail_first)
        model.layers[2].attn_norm._forward_pre_hooks.move_to_end(handle.id, last=False)
        with pytest.raises(RuntimeError, match="in the middle"):
            full_pass(model)
        handle.remove()
        before = work.copy()
        assert 0 < before.passes.total() < expected.passes.total()
        assert before.total("head") == 0
        full_pass(model)
        assert work - before == expected


def fail_first(module, args):
    raise RuntimeError("in the middle")


def test_counts_add_up_nest_and_ignore_other_models():
    model, other = model_of("small"), model_of("nano")
    once, _ = both_counts(model, full_pass)
    with torch.no_grad(), counting(model) as outer:
        full_pass(model)
        full_pass(other)
        assert outer == once
        with counting(model) as inner:
            full_pass(model)
        assert inner == once and outer.total() == 2 * once.total()
        so_far = outer.copy()
        ced_pass(model)
        last = outer - so_far
    assert so_far.total() == 2 * once.total()
    assert last == both_counts(model, ced_pass)[0]
    full_pass(model)                                             # not counted any more
    assert outer.total() == 2 * once.total() + last.total()


def test_a_kernel_set_is_given_the_functions_themselves():
    """It may compile them, which it could not do with a function that counts."""
    model, given = model_of("small"), []
    watched = ModuleType("watched")
    watched.__dict__.update(reference.__dict__, fuse=lambda f: given.append(f) or f)
    model.kernels = watched
    work, _ = both_counts(model, full_pass)
    assert set(given) == {hyper.hyper_mix, hyper.collapse, hyper.expand, gated_update}
    model.kernels = reference
    assert work == both_counts(model, full_pass)[0]


def test_the_table_shows_every_part_and_its_sums():
    model = model_of("small")
    work, _ = both_counts(model, full_pass)
    lines = work.table().splitlines()
    rows = {line[:20].strip(): [int(cell.replace(",", "")) for cell in line[20:].split()]
            for line in lines[1:]}
    sides = [side for side in SIDES if side != "draft"]           # nothing was drafted
    assert lines[0].split() == [*sides, "all"]
    parts = {name: numbers for name, numbers in rows.items() if name in PARTS}
    assert parts.keys() == PARTS.keys() - {"draft.features", "markov", "confidence", "other"}
    for name, numbers in parts.items():
        assert numbers == [*(work.total(name, side) for side in sides), work.total(name)]
        assert sum(numbers[:3]) == numbers[3]
    assert rows["multiply-adds"] == [sum(c) for c in zip(*parts.values(), strict=True)]
    assert rows["layer-token passes"] == [2 * LENGTH * 4, 2 * LENGTH * 3, 0, 2 * LENGTH * 7]
    assert rows["tokens compressed"] == [2 * LENGTH, 2 * LENGTH, 0, 4 * LENGTH]
    assert len({len(line) for line in lines}) == 1               # columns line up
    assert "multiply-adds" in Work(4, 7).table()                 # nothing was counted: no error
