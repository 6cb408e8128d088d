"""Which rows of an Engram table each token reads: primes, multipliers, addresses.

Symbols: B rows of a batch, T tokens, V vocabulary, L Engram layers, N the largest n-gram
(engram_max_ngram_size), E heads (engram_n_heads). A layer has (N-1)*E small tables laid one
after the other, order-major (bigrams first) and then by head; each has a prime number of rows.

The row of order n at token t is
    (class[t]*m0 XOR class[t-1]*m1 XOR ... XOR class[t-n+1]*m{n-1}) mod prime + offset.
A product reaches 63 bits: everything here stays in int64 and never passes through a float.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from labkit.primes import engram_primes, engram_rows

if TYPE_CHECKING:
    from labkit.config import ModelConfig

__all__ = [
    "addresses",
    "engram_multipliers",
    "engram_offsets",
    "engram_primes",
    "engram_rows",
    "next_history",
]


def engram_offsets(config: ModelConfig) -> list[list[int]]:
    """First row of every small table within its layer's table, in the order of the primes."""
    return [[0, *accumulate(primes[:-1])] for primes in engram_primes(config)]


def engram_multipliers(layer: int, classes: int, N: int) -> list[int]:
    """The N odd multipliers of model layer `layer`, as Python ints.

    Drawn so that class * multiplier < 2**63 for every class below `classes`. The products need
    all these bits; the multipliers alone pass 2**53, where a float begins to round, only with
    fewer than 1,024 classes (released: 99,092 classes, multipliers below 2**47).
    """
    half = ((2**63 - 1) // classes) // 2
    drawn = np.random.default_rng(10007 * layer).integers(0, half, N, dtype=np.int64)
    return [int(m) * 2 + 1 for m in drawn]


@lru_cache(maxsize=16)
def _constants(
    layer_ids: tuple[int, ...],
    classes: int,
    primes: tuple[tuple[int, ...], ...],
    N: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multipliers [L,N], primes [L,N-1,E], offsets [L,N-1,E], all int64."""
    multipliers = [engram_multipliers(layer, classes, N) for layer in layer_ids]
    offsets = [[0, *accumulate(layer[:-1])] for layer in primes]

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    shape = (len(layer_ids), N - 1, -1)
    return tensor(multipliers), tensor(primes).view(shape), tensor(offsets).view(shape)


def _extended(
    config: ModelConfig,
    classes: Tensor,
    ids: Tensor,
    blocked: Tensor | None,
    history: Tensor | None,
) -> Tensor:
    """Classes of the look-back and the tokens, -1 where blocked: [B, N-1+T]."""
    if blocked is None:
        tokens = classes[ids]  # [B,T]
    else:
        # What stands at a blocked position is no id of the text, and need not be one at all.
        tokens = classes[ids.masked_fill(blocked, 0)].masked_fill(blocked, -1)
    if history is None:
        history = tokens.new_full((ids.shape[0], config.engram_max_ngram_size - 1), -1)
    return torch.cat([history, tokens], dim=1)


def addresses(
    config: ModelConfig,
    classes: Tensor,
    ids: Tensor,
    blocked: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """Row numbers within each layer's table: int64 [B, T, L, (N-1)*E].

    classes: int64 [V], the class map. ids: int64 [B,T]. blocked: bool [B,T], true at image
    and padding positions. history: int64 [B,N-1], the classes just before ids[:,0], oldest
    first, -1 where there is none (`next_history`); None means that the text starts here.

    A look-back that meets the start or a blocked position is blocked from there on, and a
    blocked slot is filled with the class of engram_pad_id. At a blocked position every slot
    is. Blocking follows from positions and masks alone: the padding id written in a text is
    an ordinary token.
    """
    N, heads = config.engram_max_ngram_size, config.engram_n_heads
    layer_ids = tuple(config.engram_layer_ids)
    batch, length = ids.shape
    if not layer_ids:
        return ids.new_empty((batch, length, 0, (N - 1) * heads))
    target = ids.device
    if target.type == "mps":  # exact 64-bit products are not to be had on every such device
        ids, classes = ids.cpu(), classes.cpu()
        blocked = None if blocked is None else blocked.cpu()
        history = None if history is None else history.cpu()
    multipliers, primes, offsets = _constants(
        layer_ids,
        config.engram_compressed_vocab_size,
        tuple(map(tuple, engram_primes(config))),
        N,
        ids.device,
    )
    extended = _extended(config, classes, ids, blocked, history)  # [B,N-1+T]
    pad_class = classes[config.engram_pad_id]

    open_ = torch.ones_like(ids, dtype=torch.bool)  # [B,T]: nothing blocked so far back
    mixed = torch.zeros((), dtype=torch.int64, device=ids.device)
    rows = []
    for back in range(N):
        slot = extended[:, N - 1 - back : N - 1 - back + length]  # [B,T]: class at t-back
        open_ = open_ & (slot >= 0)
        filled = torch.where(open_, slot, pad_class)
        mixed = mixed ^ (filled[..., None] * multipliers[:, back])  # [B,T,L], below 2**63
        if back > 0:  # order back+1 is complete: E heads, same mix, other primes
            order = back - 1
            rows.append(mixed[..., None] % primes[:, order] + offsets[:, order])  # [B,T,L,E]
    stacked = torch.stack(rows, dim=3)  # [B,T,L,N-1,E]
    return stacked.view(batch, length, len(layer_ids), (N - 1) * heads).to(target)


def next_history(
    config: ModelConfig,
    classes: Tensor,
    ids: Tensor,
    lengths: Tensor | None = None,
    blocked: Tensor | None = None,
    history: Tensor | None = None,
) -> Tensor:
    """What `addresses` needs to continue after these tokens: int64 [B,N-1], oldest first.

    lengths: int64 [B], live tokens of each right-padded row (None: all T). The history of a
    row of length 0 stays as it was, so a batch may advance unevenly.
    """
    extended = _extended(config, classes, ids, blocked, history)  # [B,N-1+T]
    kept = torch.arange(config.engram_max_ngram_size - 1, device=ids.device)  # [N-1]
    if lengths is None:
        return extended[:, kept + ids.shape[1]]
    return extended.gather(1, lengths.to(ids.device)[:, None] + kept)
