"""Exercise 4.3: two codes in a byte, and out again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.numerics.blocks import quantize
from labkit.numerics.packing import pack_nibbles, unpack_nibbles
from labkit.train.controls import cache_rounding

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "4.3", "Two codes a byte", "pack_and_unpack"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 0.0
OBJECTIVE = """
Write both directions in one function. Byte j of a row holds columns 2j and 2j+1: the
*even column in the low four bits*, the odd one in the high four. Pack `codes`, and
unpack `data`, which are bytes of another row. As in the released checkpoint's experts,
`data` comes as *int8*: the same bits, but a byte from 128 up reads as a negative
number.
"""
HELP = (
    """`codes[..., 0::2]` are the even columns, `codes[..., 1::2]` the odd ones.
    `<< 4` moves a code to the high half of a byte, `|` joins two halves, `& 15` keeps
    the low half.""",
    """A shift to the right of a negative int8 drags its sign along: -1 >> 4 is -1,
    not 15. Look at the bits as unsigned first: `data.view(torch.uint8)` changes no
    bit. Unpacked columns must alternate: stack low and high halves on a new last
    axis, then flatten it.""",
    """```python
    packed = codes[..., 0::2] | ...
    data = data.view(torch.uint8)
    unpacked = torch.stack((data & 15, ...), dim=-1).flatten(-2)
    return packed, unpacked
    ```""",
)
AFTER = """That is the layout of the cache's rows and of the released experts. A round
trip is no test of it: with the halves exchanged in both directions, unpack(pack(x))
is still x, and only somebody else's bytes show the fault. The check cannot see where
scales lie; in the cache they follow the codes of their row, in the checkpoint they
are a tensor of their own."""


def solution(codes, data):
    """Bytes uint8 [..., n/2] of codes (uint8 [..., n], 0..15), codes [..., 2m] of data.

    data int8 [..., m]: bytes of two codes each, the even column in the low four bits.
    """
    packed = codes[..., 0::2] | (codes[..., 1::2] << 4)
    data = data.view(torch.uint8)                      # the same bits, without a sign
    unpacked = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    return packed, unpacked


def alternative(codes, data):
    """The package's own."""
    return pack_nibbles(codes), unpack_nibbles(data)


def high_half_first(codes, data):
    data = data.view(torch.uint8)
    return (codes[..., 1::2] | (codes[..., 0::2] << 4),
            torch.stack((data >> 4, data & 15), dim=-1).flatten(-2))


def sign_dragged_along(codes, data):
    return (codes[..., 0::2] | (codes[..., 1::2] << 4),
            torch.stack((data & 15, data >> 4), dim=-1).flatten(-2))


def halves_of_the_row(codes, data):
    data, n = data.view(torch.uint8), codes.shape[-1] // 2
    return (codes[..., :n] | (codes[..., n:] << 4), torch.cat((data & 15, data >> 4), dim=-1))


def unpacked_one_after_the_other(codes, data):
    data = data.view(torch.uint8)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4),
            torch.cat((data & 15, data >> 4), dim=-1))


MISTAKES = (
    Mistake(high_half_first, "the even column stands in the high half of the byte; it belongs in "
            "the low one. A round trip cannot tell.", "mutant `high_nibble_first`; reading a hex "
            "dump from left to right"),
    Mistake(sign_dragged_along, "the bytes were shifted as signed numbers, so a high half from 8 "
            "up drags its sign along. View them as uint8 first.", "int8 tensors of packed weights"),
    Mistake(halves_of_the_row, "the first half of the row went to the low halves and the second "
            "to the high ones; neighbours share a byte.", "planar layouts of other kernels"),
    Mistake(unpacked_one_after_the_other, "unpacking lists all low halves, then all high ones; "
            "they must alternate: stack on a new last axis and flatten.", "cat for stack"),
)


def cases(lab: Lab) -> Iterator[Case]:
    layer = next(role.layer for role in lab.config.roles if role.kind == "full")
    tap = f"layers.{layer}.attn.compressed_kv"
    with cache_rounding(lab.model, False):
        run = lab.trace("It is a truth universally acknowledged, that a man", patterns=[tap])
    codes = quantize(run[tap][0].float().cpu(), "nvfp4").codes                  # [S,d]
    yield Case("entries of the run", (codes[:2], pack_nibbles(codes[2:4]).view(torch.int8)))
    every = torch.arange(256, dtype=torch.uint8)
    yield Case("all pairs of codes",
               (torch.stack((every & 15, every >> 4), dim=-1).flatten(), every.view(torch.int8)))
    yield Case("a row of two codes", (torch.tensor([[1, 9]], dtype=torch.uint8),
                                      torch.tensor([[-112]], dtype=torch.int8)))
