"""Small targets with a draft, and a tokenizer of letters, for the tests of speculation."""

from __future__ import annotations

import functools

import torch

from labkit.engine.sampling import Sampling
from labkit.engine.session import Session
from labkit.mutants.models import DRAFT, random_model, small_config

GREEDY, PLAIN = Sampling(temperature=0), Sampling()
V = 64


@functools.cache
def model(**changes):
    return random_model(small_config(**{**DRAFT, **changes}))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def session_of(ids, target=None, **options):
    session = Session(target or model(), page_tokens=4, **options)
    session.prefill(ids)
    return session


class Letters:
    """As much of a tokenizer as a generation needs: id -> a character."""

    vocab_size = V

    class Stream:
        def push(self, id_):
            return chr(0x4E00 + id_)

        def finish(self):
            return ""

    def stream(self):
        return self.Stream()

    def decode_each(self, ids):
        return [chr(0x4E00 + i) for i in ids]


@functools.cache
def echo():
    """A target whose draft is often right: both lean to one certain id after each id."""
    target = random_model(small_config(**DRAFT), seed=1)
    made = generator(5)
    basis = torch.randn(V, 4, generator=made, dtype=torch.float64)
    basis = basis / basis.norm(dim=1, keepdim=True)
    after = torch.randperm(V, generator=made)
    after[after == 1], after[1] = after[1].clone(), 1       # no way leads to the end
    with torch.no_grad():
        for name, p in target.named_parameters():
            if name.endswith(("wo_b.weight", "w2.weight", "engram.wkv.weight")):
                p.mul_(0.3)
        target.embed.weight.mul_(0.1)
        target.embed.weight[:, :4] = 4 * basis          # what was read shows in four channels
        target.head.weight.mul_(0.1)
        target.head.weight[after, :4] = 8 * basis       # and asks for the id after it
        target.mtp.last.markov_head.embed.weight.copy_(8 * basis)
        target.mtp.last.markov_head.head.weight[after] = 8 * basis
    return target
