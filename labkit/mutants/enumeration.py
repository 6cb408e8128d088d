"""Exact laws of speculative decoding on toys: every course that chance could take.

A toy is a target and a draft over two to four tokens, given as tables. Nothing is drawn: each
draw is replaced by all of its outcomes in turn, with their probabilities. The code that accepts,
rejects and schedules is the engine's own, so a fault in it is in the law too.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from labkit.engine import verification
from labkit.engine.sampling import distribution
from labkit.engine.scheduling import Policy, StepRate, survival

Text = tuple[int, ...]
Outcome = TypeVar("Outcome", bound=Hashable)


# ------------------------------------------------------------------ every course of chance
def law(run: Callable[[], Outcome]) -> dict[Outcome, float]:
    """The outcomes of run() with their probabilities; all that it draws, `verification` draws.

    run is called once per course. The first calls fix which outcomes a draw has; the last draw
    that has another one takes it in the next call.
    """
    found: dict[Outcome, float] = defaultdict(float)
    script: list[list[tuple[int, float]]] = []     # per draw: outcomes still to be taken
    while True:
        weight, at = 1.0, 0

        def draw(odds: list[float]) -> int:
            nonlocal weight, at
            if at == len(script):
                script.append([(i, p) for i, p in enumerate(odds) if p > 0])
            taken, p = script[at][-1]
            weight, at = weight * p, at + 1
            return taken

        with _draws_by(draw):
            outcome = run()
        found[outcome] += weight
        while script and len(script[-1]) == 1:
            script.pop()
        if not script:
            return dict(found)
        script[-1].pop()


@contextmanager
def _draws_by(draw: Callable[[list[float]], int]) -> Iterator[None]:
    kept = verification.sample, verification.happens
    verification.sample = lambda probabilities, generator: draw(probabilities.tolist())
    verification.happens = lambda probability, generator: bool(draw([1 - probability, probability]))
    try:
        yield
    finally:
        verification.sample, verification.happens = kept


# ------------------------------------------------------------------ toys
@dataclass(frozen=True)
class Toy:
    """target      text -> p_t [V] of the next token
    draft       text, tokens drafted since -> p_d [V] of the next slot
    confidence  text, tokens drafted since -> of the next slot: it hangs on the last drafted token
    block       slots that the draft fills
    """

    target: Callable[[Text], torch.Tensor]
    draft: Callable[[Text, Text], torch.Tensor]
    confidence: Callable[[Text, Text], float]
    block: int


KINDS = ("dense", "sparse", "disjoint", "top_p", "greedy", "equal")


def random_toy(seed: int, vocabulary: int = 2, block: int = 2, kind: str = "dense") -> Toy:
    """A toy with random tables.

    kind  dense: all probabilities above 0; sparse: some are 0; disjoint: the draft never draws
          what the target might; top_p: both cut at 0.7; greedy: one-hot; equal: p_d = p_t
    """
    options: dict[str, Any] = {"top_p": {"top_p": 0.7}, "greedy": {"temperature": 0.0}}
    cut = options.get(kind, {})

    def numbers(*key: object) -> torch.Tensor:
        made = torch.Generator().manual_seed(hash((seed, *key)) % 2**63)
        return torch.randn(vocabulary, generator=made, dtype=torch.float64)

    @functools.cache
    def table(side: int, text: Text, drafted: Text) -> torch.Tensor:
        logits = 1.5 * numbers(side, text, drafted)
        if kind == "sparse":
            low = numbers(2, side, text, drafted) < 0
            low[int(logits.argmax())] = False
            logits[low] = -math.inf
        if kind == "disjoint":      # each place has its own half
            half = (torch.arange(vocabulary) + len(text) + len(drafted)) % 2 == side
            logits[half] = -math.inf
        return distribution(logits, **cut)

    def draft(text: Text, drafted: Text) -> torch.Tensor:
        return target(text + drafted) if kind == "equal" else table(1, text, drafted)

    def target(text: Text) -> torch.Tensor:
        return table(0, text, ())

    @functools.cache
    def confidence(text: Text, drafted: Text) -> float:
        return float(torch.sigmoid(1 + 2 * numbers(3, text, drafted)[0]))

    return Toy(target, draft, confidence, block)


# The counterexample to looking ahead. The target tosses a fair coin for ever. So does the draft in
# its first slot, which is always accepted (c_1 = 1); after a drafted 0 it tosses once more
# (c_2 = 1), after a drafted 1 it says 1 for certain, which survives in one half (c_2 = 1/2).
# Verifying one slot never pays: 2 * 0.36 = 0.72 tokens a second against 1 * 1.00. Both together
# pay after a 0, (1 + 1 + 1) * 0.36 = 1.08, and not after a 1, (1 + 1 + 1/2) * 0.36 = 0.90. Who
# decides on the first slot by the second one's confidence keeps every drafted 0 and tosses again
# for every drafted 1: the next token is 0 with probability 1/2 + 1/2 * 1/2 = 0.75.
STAIRS = StepRate({1: 1.0, 2: 0.36, 3: 0.36})


def coin() -> Toy:
    """The counterexample to looking ahead, with its step rates `STAIRS`."""
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    one = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def draft(text: Text, drafted: Text) -> torch.Tensor:
        return one if drafted == (1,) else even

    def confidence(text: Text, drafted: Text) -> float:
        return float(torch.minimum(even, draft(text, drafted)).sum())

    return Toy(lambda text: even, draft, confidence, block=2)


# ------------------------------------------------------------------ laws of texts
def plain_law(toy: Toy, text: Text, count: int) -> dict[Text, float]:
    """The next `count` tokens after `text` under plain sampling."""
    if not count:
        return {(): 1.0}
    return {(v, *rest): p * q for v, p in enumerate(toy.target(text).tolist()) if p > 0
            for rest, q in plain_law(toy, (*text, v), count - 1).items()}


def emitted_law(toy: Toy, policy: Policy, requests: int, count: int
                ) -> dict[tuple[Text, ...], float]:
    """The first `count` tokens of each request when they are drafted, scheduled and verified.

    Request r begins with the token r. One that has its tokens leaves the batch. Steps go on until
    all have left; states that agree (texts, and what the policy remembers) are taken together.
    """
    @functools.cache
    def blocks(text: Text) -> list[tuple[Text, float, list[float]]]:
        """Every block that may be drafted: ids, probability, survivals of the slots."""
        made: list[tuple[Text, float]] = [((), 1.0)]
        for _ in range(toy.block):
            made = [((*ids, v), p * q) for ids, p in made
                    for v, q in enumerate(toy.draft(text, ids).tolist()) if q > 0]
        return [(ids, p, survival([toy.confidence(text, ids[:k]) for k in range(toy.block)]))
                for ids, p in made]

    @functools.cache
    def verified(text: Text, ids: Text) -> dict[Text, float]:
        """What verifying these ids emits."""
        targets = [toy.target(text + ids[:k]) for k in range(len(ids) + 1)]
        drafts = [toy.draft(text, ids[:k]) for k in range(len(ids))]

        def run() -> Text:
            verdict = verification.verify(targets, drafts, ids, torch.Generator())
            return (*ids[: verdict.accepted], verdict.next_id)
        return law(run)

    def longer(texts: tuple[Text, ...], policy: Policy) -> Iterator[tuple[tuple, Policy, float]]:
        """All that one step may lead to."""
        going = [r for r, text in enumerate(texts) if len(text) <= count]
        for drafted in itertools.product(*(blocks(texts[r]) for r in going)):
            after = copy.deepcopy(policy)
            lengths = after.lengths([block[2] for block in drafted])
            after.done()
            chance = math.prod(block[1] for block in drafted)
            emitted = [verified(texts[r], block[0][:n])
                       for r, block, n in zip(going, drafted, lengths, strict=True)]
            for course in itertools.product(*(e.items() for e in emitted)):
                new = list(texts)
                for r, (tokens, _) in zip(going, course, strict=True):
                    new[r] = (texts[r] + tokens)[: count + 1]
                yield tuple(new), after, chance * math.prod(p for _, p in course)

    done: dict[tuple[Text, ...], float] = defaultdict(float)
    states: dict[tuple, tuple[Policy, float]] = {
        (tuple((r,) for r in range(requests)), repr(policy)): (policy, 1.0)}
    while states:
        ahead: dict[tuple, tuple[Policy, float]] = {}
        for (texts, _), (before, p) in states.items():
            for new, after, q in longer(texts, before):
                if all(len(text) > count for text in new):
                    done[tuple(text[1:] for text in new)] += p * q
                else:
                    key = (new, repr(after))
                    ahead[key] = (after, p * q + (ahead[key][1] if key in ahead else 0.0))
        states = ahead
    return dict(done)


def bias(toy: Toy, policy: Policy, requests: int, count: int) -> tuple[float, str]:
    """Total variation between `emitted_law` and plain sampling, and the outcome most at fault."""
    plain = [plain_law(toy, (r,), count) for r in range(requests)]
    wanted: dict[tuple[Text, ...], float] = {(): 1.0}
    for one in plain:
        wanted = {(*texts, text): p * q for texts, p in wanted.items() for text, q in one.items()}
    found = emitted_law(toy, policy, requests, count)
    off = {texts: found.get(texts, 0.0) - wanted.get(texts, 0.0) for texts in {*found, *wanted}}
    worst = max(off, key=lambda texts: (abs(off[texts]), texts))
    said = (f"tokens {', '.join(str(list(text)) for text in worst)} come with probability "
            f"{found.get(worst, 0.0):.4f}, under plain sampling with {wanted.get(worst, 0.0):.4f}")
    return sum(map(abs, off.values())) / 2, said
