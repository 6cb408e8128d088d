"""Block quantisation along the last axis: one scale for every 16 or 32 neighbours.

The cache of DeepSeek-V4.1 uses three recipes; they differ in elements, block and scale:

    name    used for             elements  block  scale of a block
    fp8     window KV            E4M3         32  UE8M0: 2^ceil(log2(amax / 448))
    mxfp4   index queries, keys  E2M1         32  UE8M0: 2^ceil(log2(amax / 6))
    nvfp4   compressed KV        E2M1         16  E4M3 nearest to amax / 6, at most 448

amax is the largest magnitude of the block, clamped from below by the recipe's zero guard, so a
block of zeros has a scale too. A block that holds a NaN or an infinity gets the NaN scale: it
reads back as NaN throughout, never as a plausible number.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from labkit.errors import InputError
from labkit.numerics import formats

# Which recipes are switched on: all, none, or those named.
Rounding = bool | Set[str]


@dataclass(frozen=True)
class BlockFormat:
    """One recipe of the table above. `guard` is the least amax."""

    name: str
    element: str  # "e4m3" or "e2m1"
    block: int
    scale: str  # "ue8m0" or "e4m3"
    guard: float

    @property
    def largest(self) -> float:
        """Largest element value."""
        return formats.E4M3_MAX if self.element == "e4m3" else formats.E2M1_MAX

    @property
    def element_bits(self) -> int:
        return 8 if self.element == "e4m3" else 4


FORMATS = {
    "fp8": BlockFormat("fp8", "e4m3", 32, "ue8m0", 1e-4),
    "mxfp4": BlockFormat("mxfp4", "e2m1", 32, "ue8m0", 6 * 2.0**-126),
    "nvfp4": BlockFormat("nvfp4", "e2m1", 16, "e4m3", 6 * 2.0**-9),
}


@dataclass(frozen=True)
class Quantized:
    """A quantised tensor, one code a byte (`labkit.numerics.packing` puts two FP4 codes in one).

    codes   uint8 [..., n]: element codes (E4M3: 0..255, E2M1: 0..15)
    scales  uint8 [..., n / block]: scale codes (UE8M0 or E4M3), bytes and not numbers
    format  "fp8", "mxfp4" or "nvfp4"
    dtype   dtype of the tensor that was quantised, which `dequantize` gives back
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: str
    dtype: torch.dtype = torch.float32


def block_format(name: str) -> BlockFormat:
    """The recipe of that name; InputError for an unknown one."""
    try:
        return FORMATS[name]
    except KeyError:
        raise InputError(
            f"unknown number format {name!r}: choose one of {', '.join(FORMATS)}"
        ) from None


def rounds(rounding: Rounding, name: str) -> bool:
    """Whether the recipe of that name is on."""
    return rounding if isinstance(rounding, bool) else name in rounding


def quantize(x: torch.Tensor, format: str) -> Quantized:
    """x [..., n] of any float dtype, n a multiple of the block -> codes and scales.

    Computed in fp32. InputError when n does not divide into blocks.
    """
    recipe = block_format(format)
    blocks = _split(x, recipe)  # [..., n / block, block] fp32
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), recipe)  # [..., n / block, 1]
    # A NaN scale already spoils the block; its elements are stored as zeros.
    elements = _divide(blocks, scale, recipe).nan_to_num(nan=0.0)
    encode = formats.encode_e4m3 if recipe.element == "e4m3" else formats.encode_e2m1
    scale_codes = formats.encode_ue8m0 if recipe.scale == "ue8m0" else formats.encode_e4m3
    return Quantized(
        encode(elements).reshape(x.shape), scale_codes(scale.squeeze(-1)), format, x.dtype
    )


def dequantize(q: Quantized) -> torch.Tensor:
    """Codes and scales -> values [..., n] in `q.dtype`."""
    recipe = block_format(q.format)
    decode = formats.decode_e4m3 if recipe.element == "e4m3" else formats.decode_e2m1
    decode_scale = formats.decode_ue8m0 if recipe.scale == "ue8m0" else formats.decode_e4m3
    blocks = decode(q.codes).reshape(*q.scales.shape, recipe.block)
    return (blocks * decode_scale(q.scales).unsqueeze(-1)).reshape(q.codes.shape).to(q.dtype)


def fake_quantize(x: torch.Tensor, format: str) -> torch.Tensor:
    """What `dequantize(quantize(x, format))` gives, bit for bit, without making codes.

    x [..., n] -> [..., n] in x's dtype. Straight-through: the gradient passes unchanged.
    """
    recipe = block_format(format)
    if x.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(x, recipe)  # type: ignore[no-any-return]
    return _fake_quantize(x, recipe)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, recipe):  # type: ignore[no-untyped-def]
        return _fake_quantize(x, recipe)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def _fake_quantize(x: torch.Tensor, recipe: BlockFormat) -> torch.Tensor:
    blocks = _split(x.detach(), recipe)  # [..., n / block, block] fp32
    scale = block_scale(blocks.abs().amax(-1, keepdim=True), recipe)
    round_to = formats.round_e4m3 if recipe.element == "e4m3" else formats.round_e2m1
    return round_to(_divide(blocks, scale, recipe)).mul_(scale).reshape(x.shape).to(x.dtype)


def block_scale(amax: torch.Tensor, recipe: BlockFormat) -> torch.Tensor:
    """Largest magnitudes (fp32, any shape) -> the scales as fp32 values, same shape."""
    guarded = amax.clamp(min=recipe.guard)
    if recipe.scale == "ue8m0":
        scale = power_of_two_scale(guarded, recipe.largest)
    else:
        scale = formats.round_e4m3(guarded / recipe.largest)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def power_of_two_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """2^ceil(log2(amax / largest)) on the IEEE bits; amax fp32, normal; largest 448 or 6.

    amax = 1.m * 2^e and largest = 1.l * 2^k give e - k, plus one if m > l: exact, where a
    logarithm would push some powers of two up a step.
    """
    k, mantissa = {448.0: (8, 0x600000), 6.0: (2, 0x400000)}[largest]  # 1.75 * 2^8, 1.5 * 2^2
    bits = amax.view(torch.int32)
    # Adding 2^23 - 1 - l carries into the exponent exactly when m > l.
    exponent = ((bits + (0x7FFFFF - mantissa)) >> 23) - k
    return (exponent << 23).view(torch.float32)


def _divide(blocks: torch.Tensor, scale: torch.Tensor, recipe: BlockFormat) -> torch.Tensor:
    # A power of two has an exact reciprocal; other scales need the true quotient.
    return blocks * scale.reciprocal() if recipe.scale == "ue8m0" else blocks / scale


def _split(x: torch.Tensor, recipe: BlockFormat) -> torch.Tensor:
    """[..., n] -> [..., n / block, block], fp32."""
    n = x.shape[-1]
    if n % recipe.block:
        raise InputError(
            f"the last axis has {n} entries: {recipe.name} needs a multiple of {recipe.block}"
        )
    return x.float().reshape(*x.shape[:-1], n // recipe.block, recipe.block)
