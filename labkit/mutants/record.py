"""What a wrong variant of the model is, and how one is switched on.

The model's own code knows nothing of mutants: switching one on replaces a few functions in the
modules where they are looked up, and switching it off puts the originals back.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from labkit.errors import InputError


@dataclass(frozen=True)
class Patch:
    """While the mutant is active, `owner.name` is `value`."""

    owner: Any
    name: str
    value: Any


@dataclass(frozen=True)
class Mutant:
    """One deliberate fault.

    id         its name on the command line and in `active`
    fault      what is wrong, in one sentence
    mechanism  the part of the model that it is in
    source     the kind of published bug that it stands for
    look       what a learner should look at first
    patches    makes the replacements, from the originals of the moment
    no_vector  why no golden vector can notice it, in a few words; None: one does
    """

    id: str
    fault: str
    mechanism: str
    source: str
    look: str
    patches: Callable[[], list[Patch]]
    no_vector: str | None = None


MUTANTS: dict[str, Mutant] = {}


def mutant(mechanism: str, fault: str, source: str, look: str,
           no_vector: str | None = None) -> Callable:
    """Decorator: the function (its name is the id) returns the patches."""

    def keep(patches: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        name = patches.__name__
        MUTANTS[name] = Mutant(name, fault, mechanism, source, look, patches, no_vector)
        return patches

    return keep


_active: str | None = None


@contextmanager
def active(name: str) -> Iterator[Mutant]:
    """`with active("relu_after_sum"): ...` runs the block with that fault, one at a time.

    InputError for an unknown name or when another mutant is active already.
    """
    global _active
    chosen = find(name)
    if _active:
        raise InputError(f"mutant {_active} is active already: one fault at a time")
    _import_all()
    patches = chosen.patches()
    originals = [(p, vars(p.owner)[p.name]) for p in patches]
    _active = name
    try:
        for p in patches:
            setattr(p.owner, p.name, p.value)
        yield chosen
    finally:
        for p, original in reversed(originals):
            setattr(p.owner, p.name, original)
        _active = None


def find(name: str) -> Mutant:
    if name not in MUTANTS:
        raise InputError(f"unknown mutant {name!r}: choose one of {', '.join(MUTANTS)}")
    return MUTANTS[name]


@functools.cache
def _import_all() -> None:
    """Import every module that could look up a replaced function, before anything is replaced.

    A module that is imported while a mutant is active would keep the wrong function for good.
    """
    import labkit

    for found in pkgutil.walk_packages(labkit.__path__, "labkit."):
        parts = found.name.split(".")
        if parts[1] in ("mutants", "cli", "doctor") or parts[-1] == "__main__":
            continue
        try:
            importlib.import_module(found.name)
        except ImportError:  # an optional dependency is missing: then nobody can use it either
            continue


# ---------------------------------------------------------------------- making patches
def everywhere(original: Callable, value: Callable) -> list[Patch]:
    """Replace a function in every module of labkit that looks it up by its name."""
    name = original.__name__
    owners = [module for key, module in sorted(sys.modules.items())
              if key.split(".")[0] == "labkit" and not key.startswith("labkit.mutants")
              and vars(module).get(name) is original]
    return [Patch(owner, name, value) for owner in owners]


def kernel(name: str, around: Callable[[Callable], Callable]) -> list[Patch]:
    """Replace a kernel in every set of kernels by around(original).

    A fast set may hand small cases to the reference: the fault must then act once, not twice.
    """
    inside = False

    def once(original: Callable) -> Callable:
        wrong = around(original)

        def call(*args: Any) -> Any:
            nonlocal inside
            if inside:
                return original(*args)
            inside = True
            try:
                return wrong(*args)
            finally:
                inside = False

        return call

    return [Patch(module, name, once(getattr(module, name))) for module in kernel_sets()]


def kernel_sets() -> list[ModuleType]:
    from labkit import kernels

    sets: list[ModuleType] = []
    for name in ("reference", "cpu", "auto"):
        module = kernels.get(name)
        if module not in sets:
            sets.append(module)
    return sets


def method(owner: type, name: str, around: Callable[[Callable], Callable]) -> list[Patch]:
    """Replace a method by around(original)."""
    return [Patch(owner, name, around(vars(owner)[name]))]
