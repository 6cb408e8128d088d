"""What of a sequence outlives it: blocks of global pages, and the state of its windows.

A block is the pages of all stores for the same `page_tokens` tokens. It depends on those tokens
and on all before them, never on what follows, so any text that begins alike may read it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit.cache.cache import Cache
from labkit.cache.store import Page
from labkit.errors import InputError

Block = dict[int, Page]  # by Full layer


@dataclass(frozen=True)
class WindowState:
    """All of a one-sequence cache at `length` tokens but its full pages.

    It is only good together with the blocks of the tokens before it, and at this length only: a
    remainder belongs to exactly one place in a text.
    """

    length: int
    windows: tuple[tuple[torch.Tensor, torch.Tensor], ...]     # rows, first of `Cache.rings`
    tails: dict[int, torch.Tensor]
    look_back: torch.Tensor
    partial: dict[int, Page | None]                            # the last, unfinished page

    @property
    def nbytes(self) -> int:
        tensors = [rows for rows, _ in self.windows] + [*self.tails.values(), self.look_back]
        tensors += [t for p in self.partial.values() if p for t in (p.kv, p.keys)]
        return sum(t.untyped_storage().nbytes() for t in tensors)


def full_blocks(cache: Cache) -> list[Block]:
    """The finished blocks of a one-sequence cache, by reference."""
    count = int(cache.lengths[0]) // cache.page_tokens
    return [{layer: store.pages[0][number] for layer, store in cache.stores.items()}
            for number in range(count)]


def window_state(cache: Cache) -> WindowState:
    """What `full_blocks` leaves out, by reference: no row is copied."""
    cache.settle()
    partial = {layer: store.lend_last(0) for layer, store in cache.stores.items()}
    return WindowState(
        int(cache.lengths[0]), tuple((w.rows, w.first) for w in cache.rings),
        {layer: tail.rows for layer, tail in cache.tails.items()}, cache.look_back.rows, partial)


def fill(cache: Cache, ids: list[int], blocks: list[Block], state: WindowState | None) -> None:
    """Give an empty one-sequence cache the past `ids`, from blocks that others hold too.

    With a state, which must be of just these ids, everything is there. Without, only the global
    entries are: read the windows again before anything else (`Cache.keep_global_only`).
    """
    if cache.batch != 1 or cache.tokens[0]:
        raise InputError("only an empty cache of one sequence can be filled")
    if state is not None and state.length != len(ids):
        raise InputError(f"the window state is of {state.length} tokens, the past of {len(ids)}")
    if state is not None and len(state.windows) != len(cache.rings):
        drafts = [n - len(cache.windows) for n in (len(state.windows), len(cache.rings))]
        raise InputError(f"the window state has {drafts[0]} windows of the draft, the cache "
                         f"{drafts[1]}: make both with or both without them (draft)")
    for layer, store in cache.stores.items():
        pages = [block[layer] for block in blocks]
        last = state.partial[layer] if state is not None else None
        store.adopt(0, pages + ([last] if last else []),
                    len(ids) // cache.config.compress_ratios[layer])
    if state is not None:
        for ring, (rows, first) in zip(cache.rings, state.windows, strict=True):
            ring.rows, ring.first = rows, first
        for layer, rows in state.tails.items():
            cache.tails[layer].rows = rows
        cache.look_back.rows = state.look_back
    cache.tokens = [list(ids)]
    cache.lengths = torch.tensor([len(ids)], device=cache.device)


def to_bytes(block: Block) -> bytes:
    """The rows of all layers one after the other: KV, then keys, of each."""
    rows = [part.contiguous().view(torch.uint8).reshape(-1).cpu()
            for _, page in sorted(block.items()) for part in (page.kv, page.keys)]
    return bytes(torch.cat(rows).numpy())


def from_bytes(payload: bytes, cache: Cache) -> Block | None:
    """The block again, on the cache's device; None if the size is not that of its pages."""
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    sizes = []
    for layer in sorted(cache.stores):
        store = cache.stores[layer]
        sizes += [(layer, codec, store.page_entries) for codec in (store.kv_codec, store.key_codec)]
    if len(payload) != sum(codec.nbytes * n for _, codec, n in sizes):
        return None
    parts: dict[int, list[torch.Tensor]] = {layer: [] for layer in cache.stores}
    at = 0
    for layer, codec, n in sizes:
        rows = data[at : at + codec.nbytes * n].clone().view(codec.row_dtype)
        parts[layer].append(rows.reshape(n, codec.columns).to(cache.device))
        at += codec.nbytes * n
    return {layer: Page(kv, keys) for layer, (kv, keys) in parts.items()}


def block_nbytes(block: Block) -> int:
    return sum(part.untyped_storage().nbytes()
               for page in block.values() for part in (page.kv, page.keys))
