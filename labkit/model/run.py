"""What the layers of one forward pass share: positions, lengths, rotations, what was published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType

import torch

from labkit.cache import Cache, GlobalStore
from labkit.cache.recent import take_rows
from labkit.config import ModelConfig
from labkit.model.rope import rotation
from labkit.numerics.blocks import Rounding, fake_quantize, rounds
from labkit.numerics.precision import wide
from labkit.trace import Taps


@dataclass
class Published:
    """What the last Full and index source layers left for the layers after them."""

    entries: GlobalStore | None = None          # S compressed entries a row
    index_keys: GlobalStore | None = None       # where index keys are read: the same store
    selection: torch.Tensor | None = None       # [B,T,K] entry numbers, -1 = none
    candidates: torch.Tensor | None = None      # [B,T,blocks] True = block is in the pool


@dataclass
class Run:
    """One pass of T new tokens in each of B rows over a cache.

    start [B]: position of a row's first new token; count [B]: its live new tokens (the rest of
    T is right padding, masked everywhere). enter [B]: the layers of this run are entered at this
    position, before which no window key of theirs exists; -1 where they go on (`tail`).

    Where rows differ in length, only their N live tokens are computed: tensors of the tokens, in
    comments [B,T,...], are then [1,N,...], one row after the other. What looks at a sequence
    asks for rows again: `unpack` for windows and groups, `rows` for scores and attention.
    """

    config: ModelConfig
    cache: Cache
    kernels: ModuleType
    start: torch.Tensor
    count: torch.Tensor
    length: int                                 # T
    dtype: torch.dtype
    rounding: Rounding = True                   # quantisers on: all, none, or those named
    taps: Taps | None = None
    enter: torch.Tensor | None = None
    keep: bool = False                          # the cache must be able to rewind this pass
    selecting: str = "index"                    # who picks the entries: `indexer.SELECTING`
    blind: str = ""                             # "encoder" or "decoder": it selects none
    published: Published = field(default_factory=Published)
    features: dict[int, torch.Tensor] = field(default_factory=dict)  # [B,T,D] by target layer
    _turns: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        steps = torch.arange(self.length, device=self.start.device)
        self.positions = self.start[:, None] + steps                    # [B,T]
        self.live = steps < self.count[:, None]                         # [B,T]
        self._places: torch.Tensor | None = None    # of live tokens among B*T; None: all are live
        self.sequence: torch.Tensor | None = None   # whose rows `rows` gives; None: row b is b's
        if not bool(self.live.all()):
            self._places = self.live.flatten().nonzero()[:, 0]          # [N]
            if self.length <= self.config.sliding_window:
                self.sequence = self._places // self.length             # [N]

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [B,T,...] -> the live tokens alone, [1,N,...]; as it is where all are live."""
        if self._places is None:
            return x
        return x.flatten(0, 1).index_select(0, self._places)[None]

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """What `pack` gave -> rows [B,T,...], with zeros for padding."""
        if self._places is None:
            return x
        rows = x.new_zeros(self.live.numel(), *x.shape[2:])
        return rows.index_copy(0, self._places, x[0]).unflatten(0, self.live.shape)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [B,T,...], maybe packed, as attention takes them: in rows.

        Short rows of different length become N rows of one token each, [N,1,...]; long ones stay
        together, padded, since their windows overlap.
        """
        return self.unpack(x) if self.sequence is None else x[0][:, None]

    def tokens(self, x: torch.Tensor) -> torch.Tensor:
        """What `rows` gave, or what was computed from it, as tokens again."""
        return self.pack(x) if self.sequence is None else x[:, 0][None]

    def window_rows(self, window: torch.Tensor,
                    start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each of these rows its part of the windows [B,W+T,d], and its start [B]."""
        if self.sequence is None:
            return window, start
        assert self._places is not None
        step = self._places % self.length                               # [N]
        columns = step[:, None] + torch.arange(window.shape[1] - self.length + 1,
                                               device=step.device)      # [N,W+1]
        return window[self.sequence[:, None], columns], start[self.sequence] + step

    def tail(self, length: int) -> tuple[Run, Callable[[torch.Tensor], torch.Tensor]]:
        """The run of each row's last `length` < T tokens, and what takes them from a tensor.

        A row that is cut has no window keys before its cut; a shorter row is taken whole.
        """
        kept = self.count.clamp(max=length)
        cut = self.count - kept                                         # [B] tokens left behind
        columns = cut[:, None] + torch.arange(length, device=cut.device)  # [B,length]
        enter = torch.where(cut > 0, self.start + cut, -1)
        last = Run(self.config, self.cache, self.kernels, self.start + cut, kept, length,
                   self.dtype, self.rounding, self.taps, enter, self.keep, self.selecting,
                   self.blind)

        def take(x: torch.Tensor) -> torch.Tensor:
            return last.pack(take_rows(self.unpack(x), columns))        # [B,length,...]

        p = self.published
        last.published = Published(p.entries, p.index_keys, *(
            None if x is None else take(x) for x in (p.selection, p.candidates)))
        last.features = {layer: take(feature) for layer, feature in self.features.items()}
        return last, take

    def entering(self, layer: int, h: torch.Tensor) -> None:
        """h [B,T,C,D] enters a layer: the draft's feature, if it is one of its target layers."""
        if self.cache.draft_windows and layer in self.config.dspark_target_layer_ids:
            self.features[layer] = wide(h).mean(2).to(h.dtype)           # [B,T,D]

    def turns(self, compressed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) at the tokens' positions, [B,T,R/2]."""
        if compressed not in self._turns:
            self._turns[compressed] = rotation(self.config, compressed, self.pack(self.positions),
                                               self.dtype)
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
        """Quantise and dequantise along the last axis, unless that rounding is off."""
        return fake_quantize(x, form) if rounds(self.rounding, form) else x

    def tap(self, name: str, value: torch.Tensor | Callable[[], torch.Tensor]) -> None:
        """Record what has its whole shape already; a callable is asked only if it is wanted."""
        if self.taps is not None:
            self.taps.put(name, value)

    def tap_tokens(self, name: str, value: torch.Tensor) -> None:
        """Record a tensor of the tokens, [B,T,...] or packed, as rows [B,T,...]."""
        self.tap(name, lambda: self.unpack(value))
