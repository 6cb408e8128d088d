"""Named taps: the only source of data for pictures, and a window for tests.

A forward pass calls `taps.put(name, tensor)` where a tensor of interest exists. `Taps` keeps
what was asked for; nothing is copied or changed, so a tapped run gives the same bits. Taps of
a run over a cache may therefore be views of its live state: later passes over that cache can
change their void entries (behind a row's count or length). Clone what must stay as it is.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping

import torch


class Taps(Mapping[str, torch.Tensor]):
    """Tensors by name, e.g. `layers.2.attn.topk_indices`.

    patterns: shell patterns of the names to keep (`None` keeps all).
    keep_graph: leave tensors attached to the autograd graph (the trainer needs that).
    """

    def __init__(self, patterns: list[str] | None = None, keep_graph: bool = False) -> None:
        self.patterns = patterns
        self.keep_graph = keep_graph
        self._tensors: dict[str, torch.Tensor] = {}

    def wants(self, name: str) -> bool:
        return self.patterns is None or any(fnmatch.fnmatchcase(name, p) for p in self.patterns)

    def put(self, name: str, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Keep `value` under `name` if wanted; a callable is evaluated only then."""
        if not self.wants(name):
            return
        tensor = value() if callable(value) else value
        self._tensors[name] = tensor if self.keep_graph else tensor.detach()

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            close = [n for n in self._tensors if n.rsplit(".", 1)[-1] == name.rsplit(".", 1)[-1]]
            hint = f"; this run recorded {', '.join(sorted(close))}" if close else ""
            raise KeyError(f"no tensor named {name!r} was recorded{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
