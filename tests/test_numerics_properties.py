"""Properties of the block quantisers, on values of every size, and the faults that they catch."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from test_numerics import NAMES, check_golden

from labkit.numerics import FORMATS, dequantize, fake_quantize, formats, quantize
from labkit.numerics import blocks as blocks_module

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@st.composite
def rows(draw, low=1e-7, high=3e3):
    """[2, 32] fp32; the amax of each 16 lies in low..high, many entries repeat or tie."""
    unit = st.one_of(
        st.floats(-1, 1, width=32),
        st.sampled_from([k / 16 for k in range(-16, 17)]),  # ties, codes, zeros of both signs
        st.just(-0.0),
    )
    x = draw(hnp.arrays(np.float32, (2, 32), elements=unit))
    amax = draw(st.one_of(
        st.floats(math.log2(low), math.log2(high)).map(lambda e: 2.0**e),
        st.integers(math.ceil(math.log2(low)), math.floor(math.log2(high))).map(lambda e: 2.0**e),
    ))
    x[:, ::16] = 1.0
    return torch.from_numpy(x * np.float32(amax))


def nearest(value: Fraction, values: list[float]) -> list[float]:
    """All values at the least distance, exactly."""
    best = min(abs(Fraction(v) - value) for v in values)
    return [v for v in values if abs(Fraction(v) - value) == best]


def exact_scale(amax: Fraction, name: str) -> Fraction:
    """The recipe of the table in rational arithmetic."""
    recipe = FORMATS[name]
    amax = max(amax, Fraction(float(np.float32(recipe.guard))))
    ratio = amax / Fraction(recipe.largest)
    if recipe.scale == "ue8m0":
        k = -200
        while Fraction(2) ** k < ratio:
            k += 1
        return Fraction(2) ** k
    found = nearest(min(ratio, Fraction(448)), formats.e4m3_values()[:127])
    even = [v for v in found if formats.e4m3_values().index(v) % 2 == 0]
    return Fraction(even[0] if len(found) > 1 else found[0])


def check_against_exact_arithmetic(name, x):
    recipe = FORMATS[name]
    q = quantize(x, name)
    got = fake_quantize(x, name)
    decode_scale = formats.decode_ue8m0 if recipe.scale == "ue8m0" else formats.decode_e4m3
    table = formats.e4m3_values() if recipe.element == "e4m3" else formats.e2m1_values()
    half = len(table) // 2
    positive = [v for v in table[:half] if not math.isnan(v)]
    for r in range(x.shape[0]):
        for b in range(x.shape[1] // recipe.block):
            span = slice(b * recipe.block, (b + 1) * recipe.block)
            block = [Fraction(v) for v in x[r, span].tolist()]
            scale = exact_scale(max(map(abs, block)), name)
            assert Fraction(float(decode_scale(q.scales)[r, b])) == scale
            for column, value in enumerate(block, b * recipe.block):
                near = nearest(min(abs(value / scale), Fraction(positive[-1])), positive)
                codes = [positive.index(v) for v in near]
                code = codes[0] if len(codes) == 1 else next(c for c in codes if c % 2 == 0)
                negative = math.copysign(1.0, float(x[r, column])) < 0
                assert q.codes[r, column] == code + negative * half
                want = float(Fraction(positive[code]) * scale)
                assert float(got[r, column]) == (-want if negative else want)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(x=rows())
def test_equals_the_recipe_in_exact_arithmetic(name, x):
    check_against_exact_arithmetic(name, x)


def check_round_trip(name, x):
    got = fake_quantize(x, name)
    back = dequantize(quantize(x, name))
    assert torch.equal(got.view(torch.int32), back.view(torch.int32))
    assert torch.equal(torch.signbit(got), torch.signbit(x))


@pytest.mark.parametrize("name", FORMATS)
@quick
@given(x=rows())
def test_fake_quantize_is_quantize_then_dequantize(name, x):
    check_round_trip(name, x)


# Below 2^-7 the steps of nvfp4's own E4M3 scale are too coarse, see the next test.
@pytest.mark.parametrize(("name", "low"), [("fp8", 1e-7), ("mxfp4", 1e-7), ("nvfp4", 6 * 2.0**-7)])
@quick
@given(data=st.data())
def test_rounding_twice_changes_nothing(name, low, data):
    once = fake_quantize(data.draw(rows(low=low)), name)
    assert torch.equal(fake_quantize(once, name), once)


def test_where_nvfp4_is_not_idempotent():
    """amax / 6 = 1.6 * 2^-9 takes the scale 2 * 2^-9, whose 4 next takes the scale 2^-9."""
    x = torch.zeros(1, 16)
    x[0, 0] = 6 * 1.6 * 2.0**-9
    once = fake_quantize(x, "nvfp4")
    assert once[0, 0] == 8 * 2.0**-9
    assert fake_quantize(once, "nvfp4")[0, 0] == 6 * 2.0**-9


@pytest.mark.parametrize(("name", "low", "high"), [
    ("fp8", 1e-3, 3e3), ("mxfp4", 1e-7, 3e3), ("nvfp4", 1.0, 300.0),
])
@quick
@given(data=st.data(), power=st.integers(-3, 3))
def test_powers_of_two_pass_through(name, low, high, data, power):
    x = data.draw(rows(low=low, high=high))
    factor = 2.0**power
    assert torch.equal(fake_quantize(x * factor, name), fake_quantize(x, name) * factor)


@pytest.mark.parametrize("name", FORMATS)
@quick
@given(x=rows())
def test_order_and_sign_are_kept_inside_a_block(name, x):
    block = FORMATS[name].block
    order = x[:, :block].sort(-1).indices
    y = fake_quantize(x, name)[:, :block].gather(-1, order)
    assert (y.diff(dim=-1) >= 0).all()
    assert torch.equal(fake_quantize(-x, name), -fake_quantize(x, name))


def check_power_of_two_edges(name):
    """amax = largest * 2^k fills the scale 2^k; one step more takes 2^(k+1)."""
    recipe = FORMATS[name]
    for k in range(-12, 4):
        full = np.float32(recipe.largest * 2.0**k)
        above, below = np.nextafter(full, np.float32(np.inf)), np.nextafter(full, np.float32(0))
        x = torch.zeros(3, recipe.block)
        x[:, 0] = torch.from_numpy(np.array([full, above, below]))
        scales = formats.decode_ue8m0(quantize(x, name).scales).flatten().tolist()
        assert scales == [2.0**k, 2.0 ** (k + 1), 2.0**k]
    for k in range(-12, 4):  # an amax that is itself a power of two
        x = torch.full((1, recipe.block), 2.0**k)
        assert torch.equal(fake_quantize(x, name), x)


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_exact_powers_of_two_and_their_neighbours(name):
    check_power_of_two_edges(name)


def check_nvfp4_ties():
    """Every midpoint of two elements under every E4M3 scale: only a true quotient sees the tie."""
    positive = torch.tensor(formats.e2m1_values()[:8])
    ties = (positive[:-1] + positive[1:]) / 2
    elements = torch.cat([torch.tensor([6.0, -6.0]), ties, -ties])  # [16]
    scales = torch.tensor(formats.e4m3_values()[1:127])  # [126]
    check_against_exact_arithmetic("nvfp4", scales[:, None] * elements)


def test_nvfp4_ties_under_every_scale():
    check_nvfp4_ties()


def check_zero_blocks(name):
    recipe = FORMATS[name]
    x = torch.tensor([[0.0, -0.0]]).repeat(1, recipe.block // 2)
    q = quantize(x, name)
    sign_bit = 128 if recipe.element == "e4m3" else 8
    assert q.codes.tolist() == [[0, sign_bit] * (recipe.block // 2)]
    guard_code = {"fp8": 127 - 22, "mxfp4": 1, "nvfp4": 1}[name]  # 2^-22, 2^-126, 2^-9
    assert q.scales.tolist() == [[guard_code]]
    got = fake_quantize(x, name)
    assert torch.equal(got, x) and torch.equal(torch.signbit(got), torch.signbit(x))


@pytest.mark.parametrize("name", FORMATS)
def test_zero_blocks_have_the_guard_scale_and_keep_their_signs(name):
    check_zero_blocks(name)


def check_saturation():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([1e6, -2700.0, 2688.0])
    assert quantize(x, "nvfp4").scales.tolist() == [[126]]  # 448, the largest E4M3
    assert fake_quantize(x, "nvfp4")[0, :3].tolist() == [2688.0, -2688.0, 2688.0]


def test_nvfp4_saturates_in_scale_and_elements():
    check_saturation()


# ------------------------------------------------------------------ broken variants
def _ties_away(x, largest, smallest_binade, mantissa_bits):
    magnitude = x.abs().clamp(max=largest)
    step = magnitude.clamp(min=smallest_binade).log2().floor().exp2() * 2.0**-mantissa_bits
    return ((magnitude / step + 0.5).floor() * step).copysign(x)


def _towards_zero(x, largest, smallest_binade, mantissa_bits):
    magnitude = x.abs().clamp(max=largest)
    step = magnitude.clamp(min=smallest_binade).log2().floor().exp2() * 2.0**-mantissa_bits
    return ((magnitude / step).floor() * step).copysign(x)


_round = formats._round
_scale = blocks_module.power_of_two_scale
_nvfp4_scale = blocks_module.block_scale


def _with_formats(**changes):
    return {n: replace(f, **changes.get(n, {})) for n, f in FORMATS.items()}


MUTANTS = {
    "ties away from zero": (formats, "_round", _ties_away),
    "rounding towards zero": (formats, "_round", _towards_zero),
    "negative zero loses its sign": (formats, "_round", lambda x, **k: _round(x, **k) + 0.0),
    "no subnormal codes": (
        formats, "_round",
        lambda x, **k: torch.where(x.abs() < k["smallest_binade"], x * 0, _round(x, **k)),
    ),
    "UE8M0 byte read as a number": (formats, "decode_ue8m0", lambda codes: codes.float()),
    "UE8M0 bias 128": (
        formats, "decode_ue8m0", lambda codes: torch.exp2(codes.float() - 128),
    ),
    "scale rounded down": (
        blocks_module, "power_of_two_scale", lambda a, m: (a / m).log2().floor().exp2(),
    ),
    "powers of two pushed up a step": (
        blocks_module, "power_of_two_scale", lambda a, m: (a / m).log2().floor().add(1).exp2(),
    ),
    "fp8 scale in E2M1's recipe": (
        blocks_module, "power_of_two_scale", lambda a, m: _scale(a, 6.0),
    ),
    "nvfp4 with UE8M0 scales": (
        blocks_module, "FORMATS", _with_formats(nvfp4={"scale": "ue8m0"}),
    ),
    "nvfp4 in blocks of 32": (blocks_module, "FORMATS", _with_formats(nvfp4={"block": 32})),
    "mxfp4 in blocks of 16": (blocks_module, "FORMATS", _with_formats(mxfp4={"block": 16})),
    "fp8 without zero guard": (blocks_module, "FORMATS", _with_formats(fp8={"guard": 1e-30})),
    "nvfp4 scale not saturated": (
        blocks_module, "block_scale",
        lambda a, f: a / 6 if f.name == "nvfp4" else _nvfp4_scale(a, f),
    ),
    "multiplying by an inexact reciprocal": (
        blocks_module, "_divide", lambda b, s, f: b * s.reciprocal(),
    ),
}


def _all_checks():
    for name in NAMES:
        check_golden(name)
    generator = torch.Generator().manual_seed(7)
    for name in FORMATS:
        check_zero_blocks(name)
        # every tie: (odd multiple of a sixteenth) * scale, and ordinary numbers of many sizes
        ties = (torch.arange(-32, 32, dtype=torch.float32) / 32 * 6).view(2, 32)
        ties[:, 0] = 6.0
        check_against_exact_arithmetic(name, ties)
        scale_ties = torch.arange(-32, 32, dtype=torch.float32).view(2, 32) / 4 * 1.375
        check_against_exact_arithmetic(name, scale_ties)
        for size in (1e-6, 1e-2, 30.0):
            x = torch.randn(2, 32, generator=generator) * size
            check_round_trip(name, x)
            check_against_exact_arithmetic(name, x)
    check_power_of_two_edges("fp8")
    check_power_of_two_edges("mxfp4")
    check_saturation()
    check_nvfp4_ties()


def test_all_checks_pass_unbroken():
    _all_checks()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_broken_variant_is_caught(mutant, monkeypatch):
    module, name, broken = MUTANTS[mutant]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        _all_checks()
