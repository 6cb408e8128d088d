"""Where a prefill may cut and where a replay must start; windows are the reason for both.

A layer reads the W-1 positions before a token through its window, and what stands there depends
on the layer below in the same way: exact state after n tokens reaches back W-1 more positions
with every layer. Global entries do not have to be computed again, they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from labkit.cache import Cache
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.transformer import Transformer, checked_cut
from labkit.text.engram_hash import next_history

REPLAYS = ("bounded", "exact")
HALOS = ("window", "exact")


def reach(config: ModelConfig, layers: int) -> int:
    """Tokens that a stack of `layers` layers must read so that its last W are exact.

    The first layer's input is right everywhere, the second's from the (W-1)th token on, and so
    on. Released sizes (W = 128): the 20 decoder layers 2,541; without the first of them, for a
    cut after it, 2,414; all 40 layers 5,081. The report's bounds are W a layer: 2,560 and 5,120.
    """
    W = config.sliding_window
    return W + (layers - 1) * (W - 1) if layers else W


def decoder_tail(config: ModelConfig, halo: str = "window", cut: str = "inside") -> int:
    """How many of a prompt's last tokens the decoder reads in a CED prefill."""
    checked_cut(cut)
    if halo not in HALOS:
        raise InputError(f"halo is {halo!r}: choose 'window' or 'exact'")
    if halo == "window":
        return config.sliding_window
    layers = config.num_hidden_layers - config.encoder_layers - (cut == "after")
    return reach(config, max(0, layers))


def replay_start(config: ModelConfig, length: int, replay: str = "bounded") -> int:
    """Where to start reading again, to have the windows after `length` tokens.

    bounded  W tokens back: the first of them see less than they did (the report's SWA bounded
             replay); exact: so far back that the windows come out as they were
    """
    if replay not in REPLAYS:
        raise InputError(f"replay is {replay!r}: choose 'bounded' or 'exact'")
    back = config.sliding_window if replay == "bounded" else reach(config, config.num_hidden_layers)
    return max(0, length - back)


def drop_windows(model: Transformer, cache: Cache, ids: list[int], start: int) -> None:
    """Leave of a one-sequence cache the global entries of `ids`; it goes on at token `start`.

    The next pass reads ids[start:] (and more) again. Entries that are there stay untouched, also
    when `start` lies inside a group.
    """
    c = model.config
    before = torch.tensor([ids[max(0, start - c.engram_max_ngram_size + 1) : start]],
                          dtype=torch.int64, device=model.device)
    look_back = next_history(c, model.engram_classes, before)
    cache.keep_global_only([len(ids)], [start], look_back)


def passes(ids: torch.Tensor, tail: int | None,
           chunk: int | None) -> Iterator[tuple[torch.Tensor, int | None]]:
    """ids [1,T] in passes of at most `chunk` tokens, each with the tail of its decoder.

    The last pass of a CED prefill holds the whole tail, so it may be longer than a chunk.
    """
    if chunk is None:
        yield ids, tail
        return
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise InputError(f"chunk is {chunk!r}: it must be a whole number, at least 1")
    T, at = ids.shape[1], 0
    while at < T:
        end = min(T, at + chunk)
        if tail is None:
            yield ids[:, at:end], None
        elif T - end >= tail:
            yield ids[:, at:end], 0
        else:
            end = T
            yield ids[:, at:], tail
        at = end
