"""Properties of a session that is drafted for: text and next block as ever, however it got there.

Windows must be right in rows of any length, after rejected drafts, after a crop, a prefix hit or
a cut prefill.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from labkit.cache import Cache
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.sampling import Sampling
from labkit.engine.session import Session
from labkit.engine.speculation import Proposal, Request, propose, verify
from labkit.model.dspark import Slots
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.oracle_draft import Guess
from labkit.mutants.properties_draft import (
    ANCHORS,
    features,
    guesses,
    model,
    oracles,
    slots,
    text,
)
from labkit.mutants.properties_reuse import PAGE, prefix_hit
from labkit.mutants.rules import FP64, close
from labkit.mutants.schedules import STORES

prop = collect(PROPERTIES)
PROMPT = 9                                      # ids before the first speculative step
ACCEPTED = ((0, 2), (1, 4), (2, 1), (3, 5), (4, 0), (5, 3))     # of 5, in two steps, by row
REREAD = 18     # ids known to a session or a prefix cache that reads some of them again


# ------------------------------------------------------------------ what the checks start from
@functools.cache
def _spoken() -> list[int]:
    """Greedy ids of plain decoding, for as long as the speculative steps take."""
    session, ids = Session(model(), page_tokens=PAGE), text()[0, :PROMPT].tolist()
    logits = session.prefill(ids, last_only=True)
    while len(ids) < PROMPT + 18:
        ids.append(int(logits[0, -1].argmax()))
        logits = session.decode(ids[-1])
    return ids


@functools.cache
def _after_steps() -> list[Guess]:
    """The block behind each row of `ACCEPTED` when its two steps are done."""
    (oracle, guesser), ids = oracles(), _spoken()
    rows = guesser.features(oracle.run(ids))
    ends = [PROMPT + 2 + sum(accepted) for accepted in ACCEPTED]
    return [guesser.block(rows, ids[end], end, slots()) for end in ends]


@functools.cache
def _reread(bounded: bool) -> Guess:
    """The block behind REREAD ids: as ever, or after a bounded replay of the last window."""
    (oracle, guesser), ids, first = oracles(), text()[0].tolist(), 0
    rows = features()
    if bounded:
        c = oracle.config
        first = REREAD - c.sliding_window
        kept = {k: v for k, v in oracle.run(ids[:REREAD]).items() if k.endswith(STORES)}
        rows = guesser.features(oracle.run(
            ids[:REREAD], dict.fromkeys(range(c.num_hidden_layers), first), (REREAD, kept)))
    return guesser.block(rows, ids[REREAD], REREAD, slots(), first)


def warm() -> None:
    """Compute what is kept between checks, before any fault is switched on."""
    _after_steps()
    for bounded in (False, True):
        _reread(bounded)


def _same(expected: Sequence[Guess], found: Slots) -> str | None:
    """found: N blocks, expected: one guess each."""
    for name in ("raw_hidden", "normalized_hidden", "base_logits"):
        right = torch.stack([getattr(guess, name) for guess in expected])   # [N,n,..]
        wrong = close(name, right, getattr(found, name), FP64)
        if wrong:
            return wrong
    return None


@torch.no_grad()
def _behind(cache: Cache, anchors: Sequence[int], expected: Sequence[Guess]) -> str | None:
    """The blocks behind the rows of a cache, from its own windows."""
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    found = model().draft(torch.tensor(anchors), cache.lengths, windows, slots())
    return _same(expected, found)


# ------------------------------------------------------------------ behind a session
@prop("proposal", "what is proposed to three requests at once: chances and survival by the oracle")
def proposal() -> str | None:
    target, (_, guesser) = model(), oracles()
    temperatures = [0.5, 2.0, 1.3]
    counts = [ANCHORS[5], ANCHORS[2], ANCHORS[3]]                           # 13, 3, 4
    cache = target.new_cache(3, page_tokens=PAGE)
    with torch.no_grad():
        target(text()[:, : max(counts)].expand(3, -1), torch.tensor(counts), cache=cache)
    requests = [Request(int(text()[0, n]), sampling, torch.Generator().manual_seed(n), wanted)
                for n, sampling, wanted in zip(
                    counts, (Sampling(0.7), Sampling(0), Sampling()), (3, 3, 2), strict=True)]
    found = propose(target, cache, requests, target.config.vocab_size, temperatures)
    for n, request, mine in zip(counts, requests, found, strict=True):
        guess = guesses(False, 2)[ANCHORS.index(n)]
        if len(mine.ids) != request.slots:
            return f"behind {n} tokens: {len(mine.ids)} ids, asked for {request.slots}"
        previous = [request.anchor, *mine.ids[:-1]]
        logits = guess.base_logits[: request.slots] + guesser.markov(previous)
        survives, expected = 1.0, []
        sure = guesser.confidence(guess.raw_hidden[: request.slots], previous).tolist()
        for logit, temperature in zip(sure, temperatures, strict=False):
            survives /= 1 + math.exp(-logit / temperature)
            expected.append(survives)
        heat = request.sampling.temperature
        chances = (torch.softmax(logits / heat, -1) if heat else
                   F.one_hot(logits.argmax(-1), logits.shape[-1]).double())
        wrong = (close("chances", chances, torch.stack(mine.distributions), FP64)
                 or close("survival", torch.tensor(expected).double(),
                          torch.tensor(mine.survival).double(), FP64))
        if wrong:
            return f"behind {n} tokens: {wrong}"
    return None


@prop("speculated", "after 0 to 5 accepted drafts of five, twice: text and next block as ever")
def speculated() -> str | None:
    target, ids, R = model(), _spoken(), len(ACCEPTED)
    cache = target.new_cache(R, page_tokens=PAGE)
    with torch.no_grad():
        target(torch.tensor([ids[:PROMPT]] * R), cache=cache)
    at, V = [PROMPT] * R, target.config.vocab_size
    source = torch.Generator().manual_seed(0)
    for step in range(2):
        requests = [Request(ids[a], Sampling(0), source, 5) for a in at]
        proposals = []
        for a, accepted in zip(at, ACCEPTED, strict=True):
            drafts = [i if k < accepted[step] else (i + 1) % V
                      for k, i in enumerate(ids[a + 1 : a + 6])]
            chances = F.one_hot(torch.tensor(drafts), V).double()
            proposals.append(Proposal(drafts, list(chances), [1.0] * 5))
        emissions = verify(target, cache, requests, proposals, [5] * R, V)
        for row, emission in enumerate(emissions):
            end = at[row] + 1 + ACCEPTED[row][step]
            right = ids[at[row] + 1 : end + 1]
            if emission.ids != right:
                return f"step {step + 1}, row {row}: {emission.ids}, not {right}"
            at[row] = end
        if cache.lengths.tolist() != at:
            return f"step {step + 1}: {cache.lengths.tolist()} tokens stay, not {at}"
    return _behind(cache, [ids[a] for a in at], _after_steps())


@prop("draft_kept", "the block behind a crop, a prefix hit or a cut prefill is the oracle's")
def draft_kept() -> str | None:
    ids, found = text()[0], {}
    for replay in ("bounded", "exact"):
        session = Session(model(), page_tokens=PAGE)
        session.prefill(ids)
        session.crop(REREAD, replay)
        found[f"crop, {replay} replay"] = session, replay == "bounded"
    session, _, known, kind = prefix_hit(model(), ids, ids[:REREAD], "bounded")
    if (known, kind) != (REREAD, "global-only"):
        return f"prefix without windows: {known} tokens known, {kind} hit"
    found["prefix without windows"] = session, True
    with PrefixCache(model(), page_tokens=PAGE, host_memory=1 << 24) as kept:
        first = Session(model(), page_tokens=PAGE)
        first.prefill(ids[: REREAD - 1])
        kept.keep(first)
        session, _, hit = kept.prefill(ids[:REREAD])
    if (hit.known, hit.kind) != (REREAD - 1, "full"):
        return f"prefix with its windows: {hit.known} tokens known, {hit.kind} hit"
    found["prefix with its windows"] = session, False
    for chunk in (None, 5):
        session = Session(model(), page_tokens=PAGE)
        session.prefill(ids[:REREAD], mode="ced", halo="exact", chunk=chunk)
        found[f"cut prefill, chunk {chunk}"] = session, False
    for name, (session, bounded) in found.items():
        wrong = _behind(session.cache, [int(ids[REREAD])], [_reread(bounded)])
        if wrong:
            return f"{name}: {wrong}"
    return None
