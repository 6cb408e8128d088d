"""Checkpoints: what they hold (layout, accounting), reading, writing.

The layout and the accounts work without torch; readers and writers load it when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.checkpoint.accounting import Accounting, accounting, active_decode, active_prefill
from labkit.checkpoint.layout import TensorSpec, layout, parameters, storage_of

if TYPE_CHECKING:
    from labkit.checkpoint.reader import read_state
    from labkit.checkpoint.weights import fake_quantize_weight, target_dtype
    from labkit.checkpoint.writer import write_checkpoint

_WITH_TORCH = {
    "read_state": "reader", "write_checkpoint": "writer", "fake_quantize_weight": "weights",
    "target_dtype": "weights",
}  # fmt: skip

__all__ = [
    "Accounting", "TensorSpec", "accounting", "active_decode", "active_prefill",
    "fake_quantize_weight", "layout", "parameters", "read_state", "storage_of", "target_dtype",
    "write_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _WITH_TORCH:
        from importlib import import_module

        return getattr(import_module(f"labkit.checkpoint.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module 'labkit.checkpoint' has no attribute {name!r}")
