"""Two FP4 codes in one byte, and what an entry of the cache then weighs.

The even column sits in the low nibble: byte j of a row holds columns 2j (bits 0-3) and 2j + 1
(bits 4-7). Packed experts in the checkpoint use the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.errors import InputError
from labkit.numerics.blocks import Quantized, block_format


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15, uint8 [..., n] with n even -> bytes, uint8 [..., n / 2]."""
    if codes.shape[-1] % 2:
        raise InputError(f"the last axis has {codes.shape[-1]} codes: two share a byte, so it "
                         "must be even")
    even, odd = codes[..., 0::2], codes[..., 1::2]
    return even | (odd << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Bytes, uint8 or int8 [..., n / 2] -> codes 0..15, uint8 [..., n]."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True)
class Packed:
    """A `Quantized` as stored. data uint8 [..., bytes per row], scales uint8 [..., n / block]."""

    data: torch.Tensor
    scales: torch.Tensor
    format: str
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return self.data.numel() + self.scales.numel()


def pack(q: Quantized) -> Packed:
    """Loses nothing: `unpack(pack(q))` equals q."""
    fp4 = block_format(q.format).element_bits == 4
    return Packed(pack_nibbles(q.codes) if fp4 else q.codes, q.scales, q.format, q.dtype)


def unpack(p: Packed) -> Quantized:
    fp4 = block_format(p.format).element_bits == 4
    return Quantized(unpack_nibbles(p.data) if fp4 else p.data, p.scales, p.format, p.dtype)


def packed_bytes(width: int, format: str) -> int:
    """Bytes of one row of `width` values, scales included: 512 in nvfp4 take 256 + 32."""
    recipe = block_format(format)
    if width % recipe.block:
        raise InputError(f"width {width}: {format} needs a multiple of {recipe.block}")
    return width * recipe.element_bits // 8 + width // recipe.block
