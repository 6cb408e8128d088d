"""How the release rounds a weight, and back; see `layout.storage_of` for which weight is how.

    fp8_tile  E4M3, scale 2^ceil(log2(amax / 448)) of each 32 x 32 tile
    fp8_row   E4M3, the same scale of each row's 32 columns
    fp4_row   E2M1, scale 2^ceil(log2(amax / 6)) of each row's 32 columns, two codes a byte

Rounding is to nearest, ties to even. amax has no guard but the smallest scale, 2^-126, which a
tile of zeros gets. Where a side does not divide by 32, the last tile is narrower: it is scaled
by what it holds, and the scales count ceil(n / 32). A value that was rounded once is rounded to
itself, though where rounding lowered amax to 224 (or 3) times a power of two its scale may drop
a step; the value is the same.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from labkit.checkpoint.layout import BLOCK, Storage, storage_of
from labkit.config import ModelConfig
from labkit.errors import CheckpointError
from labkit.numerics import formats
from labkit.numerics.blocks import power_of_two_scale
from labkit.numerics.packing import pack_nibbles, unpack_nibbles

_SMALLEST_SCALE = 2.0**-126


def quantize_weight(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A parameter of any float dtype -> (tensor as released, its scale or None).

    fp8_tile  [out, in] -> float8_e4m3fn [out, in], scale [ceil(out/32), ceil(in/32)]
    fp8_row   [out, in] -> float8_e4m3fn [out, in], scale [out, ceil(in/32)]
    fp4_row   [out, in] -> int8 [out, in/2], scale [out, ceil(in/32)]
    others    -> bf16 or fp32, None
    Scales are float8_e8m0fnu. The values must be finite.
    """
    storage = storage_of(name)
    weight = weight.detach()
    if storage in ("fp32", "bf16"):
        return weight.to(torch.float32 if storage == "fp32" else torch.bfloat16), None
    tiles = _tiles(weight, storage)  # [rows, 32 or 1, columns, 32]
    scale = _scale(tiles, storage)  # [rows, 1, columns, 1]
    scale_codes = formats.encode_ue8m0(scale[:, 0, :, 0]).view(torch.float8_e8m0fnu)
    elements = _untile(tiles * scale.reciprocal(), weight.shape)
    if storage == "fp4_row":
        return pack_nibbles(formats.encode_e2m1(elements)).view(torch.int8), scale_codes
    return formats.encode_e4m3(elements).view(torch.float8_e4m3fn), scale_codes


def dequantize_weight(
    storage: Storage, stored: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The pair as released (scale: float8_e8m0fnu or its bytes) -> fp32 [out, in], a copy."""
    if storage == "fp4_row":
        elements = formats.decode_e2m1(unpack_nibbles(stored))
    else:
        elements = formats.decode_e4m3(stored.view(torch.uint8))
    values = formats.decode_ue8m0(scale.view(torch.uint8))[:, None, :, None]
    return _untile(_tiles(elements, storage) * values, elements.shape)


def fake_quantize_weight(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight as the release would give it back, same shape and dtype, leading axes allowed.

    Straight-through: gradients pass unchanged, so training can run on the rounded weights.
    """
    storage = storage_of(name)
    if storage == "fp32":
        return weight
    if weight.requires_grad and torch.is_grad_enabled():
        return _StraightThrough.apply(weight, storage)  # type: ignore[no-any-return]
    return _fake_quantize(weight, storage)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, storage):  # type: ignore[no-untyped-def]
        return _fake_quantize(weight, storage)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


def _fake_quantize(weight: torch.Tensor, storage: Storage) -> torch.Tensor:
    if storage == "bf16":
        return weight.to(torch.bfloat16).to(weight.dtype)
    tiles = _tiles(weight.detach(), storage)
    scale = _scale(tiles, storage)
    round_to = formats.round_e2m1 if storage == "fp4_row" else formats.round_e4m3
    rounded = round_to(tiles * scale.reciprocal()).mul_(scale)
    return _untile(rounded, weight.shape).to(weight.dtype)


def _scale(tiles: torch.Tensor, storage: Storage) -> torch.Tensor:
    """[..., rows, 32 or 1, columns, 32] -> [..., rows, 1, columns, 1]"""
    largest = formats.E2M1_MAX if storage == "fp4_row" else formats.E4M3_MAX
    amax = tiles.abs().amax(-1, keepdim=True).amax(-3, keepdim=True)
    return power_of_two_scale(amax.clamp(min=largest * _SMALLEST_SCALE), largest)


def _tiles(weight: torch.Tensor, storage: Storage) -> torch.Tensor:
    """[..., out, in] -> fp32 [..., ceil(out/h), h, ceil(in/32), 32], h 32 or 1, zero-padded."""
    height = BLOCK if storage == "fp8_tile" else 1
    *lead, rows, columns = weight.shape
    weight = weight.float()
    if rows % height or columns % BLOCK:
        weight = pad(weight, (0, -columns % BLOCK, 0, -rows % height))
    return weight.reshape(*lead, -(-rows // height), height, -(-columns // BLOCK), BLOCK)


def _untile(tiles: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    whole = tiles.flatten(-4, -3).flatten(-2)
    return whole[..., : shape[-2], : shape[-1]].contiguous()


def target_dtype(name: str, config: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a model of `dtype` computes this parameter in.

    fp32 is a minimum for hyper-connections, sinks, routing biases; a bf16 or fp16 model also
    keeps fp32 for the head and for compressors that weigh several tokens (ratio > 1).
    """
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"dtype {dtype}: a model computes in bfloat16, float16, float32 or float64"
        )
    if storage_of(name) == "fp32" or name == "head.weight":
        return torch.float32
    if name.endswith(("compressor.wkv.weight", "compressor.wgate.weight")):
        layer = int(name.split(".")[1])
        return torch.float32 if config.roles[layer].ratio > 1 else dtype
    return dtype
