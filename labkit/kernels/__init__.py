"""Hot operations behind one dispatch: every set of kernels has the reference's signatures.

How far `cpu` is from `reference`: selections and routed experts are the same; index scores and
attention in fp32 agree to 1e-5 of the span of the values. In 16 bits both round index scores at
the same places, so these differ only where the sums before a rounding do: by at most 4e-3 of the
span in bf16 and 1e-3 in fp16 (measured on a CPU: none in bf16, 2e-4 in fp16). Attention sums in
fp32 whatever the inputs are, so it agrees to 1e-5 before the model rounds it.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from labkit.errors import InputError

if TYPE_CHECKING:
    import torch


def get(name: str = "auto", device: torch.device | str = "cpu") -> ModuleType:
    """The module that holds the operations of `reference`, under the same names.

    auto: `cpu` on a CPU device; elsewhere `reference`, since the `cpu` set loops in Python, for
    the sake of a CPU's caches; reference: plain torch, meant to be read;
    train: bf16 products and compiled chains, for training only.
    """
    from labkit.kernels import cpu, reference

    on_cpu = str(device).partition(":")[0] == "cpu"
    sets: dict[str, ModuleType] = {
        "auto": cpu if on_cpu else reference, "cpu": cpu, "reference": reference,
    }  # fmt: skip
    if name == "train":
        from labkit.kernels import train

        return train
    if name not in sets:
        raise InputError(f"unknown kernels {name!r}: choose one of {', '.join(sets)}, train")
    return sets[name]
