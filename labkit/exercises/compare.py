"""Where an answer first differs from what was expected, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def difference(actual: Any, expected: Any, tolerance: float = 0.0) -> str | None:
    """A sentence about the first difference; None where there is none.

    Tensors, arrays, numbers, texts, and lists, tuples and mappings of them. tolerance: of
    floating-point numbers, as a share of the largest absolute value expected; 0: equal.
    """
    return _difference(actual, expected, tolerance, "")


def _difference(actual: Any, expected: Any, tolerance: float, where: str) -> str | None:
    at = f" at {where}" if where else ""
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        return _of_arrays(actual, expected, tolerance, where)
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return f"expected a mapping{at}, got {_kind(actual)}"
        for key in expected:
            if key not in actual:
                return f"the entry {key!r} is missing{at}"
        for key in actual:
            if key not in expected:
                return f"there is an entry {key!r} too many{at}"
        return _first(tolerance, [(f"{where}[{k!r}]", actual[k], v) for k, v in expected.items()])
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        if isinstance(actual, (torch.Tensor, np.ndarray)):
            actual = actual.tolist()
        if not isinstance(actual, Sequence) or isinstance(actual, (str, bytes)):
            return f"expected a {type(expected).__name__}{at}, got {_kind(actual)}"
        if len(actual) != len(expected):
            return f"expected {len(expected)} elements{at}, got {len(actual)}"
        return _first(tolerance, [(f"{where}[{i}]", a, e) for i, (a, e) in enumerate(
            zip(actual, expected, strict=True))])
    if isinstance(actual, (torch.Tensor, np.ndarray)) and actual.reshape(-1).shape[0] == 1:
        actual = actual.item()                              # one number stands for itself
    if isinstance(expected, float) and not isinstance(actual, bool):
        if not isinstance(actual, (int, float, np.number)):
            return f"expected a number{at}, got {_kind(actual)}"
        if abs(actual - expected) <= tolerance * max(abs(expected), 1e-30):
            return None
        return f"expected {expected:.6g}{at}, got {actual:.6g}"
    if isinstance(expected, bool) != isinstance(actual, bool):
        return f"expected {_kind(expected)}{at}, got {_kind(actual)}"
    return None if actual == expected else f"expected {expected!r}{at}, got {actual!r}"


def _first(tolerance: float, parts: list[tuple[str, Any, Any]]) -> str | None:
    for where, actual, expected in parts:
        told = _difference(actual, expected, tolerance, where)
        if told:
            return told
    return None


def _of_arrays(actual: Any, expected: Any, tolerance: float, where: str) -> str | None:
    at = f" at {where}" if where else ""
    wanted = torch.as_tensor(expected)
    if not isinstance(actual, (torch.Tensor, np.ndarray)):
        return f"expected a tensor of shape {list(wanted.shape)}{at}, got {_kind(actual)}"
    found = torch.as_tensor(actual).detach()
    if found.shape != wanted.shape:
        return f"expected shape {list(wanted.shape)}{at}, got {list(found.shape)}"
    kinds = [t.dtype.is_floating_point for t in (found, wanted)]
    if kinds[0] != kinds[1] or (found.dtype == torch.bool) != (wanted.dtype == torch.bool):
        return f"expected numbers of {wanted.dtype}{at}, got {found.dtype}"
    if kinds[1]:
        a, e = found.double(), wanted.double()
        finite = e[e.isfinite()]
        span = float(finite.abs().max()) if finite.numel() else 0.0
        wrong = ~((a == e) | ((a - e).abs() <= tolerance * span) | (a.isnan() & e.isnan()))
    else:
        wrong = found != wanted
    if not wrong.any():
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    place = f"{where}{list(index)}" if index else where
    share = f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {place}: "
    values = f"expected {_shown(wanted[index])}, got {_shown(found[index])}"
    return share + values if index else values


def _shown(value: torch.Tensor) -> str:
    number = value.item()
    return f"{number:.6g}" if isinstance(number, float) else str(number)


def _kind(value: Any) -> str:
    if value is None:
        return "None (is a return missing?)"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"
