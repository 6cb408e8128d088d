"""Batches of small models, and the same requests alone, for the tests of batching."""

from draft_helpers import GREEDY, Letters, model

from labkit.engine.batching import Batch
from labkit.engine.generate import Generation
from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    NoDraft,
    PrefixScheduler,
    StepRate,
    Threshold,
)
from labkit.engine.session import Session

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
