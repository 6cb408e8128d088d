"""The state that a batch of sequences owns between forward passes.

A fresh `Cache` is an empty past: a prefill is a pass over it, a decode step a pass of one
token over a filled one, with the same code. Rows advance by their own number of live tokens.
A pass is a transaction: its parts take what it adds when it is committed, all or nothing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch

from labkit.cache.recent import LookBack
from labkit.cache.store import GlobalStore
from labkit.cache.tail import Tail
from labkit.cache.window import WindowRing
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.numerics.blocks import Rounding, block_format, rounds
from labkit.numerics.precision import wide
from labkit.numerics.rows import RowCodec

PAGE_TOKENS = 128  # tokens whose entries share a page, in each store; or the next multiple of r


class Cache:
    """Rings, compressor tails, global stores and Engram look-back of `batch` sequences.

    lengths   [B] int64: tokens seen so far, per row; tokens: their ids, a list per row
    windows   per layer a `WindowRing`
    stores    per Full layer a `GlobalStore`; tails: per Full layer with ratio > 1 a `Tail`
    look_back Engram classes of the last N-1 tokens
    draft_windows  per stage of the draft a `WindowRing` of the target's features; none: no draft

    form      how rows are stored, one of `labkit.numerics.rows.FORMS`
    rounding  False: cache rounding is off; names of recipes: only those are on (form "plain"
              only, unless all are on)
    page_tokens  tokens whose entries make up a page: a multiple of every ratio, by default 128
              or the next one
    stale_index_keys  behave as the released reference code does: one slot holds the published
              index keys of whichever Full layer completed a group last, so that a decode step
              that leaves a group unfinished scores another layer's keys
    draft     hold the windows that the draft (DSpark) reads
    """

    def __init__(self, config: ModelConfig, batch: int = 1, dtype: torch.dtype = torch.float32,
                 device: torch.device | str = "cpu", form: str = "packed",
                 rounding: Rounding = True, page_tokens: int | None = None,
                 stale_index_keys: bool = False, draft: bool = False) -> None:
        device = torch.device(device)
        for recipe in () if isinstance(rounding, bool) else rounding:
            block_format(recipe)                    # InputError for a name that is none
        ratios = [role.ratio for role in config.roles if role.kind == "full"]
        unit = math.lcm(*ratios)
        if page_tokens is None:
            page_tokens = -(-PAGE_TOKENS // unit) * unit
        if page_tokens < 1 or page_tokens % unit:
            raise InputError(f"page_tokens is {page_tokens}: it must be a multiple of {unit}, so "
                             "that no group of tokens is cut")
        self.config, self.dtype, self.device = config, dtype, device
        self.form, self.rounding, self.page_tokens = form, rounding, page_tokens
        self.stale_index_keys = stale_index_keys
        self.shared_slot: GlobalStore | None = None     # used by the stale fault only
        self._slot: GlobalStore | None = None           # what it was after the last pass
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.tokens: list[list[int]] = [[] for _ in range(batch)]

        def codec(width: int, recipe: str) -> RowCodec:
            return RowCodec(width, recipe, form, dtype, rounds(rounding, recipe))

        window = codec(config.head_dim, "fp8")
        self.windows = [WindowRing(batch, config.sliding_window, window, device)
                        for _ in range(config.num_hidden_layers)]
        self.draft_windows = [WindowRing(batch, config.sliding_window, window, device)
                              for _ in range(config.num_nextn_predict_layers if draft else 0)]
        self.stores: dict[int, GlobalStore] = {}
        self.tails: dict[int, Tail] = {}
        fp32 = wide(torch.empty(0, dtype=dtype)).dtype
        for role in config.roles:
            if role.kind == "full":
                self.stores[role.layer] = GlobalStore(
                    batch, page_tokens // role.ratio, codec(config.head_dim, "nvfp4"),
                    codec(config.index_head_dim, "mxfp4"), device)
                if role.ratio > 1:  # the compressor's products are fp32 also in a bf16 model
                    width = 2 * config.head_dim
                    self.tails[role.layer] = Tail(batch, role.ratio, width, fp32, device)
        self.look_back = LookBack(torch.full((batch, config.engram_max_ngram_size - 1), -1,
                                             device=device))
        self._due: tuple[torch.Tensor, torch.Tensor, list[list[int]], bool] | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # start, count of a kept pass
        self._back: torch.Tensor | None = None          # lengths of a rewind that is due

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def rings(self) -> list[WindowRing]:
        """All windows: those of the layers, then those of the draft's stages."""
        return self.windows + self.draft_windows

    def _recent(self) -> Iterator[WindowRing | Tail | LookBack]:
        """The parts that hold the last rows of something."""
        yield from self.rings
        yield from self.tails.values()
        yield self.look_back

    # ------------------------------------------------------------------ passes
    def begin(self) -> None:
        """Start a pass. What an earlier one left that was cut short is forgotten."""
        self.settle()
        self._last, self.shared_slot = None, self._slot
        for part in (*self._recent(), *self.stores.values()):
            part.begin()

    def commit(self, ids: torch.Tensor, count: torch.Tensor, kept: bool = False) -> None:
        """End a pass in which row b took in the first count[b] of ids [B,T].

        kept: the parts were told to keep what they need for `rewind`.
        """
        taken = [row[:n] for row, n in zip(ids.tolist(), count.tolist(), strict=True)]
        start = self.lengths
        # From here on the pass will be finished, now or by the next call that finds it due.
        self._due = (start, start + count, taken, kept)
        self.settle()

    def settle(self) -> None:
        """Do what is due, if a commit or a rewind was cut short. Twice does no harm."""
        if self._back is not None:
            self._take_back(self._back)
        if self._due is None:
            return
        start, lengths, taken, kept = self._due
        for part in self._recent():
            part.commit()
        for layer, store in self.stores.items():
            store.commit(lengths.tolist(), self.config.compress_ratios[layer])
        for row, at, new in zip(self.tokens, start.tolist(), taken, strict=True):
            row[at:] = new
        self.lengths, self._slot = lengths, self.shared_slot
        self._last = (start, lengths - start) if kept else None
        self._due = None

    def rewind(self, lengths: torch.Tensor) -> None:
        """Back to lengths[b] tokens, inside the last pass (which must have kept its rows).

        The one way in which tokens are taken back, for all parts alike: speculative decoding
        reads several tokens and may keep only the first of them.
        """
        self.settle()
        if self._last is None:
            raise InputError("the last pass kept nothing to go back with: run it with keep=True, "
                             "or crop the session, which reads its last window again")
        start, count = self._last
        back = lengths - start
        if lengths.shape != start.shape or bool(((back < 0) | (back > count)).any()):
            raise InputError(f"cannot go back to {lengths.tolist()} tokens: the last pass went "
                             f"from {start.tolist()} to {(start + count).tolist()}")
        self._back = lengths.clone()  # will be done, now or by the next call that finds it due
        self.settle()

    def _take_back(self, lengths: torch.Tensor) -> None:
        assert self._last is not None
        start = self._last[0]
        back = lengths - start
        for part in self._recent():
            part.rewind(back)
        for layer, store in self.stores.items():
            ratio = self.config.compress_ratios[layer]
            store.crop([min(n, length // ratio)
                        for n, length in zip(store.counts, lengths.tolist(), strict=True)])
        self.tokens = [row[:n] for row, n in zip(self.tokens, lengths.tolist(), strict=True)]
        self.lengths = lengths
        self._last, self._back = (start, back), None

    # ------------------------------------------------------------------ other pasts
    def empty(self) -> Cache:
        """A fresh cache of the same kind."""
        return Cache(self.config, self.batch, self.dtype, self.device, self.form, self.rounding,
                     self.page_tokens, self.stale_index_keys, bool(self.draft_windows))

    def fork(self) -> Cache:
        """A second sequence with the same past. Pages are shared, nothing is copied before one
        of the two writes; later passes change neither through the other."""
        self.settle()
        twin = copy.copy(self)
        twin.windows = [w.fork() for w in self.windows]
        twin.draft_windows = [w.fork() for w in self.draft_windows]
        twin.tails = {layer: t.fork() for layer, t in self.tails.items()}
        twin.stores = {layer: s.fork() for layer, s in self.stores.items()}
        twin.look_back = self.look_back.fork()
        twin.tokens = [list(row) for row in self.tokens]
        if self._slot is not None:
            owner = next(k for k, s in self.stores.items() if s is self._slot)
            twin._slot = twin.stores[owner]
        twin._last = None
        return twin

    def keep_global_only(self, lengths: list[int], enter: list[int],
                         look_back: torch.Tensor) -> None:
        """Keep the global entries of the first lengths[b] tokens and lose the rest of the state.

        The next pass reads row b from token enter[b] <= lengths[b] on; window keys exist from
        there on, and entries that are kept are not written again. look_back [B,N-1]: Engram
        classes before enter[b].
        """
        self.settle()
        for layer, store in self.stores.items():
            store.crop([n // self.config.compress_ratios[layer] for n in lengths])
        at = torch.tensor(enter, device=self.device)
        for ring in self.rings:
            ring.begin()
            ring.first = at
        for tail in self.tails.values():
            tail.begin()
            tail.rows = torch.zeros_like(tail.rows)
        self.look_back.begin()
        self.look_back.rows = look_back
        self.tokens = [row[:n] for row, n in zip(self.tokens, enter, strict=True)]
        self.lengths, self._last = at, None

    # ------------------------------------------------------------------ bytes
    def nbytes(self) -> dict[str, int]:
        """Bytes really allocated, by part (each tensor's storage, not a formula).

        `reserved` is room in pages that is not filled yet. A page that several sequences share
        counts for each of them.
        """
        self.settle()
        used = {"global_kv": 0, "index_keys": 0, "window": 0, "remainder": 0, "engram": 0,
                "draft": 0, "reserved": 0}
        for store in self.stores.values():
            for part, filled, allocated in store.nbytes():
                used[part] += filled
                used["reserved"] += allocated - filled
        used["window"] = sum(w.nbytes for w in self.windows)
        used["draft"] = sum(w.nbytes for w in self.draft_windows)
        used["remainder"] = sum(t.nbytes for t in self.tails.values())
        used["engram"] = self.look_back.nbytes
        return used
