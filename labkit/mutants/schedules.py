"""Run a text in pieces and join what the pieces gave, to compare it with one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.cache import Cache
from labkit.config import ModelConfig
from labkit.model.transformer import Transformer
from labkit.trace import Taps

STORES = ("compressed_kv", "index_keys")


@torch.no_grad()
def one_pass(model: Transformer, ids: torch.Tensor, lengths: torch.Tensor | None = None,
             cache: Cache | None = None) -> dict[str, torch.Tensor]:
    """All taps of model(ids), logits among them."""
    taps = Taps()
    model(ids, lengths, cache=cache, taps=taps)
    return dict(taps)


def in_chunks(model: Transformer, ids: torch.Tensor, sizes: Sequence[int],
              cache: Cache | None = None) -> dict[str, torch.Tensor]:
    """Passes of `sizes` tokens over one cache; every tap joined along T.

    Caches grow: of compressed entries and index keys the last state is the whole. A selection
    needs no joining beyond T; candidate masks are as wide as the cache was and padded to the end.
    """
    assert sum(sizes) == ids.shape[1], "the chunks must add up to the text"
    cache = cache if cache is not None else model.new_cache(ids.shape[0])
    parts, at = [], 0
    for size in sizes:
        parts.append(one_pass(model, ids[:, at : at + size], cache=cache))
        at += size
    return join(parts)


def join(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    out = {}
    for name in parts[-1]:
        values = [part[name] for part in parts]
        if name.endswith((*STORES, "attn.window")):
            out[name] = values[-1]
        elif name.endswith("candidates"):
            width = values[-1].shape[-1]
            out[name] = torch.cat(
                [torch.nn.functional.pad(v, (0, width - v.shape[-1])) for v in values], dim=1)
        else:
            out[name] = torch.cat(values, dim=1)
    # A window is W old columns and the pass's own: it depends on the schedule by nature.
    return {name: value for name, value in out.items() if not name.endswith("attn.window")}


def row(taps: dict[str, torch.Tensor], b: int, length: int, config: ModelConfig
        ) -> dict[str, torch.Tensor]:
    """The live part of row b of a padded pass over a fresh cache, [1, ...]."""
    return _live(taps, b, length, length, config)


def in_ragged_chunks(model: Transformer, ids: torch.Tensor, counts: Sequence[Sequence[int]],
                     cache: Cache | None = None) -> list[dict[str, torch.Tensor]]:
    """Row b takes in counts[p][b] tokens in pass p (at least 1 each): one joined run per row.

    ids [B,T] are those after what the cache holds already.
    """
    B = ids.shape[0]
    cache = cache if cache is not None else model.new_cache(B)
    past, at = cache.lengths.tolist(), [0] * B
    rows: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(B)]
    for count in counts:
        width = max(count)
        part = torch.zeros(B, width, dtype=ids.dtype)  # padding is a length: any id will do
        for b, n in enumerate(count):
            part[b, :n] = ids[b, at[b] : at[b] + n]
            at[b] += n
        taps = one_pass(model, part, torch.tensor(list(count)), cache=cache)
        for b, n in enumerate(count):
            rows[b].append(_live(taps, b, n, past[b] + at[b], model.config))
    return [join(parts) for parts in rows]


def _live(taps: dict[str, torch.Tensor], b: int, new: int, total: int, config: ModelConfig
          ) -> dict[str, torch.Tensor]:
    """Row b of one pass: `new` tokens, `total` since the start."""
    out = {}
    for name, value in taps.items():
        if name.endswith("attn.window"):
            continue
        if name.endswith((*STORES, "candidates")):
            groups = total // config.compress_ratios[int(name.split(".")[1])]
            own = value[b : b + 1, :new] if name.endswith("candidates") else value[b : b + 1]
            out[name] = own[..., :groups] if name.endswith("candidates") else own[:, :groups]
        else:
            out[name] = value[b : b + 1, :new]
    return out
