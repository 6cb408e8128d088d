"""Requests that share their passes write what each would write alone, and every pass is counted."""

from __future__ import annotations

import itertools

import pytest
import torch
from batching_helpers import POLICIES, alone, batch_of, must_equal
from draft_helpers import GREEDY, Letters, V, echo, model
from hypothesis import given, settings
from hypothesis import strategies as st
from reuse_helpers import same_state, text

import labkit
from labkit.cache.rows import join
from labkit.engine import speculation
from labkit.engine.batching import Batch, Counts
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


@pytest.mark.parametrize("policy", (PrefixScheduler, DelayedBudget))
def test_a_batch_drains_below_what_was_measured(policy):
    batch = batch_of(policy(StepRate({4: 5.0, 16: 4.0})), target=echo())
    jobs = [batch.add(text(echo(), 3 + n, n), 4 + 3 * n, GREEDY) for n in range(4)]
    list(batch.run())
    assert {step.requests for step in batch.steps} > {1, 4}
    assert batch.counts.verified > 0
    for n, job in enumerate(jobs):
        must_equal(job, alone(text(echo(), 3 + n, n), 4 + 3 * n, target=echo()))


def test_all_that_arrive_together_are_joined_at_once(monkeypatch):
    joined = []
    monkeypatch.setattr("labkit.engine.batching.join",
                        lambda caches: joined.append(len(caches)) or join(caches))
    batch = batch_of(limit=8, target=echo())
    jobs = [batch.add(text(echo(), 3, n), 1 if n == 2 else 9, GREEDY) for n in range(6)]
    batch.step()
    assert joined == [5] and jobs[2].done       # who ends with the first token needs no row
    jobs += [batch.add(text(echo(), 3, n), 9, GREEDY) for n in range(6, 9)]
    batch.step()
    assert joined == [5, 4] and len(batch.running) == 8


def test_a_block_longer_than_trained_is_labelled():
    longer, other = batch_of(Fixed(8), slots=8), batch_of(Fixed(8))
    assert (longer.slots, longer.trained_slots, other.slots) == (8, 3, 3)
    assert "; drafted 8 slots, trained for 3)" in repr(longer) and "trained" not in repr(other)


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


def test_only_what_is_in_the_text_counts_as_accepted_and_emitted(monkeypatch):
    """Alike in a batch and alone, wherever in a block the text ends."""
    verify, emissions, behind = speculation.verify, [], []

    def watched(*args):
        emissions.extend(found := verify(*args))
        return found

    monkeypatch.setattr("labkit.engine.batching.verify", watched)
    prompts = [text(echo(), 6, seed) for seed in range(4)]
    texts = [alone(ids, 20, target=echo()).text for ids in prompts]
    for (ids, whole), place in itertools.product(zip(prompts, texts, strict=True), range(3, 19, 3)):
        emissions.clear()
        batch = batch_of(Fixed(3), target=echo())
        job = batch.add(ids, 20, GREEDY, stop=whole[place - 1 : place + 1])
        list(batch.run())
        drafts = [k < e.accepted for e in emissions for k in range(len(e.ids))]
        c, told = batch.counts, alone(
            ids, 20, stop=whole[place - 1 : place + 1], target=echo(),
            speculator=Speculator(echo(), None, Fixed(3))).stats.speculation
        assert job.stop_reason == "stop"
        assert c.emitted == len(job.ids) - 1 == job.counts.emitted
        assert c.accepted == sum(drafts[: c.emitted]) == job.counts.accepted
        assert c.verified == sum(e.verified for e in emissions)
        assert (c.steps, c.verified, c.accepted) == (told.steps, told.verified, told.accepted)
        assert c.tokens_per_step == told.tokens_per_step and c.acceptance == told.acceptance
        behind.append(sum(drafts) - c.accepted)
    print(f"accepted drafts that lie behind the end of the text: {behind}")
    assert max(behind) > 0


def test_a_request_never_drafts_beyond_its_own_end():
    batch = batch_of(Fixed(3), target=echo())
    short = batch.add(text(echo(), 5, 1), 2, GREEDY)
    long = batch.add(text(echo(), 5, 2), 12, GREEDY)
    list(batch.run())
    assert short.counts.drafted == 0 and short.counts.steps == 1
    assert long.counts.drafted > 0 and len(long.ids) == 12


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
