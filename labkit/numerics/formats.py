"""The three small number formats, code by code: E2M1, E4M3 and UE8M0 (OCP microscaling).

A *code* is the stored bit pattern (uint8), a *value* the number that it stands for. Rounding is
to nearest, ties to the even code, and saturates at the largest finite value; a negative zero
keeps its sign. The rounding functions are plain fp32 arithmetic: no table, no loop, no log2.

    format  bits (sign, exponent, mantissa)   codes  largest  NaN
    E2M1    1, 2, 1                              16        6  none
    E4M3    1, 4, 3 (bias 7)                    256      448  0x7F, 0xFF
    UE8M0   0, 8, 0 (bias 127)                  256    2^127  255
"""

from __future__ import annotations

import functools
import math

import torch

E2M1_MAX = 6.0
E4M3_MAX = 448.0
UE8M0_NAN = 255

# An fp32 number is 1.m * 2^e; clearing its mantissa bits leaves 2^e.
_EXPONENT_BITS = 0x7F800000
# Adding and subtracting 1.5 * 2^23 * q rounds a smaller number to a multiple of q, ties to even.
_ROUNDER = 1.5 * 2.0**23


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 values of any shape -> the nearest E2M1 values, fp32, same shape."""
    return _round(x, largest=E2M1_MAX, smallest_binade=1.0, mantissa_bits=1)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 values of any shape -> the nearest E4M3 values, fp32, same shape."""
    return _round(x, largest=E4M3_MAX, smallest_binade=2.0**-6, mantissa_bits=3)


def _round(
    x: torch.Tensor, largest: float, smallest_binade: float, mantissa_bits: int
) -> torch.Tensor:
    magnitude = x.abs().clamp_(max=largest)
    # Grid step: 2^(e - mantissa_bits); below the smallest binade it stays (subnormal codes).
    binade = magnitude.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    rounder = binade.clamp_(min=smallest_binade).mul_(_ROUNDER * 2.0**-mantissa_bits)
    return magnitude.add_(rounder).sub_(rounder).copysign_(x)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 values -> codes 0..15, uint8, same shape. NaN has no code: ValueError."""
    if bool(torch.isnan(x).any()):
        raise ValueError("E2M1 has no code for NaN")
    value = round_e2m1(x.float())
    magnitude = value.abs()
    # From 1 up the code is (exponent + 1, mantissa bit); below it counts halves.
    normal = (magnitude.view(torch.int32) >> 22) - (126 << 1)
    code = torch.where(magnitude < 1, (magnitude * 2).to(torch.int32), normal)
    return (code | (torch.signbit(value).to(torch.int32) << 3)).to(torch.uint8)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 values -> codes 0..255, uint8, same shape. NaN becomes 0x7F or 0xFF."""
    x = x.float()
    value = round_e4m3(x)
    magnitude = value.abs()
    # Normal: fp32 bits shifted down, exponent bias 127 -> 7. Subnormal: counts of 2^-9.
    normal = (magnitude.view(torch.int32) >> 20) - ((127 - 7) << 3)
    code = torch.where(magnitude < 2.0**-6, (magnitude * 512).to(torch.int32), normal)
    code = torch.where(torch.isnan(x), torch.full_like(code, 0x7F), code)
    return (code | (torch.signbit(x).to(torch.int32) << 7)).to(torch.uint8)


def encode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """fp32 powers of two -> exponent bytes, uint8, same shape: 2^-7 has byte 120.

    NaN becomes 255. A number that is no power of two has no code: ValueError.
    """
    bits = scale.float().view(torch.int32)
    nan = torch.isnan(scale)
    exact = (bits > 0) & (bits < _EXPONENT_BITS) & ((bits & 0x7FFFFF) == 0)
    smallest = bits == 1 << 22  # 2^-127 is an fp32 subnormal, and code 0
    if not bool((exact | smallest | nan).all()):
        raise ValueError("UE8M0 holds powers of two from 2^-127 to 2^127 only")
    return torch.where(nan, torch.full_like(bits, UE8M0_NAN), bits >> 23).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (any integer dtype) -> fp32 values, same shape."""
    return _look_up("e2m1", codes)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0..255 (uint8) -> fp32 values, same shape; 0x7F and 0xFF are NaN."""
    return _look_up("e4m3", codes)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Exponent bytes (uint8) -> fp32 powers of two, same shape; 255 is NaN."""
    return _look_up("ue8m0", codes)


def _look_up(name: str, codes: torch.Tensor) -> torch.Tensor:
    table = _table(name, codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


@functools.lru_cache(maxsize=16)
def _table(name: str, device: torch.device) -> torch.Tensor:
    values = {"e2m1": e2m1_values, "e4m3": e4m3_values, "ue8m0": ue8m0_values}[name]()
    return torch.tensor(values, dtype=torch.float32, device=device)


def e2m1_values() -> list[float]:
    """The 16 values in code order: 0, .5, 1, 1.5, 2, 3, 4, 6, then the same negated."""
    return _small_float(exponent_bits=2, mantissa_bits=1, bias=1)


def e4m3_values() -> list[float]:
    """The 256 values in code order. No infinities: only the all-ones codes are NaN."""
    values = _small_float(exponent_bits=4, mantissa_bits=3, bias=7)
    values[0x7F], values[0xFF] = math.nan, -math.nan
    return values


def ue8m0_values() -> list[float]:
    """The 256 values in code order: byte b is 2^(b - 127), 255 is NaN."""
    return [2.0 ** (code - 127) for code in range(255)] + [math.nan]


def _small_float(exponent_bits: int, mantissa_bits: int, bias: int) -> list[float]:
    values = []
    for sign in (1.0, -1.0):
        for exponent in range(1 << exponent_bits):
            for mantissa in range(1 << mantissa_bits):
                fraction = mantissa / (1 << mantissa_bits)
                if exponent == 0:  # subnormal: no leading one
                    values.append(sign * fraction * 2.0 ** (1 - bias))
                else:
                    values.append(sign * (1 + fraction) * 2.0 ** (exponent - bias))
    return values
