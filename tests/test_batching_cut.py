"""Steps of a batch that fail or are cut short: no token is lost, and nothing is known too early."""

from __future__ import annotations

import importlib

import pytest
from batching_helpers import RATE, alone, batch_of, must_equal
from draft_helpers import GREEDY, echo
from reuse_helpers import text

from labkit.engine import batching
from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import DelayedBudget, Fixed, Policy
from labkit.engine.session import Session
from labkit.errors import InputError

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
    for first in (1, 3, 8):
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


# ---------------------------------------------------------------------------- failures
@pytest.mark.parametrize("place", ("verify", "propose"))
def test_steps_that_fail_tell_a_delayed_policy_nothing(place, monkeypatch):
    """Else the confidences of a step would be those of the past when it is tried again."""
    def lengths_of(failures):
        policy, batch = DelayedBudget(RATE), None
        real, tries, found = getattr(batching, place), [0], []

        def failing(*args):
            done = real(*args)
            tries[0] += 1
            if tries[0] % (failures + 1):
                raise RuntimeError("the device gave up")
            return done

        batch = batch_of(policy, target=echo(), limit=3)
        jobs = [batch.add(text(echo(), 3 + n, n), 14, Sampling(), seed=n) for n in range(4)]
        with monkeypatch.context() as patch:
            patch.setattr(batching, place, failing)
            while batch.busy:
                try:
                    batch.step()
                    found.append((batch.counts.tokens, list(policy.history)))
                except RuntimeError:
                    assert failures
        return found, [job.ids for job in jobs]

    once = lengths_of(0)
    assert lengths_of(3) == once
    assert len({tokens for tokens, _ in once[0]}) > 4


class Wrong(Policy):
    def __init__(self, lengths):
        self.found = lengths

    def lengths(self, survival):
        return self.found


@pytest.mark.parametrize("lengths", ([4, 0], [1], [1, 1, 1], [-1, 0], [1.0, 0], [True, 0], []),
                         ids=str)
def test_lengths_that_there_are_not_are_refused_by_name(lengths):
    batch = batch_of(Wrong(lengths), target=echo())
    jobs = [batch.add(text(echo(), 4, n), 9, GREEDY) for n in range(2)]
    for _ in range(2):
        with pytest.raises(InputError, match=r"the policy's lengths are .* and \[3, 3\] slots"):
            batch.step()
    batch.policy = Fixed(2)
    list(batch.run())
    for n, job in enumerate(jobs):
        must_equal(job, alone(text(echo(), 4, n), 9, target=echo()))


@pytest.mark.parametrize("place", ("prefill", "first token"))
def test_a_request_that_fails_leaves_and_the_others_go_on(place, monkeypatch):
    prompts = [text(echo(), 4 + n, n) for n in range(3)]
    prefill = Session.prefill

    def failing(self, ids, *args, **options):
        logits = prefill(self, ids, *args, **options)
        if list(ids) == prompts[1]:
            if place == "prefill":
                raise RuntimeError("no memory")
            logits.fill_(float("nan"))
        return logits

    monkeypatch.setattr(Session, "prefill", failing)
    batch = batch_of(Fixed(2), target=echo())
    jobs = [batch.add(ids, 8, GREEDY) for ids in prompts]
    with pytest.raises((RuntimeError, InputError), match="no memory|NaN") as raised:
        batch.step()
    assert jobs[1].error is raised.value and jobs[1].stop_reason == "interrupted"
    told = list(batch.run())
    monkeypatch.undo()
    assert not jobs[1].ids and jobs[0].error is None
    for n in (0, 2):
        must_equal(jobs[n], alone(prompts[n], 8, target=echo()))
        assert [event.id for job, event in told if job is jobs[n]] == jobs[n].ids
