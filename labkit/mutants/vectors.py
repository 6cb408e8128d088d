"""Checks against the golden vectors, some of them transformed so that the answer stays known.

A transformation that leaves the expected output exactly as it is (feeding a text in pieces,
renaming all ids, scaling the streams by a power of two) turns one vector into many: the numbers
to meet are still those of the independent implementation.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from safetensors.torch import load_file

from labkit.kernels import get
from labkit.model.moe import Expert, Gate
from labkit.mutants import golden
from labkit.mutants.checks import VECTORS, collect
from labkit.mutants.models import small_config
from labkit.mutants.rules import close, equal, rounded, same_sets, unrounded
from labkit.mutants.schedules import in_chunks, in_ragged_chunks, one_pass
from labkit.numerics import blocks

vector = collect(VECTORS)


@vector("worked_expert", "an expert with identity matrices and limit 10, numbers worked by hand")
def worked_expert() -> str | None:
    config = small_config(hidden_size=4, moe_intermediate_size=4, swiglu_limit=10.0)
    expert = Expert(config).double()
    x = torch.tensor([[12.0, -12.0, 3.0, -3.0]]).double()
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    # silu(10) = 9.99954602131298, silu(-12) = -7.373009e-05, 3 silu(3) = 9 / (1 + e^-3)
    for sign in (1.0, -1.0):
        expected = sign * torch.tensor([[99.9954602131298, 7.373009e-04, 8.5731671, 0.4268329]])
        with torch.no_grad():
            for w, value in ((expert.w1, 1.0), (expert.w2, 1.0), (expert.w3, sign)):
                w.weight.copy_(value * torch.eye(4))
            for name, weight, factor in (("shared", None, 1.0), ("routed", half, 0.5)):
                found = expert(x, weight)
                for i in range(4):
                    wrong = close(f"{name} expert, channel {i}", factor * expected[:, i],
                                  found[:, i], 1e-6)
                    if wrong:
                        return wrong
    return None


@vector("worked_gate", "a gate whose scores are all sqrt(ln 2): the biases pick, the weights stay")
def worked_gate() -> str | None:
    gate = Gate(small_config(), 3, 2)  # the small config scales by 1.5
    run = SimpleNamespace(kernels=get("reference"))
    with torch.no_grad():
        gate.weight.zero_()
        gate.bias.copy_(torch.tensor([0.0, 0.1, 0.2]))
        gate.bias_vl.copy_(torch.tensor([0.2, 0.1, 0.0]))
        picked, weights = gate(torch.ones(2, 16), run, torch.tensor([False, True]))
    return (equal("picked", torch.tensor([[1, 2], [0, 1]]), picked)
            or close("weights", torch.full((2, 2), 0.75), weights, 1e-6))


@vector("worked_ties", "six scores with three equal ones: which three places win, by hand")
def worked_ties() -> str | None:
    scores = torch.tensor([[0.0, 2.0, 0.0, float("-inf"), 0.0, -1.0]])
    for name in ("reference", "cpu"):
        for k, expected in ((2, [0, 1]), (3, [0, 1, 2]), (7, [0, 1, 2, 4, 5, -1, -1])):
            wrong = equal(f"{name}, best {k}", torch.tensor([expected]),
                          get(name).select_top(scores, k))
            if wrong:
                return wrong
    return None


@vector("quantisers", "the three block quantisers bit for bit, fp32 and bf16, ties among them")
def quantisers() -> str | None:
    expected = load_file(golden.folder() / "primitives" / "quantisers.safetensors")
    for name, value in expected.items():
        if name == "x":
            continue
        x = expected["x"].bfloat16() if name.endswith(".bf16") else expected["x"]
        wrong = equal(name, value, blocks.fake_quantize(x, name.split("_block")[0]))
        if wrong:
            return wrong
    return None


@vector("classes", "the number of classes of the vectors' vocabulary")
def classes() -> str | None:
    expected, found = golden.case("text").config.engram_compressed_vocab_size, golden.classes()[1]
    return None if found == expected else f"{found} classes, expected {expected}"


def _case(name: str, rounding: bool) -> str | None:
    case, model = golden.case(name), golden.model(name, rounding)
    # Roundings flip with fp32 noise, which differs between processors: float64 has none.
    taps = one_pass(golden.in_float64(model) if rounding else model, case.ids, case.lengths)
    if not rounding:
        # Addresses do not depend on rounding; only the rounded file has them.
        hashes = case.rounded.get("engram_hash_ids")
        if hashes is not None:
            wrong = equal("engram_hash_ids", case.live("", hashes),
                          case.live("", taps["engram_hash_ids"]))
            if wrong:
                return wrong
    return case.difference(taps, rounded if rounding else unrounded, rounding)


@vector("text", "two texts of 45 tokens, every stage, cache rounding off")
def text() -> str | None:
    return _case("text", rounding=False)


@vector("scaled_streams", "the vector `text` with streams 2^12 times smaller, which norms undo")
def scaled_streams() -> str | None:
    case = golden.case("text")
    assert case.unrounded is not None
    small, D = 2.0**-12, case.config.hidden_size
    state = {}
    for name, value in golden.model("text").state_dict().items():
        value = value.clone()
        if name == "embed.weight" or name.endswith(("wo_b.weight", "w2.weight")):
            value *= small
        elif name.endswith("engram.wkv.weight"):
            value[-D:] *= small  # the value's rows; the keys are normed on their own
        state[name] = value
    taps = one_pass(golden.build(case.config, state), case.ids)
    for name in ("layers.9.streams_in", "layers.5.attn.out"):
        wrong = unrounded(name, case.unrounded[name], taps[name] / small)
        if wrong:
            return wrong
    return unrounded("logits", case.unrounded["logits"], taps["logits"])


@vector("text_rounded", "the same with cache rounding")
def text_rounded() -> str | None:
    return _case("text", rounding=True)


@vector("padded", "rows of 45, 30 and 7 tokens in one pass")
def padded() -> str | None:
    return _case("padded", rounding=False)


@vector("long", "160 tokens: the candidate pool is full")
def long() -> str | None:
    return _case("long", rounding=False)


@vector("ratio4", "groups of four tokens")
def ratio4() -> str | None:
    return _case("ratio4", rounding=False)


@vector("no_candidates", "a model without a candidate pool")
def no_candidates() -> str | None:
    return _case("no_candidates", rounding=False)


@vector("bf16", "a bf16 model: the rule for logits, and the bits of the first stages")
def bf16() -> str | None:
    case = golden.case("bf16")
    taps = one_pass(golden.model("bf16", rounding=True), case.ids)
    return bf16_rule(case, taps, case.rounded) or bf16_bits(case, taps)


def bf16_rule(case: golden.Case, taps: dict[str, torch.Tensor],
              expected: dict[str, torch.Tensor]) -> str | None:
    logits, found = expected["logits"].float(), taps["logits"].float()
    median = float((logits - found).abs().median() / logits.abs().max())
    if not median <= 0.01:
        return f"logits: median error {median:.2%} of the span, allowed 1 %"
    same = float((logits.argmax(-1) == found.argmax(-1)).double().mean())
    if not same >= 0.9:
        return f"logits: the best token is the same in {same:.1%} of positions, needed 90 %"
    name = f"layers.{case.config.index_source_layer_ids[0]}.attn.topk_indices"
    share = same_sets(expected[name], taps[name])
    return None if share >= 0.95 else f"{name}: {share:.1%} of entries selected, needed 95 %"


def bf16_bits(case: golden.Case, taps: dict[str, torch.Tensor]) -> str | None:
    """Before the first selections differences have had no way to grow: most bits agree."""
    name = "layers.2.streams_in"
    return equal(name, case.rounded[name], taps[name], share=0.9)


@vector("released_layout", "a checkpoint in the released form: index, shards, fp8, fp4, scales")
def released_layout() -> str | None:
    case = golden.case("released_layout")
    model = golden.in_float64(golden.model("released_layout", rounding=True, fresh=True))
    taps = one_pass(model, case.ids)
    return case.difference(taps, rounded, rounding=True)


@vector("text_chunks", "the vector `text` fed as 7, 13, 1, 1, 1, 1, 1, 20 tokens")
def text_chunks() -> str | None:
    case = golden.case("text")
    taps = in_chunks(golden.model("text"), case.ids, [7, 13, 1, 1, 1, 1, 1, 20])
    return case.difference(taps)


@vector("padded_chunks", "the vector `padded` fed in three uneven pieces")
def padded_chunks() -> str | None:
    case = golden.case("padded")
    assert case.lengths is not None
    expected = case.unrounded
    assert expected is not None
    counts = [[20, 13, 3], [1, 8, 3], [24, 9, 1]]
    for b, taps in enumerate(in_ragged_chunks(golden.model("padded"), case.ids, counts)):
        n = int(case.lengths[b])
        for name in ("logits", "layers.2.attn.out", "layers.8.attn.topk_indices"):
            wrong = unrounded(f"row {b}, {name}", expected[name][b : b + 1, :n], taps[name])
            if wrong:
                return wrong
    return None


@vector("text_restored", "the vector `text` from a snapshot, in turns with another continuation")
def text_restored() -> str | None:
    case = golden.case("text")
    model = golden.model("text")
    cache = model.new_cache(2)
    assert case.unrounded is not None
    with torch.no_grad():
        model(case.ids[:, :21], cache=cache)
        saved, found = cache.fork(), []
        for piece in (slice(21, 26), slice(26, 27), slice(27, 45)):
            found.append(model(case.ids[:, piece], cache=saved).logits)
            model(case.ids[:, piece].flip(1), cache=cache)
    return unrounded("logits", case.unrounded["logits"][:, 21:], torch.cat(found, dim=1))


@vector("renamed_ids", "the vector `text` with all ids renamed: the pad id is no longer its class")
def renamed_ids() -> str | None:
    case = golden.case("text")
    assert case.unrounded is not None
    config = case.config
    to = torch.randperm(config.vocab_size, generator=torch.Generator().manual_seed(1))  # old -> new
    state = dict(golden.model("text").state_dict())
    class_map = golden.classes()[0]
    for name in ("embed.weight", "head.weight"):
        state[name] = torch.empty_like(state[name]).index_copy_(0, to, state[name])
    renamed = torch.empty_like(class_map).index_copy_(0, to, class_map)
    model = golden.build(config.replace(engram_pad_id=int(to[config.engram_pad_id])), state,
                         class_map=renamed)
    taps = one_pass(model, to[case.ids])
    return (equal("engram_hash_ids", case.rounded["engram_hash_ids"], taps["engram_hash_ids"])
            or unrounded("logits", case.unrounded["logits"], taps["logits"][..., to]))
