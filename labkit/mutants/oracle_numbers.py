"""Numbers of the oracle: rotary frequencies, hash constants, rounding by searching all codes."""

from __future__ import annotations

import math

import numpy as np
import torch

from labkit.config import ModelConfig


def yarn_frequencies(config: ModelConfig, compressed: bool) -> list[float]:
    """Angle per position of every channel pair."""
    R = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    out = [1.0 / theta ** (2 * i / R) for i in range(R // 2)]
    s = config.rope_scaling
    if not compressed or s.original_max_position_embeddings == 0:
        return out

    def pair(beta: float) -> float:
        wavelength = s.original_max_position_embeddings / (2 * math.pi * beta)
        return R / 2 * math.log(wavelength) / math.log(theta)

    low, high = max(math.floor(pair(s.beta_fast)), 0), min(math.ceil(pair(s.beta_slow)), R - 1)
    for i, f in enumerate(out):
        ramp = (i - low) / max(high - low, 0.001)
        ramp = 0.0 if ramp < 0 else 1.0 if ramp > 1 else ramp
        out[i] = ramp * f / s.factor + (1 - ramp) * f
    return out


def engram_constants(config: ModelConfig) -> list[tuple[list[int], list[int]]]:
    """Per Engram layer its N multipliers and its (N-1)*heads primes."""
    used: set[int] = set()
    out = []
    for layer in config.engram_layer_ids:
        primes = []
        for _order in range(2, config.engram_max_ngram_size + 1):
            candidate = config.engram_vocab_size
            for _head in range(config.engram_n_heads):
                while candidate in used or not _prime(candidate):
                    candidate += 1
                used.add(candidate)
                primes.append(candidate)
        top = ((2**63 - 1) // config.engram_compressed_vocab_size) // 2
        drawn = np.random.default_rng(10007 * layer).integers(
            0, top, config.engram_max_ngram_size, dtype=np.int64)
        out.append(([2 * int(v) + 1 for v in drawn], primes))
    return out


def _prime(n: int) -> bool:
    return n > 1 and all(n % p for p in range(2, math.isqrt(n) + 1))


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]                                    # codes 0..7
E4M3 = [m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)    # codes 0..126
        for e in range(16) for m in range(8)][:127]


def nearest_in_blocks(x: torch.Tensor, form: str) -> torch.Tensor:
    """x [n] rounded in blocks to fp8, mxfp4 or nvfp4 and read back, in x's dtype.

    The nearest value is searched among all codes; of two equally near ones the even code wins.
    """
    block = 16 if form == "nvfp4" else 32
    parts = [_round_block(part, form) for part in x.float().split(block)]
    return torch.cat(parts).to(x.dtype)


def _round_block(x: torch.Tensor, form: str) -> torch.Tensor:
    """One block of fp32 values; the quotient by the scale is taken in fp32 too."""
    amax = float(x.abs().max())
    if form == "fp8":
        scale = _power_above(max(amax, float(np.float32(1e-4))), 448.0)
    elif form == "mxfp4":
        scale = _power_above(max(amax, 6 * 2.0**-126), 6.0)
    else:
        sixth = float(np.float32(max(amax, 6 * 2.0**-9)) / np.float32(6.0))
        scale = E4M3[_nearest(sixth, E4M3)]
    codes = E4M3 if form == "fp8" else E2M1
    out = []
    for v in x.tolist():
        quotient = float(np.float32(v) / np.float32(scale))
        out.append(math.copysign(codes[_nearest(abs(quotient), codes)] * scale, v))
    return torch.tensor(out, dtype=torch.float32)


def _power_above(amax: float, largest: float) -> float:
    """The least power of two p with largest * p >= amax (every product here is exact)."""
    p = 2.0 ** (math.frexp(amax)[1] - math.frexp(largest)[1] - 2)
    while largest * p < amax:
        p *= 2
    return p


def _nearest(value: float, table: list[float]) -> int:
    """Code of the nearest table value, ties to the even code."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - value), code % 2))
