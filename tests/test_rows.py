"""Rows of a cache: what is read back is what the recipe says, bit for bit, in every form."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.numerics.blocks import FORMATS, fake_quantize
from labkit.numerics.rows import FORMS, RowCodec

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
RECIPES = tuple(FORMATS)


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal to the sign of a zero; one NaN is as good as another."""
    assert expected.dtype == found.dtype and expected.shape == found.shape
    nan = expected.isnan()
    view = INTEGERS[expected.element_size()]
    return torch.equal(nan, found.isnan()) and torch.equal(
        expected.view(view)[~nan], found.view(view)[~nan])


def reads_back(x: torch.Tensor, recipe: str, form: str) -> None:
    codec = RowCodec(x.shape[-1], recipe, form, x.dtype)
    rows = codec.encode(x)
    assert rows.dtype == codec.row_dtype and rows.shape == (*x.shape[:-1], codec.columns)
    expected = fake_quantize(x, recipe)
    if form == "fp8" and recipe != "fp8":  # rounded a second time, by another recipe
        expected = fake_quantize(expected, "fp8")
    found = codec.decode(rows)
    assert same_bits(expected, found), (recipe, form, x.dtype)


@given(st.integers(0, 10**6), st.sampled_from(RECIPES), st.sampled_from(DTYPES),
       st.integers(1, 4), st.integers(-20, 20))
def test_what_is_read_is_what_the_recipe_rounds_to(seed, recipe, dtype, blocks, exponent):
    made = torch.Generator().manual_seed(seed)
    shape = (2, 3, FORMATS[recipe].block * 2 * blocks)
    x = torch.randn(shape, generator=made, dtype=torch.float64) * 2.0**exponent
    x = x * torch.randn(shape[-1], generator=made, dtype=torch.float64).exp()  # uneven blocks
    for form in FORMS:
        reads_back(x.to(dtype), recipe, form)


SPECIAL = {
    "zeros": lambda n, d: torch.zeros(n, dtype=d),
    "minus zeros": lambda n, d: torch.full((n,), -0.0, dtype=d),
    "tiny": lambda n, d: torch.full((n,), -torch.finfo(d).smallest_normal, dtype=d),
    "subnormal": lambda n, d: torch.full((n,), torch.finfo(d).smallest_normal / 8, dtype=d),
    "huge": lambda n, d: torch.full((n,), torch.finfo(d).max, dtype=d),
    "NaN": lambda n, d: torch.arange(n).to(d).masked_fill(torch.arange(n) == 3, float("nan")),
    "infinity": lambda n, d: torch.arange(n).to(d).masked_fill(torch.arange(n) == 3, -torch.inf),
    "one spike": lambda n, d: torch.where(torch.arange(n) == 5, 6e4, 1e-3).to(d),
    "half way": lambda n, d: ((torch.arange(n) % 13) / 4 - 1.5).to(d),
}


@pytest.mark.parametrize("recipe, form, dtype", [*itertools.product(RECIPES, FORMS, DTYPES)])
def test_special_blocks(recipe, form, dtype):
    width = 64
    for make in SPECIAL.values():
        ordinary = torch.randn(width).to(dtype)
        reads_back(torch.stack([make(width, dtype), ordinary, make(width, dtype)]), recipe, form)


def test_a_spoilt_block_spoils_no_other():
    x = torch.ones(1, 64)
    x[0, 3] = float("nan")
    for recipe, form in itertools.product(RECIPES, FORMS):
        codec = RowCodec(64, recipe, form, torch.float32)
        bad = codec.decode(codec.encode(x)).isnan()[0]
        block = 32 if form == "fp8" else FORMATS[recipe].block
        assert bad.nonzero().flatten().tolist() == list(range(block)), (recipe, form)


@pytest.mark.parametrize("form, entry, key, window", [
    ("packed", 288, 68, 528), ("fp8", 528, 132, 528), ("bf16", 1024, 256, 1024),
    ("plain", 2048, 512, 2048)])
def test_bytes_of_a_row_at_the_released_widths(form, entry, key, window):
    for width, recipe, expected in ((512, "nvfp4", entry), (128, "mxfp4", key),
                                    (512, "fp8", window)):
        codec = RowCodec(width, recipe, form, torch.float32)
        rows = codec.encode(torch.randn(7, width))
        assert codec.nbytes == expected and rows.untyped_storage().nbytes() == 7 * expected


def test_fp8_rounds_compressed_kv_once_more_and_nothing_else_loses():
    """The form's own error is there to be seen; the other forms have none."""
    x = torch.randn(50, 512)
    for recipe in RECIPES:
        right = fake_quantize(x, recipe)
        lost = {form: float((RowCodec(512, recipe, form, x.dtype).decode(
            RowCodec(512, recipe, form, x.dtype).encode(x)) - right).abs().max())
            for form in FORMS}
        print(recipe, lost)
        assert lost["packed"] == lost["bf16"] == lost["plain"] == 0
        assert (lost["fp8"] > 0) == (recipe == "nvfp4")


def test_only_plain_rows_hold_values_as_they_are_and_carry_gradients():
    x = torch.randn(3, 64, requires_grad=True)
    codec = RowCodec(64, "nvfp4", "plain", torch.float32, rounding=False)
    assert codec.encode(x) is x and codec.decode(codec.encode(x)) is x
    rounded = RowCodec(64, "nvfp4", "plain", torch.float32)
    (slope,) = torch.autograd.grad(rounded.decode(rounded.encode(x)).sum(), x)
    assert torch.equal(slope, torch.ones_like(x))  # straight through
    for form in ("packed", "fp8"):
        assert not RowCodec(64, "nvfp4", form, torch.float32).encode(x).requires_grad


def test_refusals():
    for arguments, said in (
        ((64, "nvfp4", "int4", torch.float32), "'int4': choose one of packed, fp8, bf16, plain"),
        ((64, "int4", "packed", torch.float32), "unknown number format 'int4'"),
        ((40, "nvfp4", "packed", torch.float32), "width 40: nvfp4 needs a multiple of 16"),
        ((48, "mxfp4", "packed", torch.float32), "width 48: mxfp4 needs a multiple of 32"),
        ((48, "nvfp4", "fp8", torch.float32), "width 48: fp8 needs a multiple of 32"),
        *(((64, "nvfp4", form, torch.float32, False), "fit the form 'plain' only")
          for form in ("packed", "fp8", "bf16")),
    ):
        with pytest.raises(InputError, match=said):
            RowCodec(*arguments)
