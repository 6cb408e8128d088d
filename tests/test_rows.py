"""Rows of bytes: what is stored is what quantise-dequantise gives, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.numerics.blocks import fake_quantize
from labkit.numerics.rows import FORMS, RowCodec

RECIPES = ("fp8", "mxfp4", "nvfp4")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def same_bits(a, b):
    """Equal, NaN equal to NaN, and -0 unlike 0."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    nan = torch.isnan(a)
    return (a.dtype == b.dtype and torch.equal(nan, torch.isnan(b))
            and torch.equal(a[~nan].view(kinds[a.itemsize]), b[~nan].view(kinds[b.itemsize])))


def vectors(seed, dtype, size=9):
    """[size,64] at real scales, with blocks of zeros, minus zeros, one outlier, a NaN."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 64, generator=made, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-7, 4, (size, 1), generator=made)
    x[0, :32], x[1, :32] = 0.0, -0.0
    x[2, 5] = 3e3
    x[3, 40] = torch.nan
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_lost_against_fake_quantisation(recipe, dtype, seed):
    x = vectors(seed, dtype)
    once = fake_quantize(x, recipe)
    for form in ("packed", "bf16", "plain"):
        codec = RowCodec(64, recipe, form, dtype)
        if form == "bf16" and dtype == torch.float16:
            continue  # bf16 has fewer fraction bits than tiny fp16 values would keep
        rows = codec.encode(x)
        assert rows.shape == (9, codec.columns) and rows.dtype == codec.row_dtype
        assert same_bits(codec.decode(rows), once), form
    codec = RowCodec(64, recipe, "fp8", dtype)
    assert same_bits(codec.decode(codec.encode(x)), fake_quantize(once, "fp8"))


def test_fp8_rounds_compressed_kv_again_and_nothing_else():
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(1))
    for recipe in RECIPES:
        codec = RowCodec(64, recipe, "fp8", torch.float32)
        lost = not torch.equal(codec.decode(codec.encode(x)), fake_quantize(x, recipe))
        assert lost == (recipe == "nvfp4")


@pytest.mark.parametrize("recipe,width,sizes", [
    ("nvfp4", 512, (288, 528, 1024, 2048)), ("mxfp4", 128, (68, 132, 256, 512)),
    ("fp8", 512, (528, 528, 1024, 2048))])
def test_row_sizes_of_the_release(recipe, width, sizes):
    x = torch.randn(3, width)
    for form, size in zip(FORMS, sizes, strict=True):
        codec = RowCodec(width, recipe, form, torch.float32)
        assert codec.nbytes == size == codec.encode(x).untyped_storage().nbytes() // 3


def test_without_rounding_only_plain_rows_are_left():
    x = torch.randn(4, 64, dtype=torch.float64)
    plain = RowCodec(64, "nvfp4", "plain", torch.float64, rounding=False)
    assert torch.equal(plain.decode(plain.encode(x)), x)
    for form in ("packed", "fp8", "bf16"):
        with pytest.raises(InputError, match="rounding is off"):
            RowCodec(64, "nvfp4", form, torch.float64, rounding=False)
    with pytest.raises(InputError, match="choose one of packed, fp8, bf16, plain"):
        RowCodec(64, "nvfp4", "int8", torch.float32)
    with pytest.raises(InputError, match="multiple of 16"):
        RowCodec(40, "nvfp4", "packed", torch.float32)
