"""The draft's golden vectors: on a text that is there, and behind sessions that got to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from labkit.cache import Cache
from labkit.engine.drafting import draft_at
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.session import Session
from labkit.model.transformer import Transformer
from labkit.mutants import golden
from labkit.mutants.checks import VECTORS, collect
from labkit.mutants.properties_reuse import PAGE
from labkit.mutants.rules import rounded, unrounded

vector = collect(VECTORS)
BLOCK = ("raw_hidden", "normalized_hidden", "base_logits")


def _whole(rounding: bool) -> str | None:
    case, model = golden.case("text"), golden.model("text", rounding)
    if rounding:    # as in `text_rounded`: no processor's noise
        model = golden.in_float64(model)
    expected = case.rounded if rounding else case.unrounded
    assert expected is not None
    taps = draft_at(model, case.ids, expected["dspark.anchor_positions"],
                    expected["dspark.previous_token_ids"])
    for name, value in expected.items():
        if name.startswith("dspark."):
            wrong = (rounded if rounding else unrounded)(name, value, taps[name])
            if wrong:
                return f"text: {wrong}"
    return None


@vector("text_draft", "the draft behind four anchors of each text of `text`, every stage")
def text_draft() -> str | None:
    return _whole(rounding=False)


@vector("text_draft_rounded", "the same with the draft's keys in their small number format")
def text_draft_rounded() -> str | None:
    return _whole(rounding=True)


@torch.no_grad()
def _behind(model: Transformer, cache: Cache, row: int = 0) -> str | None:
    """The block behind a cache of `text`, whose length is one of the vector's anchors.

    row: the text that the cache's first row has read.
    """
    case, B = golden.case("text"), cache.batch
    assert case.unrounded is not None
    at = int(cache.lengths[0])
    n = case.config.dspark_block_size
    first = n * case.unrounded["dspark.anchor_positions"][row].tolist().index(at)
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    found = model.draft(case.ids[row : row + B, at], cache.lengths, windows, n)
    for name in BLOCK:
        right = case.unrounded[f"dspark.{name}"][row : row + B, first : first + n]
        wrong = unrounded(name, right, getattr(found, name))
        if wrong:
            return f"behind {at} tokens: {wrong}"
    return None


def _guessed(model: Transformer, cache: Cache, ids: torch.Tensor, end: int,
             accepted: Sequence[int]) -> None:
    """Read ids [B,T] up to `end`, at last by passes of five of which so many are right and stay."""
    model(ids[:, : end - sum(accepted)], cache=cache)
    for right in accepted:
        at = int(cache.lengths[0])
        guess = ids[:, at : at + 5].clone()
        guess[:, right:] = ids[:, : 5 - right].flip(1)
        model(guess, cache=cache, keep=True)
        cache.rewind(cache.lengths - 5 + right)


@vector("text_drafted_on", "the same blocks behind sessions in which most guesses were rejected")
def text_drafted_on() -> str | None:
    case, model = golden.case("text"), golden.model("text")
    for end, accepted in ((3, (2, 0)), (9, (4, 3)), (22, (5, 2, 0)), (40, (0, 3, 1))):
        cache = model.new_cache(2, page_tokens=PAGE)
        with torch.no_grad():
            _guessed(model, cache, case.ids, end, accepted)
        wrong = _behind(model, cache)
        if wrong:
            return wrong
    return None


@vector("text_draft_kept", "the same blocks behind a crop, a prefix hit and a cut prefill")
def text_draft_kept() -> str | None:
    case, model = golden.case("text"), golden.model("text")
    for row, ids in enumerate(case.ids):
        crop, cut = Session(model, page_tokens=PAGE), Session(model, page_tokens=PAGE)
        crop.prefill(torch.cat([ids[:40], ids[:5].flip(0)]))
        crop.crop(40, "exact")
        cut.prefill(ids[:40], mode="ced", halo="exact", chunk=9)
        with PrefixCache(model, page_tokens=PAGE, host_memory=1 << 24) as kept:
            first = Session(model, page_tokens=PAGE)
            first.prefill(ids[:39])
            kept.keep(first)
            hit, _, found = kept.prefill(ids[:40])
        if found.kind != "full":
            return f"39 of 40 tokens kept: {found.kind} hit"
        for name, session in (("crop", crop), ("cut prefill", cut), ("hit", hit)):
            wrong = _behind(model, session.cache, row)
            if wrong:
                return f"{name}: {wrong}"
    return None
