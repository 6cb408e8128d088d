"""Verify lengths: the published rule and its neighbours, by hand and against one another."""

import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_helpers import batches, curves, step

from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    NoDraft,
    PrefixScheduler,
    StepRate,
    Threshold,
    best_first,
    survival,
)
from labkit.errors import InputError
from labkit.mutants.enumeration import STAIRS


def smooth(tokens=64 * 6, fixed=20.0, each=1.0):
    """A step takes `fixed + each * B`: seconds convex in B, so throughput has one summit."""
    return StepRate({b: 1 / (fixed + each * b) for b in (1, tokens)})


def throughput(rows, lengths, rate):
    """tau * SPS(B), added in the order of admission, as the policies do."""
    tau = float(len(rows))
    for a, _, _ in sorted(((a, j, r) for r, row in enumerate(rows)
                           for j, a in enumerate(row[: lengths[r]])),
                          key=lambda one: (-one[0], one[1], one[2])):
        tau += a
    return tau * rate(len(rows) + sum(lengths))


# ---- survival --------------------------------------------------------------------------------


def test_survival_is_the_cumulative_product():
    assert survival([0.5, 1.0, 0.5, 0.0]) == [0.5, 0.5, 0.25, 0.0]
    assert survival([]) == []
    for bad in (1.01, -0.1, math.nan):
        with pytest.raises(InputError, match="confidence of slot 2 .*must be a probability"):
            survival([0.5, bad])


# ---- step rates ------------------------------------------------------------------------------


def test_step_rates_by_hand():
    rate = StepRate({4: 10.0, 1: 20.0, 8: 2.0})
    assert [rate(1), rate(4), rate(8)] == [20.0, 10.0, 2.0]
    # Half way between 4 and 8 tokens a step takes half way between 0.1 and 0.5 seconds.
    assert rate(6) == pytest.approx(1 / 0.3) and rate(2) == pytest.approx(1 / (0.2 / 3))
    assert (rate.smallest, rate.largest) == (1, 8)
    for outside in (0, 9, 1000, -1):
        with pytest.raises(InputError, match=f"no step rate for {outside} tokens.*1 to 8"):
            rate(outside)
    # A batch that drains: below the fewest tokens that were measured their rate counts.
    few = StepRate({4: 10.0, 8: 2.0})
    assert [few(1), few(3), few(4)] == [10.0] * 3 and few(6) == rate(6)
    with pytest.raises(InputError, match="for 9 tokens: it was measured for 4 to 8"):
        few(9)


@given(curves(), st.data())
def test_interpolated_rates_lie_between_their_neighbours(rate, data):
    tokens = data.draw(st.integers(rate.smallest, rate.largest))
    below = max(b for b in rate.points if b <= tokens)
    above = min(b for b in rate.points if b >= tokens)
    low, high = sorted((rate.points[below], rate.points[above]))
    assert low * (1 - 1e-12) <= rate(tokens) <= high * (1 + 1e-12)


@given(curves())
def test_step_rates_go_through_json(rate):
    again = StepRate.from_dict(json.loads(json.dumps(rate.to_dict())))
    assert again == rate and again.points == rate.points


@pytest.mark.parametrize(("points", "said"), [
    ({}, "no step rate was measured"), ({0: 1.0}, "step of 0 tokens"),
    ({1.5: 1.0}, "step of 1.5 tokens"), ({True: 1.0}, "step of True tokens"),
    ({1: 0.0}, "0.0 steps a second with 1 tokens"), ({1: -2.0}, "-2.0 steps a second"),
    ({1: math.nan}, "nan steps"), ({1: math.inf}, "inf steps"), ({1: "3"}, "'3' steps"),
])  # fmt: skip
def test_points_that_are_no_rates_are_refused(points, said):
    with pytest.raises(InputError, match=said):
        StepRate(points)


@pytest.mark.parametrize(("kept", "said"), [
    (None, "two lists"), ({}, "two lists"), ({"tokens": [1]}, "two lists"),
    ({"tokens": [1], "steps_per_second": [1, 2]}, "as many"),
    ({"tokens": [1, 1], "steps_per_second": [1, 2]}, "as many steps_per_second as different"),
    ({"tokens": 1, "steps_per_second": 1}, "as many"),
    ({"tokens": ["1"], "steps_per_second": [2.0]}, "step of '1' tokens"),
    ({"tokens": [[1]], "steps_per_second": [2.0]}, r"step of \[1\] tokens"),
    ({"tokens": [], "steps_per_second": []}, "no step rate was measured"),
    ({"tokens": [1], "steps_per_second": [None]}, "None steps a second"),
])  # fmt: skip
def test_damaged_records_of_step_rates_are_refused(kept, said):
    with pytest.raises(InputError, match=said):
        StepRate.from_dict(kept)


# ---- fixed, threshold ------------------------------------------------------------------------


@given(batches(), st.integers(0, 7), st.floats(0, 1))
def test_fixed_and_threshold(rows, n, least):
    assert Fixed(n).lengths(rows) == [min(n, len(row)) for row in rows]
    assert NoDraft().lengths(rows) == [0] * len(rows)
    lengths = Threshold(least).lengths(rows)
    for row, length in zip(rows, lengths, strict=True):
        assert all(a >= least for a in row[:length]) and not any(a >= least for a in row[length:])
    higher = Threshold(min(1.0, least + 0.1)).lengths(rows)
    assert all(a <= b for a, b in zip(higher, lengths, strict=True))
    assert Threshold(0).lengths(rows) == [len(row) for row in rows]


def test_what_policies_say_of_themselves():
    everything = (Threshold(0.5), PrefixScheduler(STAIRS), DelayedBudget(STAIRS))
    assert all(policy.drafts and policy.limit is None for policy in everything)
    assert Fixed(3).drafts and Fixed(3).limit == 3
    assert not NoDraft().drafts and NoDraft().limit == 0 and not Fixed(0).drafts
    for policy in (*everything, Fixed(2), NoDraft()):
        assert policy.lengths([]) == []
        policy.reset()


# ---- the prefix scheduler --------------------------------------------------------------------


def published(rows, rate):
    """The rule in one piece: sort, then the first place where throughput does not grow."""
    slots = [(a, j, r) for j in range(5) for r, row in enumerate(rows)
             for a in row[j : j + 1] if a > 0]
    slots.sort(key=lambda one: -one[0])      # stable: ties by slot, then by request
    taus = list(itertools.accumulate((a for a, _, _ in slots), initial=float(len(rows))))
    found = [tau * rate(len(rows) + k) for k, tau in enumerate(taus)]
    stop = next((k for k in range(len(slots)) if found[k + 1] <= found[k]), len(slots))
    counts = Counter(r for _, _, r in slots[:stop])
    return [counts[r] for r in range(len(rows))]


@settings(max_examples=150)
@given(batches(), curves())
def test_the_scheduler_is_the_published_rule(rows, rate):
    lengths = PrefixScheduler(rate).lengths(rows)
    assert lengths == published(rows, rate)
    # By its own estimate it is never slower than plain decoding.
    assert throughput(rows, lengths, rate) >= len(rows) * rate(len(rows))


@settings(max_examples=60)
@given(batches(), st.floats(0.1, 200), st.floats(0.01, 3))
def test_with_one_summit_the_first_stop_is_the_best_of_all(rows, fixed, each):
    rate = smooth(fixed=fixed, each=each)
    lengths = PrefixScheduler(rate).lengths(rows)
    slots = best_first(rows)
    taus = itertools.accumulate((a for a, _, _ in slots), initial=float(len(rows)))
    best = max(tau * rate(len(rows) + k) for k, tau in enumerate(taus))
    assert throughput(rows, lengths, rate) == pytest.approx(best, rel=1e-12)


@settings(max_examples=60)
@given(batches())
def test_the_order_respects_prefixes_and_ties(rows):
    slots = best_first(rows)
    assert sorted(slots) == sorted((a, j, r) for r, row in enumerate(rows)
                                   for j, a in enumerate(row) if a > 0)
    for r in range(len(rows)):
        assert [j for _, j, who in slots if who == r] == list(range(sum(a > 0 for a in rows[r])))
    for one, two in itertools.pairwise(slots):
        assert one[0] > two[0] or (one[0] == two[0] and one[1:] < two[1:])


def test_the_scheduler_by_hand():
    # 2 requests; 5 tokens a second plain; 8 slots worth of confidence
    rate = StepRate({2: 2.5, 3: 2.4, 4: 2.3, 5: 1.9, 6: 1.8})
    rows = [survival([0.9, 0.5]), survival([0.8, 0.9])]         # .9 .45 and .8 .72
    # tau * SPS: 2 * 2.5 = 5; 2.9 * 2.4 = 6.96; 3.7 * 2.3 = 8.51; 4.42 * 1.9 = 8.398, no.
    assert PrefixScheduler(rate).lengths(rows) == [1, 1]
    flat = StepRate({2: 1.0, 6: 1.0})
    assert PrefixScheduler(flat).lengths(rows) == [2, 2]        # slots are free
    assert PrefixScheduler(flat).lengths([[1.0, 0.0], []]) == [1, 0]    # but not the impossible
    # Equal throughput is no reason to go on: 1 * 1.0 and (1 + 1) * 0.5.
    assert PrefixScheduler(StepRate({1: 1.0, 2: 0.5})).lengths([[1.0]]) == [0]


def test_ties_go_to_the_earlier_slot_then_to_the_earlier_request():
    rows = [[0.5, 0.5], [0.5, 0.5], [0.5]]
    for budget, wanted in enumerate(([0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1],
                                     [2, 2, 1])):
        points = {3: 1.0, 3 + budget: 1.0, 8: 1.0, **({4 + budget: 0.01} if budget < 5 else {})}
        assert PrefixScheduler(StepRate(points)).lengths(rows) == wanted, budget


@pytest.mark.parametrize("policy", [PrefixScheduler, lambda rate: DelayedBudget(rate, 1)])
def test_what_was_not_measured_is_not_used(policy):
    rate = StepRate({2: 1.0, 4: 1.0})
    rows = [[0.9] * 5, [0.8] * 5]
    ready = policy(rate)
    step(ready, rows)
    assert sum(step(ready, rows)) == 2                     # 4 tokens were measured, no more
    with pytest.raises(InputError, match="no step rate for 5 tokens"):
        policy(rate).lengths([[0.9]] * 5)
    step(ready, rows[:1])
    assert step(ready, rows[:1]) == [3]                    # fewer requests than were measured


# ---- the delayed budget ----------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(batches(most=12), min_size=1, max_size=7), curves(), st.integers(1, 3))
def test_the_budget_is_made_from_confidences_exactly_so_old(steps, rate, delay):
    policy = DelayedBudget(rate, delay)
    for t, rows in enumerate(steps):
        lengths = step(policy, rows)
        slots = best_first(rows)
        if t < delay:
            assert sum(lengths) == 0
            continue
        old = [a for a, _, _ in best_first(steps[t - delay])]
        taus = itertools.accumulate(old, initial=float(len(rows)))
        found = [tau * rate(len(rows) + k) for k, tau in enumerate(taus)]
        budget = found.index(max(found))           # of equal ones the smallest
        counts = Counter(r for _, _, r in slots[:budget])
        assert lengths == [counts[r] for r in range(len(rows))]
    policy.reset()
    assert policy == DelayedBudget(rate, delay)
    assert sum(policy.lengths(steps[0])) == 0


@settings(max_examples=60)
@given(st.lists(st.tuples(batches(most=6), st.integers(0, 3)), min_size=1, max_size=7), curves(),
       st.integers(1, 3))
def test_a_step_that_is_tried_again_is_still_the_same_step(steps, rate, delay):
    """Today's confidences never become those of a step before, however often it fails."""
    once, often = DelayedBudget(rate, delay), DelayedBudget(rate, delay)
    for rows, failures in steps:
        for _ in range(failures):
            often.lengths(rows)
        assert step(often, rows) == step(once, rows)
    assert often == once
    with pytest.raises(InputError, match="no step rate"):
        often.lengths([[1.0]] * (rate.largest + 1))         # gives up: nothing has happened
    often.done()
    assert often.history == once.history


def test_a_jagged_curve_is_searched_as_a_whole_but_with_old_eyes():
    sure, unsure = [survival([1.0, 1.0])], [survival([1.0, 0.5])]
    policy = DelayedBudget(STAIRS, delay=2)
    found = [step(policy, rows) for rows in (sure, unsure, unsure, sure, sure, unsure)]
    assert found == [[0], [0], [2], [0], [0], [2]]      # each says what was right 2 steps before
    assert PrefixScheduler(STAIRS).lengths(sure) == [0]     # never gets over the dent


def test_a_batch_that_shrinks_keeps_the_old_budget_within_what_it_has():
    policy = DelayedBudget(StepRate({1: 1.0, 20: 1.0}), delay=1)
    step(policy, [[0.9, 0.8]] * 4)
    assert step(policy, [[0.7, 0.6]]) == [2]
    assert step(policy, [[0.9, 0.8], [0.5]]) == [2, 0]    # 2 slots were there a step ago


# ---- bad input -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Fixed(2), NoDraft(), Threshold(0.5), PrefixScheduler(STAIRS),
                                    DelayedBudget(STAIRS)])
@pytest.mark.parametrize(("rows", "said"), [
    ([[0.5], [0.5, 0.6]], r"survival 0.6 of request 1, slot 2, after 0.5.*never rise"),
    ([[1.5]], "survival 1.5 of request 0, slot 1"), ([[-0.1]], "survival -0.1"),
    ([[0.5, math.nan]], "survival nan of request 0, slot 2"),
])  # fmt: skip
def test_rows_that_are_no_survivals_are_refused(policy, rows, said):
    with pytest.raises(InputError, match=said):
        policy.lengths(rows)


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Fixed(-1), "fixed length of -1"), (lambda: Fixed(1.0), "fixed length of 1.0"),
    (lambda: Fixed(True), "fixed length of True"),
    (lambda: Threshold(1.1), "threshold of 1.1"), (lambda: Threshold(-0.1), "threshold of -0.1"),
    (lambda: Threshold(math.nan), "threshold of nan"), (lambda: Threshold("1"), "threshold of"),
    (lambda: DelayedBudget(STAIRS, 0), "delay of 0 steps.*would bias the text"),
    (lambda: DelayedBudget(STAIRS, 1.5), "delay of 1.5"),
])  # fmt: skip
def test_options_out_of_range_are_named(make, said):
    with pytest.raises(InputError, match=said):
        make()
