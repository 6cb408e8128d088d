"""The law of what speculation emits is that of plain sampling, on a small network."""

import itertools

import pytest
from draft_helpers import GREEDY, PLAIN, generator, model, session_of
from reuse_helpers import text

from labkit.cache.rows import join
from labkit.engine import speculation
from labkit.engine.sampling import Sampling, distribution
from labkit.engine.scheduling import Fixed, PrefixScheduler, StepRate, Threshold
from labkit.engine.speculation import Request, propose, verify
from labkit.mutants.chance import chi_square
from labkit.mutants.enumeration import law

TINY = 3        # only the first three ids may be drawn: every course of chance can be taken


def plain_law(ids, depth, sampling):
    """text -> probability of the next `depth` ids under plain sampling."""
    found = {(): 1.0}
    for _ in range(depth):
        longer = {}
        for said, weight in found.items():
            logits = session_of([*ids, *said[:-1]] if said else ids[:-1]).decode([*ids, *said][-1])
            p = distribution(logits[0, -1, :TINY], sampling.temperature, sampling.top_k,
                             sampling.top_p)
            longer |= {(*said, i): weight * float(q) for i, q in enumerate(p) if q > 0}
        found = longer
    return found


def spoken(cache, ids, slots, lengths, depth, sampling, source):
    """The next `depth` ids by speculative steps behind a cache of ids[:-1]."""
    cache, said = cache.fork(), []
    while len(said) < depth:
        request = Request(said[-1] if said else ids[-1], sampling, source, slots)
        proposals = propose(model(), cache, [request], TINY)
        n = lengths([p.survival for p in proposals])
        said += verify(model(), cache, [request], proposals, n, TINY)[0].ids
    return tuple(said[:depth])


@pytest.mark.parametrize("sampling", (
    PLAIN, Sampling(0.4), Sampling(2.5), Sampling(1.0, 0, 0.6), Sampling(1.0, 2, 1.0), GREEDY),
    ids=str)
@pytest.mark.parametrize("slots", (1, 2))
def test_the_law_of_two_tokens_is_exactly_that_of_plain_sampling(slots, sampling, monkeypatch):
    """The engine's own propose and verify on a real (small) network, every draw in turn."""
    ids = text(model(), 9, seed=2)
    cache = session_of(ids[:-1]).cache
    from labkit.engine import verification

    monkeypatch.setattr(speculation, "sample", lambda p, g: verification.sample(p, g))
    found = law(lambda: spoken(cache, ids, slots, Fixed(slots).lengths, 2, sampling, generator()))
    expected = plain_law(ids, 2, sampling)
    for said in itertools.product(range(TINY), repeat=2):
        assert abs(found.get(said, 0.0) - expected.get(said, 0.0)) < 1e-9, said


def torn(kind, cache, anchor):
    """A policy that takes the second slot after some first drafts and not after others."""
    seen = [propose(model(), cache, [Request(anchor, PLAIN, generator(s), 2)], TINY)[0].survival
            for s in range(20)]
    first, second = seen[0][0], sorted({a[1] for a in seen})
    assert len(second) > 1 and all(a[0] == first for a in seen)
    edge = (second[0] + second[1]) / 2
    if kind == "threshold":
        return Threshold(edge)
    # the second slot pays if (1 + a_1 + a_2) SPS(3) > (1 + a_1) SPS(2)
    return PrefixScheduler(StepRate({1: 100 * (1 + first / 2), 2: 100.0,
                                     3: 100 * (1 + first) / (1 + first + edge)}))


@pytest.mark.parametrize("kind", ("threshold", "scheduler"))
def test_policies_do_not_change_the_law(kind, monkeypatch):
    ids = text(model(), 6, seed=4)
    cache = session_of(ids[:-1]).cache
    policy = torn(kind, cache, ids[-1])
    from labkit.engine import verification

    monkeypatch.setattr(speculation, "sample", lambda p, g: verification.sample(p, g))
    chosen = set()

    def lengths(survival):
        chosen.add(tuple(found := policy.lengths(survival)))
        return found

    found = law(lambda: spoken(cache, ids, 2, lengths, 2, PLAIN, generator()))
    expected = plain_law(ids, 2, PLAIN)
    assert set(found) == set(expected) and len(chosen) > 1, chosen
    assert max(abs(found[said] - p) for said, p in expected.items()) < 1e-9


@pytest.mark.parametrize("sampling", (PLAIN, Sampling(0.7, 0, 0.8)), ids=str)
def test_drawn_tokens_follow_the_law_of_plain_sampling(sampling):
    """The same with numbers that are really drawn, by 64 requests in one batch."""
    ids = text(model(), 9, seed=2)
    start = session_of(ids[:-1]).cache
    law_of_three = plain_law(ids, 3, sampling)
    counts, rounds, R = {}, 60, 64
    sources = [generator(row) for row in range(R)]
    for _ in range(rounds):
        cache = join([start] * R)
        said = [[ids[-1]] for _ in range(R)]
        while min(map(len, said)) < 4:
            requests = [Request(s[-1], sampling, g, 3) for s, g in zip(said, sources, strict=True)]
            proposals = propose(model(), cache, requests, TINY)
            for s, e in zip(said, verify(model(), cache, requests, proposals, [3] * R, TINY),
                            strict=True):
                s += e.ids
        for s in said:
            key = tuple(s[1:4])
            counts[key] = counts.get(key, 0) + 1
    # The rarest outcomes count as one that is to be expected ten times.
    rare, mass = set(), 0.0
    for key, p in sorted(law_of_three.items(), key=lambda item: item[1]):
        if mass * rounds * R >= 10 or (not rare and p * rounds * R >= 10):
            break
        rare.add(key)
        mass += p
    if rare:
        law_of_three = {k: p for k, p in law_of_three.items() if k not in rare} | {"rare": mass}
        counts = {k: n for k, n in counts.items() if k not in rare} | {
            "rare": sum(counts.get(k, 0) for k in rare)}
    statistic, limit, detectable = chi_square(counts, law_of_three)
    print(f"{sampling}: {rounds * R} draws, {len(law_of_three)} outcomes, chi-square "
          f"{statistic:.1f}, limit {limit:.1f} (alpha 1e-4); a total variation of "
          f"{detectable:.3f} would be noticed with power 0.99")
    assert statistic < limit
