"""What the layers of one forward pass share: positions, lengths, rotations, what was published."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from labkit.cache import Cache
from labkit.config import ModelConfig
from labkit.model.rope import rotation
from labkit.numerics.blocks import fake_quantize
from labkit.trace import Taps


@dataclass
class Published:
    """What the last Full and index source layers left for the layers after them."""

    kv: torch.Tensor | None = None              # [B,S,d]      compressed entries
    index_keys: torch.Tensor | None = None      # [B,S,di]
    selection: torch.Tensor | None = None       # [B,T,K]      entry numbers, -1 = none
    candidates: torch.Tensor | None = None      # [B,T,blocks] True = block is in the pool


@dataclass
class Run:
    """One pass of T new tokens in each of B rows over a cache.

    start [B]: position of a row's first new token; count [B]: its live new tokens (the rest of
    T is right padding, masked everywhere). first [B]: the lowest position whose window keys
    exist; 0 unless a layer was entered in the middle of a text (`tail`).
    window_start [B]: `start` counted from there.
    """

    config: ModelConfig
    cache: Cache
    kernels: ModuleType
    start: torch.Tensor
    count: torch.Tensor
    length: int                                 # T
    dtype: torch.dtype
    rounding: bool = True                       # cache quantisers on
    taps: Taps | None = None
    first: torch.Tensor | None = None
    published: Published = field(default_factory=Published)
    _turns: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = torch.arange(self.length, device=self.start.device)
        self.positions = self.start[:, None] + steps                    # [B,T]
        self.live = steps < self.count[:, None]                         # [B,T]
        self.window_start = self.start if self.first is None else self.start - self.first

    def tail(self) -> tuple[Run, torch.Tensor]:
        """The run of each row's last `sliding_window` tokens, and which columns [B,W] they are.

        A row that is cut has no window keys before its cut; a shorter row is taken whole.
        """
        W = self.config.sliding_window
        kept = self.count.clamp(max=W)
        cut = self.count - kept                                         # [B] tokens left behind
        columns = cut[:, None] + torch.arange(W, device=cut.device)     # [B,W]
        first = torch.where(cut > 0, self.start + cut, 0)
        return Run(self.config, self.cache, self.kernels, self.start + cut, kept, W, self.dtype,
                   self.rounding, self.taps, first, self.published), columns

    def turns(self, compressed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) at the tokens' positions, [B,T,R/2]."""
        if compressed not in self._turns:
            self._turns[compressed] = rotation(self.config, compressed, self.positions, self.dtype)
        return self._turns[compressed]

    def group_turns(self, ratio: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of the groups that this pass may complete, [B,G,R/2].

        A compressed entry has the position of its group's first token, g * ratio.
        """
        key = (ratio, groups)
        if key not in self._turns:
            first = self.start // ratio
            numbers = first[:, None] + torch.arange(groups, device=first.device)
            self._turns[key] = rotation(self.config, True, numbers * ratio, self.dtype)
        return self._turns[key]

    def round(self, x: torch.Tensor, form: str) -> torch.Tensor:
        """Quantise and dequantise along the last axis, unless cache rounding is off."""
        return fake_quantize(x, form) if self.rounding else x

    def tap(self, name: str, value: object) -> None:
        if self.taps is not None:
            self.taps.put(name, value)  # type: ignore[arg-type]
