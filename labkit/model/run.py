"""What the layers of one forward pass share: positions, lengths, rotations, what was published."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch

from labkit.cache import Cache, GlobalStore
from labkit.cache.recent import take_rows
from labkit.config import ModelConfig
from labkit.model.rope import rotation
from labkit.numerics.blocks import fake_quantize
from labkit.numerics.precision import wide
from labkit.trace import Taps


@dataclass
class Published:
    """What the last Full and index source layers left for the layers after them."""

    entries: GlobalStore | None = None          # S compressed entries a row
    index_keys: GlobalStore | None = None       # where index keys are read: the same store
    selection: torch.Tensor | None = None       # [B,T,K]      entry numbers, -1 = none
    candidates: torch.Tensor | None = None      # [B,T,blocks] True = block is in the pool


@dataclass
class Run:
    """One pass of T new tokens in each of B rows over a cache.

    start [B]: position of a row's first new token; count [B]: its live new tokens (the rest of
    T is right padding, masked everywhere). enter [B]: the layers of this run are entered at this
    position, before which no window key of theirs exists; -1 where they go on (`tail`).
    """

    config: ModelConfig
    cache: Cache
    kernels: ModuleType
    start: torch.Tensor
    count: torch.Tensor
    length: int                                 # T
    dtype: torch.dtype
    rounding: bool = True                       # quantisers on
    taps: Taps | None = None
    enter: torch.Tensor | None = None
    keep: bool = False                          # the cache must be able to rewind this pass
    published: Published = field(default_factory=Published)
    features: dict[int, torch.Tensor] = field(default_factory=dict)  # [B,T,D] by target layer
    _turns: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = torch.arange(self.length, device=self.start.device)
        self.positions = self.start[:, None] + steps                    # [B,T]
        self.live = steps < self.count[:, None]                         # [B,T]

    def tail(self, length: int) -> tuple[Run, torch.Tensor]:
        """The run of each row's last `length` < T tokens, and which columns [B,length] they are.

        A row that is cut has no window keys before its cut; a shorter row is taken whole.
        """
        kept = self.count.clamp(max=length)
        cut = self.count - kept                                         # [B] tokens left behind
        columns = cut[:, None] + torch.arange(length, device=cut.device)  # [B,length]
        enter = torch.where(cut > 0, self.start + cut, -1)
        p = self.published
        published = Published(p.entries, p.index_keys, *(
            None if per_token is None else take_rows(per_token, columns)
            for per_token in (p.selection, p.candidates)))
        return Run(self.config, self.cache, self.kernels, self.start + cut, kept, length,
                   self.dtype, self.rounding, self.taps, enter, self.keep, published,
                   {layer: take_rows(f, columns) for layer, f in self.features.items()}), columns

    def entering(self, layer: int, h: torch.Tensor) -> None:
        """h [B,T,C,D] enters a layer: the draft's feature, if it is one of its target layers."""
        if self.cache.draft_windows and layer in self.config.dspark_target_layer_ids:
            self.features[layer] = wide(h).mean(2).to(h.dtype)           # [B,T,D]

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
        """Quantise and dequantise along the last axis, unless rounding is off."""
        return fake_quantize(x, form) if self.rounding else x

    def tap(self, name: str, value: object) -> None:
        if self.taps is not None:
            self.taps.put(name, value)  # type: ignore[arg-type]
