"""Exercise 4.2: blocks of 32 with one power of two each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from labkit.exercises.record import Case, Mistake
from labkit.numerics.blocks import quantize
from labkit.numerics.formats import encode_e2m1
from labkit.train.controls import cache_rounding

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "4.2", "A block and its scale", "mxfp4_blocks"
MINUTES, DIFFICULTY, IMPORTANCE = 20, 4, 5
TOLERANCE = 0.0
OBJECTIVE = """
Write the recipe of the index keys. Each row of x is a block of 32. Its scale is the
smallest power of two that makes the largest magnitude fit: 2^p with p = ceil(log2(amax
/ 6)), where amax is first raised to 6 * 2^-126, so that a block of zeros has a scale
too. Return the codes of x / scale, and the scale's byte p + 127 (UE8M0). An amax of
exactly 6 * 2^k must give k, and the next larger number k + 1: no logarithm in floating
point can promise that.
"""
HELP = (
    """`encode_e2m1` makes the codes, so only p is missing. `torch.frexp(amax)` takes
    a number apart exactly: amax = m * 2^e with m from 0.5 up to, but not including,
    1.""",
    """6 is 0.75 * 2^3. So amax / 6 is (m / 0.75) * 2^(e-3), and its logarithm rounded
    up is e - 3 where m is at most 0.75, one more where m is larger. Nothing was
    rounded on the way. Dividing by 2^p is exact, too: `torch.ldexp(x, -p)`.""",
    """```python
    amax = x.abs().amax(-1).clamp(min=6 * 2.0**-126)
    mantissa, exponent = torch.frexp(amax)
    power = exponent - 3 + (mantissa > ...).int()
    codes = encode_e2m1(torch.ldexp(x, ...))
    return codes, (power + 127).to(torch.uint8)
    ```""",
)
AFTER = """Codes and scales are those of the package, byte for byte. With this rule
nothing is ever clipped: the largest value of a block lands above 3 and at most at 6
times the scale. (The OCP text for MX formats suggests a floor instead, which clips;
the two are not interchangeable.) The check cannot see a block with a NaN or an
infinity: the package gives it the NaN scale, byte 255."""


def solution(x):
    """Codes uint8 [n,32] and scale bytes uint8 [n] of the blocks x, fp32 [n,32]."""
    from labkit.numerics.formats import encode_e2m1

    amax = x.abs().amax(-1).clamp(min=6 * 2.0**-126)     # [n]
    mantissa, exponent = torch.frexp(amax)               # amax = mantissa * 2^exponent
    power = exponent - 3 + (mantissa > 0.75).int()       # since 6 = 0.75 * 2^3
    codes = encode_e2m1(torch.ldexp(x, -power[:, None]))
    return codes, (power + 127).to(torch.uint8)


def alternative(x):
    """The package's own quantiser, which adds a carry to the bits of amax."""
    q = quantize(x, "mxfp4")
    return q.codes, q.scales[:, 0]


def _blocks(x, power):
    """Codes and bytes with 2^power(amax) as the scale, amax [n] in float64 and not zero."""
    amax = x.abs().amax(-1).double().clamp(min=6 * 2.0**-126)
    p = power(amax).int().clamp(-126, 127)
    return encode_e2m1(torch.ldexp(x, -p[:, None])), (p + 127).to(torch.uint8)


def divides_by_seven(x):
    return _blocks(x, lambda amax: (amax / 7).log2().ceil())


def rounds_the_power_down(x):
    return _blocks(x, lambda amax: (amax / 6).log2().floor())


def floor_of_amax(x):
    return _blocks(x, lambda amax: amax.log2().floor() - 2)


def steps_up_from_exact_powers(x):
    return _blocks(x, lambda amax: (amax / 6).log2().floor() + 1)


def logarithm_in_fp32(x):
    return _blocks(x, lambda amax: (amax.float() / 6).log2().ceil())


def one_scale_for_all(x):
    return _blocks(x, lambda amax: (amax / 6).amax().log2().ceil().expand_as(amax))


def scale_one_for_zeros(x):
    codes, scales = solution(x)
    return codes, torch.where((x == 0).all(-1), 127, scales).to(torch.uint8)


MISTAKES = (
    Mistake(divides_by_seven, "amax is divided by 7, the largest magnitude of a symmetric int4; "
            "the largest value of E2M1 is 6.", "int4 recipes"),
    Mistake(rounds_the_power_down, "the power is rounded down, so the largest values of a block "
            "do not fit and are cut to 6 times the scale. It is rounded up.", "floor for ceil"),
    Mistake(floor_of_amax, "the scale is 2^(floor(log2(amax)) - 2), as the OCP text on MX formats "
            "suggests: values from 6 to 8 times the scale are cut to 6. Here the power of "
            "amax / 6 is rounded up.", "OCP Microscaling Formats (MX) specification"),
    Mistake(one_scale_for_all, "one scale serves all rows: small blocks then lose everything to "
            "the largest one. Take the largest magnitude along the last axis only.",
            "per-tensor scales"),
    Mistake(steps_up_from_exact_powers, "an amax of exactly 6 * 2^k gets the scale 2^(k+1), and "
            "the codes of 4 and 6 lie idle: a ceiling leaves whole numbers alone.",
            "mutant `exact_powers_step_up`; floor + 1"),
    Mistake(logarithm_in_fp32, "amax / 6 or its logarithm was rounded: just above 6 * 2^k it "
            "became k, and the largest value no longer fits. Compare mantissas instead.",
            "log2 in fp32; pitfalls of power-of-two scales"),
    Mistake(scale_one_for_zeros, "a block of zeros gets the scale 1. The guard raises amax to "
            "6 * 2^-126 instead, which gives byte 1.", "where(amax == 0, 1, scale)"),
)


def cases(lab: Lab) -> Iterator[Case]:
    layer = next(role.layer for role in lab.config.roles if role.kind == "full")
    tap = f"layers.{layer}.attn.index_keys"
    with cache_rounding(lab.model, False):
        run = lab.trace("It is a truth universally acknowledged, that a single man in possession "
                        "of a good fortune, must be in want of a wife.", patterns=[tap])
    keys = run[tap][0].float().cpu()
    # Blocks of very different sizes, so that one scale for all shows.
    sizes = torch.logspace(-4, 3, len(keys))[:, None]
    yield Case("index keys of the run, some made larger and some smaller",
               ((keys * sizes).reshape(-1, 32),))
    exact = torch.ones(5, 32)
    exact[:, 7] = torch.tensor([6.0, 6 * 2.0**-20, 6 * 2.0**20, -6.0, -3.0])
    yield Case("an amax of exactly 6 * 2^k has the power k", (exact,))
    above = torch.zeros(3, 32)
    above[:, 0] = torch.nextafter(torch.tensor([6.0, 3.0, 6 * 2.0**40]), torch.tensor(torch.inf))
    yield Case("the next number above 6 * 2^k has the power k + 1", (above,))
    yield Case("a block of zeros has a scale, too, and a tiny one a tiny scale",
               (torch.stack([torch.zeros(32), torch.full((32,), 1e-30)]),))
