"""No policy looks ahead: texts keep the law of plain sampling, exactly."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_helpers import CONFIDENCE, batches, curves, step

from labkit import mutants
from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    PrefixScheduler,
    StepRate,
    Threshold,
    survival,
)
from labkit.mutants.enumeration import KINDS, STAIRS, bias, coin, emitted_law, random_toy

EXACT = 1e-12

POLICIES = {
    "fixed": lambda rate: Fixed(2),
    "threshold": lambda rate: Threshold(0.4),
    "scheduler": PrefixScheduler,
    "budget, 1 step": lambda rate: DelayedBudget(rate, 1),
    "budget, 2 steps": lambda rate: DelayedBudget(rate, 2),
}


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60)
@given(batches(), curves(), st.data())
def test_confidences_behind_the_next_slot_change_nothing(name, rows, rate, data):
    """Slot l is the first that was left out: its confidence may matter, those behind it not."""
    earlier = data.draw(batches())

    def lengths(today):
        policy = POLICIES[name](rate)
        for _ in range(2):
            step(policy, earlier)
        return policy.lengths(today)

    found = lengths(rows)
    other = [row[: n + 1] + survival([data.draw(CONFIDENCE) for _ in row[n + 1 :]])
             for row, n in zip(rows, found, strict=True)]
    other = [list(itertools.accumulate(row, min)) for row in other]     # so that none rises
    assert lengths(other) == found


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**20), rates=st.lists(st.floats(0.2, 1), min_size=4, max_size=4))
def test_one_request_keeps_the_law_of_plain_sampling(name, kind, seed, rates):
    rate = StepRate(dict(enumerate(rates, 1)))
    off, said = bias(random_toy(seed, 2, 3, kind), POLICIES[name](rate), 1, 4)
    assert off < EXACT, said


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=5)
@given(seed=st.integers(0, 2**20), rates=st.lists(st.floats(0.2, 1), min_size=6, max_size=6))
def test_two_requests_that_share_steps_keep_it_too(name, seed, rates):
    """Also jointly: neither text says anything of the other."""
    rate = StepRate(dict(enumerate(rates, 1)))
    off, said = bias(random_toy(seed, 2, 2), POLICIES[name](rate), 2, 3)
    assert off < EXACT, said


@pytest.mark.parametrize("name", POLICIES)
def test_on_the_counterexample_the_policies_are_right(name):
    off, said = bias(coin(), POLICIES[name](STAIRS), 1, 4)
    assert off < EXACT, said


@pytest.mark.parametrize(("fault", "policy"), [
    ("scheduler_looks_ahead", PrefixScheduler(STAIRS)),
    ("threshold_looks_ahead", Threshold(0.8)),
    ("budget_of_today", DelayedBudget(STAIRS)),
])  # fmt: skip
def test_who_looks_ahead_loads_the_coin(fault, policy):
    """Verified with both slots after a drafted 0, tossed anew after a drafted 1."""
    assert emitted_law(coin(), policy, 1, 1) == {((0,),): 0.5, ((1,),): 0.5}
    with mutants.active(fault):
        assert type(policy)(**_fields(policy)).lengths([[1.0, 1.0]]) == [2]
        assert type(policy)(**_fields(policy)).lengths([[1.0, 0.5]]) == [0]
        assert emitted_law(coin(), policy, 1, 1) == {((0,),): 0.75, ((1,),): 0.25}
        off, said = bias(coin(), policy, 1, 4)
    print(f"{fault}: {said}; total variation {off:.3f}")
    assert off > 0.25


def _fields(policy):
    kept = ("history", "staged")
    return {name: value for name, value in vars(policy).items() if name not in kept}


def test_looking_ahead_shows_on_random_toys_too():
    """That the exact comparison can fail: 20 toys with one curve, jagged as `STAIRS`."""
    with mutants.active("scheduler_looks_ahead"):
        off = [bias(random_toy(seed, 2, 2), PrefixScheduler(STAIRS), 1, 3)[0]
               for seed in range(20)]
    biased = [x for x in off if x > 1e-6]
    print(f"{len(biased)} of 20 toys biased, total variation up to {max(off):.3f}")
    assert len(biased) >= 5
