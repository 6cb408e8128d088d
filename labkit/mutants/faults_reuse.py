"""Wrong variants of crops, replays, prefix hits, forks and rewinds."""

from __future__ import annotations

import torch

from labkit.mutants.record import Patch, everywhere, method, mutant

BEHIND = "dspark.raw_hidden of the block behind"
OUTRUN = "an exact replay starts so far back that its end does not feel it"


# ------------------------------------------------------------------ crop
@mutant("crop", "A cropped text keeps the windows and remainders of the text that was cut off.",
        "Cropping a cache back by shortening what has a length, and nothing else.",
        "Crop, go on with other tokens, compare with one pass")
def crop_keeps_windows() -> list[Patch]:
    from labkit.engine.session import Session

    def crop(self, length, replay="bounded"):
        cache = self.cache.fork()
        for layer, store in cache.stores.items():
            store.crop([length // cache.config.compress_ratios[layer]])
        cache.tokens = [cache.tokens[0][:length]]
        cache.lengths = torch.tensor([length])
        self.cache = cache
    return [Patch(Session, "crop", crop)]


@mutant("crop", "The entry of the group that a crop cuts in two is kept.",
        "Rounding up in a crop: the entry still speaks of tokens that are gone.",
        "compressed_kv after a crop to an odd length and another ending")
def crop_keeps_cut_group() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def keep_global_only(self, lengths, enter, look_back):
            before = {layer: store.fork() for layer, store in self.stores.items()}
            original(self, lengths, enter, look_back)
            for layer, store in before.items():
                ratio = self.config.compress_ratios[layer]
                store.crop([min(had, -(-n // ratio))
                            for had, n in zip(store.counts, lengths, strict=True)])
                self.stores[layer] = store
        return keep_global_only
    return method(Cache, "keep_global_only", around)


# ------------------------------------------------------------------ replay
@mutant("replay", "A replay writes finished entries again, from less context.",
        "Replay through the ordinary write path, also when it starts inside a pair.",
        "compressed_kv before and after a replay: it should not change")
def replay_rewrites_entries() -> list[Patch]:
    from labkit.cache.store import GlobalStore

    def append(self, kv, keys, first, complete):
        kv_rows, key_rows = self.kv_codec.encode(kv), self.key_codec.encode(keys)
        starts, ends = first.tolist(), (first + complete).tolist()
        for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
            for at in range(start, end):
                number, slot = divmod(at, self.page_entries)
                if number < len(self.pages[b]):
                    self.pages[b][number] = self.pages[b][number].clone()
                page, slot = self._page_for(b, at, key_rows)
                page.kv[slot], page.keys[slot] = kv_rows[b, at - start], key_rows[b, at - start]
            self._filled[b] = max(self._filled[b], end)
        self._forget_joined()
    return [Patch(GlobalStore, "append", append)]


@mutant("replay", "A window looks at all W slots, also at those from before the replay's start.",
        "The lower bound of a window counted from position 0 instead of from the segment's start.",
        "attn.window and attn.out of the first token that is read again", OUTRUN)
def window_bound_ignored() -> list[Patch]:
    from labkit.cache.window import WindowRing

    def around(original):
        def take_in(self, new, start, *args):
            window, _ = original(self, new, start, *args)
            return window, start
        return take_in
    return method(WindowRing, "take_in", around)


@mutant("window", "A window begins with the pass instead of with the sequence.",
        "The lower bound of a window counted from the chunk: each chunk reads as if alone.",
        "layers.0.attn.out of the first token of a second chunk")
def window_bound_per_pass() -> list[Patch]:
    from labkit.cache.window import WindowRing

    def around(original):
        def take_in(self, new, start, *args):
            window, begun = original(self, new, start, *args)
            return window, torch.zeros_like(begun)
        return take_in
    return method(WindowRing, "take_in", around)


@mutant("window", "After a pass a layer forgets where it was entered.",
        "The bound of a segment kept in the pass and lost before the next chunk.",
        "A cut prefill in chunks whose last chunk is just the decoder's tail", OUTRUN)
def window_bound_not_kept() -> list[Patch]:
    from labkit.cache.window import WindowRing

    def around(original):
        def commit(self):
            original(self)
            self.first = torch.zeros_like(self.first)
        return commit
    return method(WindowRing, "commit", around)


@mutant("prefix hit", "A prefix that is found without its windows is not read again.",
        "Empty windows treated as valid: the text after a hit was empty or corrupt.",
        "The first logits after a global-only hit")
def hit_without_replay() -> list[Patch]:
    from labkit.engine import prefix_cache

    def around(original):
        def drop(model, cache, ids, start):
            original(model, cache, ids, start)
            for ring in cache.windows:
                ring.first = torch.zeros_like(ring.first)
        return drop
    return [Patch(prefix_cache, "replay_start", lambda config, length, replay="bounded": length),
            Patch(prefix_cache, "drop_windows", around(prefix_cache.drop_windows))]


@mutant("replay", "A bounded replay reads W-1 tokens again instead of W.",
        "Off by one at hit length 255 with a window of 128: the first token is missing.",
        "attn.out of the second token that is read again", OUTRUN)
def replay_one_token_late() -> list[Patch]:
    from labkit.engine.replay import replay_start

    def late(config, length, replay="bounded"):
        start = replay_start(config, length, replay)
        return start + 1 if 0 < start < length else start
    return everywhere(replay_start, late)


@mutant("replay", "At the start of a replay the Engram look-back is empty.",
        "Hashes that start anew where the tokens before were not read in the same call.",
        "engram_hash_ids of the first tokens that are read again", OUTRUN)
def replay_without_lookback() -> list[Patch]:
    from labkit.text.engram_hash import next_history

    def empty(*args, **kwargs):
        return torch.full_like(next_history(*args, **kwargs), -1)
    return everywhere(next_history, empty)


# ------------------------------------------------------------------ fork
@mutant("fork", "A fork shares the compressor's remainder, which each side writes in place.",
        "A shallow copy of a cache: the tensors in it are still the same.",
        "Fork inside a group, decode in turns in both, compare with never having forked")
def fork_shares_remainder() -> list[Patch]:
    from labkit.cache.recent import Recent
    from labkit.cache.tail import Tail

    def around(original):
        def commit(self):
            if isinstance(self, Tail) and self._next is not None:
                self.rows.copy_(self._next)
            else:
                original(self)
        return commit
    return method(Recent, "commit", around)


# ------------------------------------------------------------------ rewind
_REJECTED = "Rejected drafts left in part of the state: the text after the first rejection decays."


@mutant("rewind", "Rejected tokens stay in the windows.", _REJECTED,
        "attn.window after a rewind; with all tokens accepted nothing is wrong")
def rewind_forgets_windows() -> list[Patch]:
    from labkit.cache.window import WindowRing
    return _not_rewound(WindowRing)


@mutant("rewind", "Rejected tokens stay in the compressor's remainder.", _REJECTED,
        "compressed_kv of the group in which tokens were rejected")
def rewind_forgets_remainder() -> list[Patch]:
    from labkit.cache.tail import Tail
    return _not_rewound(Tail)


@mutant("rewind", "Rejected tokens stay in the Engram look-back.", _REJECTED,
        "engram_hash_ids of the first tokens after a rewind")
def rewind_forgets_lookback() -> list[Patch]:
    from labkit.cache.recent import LookBack
    return _not_rewound(LookBack)


def _not_rewound(kind: type) -> list[Patch]:
    from labkit.cache.recent import Recent

    def around(original):
        def rewind(self, count):
            if not isinstance(self, kind):
                original(self, count)
        return rewind
    return method(Recent, "rewind", around)


@mutant("rewind", "Entries made of rejected tokens stay in the global store.", _REJECTED,
        "compressed_kv after a rewind over a finished group")
def rewind_forgets_entries() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def rewind(self, lengths):
            stores = self.stores
            self.stores = {}
            try:
                original(self, lengths)
            finally:
                self.stores = stores
        return rewind
    return method(Cache, "rewind", around)


# ------------------------------------------------------------------ the draft's part of a session
@mutant("rewind", "Rejected tokens stay in the draft's windows.",
        "Rejected drafts left in part of the state: here the text stays right, guesses decay.",
        BEHIND + " a step in which something was rejected")
def rewind_forgets_draft_windows() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def _take_back(self, lengths):
            rings, self.draft_windows = self.draft_windows, []
            try:
                original(self, lengths)
            finally:
                self.draft_windows = rings
        return _take_back
    return method(Cache, "_take_back", around)


@mutant("rewind", "The first rejected token stays.",
        "Off by one: a pass over n drafts reads n + 1 tokens, the anchor first.",
        "The length of a session after a step, and all that follows")
def rewind_keeps_first_rejected() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def rewind(self, lengths):
            self.settle()
            original(self, torch.minimum(lengths + 1, self.lengths))
        return rewind
    return method(Cache, "rewind", around)


@mutant("replay", "What is read again does not count for the draft's windows.",
        "The window of the draft empty after a restore: acceptance is low for about W tokens.",
        BEHIND + " a crop or a hit, and how many features the rings say exist")
def replay_leaves_draft_empty() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def keep_global_only(self, lengths, enter, look_back):
            original(self, lengths, enter, look_back)
            for ring in self.draft_windows:
                ring.first = torch.tensor(lengths, device=self.device)
        return keep_global_only
    return method(Cache, "keep_global_only", around)


@mutant("prefix hit", "A full hit brings back the layers' windows, but not the draft's.",
        "A saved state whose list of parts was made before there was a draft.",
        BEHIND + " a full hit, and how many features the rings say exist")
def hit_without_draft_windows() -> list[Patch]:
    from labkit.cache.blocks import fill

    def bare(cache, ids, blocks, state):
        empty = [(ring.rows, torch.full_like(ring.first, len(ids))) for ring in cache.draft_windows]
        fill(cache, ids, blocks, state)
        for ring, (rows, first) in zip(cache.draft_windows, empty, strict=True):
            ring.rows, ring.first = rows, first
    return everywhere(fill, bare)
