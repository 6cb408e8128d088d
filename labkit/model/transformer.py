"""The whole text model: embed, layers over C streams, head; one code path for every use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from labkit import kernels
from labkit.cache import Cache
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.block import Block
from labkit.model.dspark import BlockRun, DSpark, Slots, Window
from labkit.model.hyper import collapse
from labkit.model.norm import RMSNorm
from labkit.model.run import Run
from labkit.numerics.blocks import FORMATS, Rounding, rounds
from labkit.numerics.precision import wide
from labkit.text.engram_hash import addresses
from labkit.trace import Taps


def checked_cut(cut: str) -> str:
    """`cut` itself; InputError if there is no such place to cut at."""
    if cut not in ("inside", "after"):
        raise InputError(f"cut is {cut!r}: choose 'inside' or 'after' (the last KV source)")
    return cut


@dataclass
class Output:
    logits: torch.Tensor  # [B,T,V] fp32 or wider; void behind a row's length


class Transformer(nn.Module):
    """DeepSeek-V4.1 text backbone; parameter names are the checkpoint's.

    `model(ids)` is a pass over a fresh cache; prefill in chunks, decode and replay are the same
    layers over a cache that already holds something.
    """

    engram_classes: torch.Tensor

    def __init__(self, config: ModelConfig, engram_classes: torch.Tensor | None = None,
                 kernel_set: str = "auto", cache_rounding: Rounding = True,
                 device: torch.device | str | None = None, draft: bool = False) -> None:
        """engram_classes: int64 [V], class of every id (`labkit.text.engram_classes`).

        device: where it will run, if it is built elsewhere; only `kernel_set` "auto" looks at it.
        draft: with the stages of DSpark, `mtp`.
        """
        super().__init__()
        self.config = config
        self.kernels = kernels.get(kernel_set, device or torch.get_default_device())
        self.cache_rounding = cache_rounding  # of all recipes, of none, or of those named
        self.selecting = "index"  # or a control: "all", "random", "none" (`indexer.SELECTING`)
        self.blind = ""           # or a half, "encoder" or "decoder", that sees its windows alone
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, role, f"layers.{role.layer}")
                                    for role in config.roles)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = DSpark(config) if draft and config.num_nextn_predict_layers else None
        if engram_classes is None:
            if config.engram_layer_ids:
                raise InputError("a model with Engram layers needs the class map of its tokenizer: "
                                 "pass engram_classes")
            engram_classes = torch.zeros(config.vocab_size, dtype=torch.int64)
        self.register_buffer("engram_classes", engram_classes, persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def new_cache(self, batch: int = 1, form: str | None = None, page_tokens: int | None = None,
                  stale_index_keys: bool = False, draft: bool | None = None) -> Cache:
        """An empty past. form None: packed, or plain where a cache rounding is off (see `Cache`).

        draft: hold the draft's windows as well; None: if the model has a draft.
        """
        whole = all(rounds(self.cache_rounding, recipe) for recipe in FORMATS)
        form = form or ("packed" if whole else "plain")
        return Cache(self.config, batch, self.dtype, self.device, form, self.cache_rounding,
                     page_tokens, stale_index_keys,
                     self.mtp is not None if draft is None else draft)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor | None = None, *,
                cache: Cache | None = None, taps: Taps | None = None,
                last_only: bool = False, tail: int | None = None, cut: str = "inside",
                keep: bool = False,
                pixel_values: torch.Tensor | None = None,
                image_grid_hws: torch.Tensor | None = None,
                vision_token_types: torch.Tensor | None = None) -> Output:
        """ids int64 [B,T], right-padded; lengths [B]: live tokens a row (default T).

        Padding is a length, never an id: what lies behind a row's length may be any number.
        cache: continue the sequences in it (advanced in place); None: a fresh one.
        last_only: logits of each row's last live token only, [B,1,V].
        tail: None, all layers see all tokens. Else this is a prefill of the causal
            encoder-decoder: layers before the last KV source see all tokens, that layer stores
            the entries of all, and what is left of it and the layers behind it see each row's
            last `tail` tokens only; logits are of those, [B,tail,V]. With T <= tail nothing is
            cut and nothing differs. 0: no token goes further (an earlier part of a prompt).
        cut: where the tail begins: "inside" the last KV source, or "after" it (that layer then
            sees all tokens).
        keep: remember enough for `cache.rewind` to take back some of these tokens.
        InputError for ids, lengths, a context or images that the model cannot take.
        """
        if any(image is not None for image in (pixel_values, image_grid_hws, vision_token_types)):
            raise InputError("this version of labkit does not see images: leave out pixel_values, "
                             "image_grid_hws and vision_token_types")
        ids, count = self._checked(ids, lengths, cache)
        if tail is not None and (keep or tail < 0):
            raise InputError(f"tail is {tail}: it must be 0 or more" if tail < 0 else
                             "keep goes with a pass of all layers: leave out tail")
        checked_cut(cut)
        if cache is None:  # thrown away after this pass: not worth packing, and one page will do
            cache = self.new_cache(ids.shape[0], "plain", math.lcm(
                *(r.ratio for r in self.config.roles if r.kind == "full")) * ids.shape[1],
                draft=False)
        cache.begin()
        run = Run(self.config, cache, self.kernels, cache.lengths, count, ids.shape[1], self.dtype,
                  self.cache_rounding, taps, keep=keep, selecting=self.selecting,
                  blind=self.blind)
        x, last = self._layers(ids, run, tail, cut)                     # [B,T,D]
        if last_only and last.length:
            x = torch.take_along_dim(last.unpack(x), (last.count - 1)[:, None, None], dim=1)
        logits = F.linear(wide(self.norm(x)), wide(self.head.weight))   # [B,T,V]
        if not last_only:
            logits = last.unpack(logits)
        run.tap("logits", logits)
        cache.commit(ids, count, keep)
        return Output(logits)

    def _layers(self, ids: torch.Tensor, run: Run, tail: int | None,
                cut: str) -> tuple[torch.Tensor, Run]:
        """Streams through all layers, then collapsed: [B,T] -> [B,T,D], and the last layer's run.

        After the cut of a CED prefill T is the tail.
        """
        c, cache = self.config, run.cache
        blocked = ~run.live                                             # [B,T]
        rows = None
        if c.engram_layer_ids:
            # What stands behind a row's length, or is blocked, has no class.
            new = self.engram_classes[ids].masked_fill(blocked, -1)     # [B,T]
            both = cache.look_back.extend(new, run.start, run.count, run.keep)
            history = both[:, : c.engram_max_ngram_size - 1]
            rows = addresses(c, self.engram_classes, ids, blocked, history)  # [B,T,L,(N-1)*heads]
            run.tap("engram_hash_ids", rows)
            rows = run.pack(rows)
        ids, blocked = run.pack(ids), run.pack(blocked)                 # from here on live tokens
        h = self.embed(ids)[:, :, None].expand(-1, -1, c.hc_mult, -1)    # [B,T,C,D]
        pre = torch.zeros(*ids.shape, c.hc_mult, dtype=wide(h[:1, :1]).dtype, device=ids.device)
        pre[..., 0] = 1.0                                   # the first site reads stream 0
        cut_layer = len(self.layers)
        if tail is not None and run.length > tail:
            cut_layer = c.encoder_layers
        for layer, module in enumerate(self.layers):
            block, own = cast(Block, module), None
            if rows is not None and layer in c.engram_layer_ids:
                own = rows[:, :, c.engram_layer_ids.index(layer)]
            if layer != cut_layer:
                h, pre = block(h, pre, run, own, blocked)
                continue
            assert tail is not None
            if cut == "after":
                h, pre = block(h, pre, run, own, blocked)
            else:
                h = block.enter(h, run, own, blocked)
                block.publish(h, pre, run)                  # the decoder's global KV, all tokens
            last, take = run.tail(tail)
            if tail == 0:
                for ring in cache.rings[layer + (cut == "after"):]:
                    ring.enter(run.start + run.count)
                return run.unpack(h)[:, :0, 0], last
            run, blocked = last, last.pack(~last.live)
            h, pre = take(h), take(pre)                                 # [B,tail,C,D], [B,tail,C]
            rows = None if rows is None else take(rows)
            if cut == "inside":
                h, pre = block.sites(h, pre, run, published=True)
        if cache.draft_windows:
            assert self.mtp is not None
            self.mtp.take_in(run)
        return collapse(h, pre), run

    def draft(self, anchors: torch.Tensor, positions: torch.Tensor, windows: Sequence[Window],
              slots: int, taps: Taps | None = None) -> Slots:
        """One pass of the draft for N blocks of n slots.

        anchors [N] ids and positions [N]: the newest token of each, which the target has not read
        windows of every stage: rows [N,W,d] of the positions before the anchors, how many exist
        """
        assert self.mtp is not None, "the model has no draft"
        c = self.config
        ids = torch.full((len(anchors), slots), c.dspark_noise_token_id, device=self.device)
        ids[:, 0] = anchors                                             # [N,n]
        run = BlockRun(c, self.new_cache(0, "plain", draft=False), self.kernels, positions,
                       torch.full_like(positions, slots), slots, self.dtype, self.cache_rounding,
                       taps, windows=windows)
        return self.mtp.slots(self.mtp(self.embed(ids), run), self.head.weight)

    def _checked(self, ids: torch.Tensor, lengths: torch.Tensor | None,
                 cache: Cache | None) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.as_tensor(ids, device=self.device)
        if ids.ndim == 1:
            ids = ids[None]
        if ids.ndim != 2 or ids.dtype.is_floating_point or ids.dtype == torch.bool:
            raise InputError(f"ids must be integers of shape [B,T], got {tuple(ids.shape)} "
                             f"{ids.dtype}")
        B, T = ids.shape
        if T == 0 or B == 0:
            raise InputError("the prompt is empty: give at least one token")
        ids = ids.long()
        if lengths is None:
            count = torch.full((B,), T, device=ids.device)
        else:
            count = torch.as_tensor(lengths, device=ids.device)
            if count.is_floating_point() or count.dtype == torch.bool:
                raise InputError(f"lengths must be whole numbers, got {count.tolist()}")
            count = count.long()
            if count.shape != (B,) or int(count.min()) < 1 or int(count.max()) > T:
                raise InputError(f"lengths must be {B} numbers in 1..{T}, got {count.tolist()}")
            # The embedding looks padding up too, so it gets an id that exists.
            padding = torch.arange(T, device=ids.device) >= count[:, None]
            ids = ids.masked_fill(padding, self.config.pad_token_id)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.config.vocab_size:
            bad = low if low < 0 else high
            raise InputError(f"token id {bad} is outside the vocabulary "
                             f"0..{self.config.vocab_size - 1}")
        if cache is not None and cache.batch != B:
            raise InputError(f"the cache holds {cache.batch} sequences, ids hold {B}")
        past = torch.zeros_like(count)
        if cache is not None:
            cache.settle()
            past = cache.lengths
            if cache.draft_windows and self.mtp is None:
                raise InputError("the cache has windows of a draft, which this model lacks: make "
                                 "it with model.new_cache()")
        longest = int((past + count).max())
        if longest > self.config.max_position_embeddings:
            raise InputError(
                f"{longest} tokens do not fit the context of {self.config.max_position_embeddings} "
                "(max_position_embeddings): shorten the prompt or ask for fewer new tokens")
        return ids, count
