"""Hot operations behind one dispatch: every set of kernels has the reference's signatures."""

from __future__ import annotations

from types import ModuleType

from labkit.errors import InputError


def get(name: str = "auto") -> ModuleType:
    """The module that holds the operations of `reference`, under the same names.

    auto: the fastest set that equals the reference; reference: plain torch, meant to be read;
    train: bf16 products and compiled chains, for training only.
    """
    from labkit.kernels import cpu, reference

    sets: dict[str, ModuleType] = {"auto": cpu, "cpu": cpu, "reference": reference}
    if name == "train":
        from labkit.kernels import train

        return train
    if name not in sets:
        raise InputError(f"unknown kernels {name!r}: choose one of {', '.join(sets)}, train")
    return sets[name]
