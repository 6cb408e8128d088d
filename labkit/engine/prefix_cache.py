"""Prefix cache: texts that begin alike are read once.

Three things can happen to a prompt: nothing of it is known (cold); its beginning is known with
its windows (full hit), and reading goes on behind it; or only the global entries are there
(global-only hit), and the last window of the known part is read again. The report keeps the
window state for minutes, so a global-only hit is what most returning users meet.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from labkit.cache.blocks import Block, WindowState, fill, full_blocks, window_state
from labkit.cache.cache import Cache
from labkit.cache.radix import RadixTree
from labkit.cache.tiers import GLOBAL_LIFETIME, WINDOW_LIFETIME, Tiers, WindowPool
from labkit.engine.replay import drop_windows, replay_start
from labkit.engine.session import Session, as_ids
from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.store import DiskStore

HitKind = Literal["cold", "full", "global-only"]


@dataclass(frozen=True)
class Hit:
    """What a prompt found, in tokens.

    known     leading tokens that were taken from the cache
    replayed  of these, how many were read again for their windows
    computed  tokens that were read: replayed ones and the rest of the prompt
    tiers     blocks by the tier that they came from
    """

    kind: HitKind
    prompt: int
    known: int
    replayed: int
    computed: int
    tiers: dict[str, int]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class PrefixCache:
    """Shared by all sessions of one model.

    device, host  bytes for blocks in the model's memory and in the host's
    disk          a folder for blocks that outlive the process, with its budget in bytes
    host_memory   bytes of the host; the window pool gets 10 % of it. None: this machine's
    replay        "bounded" or "exact", what a global-only hit reads again
    form, page_tokens, draft  of the sessions, see `labkit.cache.Cache`; draft None: if the model
                  has a draft. Its windows are kept and lost with all others
    clock, wall   tell the time to memory tiers (monotonic) and to the disk (since 1970)
    StoreError if the folder belongs to another model, is in use by another writer, or cannot be
    written; everything that goes wrong later costs a computation, not an answer.
    """

    def __init__(self, model: Transformer, *, device: int = 1 << 28, host: int = 1 << 28,
                 disk: str | None = None, disk_budget: int = 1 << 30,
                 host_memory: int | None = None, lifetime: float = GLOBAL_LIFETIME,
                 window_lifetime: float = WINDOW_LIFETIME, form: str | None = None,
                 page_tokens: int | None = None, replay: str = "bounded",
                 draft: bool | None = None,
                 clock: Callable[[], float] = time.monotonic,
                 wall: Callable[[], float] = time.time) -> None:
        replay_start(model.config, 0, replay)  # refuses an unknown kind now
        if host_memory is None:
            import psutil

            host_memory = psutil.virtual_memory().total
        template = model.new_cache(1, form, page_tokens, draft=draft)
        self.model, self.replay, self.form = model, replay, form
        self.page_tokens, self.draft = template.page_tokens, bool(template.draft_windows)
        self.digest = model_digest(model, template)
        self._pages: RadixTree[str] = RadixTree()
        self._windows: RadixTree[str] = RadixTree()
        store = None
        if disk is not None:
            store = DiskStore(disk, self.digest, budget=disk_budget, lifetime=lifetime, clock=wall)
        self.tiers = Tiers(template, device, host, store, lifetime, clock, self._pages.discard)
        self.pool = WindowPool(host_memory, window_lifetime, clock, self._windows.discard)
        self.hits: Counter[str] = Counter()
        if store is not None:
            self._find_on_disk(store)

    def close(self) -> None:
        """Let go of the folder; what is in it stays for the next one."""
        if self.tiers.disk is not None:
            self.tiers.disk.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---------------------------------------------------------------- reading
    def prefill(self, ids: torch.Tensor | Sequence[int], mode: str = "full",
                last_only: bool = True) -> tuple[Session, torch.Tensor, Hit]:
        """A session that has read ids, the logits of what it had to read, and what it found.

        logits [1,computed,V] (last_only: [1,1,V]); mode as in `Session.prefill`.
        """
        started = time.perf_counter()
        wanted = as_ids(ids).flatten().tolist()
        if not wanted:
            raise InputError("the prompt is empty: give at least one token")
        session = Session(self.model, self.form, self.page_tokens, draft=self.draft)
        blocks, tiers, known = self._known_blocks(wanted)
        state = self._known_state(wanted, len(blocks))
        start = replay_start(self.model.config, known, self.replay)
        kind: HitKind = "cold"
        if state is not None and (start == 0 or state.length >= start):
            # Reading on from a state is exact, and here it also reads no more tokens.
            kind, known, start = "full", state.length, state.length
            fill(session.cache, wanted[:known], blocks[: known // self.page_tokens], state)
        elif start > 0:
            kind = "global-only"
            fill(session.cache, wanted[:known], blocks, None)
            drop_windows(self.model, session.cache, wanted[:known], start)
        else:
            known, start, tiers = 0, 0, {}
        logits = session.prefill(wanted[start:], last_only, mode)
        self.hits[kind] += 1
        return session, logits, Hit(kind, len(wanted), known, known - start, len(wanted) - start,
                                    tiers, time.perf_counter() - started)

    def keep(self, session: Session) -> None:
        """Keep what a session knows: its finished blocks, and its windows for a while."""
        if session.model is not self.model:
            raise InputError("the session is of another model than the prefix cache")
        cache, ids = session.cache, session.ids
        if (cache.form, cache.page_tokens) != (self.tiers.template.form, self.page_tokens):
            raise InputError(f"the session has {cache.form} pages of {cache.page_tokens} tokens, "
                             f"the prefix cache {self.tiers.template.form} ones of "
                             f"{self.page_tokens}: make both alike")
        if bool(cache.draft_windows) != self.draft:
            raise InputError("the draft's windows are in only one of the session and the prefix "
                             f"cache: make both with draft={self.draft}, as the prefix cache is")
        P, marks, parent = self.page_tokens, {}, self.digest
        for number, block in enumerate(full_blocks(cache)):
            own = ids[number * P : (number + 1) * P]
            key = _chain(parent, own)
            self.tiers.put(key, block, parent.encode() + _pack(own))
            if key in self.tiers:
                marks[(number + 1) * P] = key
            parent = key
        if marks:
            self._pages.insert(ids, marks)
        if ids:
            key = _chain(parent, ids[len(ids) // P * P :]) + f":{len(ids)}"
            if self.pool.put(key, window_state(cache)):
                self._windows.insert(ids, {len(ids): key})

    def nbytes(self) -> dict[str, int]:
        """Bytes held, by store: device, host, disk (global pages), windows (the pool)."""
        return {**self.tiers.nbytes(), "windows": self.pool.nbytes}

    # ---------------------------------------------------------------- looking up
    def _known_blocks(self, ids: list[int]) -> tuple[list[Block], dict[str, int], int]:
        """Blocks of the longest known beginning (the last may reach beyond it), how many came
        from each tier, and the beginning's tokens."""
        match = self._pages.match(ids)
        places = dict(match.marks)
        if match.below is not None:  # a page that goes on otherwise serves up to the fork
            places[match.below[0]] = match.below[1]
        blocks: list[Block] = []
        tiers: Counter[str] = Counter()
        while (key := places.get((len(blocks) + 1) * self.page_tokens)) is not None:
            found = self.tiers.get(key)
            if found is None:
                self._pages.discard(key)
                break
            blocks.append(found[0])
            tiers[found[1]] += 1
        return blocks, dict(tiers), min(match.length, len(blocks) * self.page_tokens)

    def _known_state(self, ids: list[int], blocks: int) -> WindowState | None:
        """The window state of the longest beginning that leaves a token to read."""
        for length, key in reversed(self._windows.match(ids[:-1]).marks):
            if length // self.page_tokens <= blocks and (state := self.pool.get(key)) is not None:
                return state
        return None

    def _find_on_disk(self, store: DiskStore) -> None:
        """Rebuild the tree from what an earlier process left."""
        children: dict[str, list[tuple[str, list[int]]]] = {}
        for key, meta, _ in store.items():
            parent, own = meta[: len(self.digest)].decode(), _unpack(meta[len(self.digest) :])
            if len(own) == self.page_tokens and _chain(parent, own) == key:
                children.setdefault(parent, []).append((key, own))
        paths: list[tuple[str, list[int], dict[int, str]]] = [(self.digest, [], {})]
        while paths:
            parent, ids, marks = paths.pop()
            branches = children.get(parent, [])
            if not branches and marks:
                self._pages.insert(ids, marks)
            for key, own in branches:
                text = ids + own
                paths.append((key, text, {**marks, len(text): key}))


def _chain(parent: str, ids: list[int]) -> str:
    """A block's key: it names its tokens and, through its parent, all before them."""
    return hashlib.blake2b(parent.encode() + _pack(ids), digest_size=16).hexdigest()


def _pack(ids: list[int]) -> bytes:
    return struct.pack(f"<{len(ids)}q", *ids)


def _unpack(data: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(data) // 8}q", data[: len(data) // 8 * 8]))


SAMPLE = 4096  # values of a parameter that enter the digest


def model_digest(model: Transformer, cache: Cache) -> str:
    """32 hexadecimal digits that change with the model, its vocabulary or the pages' form.

    Of each parameter the name, the shape and up to 4,096 values evenly spread over it enter,
    so that a model of any size has a digest at once. Pages hold nothing of the draft's, so its
    weights do not enter: they outlive a draft that is trained anew.
    """
    found = hashlib.blake2b(digest_size=16)
    head = (model.config.to_dict(), cache.form, cache.page_tokens, str(cache.dtype), "1")
    found.update(repr(head).encode())
    found.update(model.engram_classes.cpu().numpy().tobytes())
    for name, parameter in sorted(model.named_parameters()):
        if name.startswith("mtp."):
            continue
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // SAMPLE)].double().cpu()
        found.update(repr((name, tuple(parameter.shape))).encode() + sample.numpy().tobytes())
    return found.hexdigest()
