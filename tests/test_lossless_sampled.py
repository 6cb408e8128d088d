"""Sampled speculation on the trained mini: what it draws follows the law of plain sampling.

64 rows of a batch are forks of one text behind which they write on, half of them with one
sampling and half with another. A delayed budget decides how much of each is verified; rows that
have their two tokens leave, others fill the batch again, and the policy goes on as in a running
batch. Outcomes are pairs of tokens over the whole vocabulary; those that are too rare to be
counted alone are pooled: by first token, and pairs of rare first tokens all together.
"""

from collections import Counter

import pytest
import torch

import labkit
from labkit.cache.rows import join, select
from labkit.engine.sampling import Sampling, distribution
from labkit.engine.scheduling import DelayedBudget, StepRate
from labkit.engine.session import Session
from labkit.engine.speculation import Request, propose, verify
from labkit.mutants.chance import chi_square
from labkit.text.prompts import prompts

KINDS = (Sampling(0.7, 0, 0.95), Sampling(1.0))
R, SLOTS, ROUNDS = 64, 3, 64
LENGTH = 150                            # longer than a window: rings wrap
DRAWS = R * ROUNDS // len(KINDS)        # of each kind
LEAST = 10                              # expected count of an outcome that is not pooled
RARE = -1
# A step takes as long as 200 tokens and one for each that it reads, 60 more beyond 112.
RATE = StepRate({1: 1 / 201, 112: 1 / 312, 113: 1 / 373, R * (1 + SLOTS): 1 / 516})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def lab():
    return labkit.load("mini", device="cpu")


def pooled(p, draws):
    """A distribution [V] -> its law: ids that are to be expected often enough, and the rest."""
    law = {i: float(p[i]) for i in (p * draws >= LEAST).nonzero().flatten().tolist()}
    rest = 1 - sum(law.values())
    while law and 1e-12 < rest * draws < LEAST:     # too little for an outcome of its own
        rest += law.pop(min(law, key=law.get))
    return law | ({RARE: rest} if rest > 1e-12 else {})


def plain_law(lab, session, anchor, sampling):
    """(law of the first token, law of pairs) by plain decoding, one token a pass."""
    def next_law(fork, token):
        logits = fork.decode(token)[0, -1, : lab.tokenizer.vocab_size]
        return distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p)

    first = pooled(next_law(session.fork(), anchor), DRAWS)
    pairs = {}
    for x, weight in first.items():
        if x == RARE:
            pairs[RARE, RARE] = weight
            continue
        fork = session.fork()
        fork.decode(anchor)
        second = pooled(next_law(fork, x), weight * DRAWS)
        pairs |= {(x, y): weight * p for y, p in second.items()}
    return first, pairs


def drawn(lab, start, anchor):
    """Pairs that speculation writes, by kind, and what it took: ROUNDS times R forks."""
    vocabulary, policy = lab.tokenizer.vocab_size, DelayedBudget(RATE)
    sources = [torch.Generator().manual_seed(row) for row in range(R)]
    counts, told = {kind: Counter() for kind in KINDS}, Counter()
    for _ in range(ROUNDS):
        cache, going = join([start] * R), list(range(R))
        said = [[anchor] for _ in range(R)]
        while going:
            requests = [Request(said[i][-1], KINDS[i % len(KINDS)], sources[i], SLOTS)
                        for i in going]
            proposals = propose(lab.model, cache, requests, vocabulary)
            lengths = policy.lengths([p.survival for p in proposals])
            emissions = verify(lab.model, cache, requests, proposals, lengths, vocabulary)
            policy.done()
            for i, n, emission in zip(going, lengths, emissions, strict=True):
                said[i] += emission.ids
                told[f"length {n}"] += 1
                told["accepted"] += len(emission.ids) - 1
                told["rejected"] += len(emission.ids) <= n
            policy.done()
            stay = [row for row, i in enumerate(going) if len(said[i]) < 3]
            going = [going[row] for row in stay]
            cache = select(cache, stay) if stay else cache
        for i, (_, x, y, *_) in enumerate(said):
            counts[KINDS[i % len(KINDS)]][x, y] += 1
    return counts, told


def test_two_tokens_follow_the_law_of_plain_sampling(lab):
    assert LENGTH > lab.config.sliding_window + 2
    prompt = prompts("prose", lab.tokenizer, 8, LENGTH)[3]
    session = Session(lab.model, form="packed")
    session.prefill(prompt[:-1])
    counts, told = drawn(lab, session.cache, prompt[-1])
    print(", ".join(f"{name}: {told[name]}" for name in sorted(told)))
    # Ragged lengths, drafts that stayed and drafts that were replaced: all of it was at work.
    assert sum(name.startswith("length") for name in told) > 2
    assert min(told["accepted"], told["rejected"]) > DRAWS / 10
    for sampling in KINDS:
        first, pairs = plain_law(lab, session, prompt[-1], sampling)
        found = Counter()
        for (x, y), n in counts[sampling].items():
            key = (RARE, RARE) if x not in first else (x, y if (x, y) in pairs else RARE)
            found[key] += n
        firsts = Counter()
        for (x, _), n in found.items():
            firsts[x] += n
        for name, seen, law in (("first tokens", firsts, first), ("pairs", found, pairs)):
            statistic, limit, detectable = chi_square(seen, law)
            print(f"{sampling}, {name}: {DRAWS} draws, {len(law)} outcomes, chi-square "
                  f"{statistic:.1f}, limit {limit:.1f} (alpha 1e-4); a total variation of "
                  f"{detectable:.3f} would be noticed with power 0.99")
            assert statistic < limit, (sampling, name)
