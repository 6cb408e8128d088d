"""Properties of single parts: number formats, top-k, text classes, experts, routing."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from labkit.kernels import get
from labkit.model.moe import Expert, Gate
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.models import fill, small_config
from labkit.mutants.oracle_numbers import nearest_in_blocks
from labkit.mutants.rules import close, equal
from labkit.numerics import blocks, formats, packing
from labkit.text import engram_map

prop = collect(PROPERTIES)


@prop("quantisers_search", "block rounding equals a search among all codes, midpoints included")
def quantisers_search() -> str | None:
    made = torch.Generator().manual_seed(5)
    midpoints = torch.tensor([0, .25, .75, 1.25, 1.75, 2.5, 3.5, 5])
    ties = torch.cat([midpoints, -midpoints, midpoints * 0.5, torch.tensor([6.0] * 8)])   # [32]
    for form in ("fp8", "mxfp4", "nvfp4"):
        for x in (ties, ties * 2.0**-7, torch.randn(96, generator=made),
                  torch.randn(96, generator=made) * 1e-4, torch.zeros(32)):
            wrong = equal(form, nearest_in_blocks(x, form), blocks.fake_quantize(x, form))
            if wrong:
                return wrong
    return None


@prop("nibbles", "packing two codes a byte: the even column is the byte modulo 16")
def nibbles() -> str | None:
    codes = torch.arange(64, dtype=torch.uint8).reshape(4, 16) * 7 % 16
    packed = packing.pack_nibbles(codes)
    return (equal("low nibble", codes[:, 0::2], packed % 16)
            or equal("unpacked", codes, packing.unpack_nibbles(packed)))


@prop("scale_bytes", "a scale byte one higher means twice the scale")
def scale_bytes() -> str | None:
    values = formats.decode_ue8m0(torch.arange(1, 255, dtype=torch.uint8))
    return (equal("doubling", values[:-1] * 2, values[1:])
            or equal("round trip", values, formats.decode_ue8m0(formats.encode_ue8m0(values))))


@prop("top_k", "a selection equals Python's sort: best first, of equal scores the earlier")
def top_k() -> str | None:
    made = torch.Generator().manual_seed(2)
    scores = torch.randint(-2, 3, (40, 11), generator=made).double()   # many ties
    scores[torch.rand(scores.shape, generator=made) < 0.4] = -math.inf
    for k in (1, 4, 11, 14):
        expected = []
        for line in scores.tolist():
            finite = [g for g in range(len(line)) if line[g] != -math.inf]
            best = sorted(sorted(finite, key=lambda g: (-line[g], g))[:k])
            expected.append(best + [-1] * (k - len(best)))
        for name in ("reference", "cpu"):
            found = get(name).select_top(scores, k)
            wrong = equal(f"{name} top {k}", torch.tensor(expected), found)
            if wrong:
                return wrong
    return None


@prop("text_classes", "texts that differ in case or outer spaces share a class")
def text_classes() -> str | None:
    for word in ("the", "été", "straße's", "naïve"):
        upper = word.upper().replace("SS", "ß")
        for other in (upper, " " + word, word.title(), "\n" + word + "  "):
            if engram_map.normalise(other) != engram_map.normalise(word):
                return f"{other!r} and {word!r} are in different classes"
    kept = engram_map.normalise(" "), engram_map.normalise("  "), engram_map.normalise("\n")
    if kept != (" ", " ", " "):
        return f"a lone space became {kept}"
    return None


@prop("expert_limits", "beyond the limits an expert no longer changes, within them it does")
def expert_limits() -> str | None:
    config = small_config(swiglu_limit=2.0)
    expert = Expert(config).double()
    fill(expert, 1)
    x = torch.zeros(1, config.hidden_size, dtype=torch.float64)
    x[0, 0] = 1.0

    def out(gate: float, up: float, weight: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            expert.w1.weight[:, 0], expert.w3.weight[:, 0] = gate, up
            return expert(x, weight)

    one = torch.ones(1, 1, dtype=torch.float64)
    for weight, who in ((one, "routed"), (None, "shared")):
        for changed, same, what in (((5, 1), (2, 1), "gate above"), ((1, 9), (1, 2), "up above"),
                                    ((1, -9), (1, -2), "up below")):
            wrong = equal(f"{who} expert, {what}", out(*same, weight), out(*changed, weight))
            if wrong:
                return wrong
        if not close("", out(-2, 1, weight), out(-5, 1, weight), 1e-6):
            return f"{who} expert, gate below: limited, but the limit is from above only"
    return None


@prop("expert_bf16", "a bf16 expert rounds silu * up * weight once, before the down projection")
def expert_bf16() -> str | None:
    config = small_config(hidden_size=64, moe_intermediate_size=64)
    expert = Expert(config)
    fill(expert, 3)
    expert = expert.bfloat16()
    made = torch.Generator().manual_seed(4)
    x = torch.randn(64, 64, generator=made).bfloat16()
    weight = torch.rand(64, 1, generator=made) + 0.2
    limit = config.swiglu_limit

    def project(name: str, v: torch.Tensor) -> torch.Tensor:
        return (v.double() @ getattr(expert, name).weight.double().T).bfloat16()

    with torch.no_grad():
        gate, up = project("w1", x).double(), project("w3", x).double()
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = gate * torch.sigmoid(gate) * up
        expected = project("w2", (inner * weight.double()).bfloat16())
        return equal("bf16 expert", expected, expert(x, weight), share=0.97)


@prop("routing_bias", "a bias equal for all changes nothing; an image token has its own bias")
def routing_bias() -> str | None:
    config = small_config()
    gate = Gate(config, 5, 2).double()
    fill(gate, 6)
    run = SimpleNamespace(kernels=get("reference"))
    made = torch.Generator().manual_seed(7)
    x = torch.randn(12, config.hidden_size, generator=made).double()
    image = torch.arange(12) % 2 == 1
    with torch.no_grad():
        picked, weights = gate(x, run, image)
        gate.bias.add_(3.0)
        again, shifted = gate(x, run, image)
        wrong = equal("picked", picked, again) or close("weights", weights, shifted, 1e-12)
        if wrong:
            return wrong
        gate.bias_vl.copy_(torch.tensor([9.0, 0, 0, 0, 9.0]))
        picked, _ = gate(x, run, image)
    return equal("experts of image tokens", torch.tensor([[0, 4]] * 6), picked[image])
