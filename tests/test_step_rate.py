"""The step rate of the running engine, measured at real verify widths."""

from __future__ import annotations

import pytest
import torch
from draft_helpers import Letters, model
from hypothesis import given
from hypothesis import strategies as st
from reuse_helpers import text

from labkit.engine.batching import measure_steps, profile_steps, spread
from labkit.engine.scheduling import StepRate
from labkit.errors import InputError
from labkit.mutants.models import random_model, small_config


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
