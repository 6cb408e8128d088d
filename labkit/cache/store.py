"""The global KV of one Full layer: compressed entries and their index keys, in pages.

A page holds the rows of a fixed number of entries, and sequences share pages: forking one copies
a list of pages, no rows. Full pages never change; the last page is copied by the first sequence
that writes into it while another may still read it (copy on write).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.errors import InputError
from labkit.numerics.rows import RowCodec


@dataclass
class Page:
    """Rows of `entries` consecutive entries: kv [entries, columns], keys [entries, columns]."""

    kv: torch.Tensor
    keys: torch.Tensor

    def clone(self) -> Page:
        return Page(self.kv.clone(), self.keys.clone())


class GlobalStore:
    """Entries of B sequences, row by row; `page_entries` of them in a page.

    counts[b] entries of row b are filled. Inside a pass the new ones can be read at once; they
    count when the pass is committed. What lies behind them is void and never visible.
    """

    def __init__(self, batch: int, page_entries: int, kv: RowCodec, keys: RowCodec,
                 device: torch.device) -> None:
        self.page_entries, self.kv_codec, self.key_codec, self.device = (
            page_entries, kv, keys, device)
        self.pages: list[list[Page]] = [[] for _ in range(batch)]
        self.counts = [0] * batch
        self._shared = [False] * batch          # may another sequence read the last page?
        self._joint: dict[str, torch.Tensor] = {}
        self._values: torch.Tensor | None = None
        self._keys: torch.Tensor | None = None
        self.begin()

    def begin(self) -> None:
        """Forget what a pass that did not end has left. Its pages go too: a fork would share
        them, and both sides would then write into the same ones."""
        for pages, count in zip(self.pages, self.counts, strict=True):
            del pages[-(-count // self.page_entries):]
        self._filled = list(self.counts)
        self._forget_joined()

    def append(self, kv: torch.Tensor, keys: torch.Tensor, first: torch.Tensor,
               complete: torch.Tensor) -> None:
        """Store entry first[b]+j of row b for j < complete[b]; kv [B,G,d], keys [B,G,di].

        Both as computed; rounding is the codec's. An entry that is there already stays as it is:
        a replay that computes it again, from less context, must not touch it.
        """
        starts = first.tolist()
        ends = (first + complete).tolist()
        if any(end > filled for end, filled in zip(ends, self._filled, strict=True)):
            kv_rows, key_rows = self.kv_codec.encode(kv), self.key_codec.encode(keys)
            for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
                assert start <= self._filled[b], "entries are missing before the new ones"
                at = self._filled[b]
                while at < end:
                    page, slot = self._page_for(b, at, key_rows)
                    n = min(end - at, self.page_entries - slot)
                    page.kv[slot : slot + n] = kv_rows[b, at - start : at - start + n]
                    page.keys[slot : slot + n] = key_rows[b, at - start : at - start + n]
                    at += n
                self._filled[b] = max(self._filled[b], end)
            self._forget_joined()

    def _page_for(self, b: int, entry: int, like: torch.Tensor) -> tuple[Page, int]:
        """The page of row b that `entry` goes into, writable, and its place in it."""
        number, slot = divmod(entry, self.page_entries)
        pages = self.pages[b]
        if number == len(pages):
            # Zeros, since a masked row still enters a product, and NaN times 0 is NaN.
            pages.append(Page(
                torch.zeros(self.page_entries, self.kv_codec.columns,
                            dtype=self.kv_codec.row_dtype, device=self.device),
                torch.zeros(self.page_entries, self.key_codec.columns,
                            dtype=self.key_codec.row_dtype, device=self.device)))
            self._shared[b] = False
        elif self._shared[b] or pages[number].kv.requires_grad:  # (autograd still needs the old)
            pages[number] = pages[number].clone()
            self._shared[b] = False
        return pages[number], slot

    def commit(self, lengths: list[int], ratio: int) -> None:
        """The pass has ended and row b is lengths[b] tokens long."""
        self.counts = [max(before, min(filled, length // ratio)) for before, filled, length
                       in zip(self.counts, self._filled, lengths, strict=True)]
        self._forget_joined()

    # ------------------------------------------------------------------ reading
    @property
    def length(self) -> int:
        """Entries of the fullest row."""
        return max(self._filled)

    def values(self) -> torch.Tensor:
        """All entries as the model reads them, [B,S,d]."""
        if self._values is None:
            self._values = self.kv_codec.decode(self._joined("kv"))
        return self._values

    def keys(self, first: int = 0, last: int | None = None,
             sequence: torch.Tensor | None = None) -> torch.Tensor:
        """Index keys of entries first..last-1, [B,last-first,di]; of some rows [n], [n,...]."""
        last = self.length if last is None else last
        if (first, last) != (0, self.length):
            keys = self.key_codec.decode(self._joined("keys")[:, first:last])
        else:
            if self._keys is None:
                self._keys = self.key_codec.decode(self._joined("keys"))
            keys = self._keys
        return keys if sequence is None else keys.index_select(0, sequence)

    def read(self, selection: torch.Tensor, sequence: torch.Tensor | None = None,
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries that contain the selected ones, [n,S,d], and where they lie there, [n,T,K].

        selection [n,T,K]: entry numbers, -1 = none, in rows sequence[n]; None: of all rows, in
        order. Only what is needed is decoded: all entries where many queries select from few of
        them, else just those that were selected.
        """
        n, T, K = selection.shape
        S, B = self.length, len(self.counts)
        whole = self._values is not None or n * T * K >= B * S
        if not S or (whole and sequence is None):
            return self.values(), selection
        rows = self.values() if whole else self._joined("kv")           # [B,S,columns]
        first = S * (torch.arange(B, device=rows.device) if sequence is None else sequence)
        index = selection.clamp(min=0).flatten(1) + first[:, None]      # [n,T*K]
        found = rows.flatten(0, 1).index_select(0, index.flatten()).unflatten(0, (n, T * K))
        place = torch.arange(T * K, device=selection.device).reshape(T, K)
        return (found if whole else self.kv_codec.decode(found),
                torch.where(selection < 0, selection, place))

    def _joined(self, part: str) -> torch.Tensor:
        """The rows of all pages one after the other, [B,S,columns]; short rows end in zeros."""
        if part not in self._joint:
            S, codec = self.length, self.kv_codec if part == "kv" else self.key_codec
            rows = []
            for pages, n in zip(self.pages, self._filled, strict=True):
                parts = [getattr(page, part) for page in pages[: -(-n // self.page_entries)]]
                if n < S:
                    parts.append(torch.zeros(S, codec.columns, dtype=codec.row_dtype,
                                             device=self.device))
                    if n % self.page_entries:
                        parts[-2] = parts[-2][: n % self.page_entries]
                rows.append((torch.cat(parts) if len(parts) != 1 else parts[0])[:S]
                            if parts else torch.zeros(0, codec.columns, dtype=codec.row_dtype,
                                                      device=self.device))
            self._joint[part] = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        return self._joint[part]

    def _forget_joined(self) -> None:
        self._joint, self._values, self._keys = {}, None, None

    # ------------------------------------------------------------------ sharing
    def fork(self) -> GlobalStore:
        """A copy that shares all pages; each side copies the last one before it writes."""
        return self.gathered([self], range(len(self.counts)))

    @staticmethod
    def gathered(stores: Sequence[GlobalStore], chosen: Sequence[int]) -> GlobalStore:
        """A store of the chosen rows, counted through all stores one after the other.

        Pages are shared, as in a fork, and the stores stay usable.
        """
        for store in stores:
            store.begin()
        every = [(store, b) for store in stores for b in range(len(store.counts))]
        rows = [every[number] for number in chosen]
        for store, b in rows:
            store._shared[b] = True
        twin = copy.copy(stores[0])
        twin.pages = [list(store.pages[b]) for store, b in rows]
        twin.counts = [store.counts[b] for store, b in rows]
        twin._shared = [True] * len(rows)
        twin.begin()
        return twin

    def crop(self, counts: list[int]) -> None:
        """Keep the first counts[b] entries of row b; pages are dropped, none is copied."""
        for b, count in enumerate(counts):
            if not 0 <= count <= self.counts[b]:
                raise InputError(f"cannot crop to {count} entries: there are {self.counts[b]}")
            kept = -(-count // self.page_entries)
            if count < self.counts[b] and self.counts[b] >= kept * self.page_entries:
                self._shared[b] = True          # a page that was full may be in other hands
            del self.pages[b][kept:]
            self.counts[b] = count
        self.begin()

    def lend_last(self, row: int) -> Page | None:
        """The unfinished page of a row, if there is one, for somebody else to read: before
        writing, this row copies it."""
        number, slot = divmod(self.counts[row], self.page_entries)
        if not slot:
            return None
        self._shared[row] = True
        return self.pages[row][number]

    def adopt(self, row: int, pages: list[Page], count: int) -> None:
        """Begin an empty row with pages that others hold too, of which `count` entries count."""
        if self.counts[row] or not 0 <= count <= len(pages) * self.page_entries:
            raise InputError(f"{count} entries of {len(pages)} pages do not fit an empty row")
        self.pages[row] = list(pages[: -(-count // self.page_entries)])
        self.counts[row], self._shared[row] = count, True
        self.begin()

    def nbytes(self) -> list[tuple[str, int, int]]:
        """(part, bytes filled, bytes allocated) of entries and of index keys."""
        found = []
        for part, name in (("kv", "global_kv"), ("keys", "index_keys")):
            filled = allocated = 0
            for pages, count in zip(self.pages, self.counts, strict=True):
                for number, page in enumerate(pages):
                    rows: torch.Tensor = getattr(page, part)
                    allocated += rows.untyped_storage().nbytes()
                    filled += rows[: max(0, count - number * self.page_entries)].nbytes
            found.append((name, filled, allocated))
        return found
