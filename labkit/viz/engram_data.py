"""What Engram looked up for every token of a text, and what it was worth, from runs.

Symbols: T tokens, L Engram layers, N the longest n-gram, E heads, C streams. Rows and gates are
taps of the run; the arithmetic in between is done again here, in Python's own integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.text.engram_hash import addresses, engram_multipliers, engram_offsets, engram_primes
from labkit.text.tokenizer import Tokenizer
from labkit.viz.tokens import pieces

if TYPE_CHECKING:
    from labkit.lab import Lab


@dataclass(frozen=True)
class Slot:
    """One place of an n-gram: its token's text, its class, and whether padding stands there."""

    text: str
    number: int
    blocked: bool


@dataclass(frozen=True)
class Lookup:
    """One n-gram at one token in one layer.

    slots   oldest first; multipliers, products: in the order of the slots
    mix     XOR of the products, below 2^63
    primes, offsets, rows   one of each head: row = mix mod prime + offset
    """

    order: int
    slots: tuple[Slot, ...]
    multipliers: tuple[int, ...]
    products: tuple[int, ...]
    mix: int
    primes: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: tuple[int, ...]


class EngramRecording:
    """A text with its classes, its rows and, where a model ran, its gates.

    ids [T], texts: one string a token, classes: of the whole vocabulary, rows [T,L,N-1,E],
    gates: layer -> [T,C]; none where only addresses were computed.
    """

    def __init__(self, config: ModelConfig, ids: Sequence[int], texts: Sequence[str],
                 classes: torch.Tensor, rows: torch.Tensor,
                 gates: dict[int, torch.Tensor]) -> None:
        shape = (len(ids), len(config.engram_layer_ids), config.engram_max_ngram_size - 1, -1)
        self.config, self.ids, self.texts, self.gates = config, list(ids), list(texts), gates
        self.rows = rows.cpu().view(shape)
        self.classes = classes.cpu()
        self.numbers = [int(n) for n in self.classes[torch.tensor(self.ids)]]
        self.pad = Slot("pad", int(self.classes[config.engram_pad_id]), True)

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, layer: int) -> int:
        """Which of the Engram layers that is; InputError where it is none."""
        if layer not in self.config.engram_layer_ids:
            raise InputError(f"layer is {layer}: Engram stands in layers "
                             f"{', '.join(map(str, self.config.engram_layer_ids))}")
        return self.config.engram_layer_ids.index(layer)

    def slot(self, position: int) -> Slot:
        """A token, or padding before the start."""
        if position < 0:
            return self.pad
        return Slot(self.texts[position], self.numbers[position], False)

    def lookups(self, layer: int, token: int) -> list[Lookup]:
        """What position `token` looks up in `layer`, one order after the other."""
        if not 0 <= token < len(self):
            raise InputError(f"token is {token}: this text has 0 to {len(self) - 1}")
        c, number = self.config, self.at(layer)
        N, E = c.engram_max_ngram_size, c.engram_n_heads
        multipliers = engram_multipliers(layer, c.engram_compressed_vocab_size, N)
        primes, offsets = engram_primes(c)[number], engram_offsets(c)[number]
        found = []
        for order in range(2, N + 1):
            slots = [self.slot(token - back) for back in range(order)]       # newest first
            products = [s.number * m for s, m in zip(slots, multipliers, strict=False)]
            mix = 0
            for product in products:
                mix ^= product
            heads = slice((order - 2) * E, (order - 1) * E)
            found.append(Lookup(
                order, tuple(slots[::-1]), tuple(multipliers[:order][::-1]),
                tuple(products[::-1]), mix, tuple(primes[heads]), tuple(offsets[heads]),
                tuple(self.rows[token, number, order - 2].tolist())))
        return found


def record_engram(lab: Lab, text: str | Sequence[int]) -> EngramRecording:
    """Run the model over a text (or ids) once and keep its Engram rows and gates."""
    ids = lab.encode(text)
    taps = lab.trace(ids, patterns=["engram_hash_ids", "*.engram.gate"])
    gates = {layer: taps[f"layers.{layer}.engram.gate"][0].float().cpu()
             for layer in lab.config.engram_layer_ids}
    return EngramRecording(lab.config, ids, pieces(lab.tokenizer, ids), lab.model.engram_classes,
                           taps["engram_hash_ids"][0], gates)


def engram_addresses(config: ModelConfig, tokenizer: Tokenizer, classes: torch.Tensor,
                     text: str) -> EngramRecording:
    """The same without a model: addresses follow from the text, the vocabulary and the config."""
    ids = tokenizer.encode(text, bos=True)
    rows = addresses(config, classes, torch.tensor([ids]))[0]
    return EngramRecording(config, ids, pieces(tokenizer, ids), classes, rows, {})


def class_members(tokenizer: Tokenizer, classes: torch.Tensor, text: str) -> list[str]:
    """All vocabulary entries of the class of a text that is one token, in the order of ids.

    InputError for a text of several tokens.
    """
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise InputError(f"{text!r} is {len(ids)} tokens here: give a text of one")
    same = (classes[: tokenizer.vocab_size] == classes[ids[0]]).nonzero()[:, 0].tolist()
    return pieces(tokenizer, same)


@dataclass(frozen=True)
class MutedCosts:
    """What every token of a text costs, in nats, with Engram and without.

    texts: all tokens, the first (BOS) costs nothing; nats, muted: float32 [T-1], of the others.
    """

    texts: list[str]
    nats: torch.Tensor
    muted: torch.Tensor
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return float(self.nats.sum()) / math.log(2) / self.bytes

    @property
    def bits_per_byte_muted(self) -> float:
        return float(self.muted.sum()) / math.log(2) / self.bytes

    @property
    def more(self) -> torch.Tensor:
        """Nats that muting adds to each token, [T-1]; negative where the token gets cheaper."""
        return self.muted - self.nats


def muted_costs(lab: Lab, text: str | Sequence[int]) -> MutedCosts:
    """Two passes over a text (or ids, BOS first): as it is, and with Engram muted."""
    from labkit.train.controls import muted_engram

    ids = lab.encode(text)
    if len(ids) < 2:
        raise InputError("the text has no token to predict: give at least one behind BOS")
    size = len(lab.tokenizer.decode(ids[1:]).encode())

    def nats() -> torch.Tensor:
        logits = lab.trace(ids, patterns=["logits"])["logits"][0, :-1]          # [T-1,V]
        return F.cross_entropy(logits.float().cpu(), torch.tensor(ids[1:]), reduction="none")

    normal = nats()
    with muted_engram(lab.model):
        muted = nats()
    return MutedCosts(pieces(lab.tokenizer, ids), normal, muted, size)
