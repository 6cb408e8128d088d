"""A check is a function that gives None when all is well, or a sentence that says what is not.

`PROPERTIES` need nothing but the package, `VECTORS` the golden vectors of the source tree. Right
code passes all of them; each wrong variant in `labkit.mutants` fails at least one of each kind,
or says why no vector can notice it.
They are in order of cost, as a search for the first that fails goes through them in order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    name: str
    says: str
    run: Callable[[], str | None]

    def failure(self) -> str | None:
        """The check's sentence; a crash is a failure too and says which error."""
        try:
            return self.run()
        except Exception as error:  # a wrong variant may break shapes: that is noticed, not hidden
            return f"stops with {type(error).__name__}: {str(error).splitlines()[0][:120]}"


def collect(found: dict[str, Check]) -> Callable[[str, str], Callable]:
    """A decorator that puts the function under its name into `found`."""

    def named(name: str, says: str) -> Callable:
        def keep(run: Callable[[], str | None]) -> Callable[[], str | None]:
            found[name] = Check(name, says, run)
            return run
        return keep

    return named


PROPERTIES: dict[str, Check] = {}
VECTORS: dict[str, Check] = {}


def load() -> None:
    """Fill both tables (the modules register their checks when imported)."""
    for module in ("properties_small", "properties_speculation", "properties",
                   "properties_draft", "properties_reuse", "properties_drafted", "vectors",
                   "vectors_draft", "vectors_reuse"):
        importlib.import_module(f"labkit.mutants.{module}")
    for name in ("token_by_token", "text_drafted_on", "text_draft_kept", "scaled_streams", "bf16",
                 "renamed_ids"):
        found = PROPERTIES if name in PROPERTIES else VECTORS
        found[name] = found.pop(name)  # the costly ones come last
