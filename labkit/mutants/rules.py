"""When two tensors count as equal. A rule gives None, or one sentence that says what differs.

The *span* of a comparison is the largest absolute value of the expected tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

FP32 = 1e-5      # of the span: fp32 against another implementation, or another schedule
FP64 = 1e-9      # of the span: float64 against another schedule or the oracle
ROUNDED = 1e-2   # of the span, where one flipped rounding may have travelled
FLIPS = 1e-3     # share of cache elements that may round the other way
INDICES = 0.995  # share of selection entries that must agree after rounding
MOST = 0.5       # share of elements that flips leave alone: one may touch all later tokens


def error_of_span(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Absolute errors in units of the span, elementwise, float64."""
    expected, actual = expected.double(), actual.double()
    return (actual - expected).abs() / expected.abs().max().clamp(min=1e-300)


def close(name: str, expected: torch.Tensor, actual: torch.Tensor, of_span: float,
          absolute: float = 0.0) -> str | None:
    """Every element within of_span * span + absolute. NaN is never close."""
    wrong = _shapes(name, expected, actual)
    if wrong or not expected.numel():
        return wrong
    span = float(expected.double().abs().max())
    error = (actual.double() - expected.double()).abs()
    allowed = of_span * span + absolute
    if bool((error <= allowed).all()):
        return None
    at = tuple(torch.unravel_index(error.nan_to_num(nan=torch.inf).argmax(), error.shape))
    return (f"{name}: off by {float(error[at]):.3g} at {[int(i) for i in at]}, "
            f"allowed {allowed:.3g} (span {span:.3g})")


def equal(name: str, expected: torch.Tensor, actual: torch.Tensor,
          share: float = 1.0) -> str | None:
    """At least `share` of the elements exactly equal."""
    wrong = _shapes(name, expected, actual)
    if wrong or not expected.numel():
        return wrong
    same = expected == actual
    found = float(same.double().mean())
    if found >= share:
        return None
    at = [int(i) for i in (~same).nonzero()[0]]
    return (f"{name}: {found:.2%} of the elements are equal, needed {share:.2%}; first other at "
            f"{at}: {expected[tuple(at)].item()} expected, {actual[tuple(at)].item()} found")


def close_but_flips(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """Cache contents: within 1e-5 of the span, but for fewer than 0.1 % flipped roundings."""
    wrong = _shapes(name, expected, actual)
    if wrong or not expected.numel():
        return wrong
    off = ~(error_of_span(expected, actual) <= FP32)
    share = float(off.double().mean())
    if share < FLIPS:
        return None
    return f"{name}: {share:.2%} of the elements are off, allowed are fewer than {FLIPS:.1%}"


def same_values(name: str, expected: torch.Tensor, actual: torch.Tensor, of_span: float,
                absolute: float = 0.0) -> str | None:
    """`equal` for integers and masks, `close` for floats."""
    if expected.dtype.is_floating_point:
        return close(name, expected, actual, of_span, absolute)
    return equal(name, expected, actual)


def unrounded(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """fp32 without cache rounding: floats to 1e-5 of the span + 1e-5, all else exact."""
    return same_values(name, expected, actual, FP32, 1e-5)


def rounded(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """Cache rounding on: one flip may travel."""
    if name.endswith(("compressed_kv", "index_keys")):
        return close_but_flips(name, expected, actual)
    if name == "engram_hash_ids":
        return equal(name, expected, actual)
    if not expected.dtype.is_floating_point:
        return equal(name, expected, actual, INDICES)
    return close(name, expected, actual, ROUNDED)


def mostly(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    """What fp32 noise may do with cache rounding on: half of the elements keep the rounded rule.

    Another processor adds in another order; a value next to a rounding boundary then flips, and
    a flip may change every token after it. In float64 this does not happen: `rounded` is for it.
    """
    wrong = _shapes(name, expected, actual)
    if wrong or not expected.numel():
        return wrong
    same = expected == actual
    if expected.dtype.is_floating_point:
        same = error_of_span(expected, actual) <= ROUNDED
    share = float(same.double().mean())
    if share >= MOST:
        return None
    return f"{name}: {share:.2%} of the elements agree, needed {MOST:.0%}"


def same_run(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor],
             of_span: float) -> str | None:
    """All tensors that both runs have, under `same_values`; the first that differs."""
    names = [name for name in expected if name in actual]
    if "logits" not in names:
        return "logits: not in both runs"
    for name in names:
        wrong = same_values(name, expected[name], actual[name], of_span)
        if wrong:
            return wrong
    return None


def same_sets(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Share of the expected selections [...,K] (-1 = none) found in the actual ones, as sets."""
    there = (expected[..., :, None] == actual[..., None, :]).any(-1)
    real = expected >= 0
    return float(there[real].double().mean())


def _shapes(name: str, expected: torch.Tensor, actual: torch.Tensor) -> str | None:
    if expected.shape == actual.shape:
        return None
    return f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
