"""Hot operations behind one dispatch: every set of kernels has the reference's signatures."""

from __future__ import annotations

from types import ModuleType

from labkit.errors import InputError


def get(name: str = "auto") -> ModuleType:
    """The module that holds `sparse_attention`, `index_scores`, `select_top`, `routed_experts`.

    auto: the fastest set that this machine has; reference: plain torch, meant to be read.
    """
    from labkit.kernels import cpu, reference

    sets: dict[str, ModuleType] = {"auto": cpu, "cpu": cpu, "reference": reference}
    if name not in sets:
        raise InputError(f"unknown kernels {name!r}: choose one of {', '.join(sets)}")
    return sets[name]
