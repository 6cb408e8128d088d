"""Wrong variants of what is kept between passes (caches, look-back), of text and of loading."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch

from labkit.mutants.record import Patch, everywhere, method, mutant


@mutant("compressor", "An unfinished group keeps its values for the next pass, but not its gates.",
        "A chunk that ends inside a group: half of its state was forgotten.",
        "layers.2.attn.compressed_kv after chunks of 7 and 13 tokens; one pass shows nothing")
def gates_left_behind() -> list[Patch]:
    from labkit.cache.tail import Tail

    def around(original):
        def groups(self, new, start, count, keep=False):
            out = original(self, new, start, count, keep)
            values, gates = self._next.chunk(2, dim=-1)
            self._next = torch.cat([values, torch.zeros_like(gates)], dim=-1)
            return out
        return groups
    return method(Tail, "groups", around)


@mutant("compressor", "Groups are counted from the padded length, not from a row's live tokens.",
        "Batches of unequal rows whose short rows gained entries made of padding.",
        "A padded batch that goes on: the short rows' compressed entries are shifted")
def padding_makes_groups() -> list[Patch]:
    return groups_counted(lambda run, r: (run.start + run.length) // r - run.start // r)


def groups_counted(count: Callable) -> list[Patch]:
    """A compressor that says count(run, ratio) groups are complete, and a store that keeps them."""
    from labkit.cache.store import GlobalStore
    from labkit.model.compressor import Compressor

    def commit(self, lengths, ratio):  # the store would drop what a row's length does not allow
        self.counts = list(self._filled)
        self._forget_joined()

    def around(original):
        def forward(self, x, run):
            latent, _ = original(self, x, run)
            return latent, count(run, self.ratio).clamp(max=latent.shape[1])
        return forward
    return [*method(Compressor, "forward", around), Patch(GlobalStore, "commit", commit)]


@mutant("window", "After a pass the ring's rows are one slot too far.",
        "Ring buffers whose writer and reader disagree about position modulo W.",
        "The first token decoded after a prompt: its window is one token off")
def ring_off_by_one() -> list[Patch]:
    from labkit.cache.window import WindowRing

    def around(original):
        def take_in(self, *args):
            out = original(self, *args)
            self._next = self._next.roll(1, dims=1)
            return out
        return take_in
    return method(WindowRing, "take_in", around)


@mutant("indexer", "One shared slot holds the published index keys, renewed only by full groups.",
        "The released reference: on a half-filled pair a decode step scores a stale layer's keys.",
        "Decode token by token: every second token of the ratio-2 layers selects differently")
def stale_index_keys() -> list[Patch]:
    from labkit.model.attention import Attention

    def around(original):
        def publish(self, x, run):
            run.cache.stale_index_keys = True  # the option, switched on for everybody
            original(self, x, run)
        return publish
    return method(Attention, "publish", around)


@mutant("snapshot", "A forked sequence writes into the last page that both still read.",
        "A restore that reported success although the state had been written over.",
        "Fork, decode in turns in both, compare with never having forked")
def snapshot_shares_entries() -> list[Patch]:
    from labkit.cache.store import GlobalStore

    def around(original):
        def fork(self):
            twin = original(self)
            self._shared = [False] * len(self.counts)
            twin._shared = [False] * len(self.counts)
            return twin
        return fork
    return method(GlobalStore, "fork", around)


@mutant("Engram", "The look-back is forgotten at the end of a pass.",
        "Hashes that start anew in every chunk or decode step.",
        "engram_hash_ids of the first tokens of a second chunk")
def lookback_forgotten() -> list[Patch]:
    from labkit.cache.cache import Cache

    def around(original):
        def begin(self):
            original(self)
            self.look_back.rows = torch.full_like(self.look_back.rows, -1)
        return begin
    return method(Cache, "begin", around)


@mutant("Engram", "A blocked slot holds the pad id itself instead of the pad id's class.",
        "In the real tokenizer id and class happen to be equal, so nobody noticed.",
        "engram_hash_ids of the first N-1 tokens with a vocabulary whose classes are renumbered")
def pad_id_not_class() -> list[Patch]:
    from labkit.text import engram_hash

    def around(config, classes, ids, blocked=None, history=None):
        # A twin of the pad id at the end of the table carries the wrong value for blocked slots.
        with_twin = torch.cat([classes, classes.new_tensor([config.engram_pad_id])])
        twin = copy.copy(config)
        object.__setattr__(twin, "engram_pad_id", len(classes))
        return original(twin, with_twin, ids, blocked, history)

    original = engram_hash.addresses
    return everywhere(original, around)


@mutant("Engram", "The hash multipliers pass through a 64-bit float.",
        "JSON and JavaScript numbers round what exceeds 2^53: multipliers of few classes do.",
        "engram_hash_ids against exact integers")
def float_multipliers() -> list[Patch]:
    from labkit.text import engram_hash

    def around(original):
        # The constants' cache keeps the right ones: go round it.
        return lambda *args: tuple(
            value if i else value.to(torch.float64).to(torch.int64)
            for i, value in enumerate(original(*args)))
    return [Patch(engram_hash, "_constants", around(engram_hash._constants))]


@mutant("text", "Class texts keep their case.",
        "A class map without lower-casing: 'The' and 'the' look up different rows.",
        "The number of classes, then engram_hash_ids")
def case_kept() -> list[Patch]:
    from labkit.text import engram_map

    def normalise(text, rules=engram_map.RULES):
        # Upper case survives the original when it is hidden behind private characters.
        hidden = "".join(f"{c.lower()}\ue000" if c.lower() != c else c for c in text)
        return original(hidden, rules)
    original = engram_map.normalise
    return everywhere(original, normalise)


@mutant("text", "A lone space is stripped to nothing.",
        "99,250 classes for the released vocabulary instead of 99,092.",
        "The classes of tokens that are nothing but white space")
def lone_space_lost() -> list[Patch]:
    from labkit.text import engram_map

    def normalise(text, rules=engram_map.RULES):
        kept = original(text, rules)
        return "" if kept == " " else kept
    original = engram_map.normalise
    return everywhere(original, normalise)


@mutant("formats", "The even column is taken from the high nibble.",
        "Packed FP4 weights whose two codes a byte were read in the other order.",
        "Two neighbouring columns of an expert's w1 are exchanged")
def high_nibble_first() -> list[Patch]:
    from labkit.numerics.packing import unpack_nibbles

    def swapped(packed):
        return unpack_nibbles(packed).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return everywhere(unpack_nibbles, swapped)


@mutant("formats", "Scale bytes are read as numbers instead of exponents.",
        "UE8M0 120 means 2^-7, not 120.0.",
        "The size of any dequantised weight")
def scale_bytes_as_numbers() -> list[Patch]:
    from labkit.numerics import formats
    return [Patch(formats, "decode_ue8m0", lambda codes: codes.float())]


@mutant("formats", "E2M1 rounds halves away from zero.",
        "A bucket search that sends every tie the same way.",
        "fake_quantize of 2.5 and 5.0 in a block whose largest value is 6")
def ties_away() -> list[Patch]:
    from labkit.numerics import formats

    def away(x):
        return formats_round(x * (1 + 2.0**-20))
    formats_round = formats.round_e2m1
    return everywhere(formats_round, away)


@mutant("formats", "Power-of-two scales are rounded up from exact powers too.",
        "ceil(log2(x)) computed with a logarithm that ends just above an integer.",
        "The scale of a block whose largest value is exactly 6 or 448")
def exact_powers_step_up() -> list[Patch]:
    from labkit.numerics import blocks

    def stepped(amax, largest):
        return original(amax * (1 + 2.0**-22), largest)
    original = blocks.power_of_two_scale
    return everywhere(original, stepped)
