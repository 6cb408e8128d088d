"""Properties of everything that is not read twice: crops, replays, hits, rewinds, cut prefills."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.session import Session
from labkit.model import indexer
from labkit.model.transformer import Transformer
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.models import random_ids, random_model, small_classes, small_config
from labkit.mutants.oracle import Oracle
from labkit.mutants.oracle_numbers import nearest_in_blocks
from labkit.mutants.rules import FP32, FP64, close, equal, same_run
from labkit.mutants.schedules import STORES, in_chunks, one_pass
from labkit.numerics.rows import RowCodec

prop = collect(PROPERTIES)
PAGE = 4                    # tokens: many pages in a short text
LENGTH, MORE = 27, 6        # tokens that stay, and that follow


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def later(taps: Mapping[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
    """What a pass from `start` on should record, from the taps of the whole text."""
    return {name: value if name.endswith(STORES) else value[:, start:]
            for name, value in taps.items() if not name.endswith("attn.window")}


def prefix_hit(model: Transformer, first: torch.Tensor, second: torch.Tensor,
               replay: str) -> tuple[Session, torch.Tensor, int, str]:
    """`second` [T] after a prefix cache has kept `first`, whose windows have expired.

    Its session, the logits of the tokens that it read, tokens found, kind of hit.
    """
    clock = Clock()
    with PrefixCache(model, page_tokens=PAGE, replay=replay, host_memory=1 << 24,
                     window_lifetime=60.0, clock=clock, wall=clock) as cache:
        session = Session(model, page_tokens=cache.page_tokens)
        session.prefill(first)
        cache.keep(session)
        clock.now = 100.0
        session, logits, hit = cache.prefill(second, last_only=False)
        return session, logits, hit.known, hit.kind


@contextmanager
def small_chunks(elements: int = 64, block: int = 5) -> Iterator[None]:
    """The indexer's limits so low that a short text meets them."""
    before = indexer.CHUNK_ELEMENTS, indexer.KEY_BLOCK
    indexer.CHUNK_ELEMENTS, indexer.KEY_BLOCK = elements, block
    try:
        yield
    finally:
        indexer.CHUNK_ELEMENTS, indexer.KEY_BLOCK = before


# ------------------------------------------------------------------ what the checks start from
@functools.cache
def _model(rounding: bool = False) -> Transformer:
    return random_model(small_config(), seed=1, cache_rounding=rounding)


@functools.cache
def _texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts [1,T] that are alike in their first LENGTH tokens, then go on otherwise."""
    config = small_config()
    first = random_ids(config, LENGTH + MORE, seed=21)
    second = first.clone()
    second[:, LENGTH:] = random_ids(config, MORE, seed=22)
    second[:, LENGTH] = (first[:, LENGTH] + 1) % config.vocab_size
    return first, second


@functools.cache
def _oracle() -> Oracle:
    model = _model()
    return Oracle(model.config, dict(model.named_parameters()),
                  small_classes(model.config, 1).tolist())


@functools.cache
def _whole() -> dict[str, torch.Tensor]:
    """The oracle's taps [1,T,...] of the second text."""
    return _batched(_oracle().run(_texts()[1][0].tolist()))


@functools.cache
def replayed(length: int) -> dict[str, torch.Tensor]:
    """The same where the first `length` tokens had been read, then their last window again."""
    start = length - _model().config.sliding_window
    layers = range(_model().config.num_hidden_layers)
    kept = {name: value[0] for name, value in _whole().items() if name.endswith(STORES)}
    return _batched(_oracle().run(_texts()[1][0].tolist(), dict.fromkeys(layers, start),
                                  (length, kept)))


@functools.cache
def cut_prefill(cut: str) -> dict[str, torch.Tensor]:
    """The same where the decoder saw the last window of the first LENGTH tokens only."""
    c = _model().config
    layers = range(c.encoder_layers + (cut == "after"), c.num_hidden_layers)
    return _batched(_oracle().run(_texts()[1][0].tolist(),
                                  dict.fromkeys(layers, LENGTH - c.sliding_window)))


def warm() -> None:
    """Compute what is kept between checks, before any fault is switched on."""
    for rounding in (False, True):
        _model(rounding)
    for length in (LENGTH, LENGTH - 1):
        replayed(length)
    for cut in ("inside", "after"):
        cut_prefill(cut)


def _batched(taps: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in taps.items()}


def _continued(session: Session, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Taps of the pass that reads the rest of ids [1,T]."""
    return one_pass(session.model, ids[:, session.length:], cache=session.cache)


# ------------------------------------------------------------------ reading again
@prop("crop", "a text cropped with exact replay and continued otherwise equals one pass")
def crop() -> str | None:
    first, second = _texts()
    for length in (LENGTH, LENGTH - 1, 3, 0):
        session = Session(_model(), page_tokens=PAGE)
        session.prefill(first)
        session.crop(length, "exact")
        if session.ids != second[0, :length].tolist():
            return f"cropped to {length} tokens: other tokens are left"
        wrong = same_run(later(_whole(), length), _continued(session, second), FP64)
        if wrong:
            return f"cropped to {length} tokens: {wrong}"
    return None


@prop("replay", "bounded replay equals the oracle with windows that begin where it starts")
def replay() -> str | None:
    first, second = _texts()
    for length in (LENGTH, LENGTH - 1):
        session = Session(_model(), page_tokens=PAGE)
        session.prefill(first)
        session.crop(length)
        wrong = same_run(later(replayed(length), length), _continued(session, second), FP64)
        if wrong:
            return f"cropped to {length} tokens: {wrong}"
    return None


@prop("hit", "a prefix found without its windows equals the oracle's replay, or one pass")
def hit() -> str | None:
    first, second = _texts()
    for kind, expected in (("exact", _whole()), ("bounded", replayed(LENGTH))):
        _, logits, known, found = prefix_hit(_model(), first[0], second[0], kind)
        if (known, found) != (LENGTH, "global-only"):
            return f"{kind} replay: {known} tokens known, {found} hit"
        wrong = close(f"{kind} replay: logits", expected["logits"][:, LENGTH:],
                      logits[:, -MORE:], FP64)
        if wrong:
            return wrong
    return None


# ------------------------------------------------------------------ taking back
def rewound(model: Transformer, ids: torch.Tensor, start: int,
            other: torch.Tensor) -> torch.Tensor:
    """Logits [6,n,V] of ids [1,T] by rows that accept 0..5 of five guessed tokens, twice.

    Row b reads a pass of `start` tokens, then twice a pass of five of which b are right (the rest
    are of `other`, [1,T]) and which it takes back to b, then as many as all rows still have.
    """
    B, accepted = 6, torch.arange(6)
    cache = model.new_cache(B, page_tokens=PAGE)
    n = ids.shape[1] - start - 10
    with torch.no_grad():
        model(ids[:, :start].expand(B, -1), cache=cache)
        for _ in range(2):
            at = cache.lengths[:, None] + torch.arange(5)                   # [B,5]
            right = torch.arange(5) < accepted[:, None]
            guess = torch.where(right, ids[0][at], other[0][at])
            model(guess, cache=cache, keep=True)
            cache.rewind(at[:, 0] + accepted)
        at = cache.lengths[:, None] + torch.arange(n)
        return model(ids[0][at], cache=cache).logits


def rewound_expected(logits: torch.Tensor, start: int) -> torch.Tensor:
    """The same rows [6,n,V] from logits [T,V] of one pass."""
    n = logits.shape[0] - start - 10
    return torch.stack([logits[start + 2 * b : start + 2 * b + n] for b in range(6)])


@prop("rewind", "after 0 to 5 accepted tokens of five, twice, a text equals one pass")
def rewind() -> str | None:
    ids, other = _texts()[1], random_ids(_model().config, LENGTH + MORE, seed=23)
    for start in (9, 10):
        wrong = close(f"from {start} tokens: logits",
                      rewound_expected(_whole()["logits"][0], start),
                      rewound(_model(), ids, start, other), FP64)
        if wrong:
            return wrong
    return None


# ------------------------------------------------------------------ prefills that are cut
@prop("ced", "a causal encoder-decoder prefill, whole or in chunks, equals the oracle")
def ced() -> str | None:
    text, W = _texts()[1], _model().config.sliding_window
    for cut in ("inside", "after"):
        # 23: what is left is just the decoder's tail; 5 leaves a piece shorter than it.
        for chunk in (None, LENGTH - W, 5):
            session = Session(_model(), page_tokens=PAGE)
            logits = session.prefill(text[0, :LENGTH], mode="ced", cut=cut, chunk=chunk)
            expected, where = cut_prefill(cut), f"cut {cut}, chunk {chunk}: "
            wrong = (close(f"{where}last logits", expected["logits"][:, LENGTH - 1 : LENGTH],
                           logits[:, -1:], FP64)
                     or same_run(later(expected, LENGTH), _continued(session, text), FP64))
            if wrong:
                return wrong if wrong.startswith(where) else where + wrong
    return None


@prop("exact_halo", "with the exact halo a cut prefill ends like a full one")
def exact_halo() -> str | None:
    text = _texts()[1]
    for cut in ("inside", "after"):
        for chunk in (None, 6):
            session = Session(_model(), page_tokens=PAGE)
            logits = session.prefill(text[0, :LENGTH], mode="ced", halo="exact", cut=cut,
                                     chunk=chunk)
            where = f"cut {cut}, chunk {chunk}: "
            wrong = (close(f"{where}last logits", _whole()["logits"][:, LENGTH - 1 : LENGTH],
                           logits[:, -1:], FP64)
                     or same_run(later(_whole(), LENGTH), _continued(session, text), FP64))
            if wrong:
                return wrong if wrong.startswith(where) else where + wrong
    return None


@prop("query_chunks", "an indexer that scores a few queries and keys at a time selects the same")
def query_chunks() -> str | None:
    with small_chunks():
        return same_run(_whole(), one_pass(_model(), _texts()[1]), FP64)


# ------------------------------------------------------------------ how rows lie in memory
@prop("packed", "packed and bf16 caches give the bits of one that holds rounded values")
def packed() -> str | None:
    model, text = _model(rounding=True), _texts()[1]
    plain = in_chunks(model, text, [14, 1, 1, 17], model.new_cache(1, "plain"))
    for form in ("packed", "bf16"):
        cache = model.new_cache(1, form, page_tokens=PAGE)
        wrong = same_run(plain, in_chunks(model, text, [14, 1, 1, 17], cache), 0.0)
        if wrong:
            return f"{form}: {wrong}"
    return None


@prop("rows", "a row read back holds what a search among all codes finds, in every form")
def rows() -> str | None:
    made = torch.Generator().manual_seed(24)
    x = torch.randn(5, 64, generator=made) * torch.logspace(-3, 2, 5)[:, None]
    for recipe in ("nvfp4", "mxfp4", "fp8"):
        right = torch.stack([nearest_in_blocks(v, recipe) for v in x])
        for form in ("packed", "bf16", "plain", "fp8"):
            expected = right
            if form == "fp8" and recipe != "fp8":       # rounded once more
                expected = torch.stack([nearest_in_blocks(v, "fp8") for v in right])
            codec = RowCodec(64, recipe, form, torch.float32)
            found = codec.decode(codec.encode(x))
            wrong = (equal if form != "fp8" else functools.partial(close, of_span=FP32))(
                f"{recipe} as {form}", expected.float(), found)
            if wrong:
                return wrong
    return None
