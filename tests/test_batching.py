"""Requests that share their passes write what each would write alone, and every pass is counted."""

from __future__ import annotations

import importlib

import pytest
import torch
from draft_helpers import GREEDY, Letters, V, echo, model
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_helpers import same_state, text

import labkit
from labkit.engine.batching import Batch, Counts, measure_steps, profile_steps, spread
from labkit.engine.generate import Generation
from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    NoDraft,
    PrefixScheduler,
    StepRate,
    Threshold,
)
from labkit.engine.session import Session
from labkit.engine.speculator import Speculator
from labkit.errors import InputError
from labkit.mutants.models import random_model, small_config

RATE = StepRate({1: 10.0, 4: 9.0, 8: 6.5, 40: 2.0})
POLICIES = {
    "plain": lambda: None, "none": NoDraft, "fixed 1": lambda: Fixed(1),
    "fixed 5": lambda: Fixed(5), "threshold": lambda: Threshold(0.2),
    "scheduler": lambda: PrefixScheduler(RATE), "delayed": lambda: DelayedBudget(RATE),
}


def batch_of(policy=None, slots=None, target=None, **options):
    return Batch(target or model(), Letters(), policy, slots, page_tokens=4, **options)


def alone(ids, count, sampling=GREEDY, stop=None, seed=None, speculator=None, target=None,
          **options):
    session = Session(target or model(), page_tokens=4)
    generation = Generation(session, Letters(), ids, count, sampling, stop, seed,
                            speculator=speculator, **options)
    list(generation)
    return generation


def must_equal(job, expected):
    assert (job.ids, job.text, job.stop_reason) == (
        expected.ids, expected.text, expected.stop_reason)


# ---------------------------------------------------------------------------- the same texts
@st.composite
def loads(draw):
    """Requests (step of arrival, prompt length, new tokens), how many run at once."""
    requests = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 15), st.integers(1, 12)),
                             min_size=1, max_size=6))
    return sorted(requests), draw(st.integers(1, 6))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=6)
@given(load=loads(), near=st.booleans())
def test_greedy_requests_write_what_they_would_alone(policy, load, near):
    requests, limit = load
    target = echo() if near else model()
    batch = batch_of(POLICIES[policy](), slots=5 if policy == "fixed 5" else None, target=target,
                     limit=limit)
    jobs, waiting, told, step = [], list(enumerate(requests)), [], 0
    while waiting or batch.busy:
        while waiting and waiting[0][1][0] <= step:
            number, (_, length, count) = waiting.pop(0)
            jobs.append((batch.add(text(target, length, number), count, GREEDY), length, count))
        told += batch.step()
        assert len(batch.running) <= limit
        step += 1
    for number, (job, length, count) in enumerate(jobs):
        must_equal(job, alone(text(target, length, number), count, target=target))
        events = [event for other, event in told if other is job]
        assert [event.id for event in events] == job.ids
        assert "".join(event.text for event in events) == job.text
        assert [event.index for event in events] == list(range(len(job.ids)))
    assert batch.counts.emitted == sum(len(job.ids) - 1 for job, _, _ in jobs)
    assert not batch.running and batch._cache is None


@pytest.mark.parametrize("sampling", (Sampling(), Sampling(0.7, 0, 0.8), Sampling(1.5, 5)), ids=str)
@pytest.mark.parametrize("policy", ("plain", "fixed 1", "threshold"))
def test_a_seed_gives_the_text_that_it_gives_alone(policy, sampling):
    """Each request draws from its own numbers, whoever is in the batch with it."""
    batch = batch_of(POLICIES[policy](), target=echo())
    jobs = [batch.add(text(echo(), 3 + 4 * n, n), 9 + n, sampling, seed=n) for n in range(5)]
    list(batch.run())
    for n, job in enumerate(jobs):
        chosen = POLICIES[policy]()
        expected = alone(text(echo(), 3 + 4 * n, n), 9 + n, sampling, seed=n, target=echo(),
                         speculator=None if chosen is None else Speculator(echo(), None, chosen))
        must_equal(job, expected)


@pytest.mark.parametrize("options", ({"prefill": "ced"}, {"prefill": "ced", "cut": "after"},
                                     {"prefill": "ced", "halo": "exact", "chunk": 5},
                                     {"chunk": 4}), ids=str)
def test_every_kind_of_prefill(options):
    batch = batch_of(Fixed(2), **options)
    jobs = [batch.add(text(model(), n, n), 10, GREEDY) for n in (19, 3, 11)]
    list(batch.run())
    for n, job in zip((19, 3, 11), jobs, strict=True):
        must_equal(job, alone(text(model(), n, n), 10, **options))


@pytest.mark.parametrize("policy", ("plain", "fixed 1", "fixed 5"))
def test_stop_strings_and_eos_end_one_request_and_no_other(policy):
    """Also inside an accepted block, what lies behind the end is nobody's text."""
    prompts = [text(echo(), 4 + n, n) for n in range(4)]
    texts = [alone(ids, 24, target=echo()).text for ids in prompts]
    stops = [texts[0][7:9], None, texts[2][4], None]
    batch = batch_of(POLICIES[policy](), slots=5 if policy == "fixed 5" else None, target=echo())
    jobs = [batch.add(ids, 24, GREEDY, stop) for ids, stop in zip(prompts, stops, strict=True)]
    list(batch.run())
    for ids, stop, job in zip(prompts, stops, jobs, strict=True):
        must_equal(job, alone(ids, 24, stop=stop, target=echo()))
    assert [job.stop_reason for job in jobs] == ["stop", "length", "stop", "length"]


def test_rounded_packed_caches_of_fp32():
    """Every request ends, with the ids that were told, whatever the noise of the sums does."""
    target = random_model(model().config, dtype=torch.float32, cache_rounding=True)
    batch = batch_of(Fixed(3), target=target)
    jobs = [batch.add(text(target, n, n), 15, GREEDY) for n in (2, 9, 17)]
    told = list(batch.run())
    for n, job in zip((2, 9, 17), jobs, strict=True):
        assert [event.id for other, event in told if other is job] == job.ids
        assert job.ids[0] == alone(text(target, n, n), 1, target=target).ids[0]
        assert job.stop_reason in ("length", "eos")


# ---------------------------------------------------------------------------- coming and going
def test_a_place_is_taken_as_soon_as_it_is_free_and_rows_are_given_up():
    batch = batch_of(limit=2)
    counts = [3, 6, 4, 2]
    jobs = [batch.add(text(model(), 5, n), count, GREEDY) for n, count in enumerate(counts)]
    running = []
    while batch.busy:
        batch.step()
        running.append([jobs.index(job) for job in batch.running])
        assert (batch._cache is None) == (not batch.running)
        for row, job in enumerate(batch.running):
            # The newest token is not read yet.
            assert batch._cache.tokens[row] == job.prompt + job.ids[:-1]
            same_state(read(job.prompt + job.ids[:-1]), batch._cache, [(0, row)])
    assert [len(job.ids) for job in jobs] == counts
    first = [next(step for step, rows in enumerate(running) if n in rows) for n in range(3)]
    assert first == sorted(first) and first[2] > first[1]


def read(ids):
    session = Session(model(), page_tokens=4, draft=False)
    session.prefill(ids)
    return session.cache


def test_requests_that_leave_are_gone_and_the_others_go_on():
    batch = batch_of(Fixed(2), target=echo(), limit=3)
    prompts = [text(echo(), 3 + n, n) for n in range(5)]
    jobs = [batch.add(ids, 20, GREEDY) for ids in prompts]
    batch.step()
    batch.leave(jobs[1])
    batch.leave(jobs[4])
    said = list(jobs[1].ids)
    assert jobs[1].stop_reason == jobs[4].stop_reason == "interrupted"
    list(batch.run())
    assert jobs[1].ids == said and not jobs[4].ids and jobs[4].counts == Counts()
    for n in (0, 2, 3):
        must_equal(jobs[n], alone(prompts[n], 20, target=echo()))


def test_a_batch_with_nothing_to_do_does_nothing():
    batch = batch_of()
    assert not batch.busy and batch.step() == [] and list(batch.run()) == []
    assert batch.counts == Counts() and batch.counts.tokens_per_step is None


# ---------------------------------------------------------------------------- counts
@pytest.mark.parametrize("policy", POLICIES)
def test_every_pass_and_token_is_counted(policy, monkeypatch):
    target, passes, blocks = echo(), [], []
    forward, draft = type(target).forward, type(target).draft

    def watched(self, ids, lengths=None, **options):
        passes.append((ids.shape, None if lengths is None else lengths.tolist()))
        return forward(self, ids, lengths, **options)

    def drafted(self, anchors, *rest, **options):
        blocks.append(len(anchors))
        return draft(self, anchors, *rest, **options)

    monkeypatch.setattr(type(target), "forward", watched)
    monkeypatch.setattr(type(target), "draft", drafted)
    batch = batch_of(POLICIES[policy](), target=target, limit=4)
    jobs = [batch.add(text(target, 3 + n, n), 5 + 3 * n, GREEDY) for n in range(6)]
    list(batch.run())
    c = batch.counts
    steps = [lengths for shape, lengths in passes if lengths is not None]
    assert c.prefills == len(passes) - len(steps) == 6
    assert c.prompt_tokens == sum(len(job.prompt) for job in jobs)
    assert c.steps == len(steps) == len(batch.steps)
    assert c.tokens == sum(map(sum, steps)) and [s.tokens for s in batch.steps] == [
        sum(lengths) for lengths in steps]
    assert [s.requests for s in batch.steps] == [len(lengths) for lengths in steps]
    assert c.tokens == sum(s.requests for s in batch.steps) + c.verified
    assert c.accepted <= c.verified <= c.drafted
    assert sum(s.emitted for s in batch.steps) == c.emitted == sum(len(j.ids) - 1 for j in jobs)
    assert c.emitted == sum(s.requests for s in batch.steps) + c.accepted
    for name in ("prefills", "prompt_tokens", "tokens", "drafted", "verified", "accepted",
                 "emitted"):
        assert sum(getattr(job.counts, name) for job in jobs) == getattr(c, name), name
    assert sum(job.counts.steps for job in jobs) == sum(s.requests for s in batch.steps)
    assert all(s.seconds >= s.draft_seconds + s.verify_seconds > 0 for s in batch.steps)
    if policy in ("plain", "none"):
        assert not blocks and c.drafted == 0 and c.acceptance is None
    else:
        assert 0 < len(blocks) <= c.steps and c.drafted > 0
        assert c.tokens_per_step > 1 or policy == "delayed"
    # Lengths differ from request to request, in one pass.
    if policy in ("threshold", "scheduler"):
        assert any(len(set(lengths)) > 1 for lengths in steps)


def test_tokens_behind_the_end_of_a_text_are_not_emitted():
    ids = text(echo(), 6, 1)
    whole = alone(ids, 20, target=echo())
    batch = batch_of(Fixed(3), target=echo())
    job = batch.add(ids, 20, GREEDY, stop=whole.text[2])
    list(batch.run())
    assert len(job.ids) - 1 == job.counts.emitted < job.counts.steps + job.counts.accepted


def test_a_request_never_drafts_beyond_its_own_end():
    batch = batch_of(Fixed(3), target=echo())
    short = batch.add(text(echo(), 5, 1), 2, GREEDY)
    long = batch.add(text(echo(), 5, 2), 12, GREEDY)
    list(batch.run())
    assert short.counts.drafted == 0 and short.counts.steps == 1
    assert long.counts.drafted > 0 and len(long.ids) == 12


# ---------------------------------------------------------------------------- interrupts
PLACES = ("engine.batching.join", "engine.batching.select", "engine.batching.propose",
          "engine.batching.verify", "engine.speculation.distribution",
          "engine.verification.verify", "engine.session.Session.prefill",
          "engine.transcript.distribution", "engine.transcript.Transcript.take",
          "engine.scheduling.Fixed.lengths", "cache.cache.Cache.rewind",
          "cache.cache.Cache.commit", "cache.window.WindowRing.commit",
          "cache.recent.Recent.gathered", "cache.store.GlobalStore.gathered",
          "model.dspark.DSpark.forward", "model.attention.Attention.forward")


def place_of(name):
    owner, _, attribute = f"labkit.{name}".rpartition(".")
    try:
        return importlib.import_module(owner), attribute
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        return getattr(importlib.import_module(module), kind), attribute


@pytest.mark.parametrize("late", (False, True), ids=("before", "after"))
@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_at_any_call_loses_no_token_of_no_request(place, late, monkeypatch):
    """Cut at one call and soon again at another; the texts go on as if nothing was."""
    owner, name = place_of(place)
    plain = owner.__dict__[name]
    call_it = plain.__func__ if isinstance(plain, (classmethod, staticmethod)) else plain
    prompts = [text(echo(), 3 + 4 * n, n) for n in range(3)]
    counts = (7, 3, 10)
    expected = [alone(ids, n, target=echo()) for n, ids in zip(counts, prompts, strict=True)]
    cuts = 0
    for first in (1, 2, 4, 7, 12):
        calls = 0

        def cut(*args, _first=first, **kwargs):
            nonlocal calls
            calls += 1
            if calls in (_first, _first + 4) and not late:
                raise KeyboardInterrupt
            found = call_it(*args, **kwargs)
            if calls in (_first, _first + 4) and late:
                raise KeyboardInterrupt
            return found

        batch = batch_of(Fixed(2), target=echo(), limit=2)
        jobs = [batch.add(ids, n, GREEDY) for n, ids in zip(counts, prompts, strict=True)]
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, type(plain)(cut) if call_it is not plain else cut)
            while batch.busy:
                try:
                    batch.step()
                except KeyboardInterrupt:
                    cuts += 1
        for job, whole in zip(jobs, expected, strict=True):
            must_equal(job, whole)
    assert cuts, f"{place} was never called"


# ---------------------------------------------------------------------------- bad input
def test_what_a_batch_cannot_take_is_refused():
    bare = random_model(small_config())
    with pytest.raises(InputError, match="needs a draft"):
        Batch(bare, Letters(), Fixed(2))
    assert not Batch(bare, Letters(), NoDraft()).busy       # plain decoding needs none
    for said, options in (("limit is 0", {"limit": 0}), ("chunk is 0", {"chunk": 0}),
                          ("policy is 5", {"policy": 5}), ("halo is 'no'", {"halo": "no"}),
                          ("prefill is 'half'", {"prefill": "half"}),
                          ("draft length is 17", {"policy": Threshold(0.5), "slots": 17})):
        with pytest.raises(InputError, match=said):
            batch_of(**options)
    batch = batch_of()
    for said, arguments in (("the prompt is empty", ([], 3)), ("max_new_tokens is 0", ([1], 0)),
                            ("outside the vocabulary", ([V], 3)),
                            ("more than the context", ([1] * 4096, 1))):
        with pytest.raises(InputError, match=said):
            batch.add(*arguments)
    assert not batch.busy


def test_a_policy_that_gives_up_leaves_the_batch_as_it_was():
    """More requests than the step rate was measured for."""
    batch = batch_of(PrefixScheduler(StepRate({1: 5.0, 2: 4.0})), target=echo())
    prompts = [text(echo(), 4, n) for n in range(3)]
    jobs = [batch.add(ids, 6, GREEDY) for ids in prompts]
    for _ in range(2):
        with pytest.raises(InputError, match="no step rate for 3"):
            batch.step()
    batch.policy = Fixed(2)
    list(batch.run())
    for ids, job in zip(prompts, jobs, strict=True):
        must_equal(job, alone(ids, 6, target=echo()))


# ---------------------------------------------------------------------------- the step rate
@given(st.integers(1, 9), st.integers(0, 5), st.data())
def test_verify_lengths_are_spread_raggedly(requests, slots, data):
    total = data.draw(st.integers(0, requests * slots))
    lengths = spread(total, requests, slots, torch.Generator().manual_seed(1))
    assert sum(lengths) == total and len(lengths) == requests
    assert all(0 <= n <= slots for n in lengths)


def test_the_step_rate_is_measured_at_real_widths(monkeypatch):
    target, seen = model(), []
    forward = type(target).forward

    def watched(self, ids, lengths=None, **options):
        if lengths is not None:
            seen.append(tuple(lengths.tolist()))
        return forward(self, ids, lengths, **options)

    monkeypatch.setattr(type(target), "forward", watched)
    prompts = [text(target, 6 + n, n) for n in range(5)]
    found = measure_steps(target, Letters(), prompts, (1, 4), repeats=3, page_tokens=4)
    slots = target.config.dspark_block_size
    assert {m.requests for m in found} == {1, 4}
    for R in (1, 4):
        widths = [m.tokens for m in found if m.requests == R]
        assert widths == sorted(set(widths)) and widths[0] == R and widths[-1] == R * (1 + slots)
        for tokens in widths:
            steps = [lengths for lengths in seen if len(lengths) == R and sum(lengths) == tokens]
            assert len(steps) >= 4                          # one to warm up
    assert all(m.seconds > 0 and m.repeats == 3 for m in found)
    ragged = [lengths for lengths in seen if len(set(lengths)) > 1]
    assert len(set(ragged)) > 10
    rate = profile_steps(target, Letters(), prompts, (1, 4), repeats=3, page_tokens=4)
    assert (rate.smallest, rate.largest) == (1, 4 * (1 + slots))
    assert set(rate.points) == {m.tokens for m in found}
    assert StepRate.from_dict(rate.to_dict()) == rate


def test_a_profile_of_plain_steps_needs_no_draft():
    bare = random_model(small_config())
    rate = profile_steps(bare, Letters(), [text(bare, 5, 1)], (1, 2), slots=0, repeats=2,
                         page_tokens=4)
    assert set(rate.points) == {1, 2}


def test_a_profile_that_cannot_be_measured_is_refused():
    with pytest.raises(InputError, match="at least one prompt"):
        profile_steps(model(), Letters(), [], (1,))
    with pytest.raises(InputError, match="requests are"):
        profile_steps(model(), Letters(), [[1]], ())
    with pytest.raises(InputError, match="repeats is 0"):
        profile_steps(model(), Letters(), [[1]], (1,), repeats=0)


def test_a_lab_has_batches():
    with pytest.warns(UserWarning, match="random weights"):
        lab = labkit.load("nano", dtype=torch.float64, cache_rounding=False)
    batch = lab.batch(Fixed(3), limit=2)
    texts = ("It is a truth", "universally", "acknowledged that")
    jobs = [batch.add(lab.encode(prompt), 12, GREEDY) for prompt in texts]
    pieces = {id(job): "" for job in jobs}
    for job, event in batch.run():
        pieces[id(job)] += event.text
    for prompt, job in zip(texts, jobs, strict=True):
        alone = lab.generate(prompt, 12, temperature=0)
        assert tuple(job.ids) == alone.ids and pieces[id(job)] == job.text == alone.text
