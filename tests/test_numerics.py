"""Codecs, code by code, and the block quantisers against the golden vectors."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from labkit.errors import InputError
from labkit.numerics import (
    FORMATS,
    dequantize,
    fake_quantize,
    formats,
    max_error,
    pack,
    packed_bytes,
    quantize,
    relative_rms,
    sqnr_db,
    unpack,
)
from labkit.numerics.packing import pack_nibbles, unpack_nibbles

GOLDEN = Path(__file__).parent / "golden" / "primitives" / "quantisers.safetensors"
NAMES = {"fp8": "fp8_block32", "mxfp4": "mxfp4_block32", "nvfp4": "nvfp4_block16"}


def bits(x: torch.Tensor) -> list[int]:
    """The bit patterns: -0 and 0 differ, NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    return x.contiguous().view(integer).tolist()


def check_golden(name, dtype=torch.float32):
    golden = load_file(GOLDEN)
    key = NAMES[name] + (".bf16" if dtype == torch.bfloat16 else "")
    x = golden["x"].to(dtype)  # [64, 64]
    for got in (fake_quantize(x, name), dequantize(quantize(x, name)),
                dequantize(unpack(pack(quantize(x, name))))):
        assert got.dtype == dtype
        assert bits(got) == bits(golden[key].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_golden_vectors_bit_for_bit(name, dtype):
    check_golden(name, dtype)


# ------------------------------------------------------------------ codes
def test_e2m1_has_these_sixteen_values():
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
    assert values == positive + [-v for v in positive]
    assert math.copysign(1, values[8]) == -1


def test_e4m3_equals_torchs_own_type_for_all_codes():
    codes = torch.arange(256).to(torch.uint8)
    ours, torchs = formats.decode_e4m3(codes), codes.view(torch.float8_e4m3fn).float()
    nan = torch.isnan(ours)
    assert codes[nan].tolist() == [0x7F, 0xFF]
    assert torch.equal(nan, torch.isnan(torchs))
    assert bits(ours[~nan]) == bits(torchs[~nan])


def test_ue8m0_bytes_are_exponents():
    values = formats.decode_ue8m0(torch.arange(256).to(torch.uint8))
    assert values[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert math.isnan(values[255])
    assert values[120] == 2.0**-7


@pytest.mark.parametrize(("encode", "decode", "count"), [
    (formats.encode_e2m1, formats.decode_e2m1, 16),
    (formats.encode_e4m3, formats.decode_e4m3, 256),
    (formats.encode_ue8m0, formats.decode_ue8m0, 256),
])
def test_every_code_survives_decoding_and_encoding(encode, decode, count):
    codes = torch.arange(count).to(torch.uint8)
    assert torch.equal(encode(decode(codes)), codes)


@pytest.mark.parametrize(("encode", "round_to", "values"), [
    (formats.encode_e2m1, formats.round_e2m1, formats.e2m1_values()[:8]),
    (formats.encode_e4m3, formats.round_e4m3, formats.e4m3_values()[:127]),
])
def test_between_neighbours_the_nearer_wins_and_a_tie_takes_the_even_code(encode, round_to, values):
    for low in range(len(values) - 1):
        middle = (values[low] + values[low + 1]) / 2  # exact: it has one bit more than a value
        even = low if low % 2 == 0 else low + 1
        tie = torch.tensor(middle)
        below = torch.nextafter(tie, torch.tensor(0.0))
        above = torch.nextafter(tie, torch.tensor(math.inf))
        x = torch.stack([tie, below, above])
        want = [even, low, low + 1]
        assert encode(x).tolist() == want
        assert round_to(x).tolist() == [values[i] for i in want]
        sign_bit = 8 if len(values) == 8 else 128
        assert encode(-x).tolist() == [i + sign_bit for i in want]


def test_saturation_nan_and_negative_zero():
    huge = torch.tensor([6.0, 6.1, 1e30, math.inf, -math.inf, -0.0, 0.0])
    assert formats.encode_e2m1(huge).tolist() == [7, 7, 7, 7, 15, 8, 0]
    assert formats.encode_e4m3(huge).tolist()[2:] == [126, 126, 254, 128, 0]
    assert formats.encode_e4m3(torch.tensor([448.0, 464.0, 480.0])).tolist() == [126] * 3
    assert formats.encode_e4m3(torch.tensor([math.nan])).tolist() in ([0x7F], [0xFF])
    with pytest.raises(ValueError, match="E2M1 has no code for NaN"):
        formats.encode_e2m1(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("value", [0.0, -1.0, 3.0, 1.0 + 2.0**-23, math.inf, 2.0**-128])
def test_ue8m0_refuses_what_is_no_power_of_two(value):
    with pytest.raises(ValueError, match="powers of two"):
        formats.encode_ue8m0(torch.tensor([value]))


# ------------------------------------------------------------------ packing and sizes
def test_even_column_lies_in_the_low_nibble():
    codes = torch.tensor([[0x1, 0xA, 0xF, 0x0]], dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [[0xA1, 0x0F]]
    assert torch.equal(unpack_nibbles(packed), codes)


def test_packing_keeps_all_pairs_of_codes():
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)  # [256, 2]
    packed = pack_nibbles(codes)
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(unpack_nibbles(packed), codes)
    assert torch.equal(unpack_nibbles(packed.view(torch.int8)), codes)
    with pytest.raises(InputError, match="must be even"):
        pack_nibbles(codes[:, :1])


def test_bytes_of_a_compressed_entry():
    entry = packed_bytes(512, "nvfp4") + packed_bytes(128, "mxfp4")
    assert (packed_bytes(512, "nvfp4"), packed_bytes(128, "mxfp4")) == (256 + 32, 64 + 4)
    # three sources at ratio 2, one at ratio 1
    assert entry * (3 / 2 + 1) == 890
    assert packed_bytes(512, "fp8") == 528
    for name in FORMATS:
        packed = pack(quantize(torch.randn(3, 5, 64), name))
        assert packed.nbytes == 15 * packed_bytes(64, name)


# ------------------------------------------------------------------ input and output
@pytest.mark.parametrize("name", FORMATS)
def test_shapes_strides_and_dtypes(name):
    x = torch.randn(3, 4, 64)
    want = fake_quantize(x, name)
    for view in (x.transpose(0, 1), x[:, ::2], x[1], x[:0], x[..., :32]):
        assert torch.equal(fake_quantize(view, name), dequantize(quantize(view, name)))
    assert torch.equal(fake_quantize(x.transpose(0, 1), name), want.transpose(0, 1))
    wide = torch.stack([x, -x], -1).flatten(-2)
    assert torch.equal(fake_quantize(wide[..., ::2], name), want)
    q = quantize(x, name)
    assert q.codes.dtype == q.scales.dtype == torch.uint8
    assert q.codes.shape == x.shape and q.scales.shape == (3, 4, 64 // FORMATS[name].block)
    assert torch.equal(fake_quantize(x.double(), name), want.double())
    assert fake_quantize(x.half(), name).dtype == torch.float16


@pytest.mark.parametrize("name", FORMATS)
def test_the_input_is_left_alone_and_gradients_pass(name):
    x = torch.randn(2, 32, requires_grad=True)
    before = x.detach().clone()
    y = fake_quantize(x, name)
    weight = torch.randn(2, 32)
    (y * weight).sum().backward()
    assert torch.equal(x.grad, weight)
    assert torch.equal(x.detach(), before)
    assert torch.equal(y.detach(), fake_quantize(before, name))
    with torch.no_grad():
        assert not fake_quantize(x, name).requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_a_block_with_a_non_number_reads_as_nan_and_spoils_no_other(name, bad):
    x = torch.full((1, 64), 3.0)  # 6 * 0.5: exact in all formats
    x[0, 3] = bad
    block = FORMATS[name].block
    for got in (fake_quantize(x, name), dequantize(quantize(x, name))):
        assert torch.isnan(got[0, :block]).all()
        assert torch.equal(got[0, block:], torch.full((64 - block,), 3.0))
    scale = quantize(x, name).scales[0, 0].item()
    assert scale == {"ue8m0": 255, "e4m3": 0x7F}[FORMATS[name].scale]


def test_bad_calls_say_what_is_wrong():
    with pytest.raises(InputError, match="'int4': choose one of fp8, mxfp4, nvfp4"):
        quantize(torch.zeros(32), "int4")
    with pytest.raises(InputError, match="48 entries: fp8 needs a multiple of 32"):
        fake_quantize(torch.zeros(48), "fp8")
    with pytest.raises(InputError, match="width 24"):
        packed_bytes(24, "nvfp4")


def test_error_measures():
    exact, rounded = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert relative_rms(exact, rounded) == pytest.approx(0.1)
    assert sqnr_db(exact, rounded) == pytest.approx(20.0)
    assert max_error(exact, rounded) == 0.5
    assert (relative_rms(exact, exact), sqnr_db(exact, exact)) == (0.0, math.inf)
    assert relative_rms(torch.zeros(2), rounded) == math.inf
    with pytest.raises(ValueError, match="shapes differ"):
        relative_rms(exact, rounded[:1])
