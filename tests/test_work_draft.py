"""The draft's work against torch's counter: in the target's own pass, in blocks, in speculation."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_work import CONFIGS as PRESETS
from test_work import LENGTH, both_counts, check_layers, hooks_of, in_bf16

from labkit.engine.sampling import Sampling
from labkit.engine.speculation import Request, propose, verify
from labkit.model import dspark, hyper
from labkit.model.work import ELEMENTWISE, PARTS, SIDES, counting
from labkit.mutants.models import DRAFT, random_ids, random_model, small_config

CONFIGS = {"small": small_config(**DRAFT), "nano": PRESETS["nano"]}


def model_of(name, kernels="reference"):
    return random_model(CONFIGS[name], 1, torch.float32, True, kernels)


def past(model, rows=2, length=9):
    """A cache of some texts, and an anchor for each row."""
    cache = model.new_cache(rows)
    with torch.no_grad():
        model(random_ids(model.config, length, rows, seed=1), cache=cache)
    return cache, random_ids(model.config, 1, rows, seed=2)[:, 0]


def block(model, cache, anchors, slots):
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    return model.draft(anchors, cache.lengths, windows, slots)


# ------------------------------------------------------------------ the target's own pass
@pytest.mark.parametrize("kind", ["full", "ced", "ced after", "no decoder", "ragged", "chunks",
                                  "kept"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_target_pass_with_draft_windows(name, kind):
    """Everything is half of torch's FLOP, and more than without by the features alone."""
    model, rows = model_of(name), 1 + (kind == "ragged")
    c, W = model.config, CONFIGS[name].sliding_window
    lengths = torch.tensor([LENGTH, 7]) if kind == "ragged" else None
    how = {"ced": {"tail": W}, "ced after": {"tail": W, "cut": "after"}, "no decoder": {"tail": 0},
           "kept": {"keep": True}}.get(kind, {})
    seen = {"ced": W, "ced after": W, "no decoder": 0, "ragged": LENGTH + 7}.get(kind, LENGTH)
    parts = (25, LENGTH - 25) if kind == "chunks" else (LENGTH,)

    def work(draft):
        def passes(model):
            cache = model.new_cache(rows, draft=draft)
            for ids in random_ids(c, LENGTH, rows, seed=3).split(parts, dim=1):
                model(ids, lengths, cache=cache, **how)
        return passes

    ours, flops = both_counts(model, work(True))
    assert 2 * ours.products() == flops["Global"] > 0
    if kind != "no decoder":
        check_layers(model, ours, flops, c.encoder_layers if kind == "ced" else -1)
    bare, _ = both_counts(model, work(False))
    added = ours - bare
    assert {part for _, part in added.macs} <= {"draft.features"} and not added.passes
    D, stages, targets = c.hidden_size, len(model.mtp), len(c.dspark_target_layer_ids)
    per_stage = [seen * D * (c.head_dim + targets * D * (s == 0)) for s in range(stages)]
    found = [ours.macs[len(model.layers) + s, "draft.features"] for s in range(stages)]
    assert found == per_stage and ours.total(side="draft") == sum(per_stage)
    print(f"{name}, {kind}: features are {ours.total('draft.features') / ours.total():.2%}")


# ------------------------------------------------------------------ blocks
@pytest.mark.parametrize("slots", [1, 3, 5, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_of_slots_stage_by_stage(name, slots):
    model, c = model_of(name), CONFIGS[name]
    cache, anchors = past(model)
    ours, flops = both_counts(model, lambda m: block(m, cache, anchors, slots))
    assert 2 * ours.products() == flops["Global"] > 0
    assert ours.total() == ours.products() + ours.total("hyper.write")
    assert ours.total() == ours.total(side="draft") and not ours.stored
    tokens, first, last = 2 * slots, len(model.layers), len(model.mtp) - 1
    assert dict(ours.passes) == dict.fromkeys(range(first, first + last + 1), tokens)
    for s in range(last + 1):
        def torchs(inside, s=s):
            return flops.get(f"DSpark.{s}.{inside}", 0)

        def macs(*parts, s=s):
            return 2 * sum(ours.macs[first + s, part] for part in parts)

        projections = sum(torchs(f"attn.{w}") for w in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b"))
        assert macs("attn.projections") == projections > 0
        assert macs("attn.scores", "attn.values") == torchs("attn") - projections
        keys = c.sliding_window + slots
        assert macs("attn.scores") == 2 * tokens * c.num_attention_heads * c.head_dim * keys
        assert macs("gate") == torchs("ffn.gate")
        assert macs("shared_expert") == torchs("ffn.shared_experts")
        assert macs("gate", "experts", "shared_expert") == torchs("ffn") > 0
        streams = c.hc_mult * c.hidden_size
        assert macs("hyper.write") == 2 * 2 * tokens * streams          # two sites
        assert macs("head") == (2 * tokens * c.hidden_size * c.vocab_size if s == last else 0)
        # Coefficients and mixing at two sites, three reads where the head's comes after them.
        C = c.hc_mult
        assert macs("hyper") == 2 * tokens * streams * (2 * (C * (C + 2) + C) + 2 + (s == last))
    print(f"{name}, {slots} slots: {ours.total():,} multiply-adds, {ours.total('head'):,} of them "
          "the head")


def test_the_draft_counts_the_same_on_other_kernels_and_in_bf16():
    for name in CONFIGS:
        counts = []
        for model in (model_of(name), model_of(name, "cpu"), in_bf16(model_of(name))):
            cache, anchors = past(model)
            work, flops = both_counts(model, lambda m, c=cache, a=anchors: block(m, c, a, 3))
            assert flops["Global"] >= 2 * work.products()
            counts.append(work)
        assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_speculative_step_of_several_requests(name):
    """Proposing and verifying, with the heads that are asked slot by slot."""
    model, c, rows = model_of(name), CONFIGS[name], 3
    n = c.dspark_block_size
    cache, anchors = past(model, rows)
    requests = [Request(int(a), Sampling(1.0, 0, 1.0), torch.Generator().manual_seed(i), n)
                for i, a in enumerate(anchors)]
    found = []

    def step(model):
        proposals = propose(model, cache, requests, c.vocab_size)
        found.append(inner.copy())
        verify(model, cache, requests, proposals, [n, 1, n], c.vocab_size)

    with counting(model) as inner:
        ours, flops = both_counts(model, step)
    assert 2 * ours.products() == flops["Global"] > 0
    drafting, = found
    last, rank = len(model.layers) + len(model.mtp) - 1, c.dspark_markov_rank
    slots = rows * n
    assert drafting.macs[last, "markov"] == slots * rank * c.vocab_size
    assert drafting.macs[last, "confidence"] == slots * (c.hidden_size + rank)
    verifying = ours - drafting
    assert verifying.total("draft.features") == verifying.total(side="draft") > 0
    assert verifying.passes.total() == len(model.layers) * (2 * (n + 1) + 2)
    print(f"{name}: a draft of {slots} slots is {drafting.total() / verifying.total():.1%} of the "
          f"target's pass over {2 * (n + 1) + 2} tokens")


# ------------------------------------------------------------------ nothing else changes
def test_counting_changes_no_bit_of_a_draft_and_is_taken_off():
    for kernels in ("reference", "cpu"):
        model = model_of("small", kernels)
        cache, anchors = past(model)
        with torch.no_grad():
            plain = block(model, cache, anchors, 3)
            with counting(model):
                assert dspark.collapse is not hyper.collapse
                watched = block(model, cache, anchors, 3)
        for field in dataclasses.fields(plain):
            assert torch.equal(getattr(plain, field.name), getattr(watched, field.name))
        assert hooks_of(model) == 0 and dspark.collapse is hyper.collapse


@pytest.mark.parametrize("module", ["mtp.1.attn_norm", "mtp.1.ffn.gate", "mtp.1.norm",
                                    "mtp.0.main_norm", "layers.6.ffn"])
def test_what_was_cut_short_leaves_no_trace_in_the_next_block_or_pass(module):
    model = model_of("small")
    cache, anchors = past(model)
    twin = cache.fork()

    def both(model, cache):
        block(model, cache, anchors, 3)
        model(anchors[:, None], cache=cache)

    expected, _ = both_counts(model, lambda m: both(m, twin))

    def fail(module, args):
        raise KeyboardInterrupt

    with torch.no_grad(), counting(model) as work:
        place = model.get_submodule(module)
        handle = place.register_forward_pre_hook(fail)
        place._forward_pre_hooks.move_to_end(handle.id, last=False)
        with pytest.raises(KeyboardInterrupt):
            both(model, cache)
        handle.remove()
        before = work.copy()
        assert 0 < before.total() < expected.total()
        both(model, cache)
        assert work - before == expected


def test_the_table_has_a_column_for_the_draft():
    model = model_of("small")
    with torch.no_grad(), counting(model) as work:
        cache, anchors = past(model)
        block(model, cache, anchors, 3)
        model.mtp.markov_logits(anchors)
        model.mtp.confidence_logits(torch.zeros(2, model.config.hidden_size), anchors)
    lines = work.table().splitlines()
    assert lines[0].split() == [*SIDES, "all"] == ["encoder", "decoder", "draft", "outside", "all"]
    rows = {line[:20].strip(): [int(cell.replace(",", "")) for cell in line[20:].split()]
            for line in lines[1:]}
    parts = {name: numbers for name, numbers in rows.items() if name in PARTS}
    assert parts.keys() == PARTS.keys() - {"other"} and set(ELEMENTWISE) <= parts.keys()
    for name, numbers in parts.items():
        assert numbers == [*(work.total(name, side) for side in SIDES), work.total(name)]
        assert sum(numbers[:-1]) == numbers[-1]
    assert rows["multiply-adds"] == [sum(c) for c in zip(*parts.values(), strict=True)]
    assert rows["layer-token passes"] == [2 * 9 * 4, 2 * 9 * 3, 2 * 2 * 3, 0, 2 * 9 * 7 + 12]
    assert rows["head"][2] == 2 * 3 * model.config.hidden_size * model.config.vocab_size
    assert rows["head"][3] == 2 * 9 * model.config.hidden_size * model.config.vocab_size
