"""A small model with a draft, what it says behind a session, and how two sessions compare."""

from __future__ import annotations

import dataclasses
import functools

import torch
from reuse_helpers import must_be_close

from labkit.engine.sampling import Sampling
from labkit.engine.speculation import Request, propose, verify
from labkit.mutants.models import DRAFT, random_model, small_config

ANCHOR = 9


@functools.cache
def drafting(window=4, seed=0):
    """The small model with a draft of two stages; W = 4, seven layers reach back 22 tokens."""
    return random_model(small_config(sliding_window=window, **DRAFT), seed)


@functools.cache
def rounding():
    return random_model(small_config(**DRAFT), dtype=torch.float32, cache_rounding=True)


@torch.no_grad()
def drafted(session, slots=3):
    """What the draft says behind a session, before any token is drawn."""
    cache = session.cache
    cache.settle()
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    return session.model.draft(torch.tensor([ANCHOR]), cache.lengths, windows, slots)


def features(session):
    """How many features each stage's window knows."""
    cache = session.cache
    return [int(ring.read(cache.lengths)[1]) for ring in cache.draft_windows]


def each(a, b):
    return [(f.name, getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a)]


def same_drafts(one, two):
    for name, a, b in each(drafted(one), drafted(two)):
        assert torch.equal(a, b), name


def close_drafts(one, two):
    for name, a, b in each(drafted(one), drafted(two)):
        must_be_close(name, a, b)


def off(one, two):
    """Largest difference of the base logits, of their span."""
    a, b = (drafted(s).base_logits for s in (one, two))
    return float((a - b).abs().max() / a.abs().max())


def variation(one, two):
    """Mean total variation between what two sessions' slots would be drawn from."""
    p, q = (drafted(s).base_logits.softmax(-1) for s in (one, two))
    return float((p - q).abs().sum(-1).mean() / 2)


def speculate(session, steps=4, seed=1):
    """A few steps of speculation in a session; the emitted ids."""
    model, cache = session.model, session.cache
    request = Request(ANCHOR, Sampling(1.0), torch.Generator().manual_seed(seed), 3)
    ids = []
    for _ in range(steps):
        proposals = propose(model, cache, [request], model.config.vocab_size)
        emission, = verify(model, cache, [request], proposals, [3], model.config.vocab_size)
        ids += emission.ids
        request = dataclasses.replace(request, anchor=ids[-1])
    return ids
