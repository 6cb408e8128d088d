"""How one generation speculates: how many slots, what it has cost, what it has brought."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from labkit.cache import Cache
from labkit.engine.drafting import block_note, checked_slots
from labkit.engine.scheduling import Fixed, Policy
from labkit.engine.speculation import Emission, Proposal, Request, needs_draft, propose, verify
from labkit.errors import InputError
from labkit.model.transformer import Transformer


@dataclass(frozen=True)
class Speculation:
    """What a speculative generation did, over its steps so far.

    steps      passes of the target, each over an anchor and the drafts behind it
    verified   drafts that it read; accepted: those that stayed in the text, which may end
               inside a block. per_slot: (verified, accepted) of slot 1, 2, ..
    tokens_per_step  tokens of the text, but for the first, which the prefill gives; plain
               decoding has 1
    acceptance share of the verified drafts that stayed (None: none was verified)
    slots, trained_slots   drafted in a step at most, and in training; what lies beyond the
               trained block is drafted all the same
    draft_seconds, verify_seconds   of decode_seconds
    """

    steps: int
    verified: int
    accepted: int
    per_slot: tuple[tuple[int, int], ...]
    tokens_per_step: float | None
    acceptance: float | None
    slots: int
    trained_slots: int
    draft_seconds: float
    verify_seconds: float

    def line(self) -> str:
        """In a line: tokens a step and acceptance, over all and by slot."""
        if self.tokens_per_step is None:
            return "speculation: no step was needed"
        said = f"speculation: {self.steps} steps, {self.tokens_per_step:.2f} tokens a step"
        if self.acceptance is None:
            return f"{said}, nothing was drafted"
        slots = ", ".join(f"{a / v:.0%}" if v else "-" for v, a in self.per_slot)
        said += f", {self.accepted} of {self.verified} drafts accepted ({self.acceptance:.0%}; "
        said += f"by slot {slots})"
        note = block_note(self.slots, self.trained_slots)
        return f"{said}; {note}" if note else said


class Speculator:
    """Steps one request: drafts, lets the policy choose a length, verifies, counts.

    slots         drafted in a step, 0 (none: plain decoding) to `MAX_SLOTS`; None: as trained
    policy        chooses how many of them are verified; None: all
    temperatures  of the confidence head (`Calibration`); None: 1
    """

    def __init__(self, model: Transformer, slots: int | None = None, policy: Policy | None = None,
                 temperatures: Sequence[float] | None = None) -> None:
        self.trained_slots = model.config.dspark_block_size
        self.slots = checked_slots(slots, self.trained_slots)
        if policy is not None and not isinstance(policy, Policy):
            raise InputError(f"policy is {policy!r}: give one of labkit.engine.scheduling")
        self.policy = policy or Fixed(self.slots)
        # Slots of which any is ever wanted.
        self.limit = (self.slots if self.policy.limit is None else
                      min(self.slots, self.policy.limit))
        self.temperatures = temperatures
        self._forget()

    def _forget(self) -> None:
        self.policy.reset()
        self.steps = self.emitted = 0
        self.per_slot = [[0, 0] for _ in range(self.slots)]
        self.draft_seconds = self.verify_seconds = 0.0

    def begin(self, model: Transformer, cache: Cache) -> None:
        """Another sequence begins, counted anew; InputError if it cannot be drafted for."""
        if self.limit:
            needs_draft(model, cache)
        self._forget()

    def step(self, model: Transformer, cache: Cache, request: Request,
             vocabulary: int) -> Emission:
        """One step of a cache of one row (see `speculation.verify`).

        Whoever turns the emission into text says of each id that stays: `stayed`.
        """
        request = replace(request, slots=max(0, min(request.slots, self.limit)))
        started = time.perf_counter()
        proposals = [Proposal()]
        if request.slots:
            proposals = propose(model, cache, [request], vocabulary, self.temperatures)
        drafted = time.perf_counter()
        lengths = self.policy.lengths([p.survival for p in proposals])
        emission, = verify(model, cache, [request], proposals, lengths, vocabulary)
        self.policy.done()
        self.draft_seconds += drafted - started
        self.verify_seconds += time.perf_counter() - drafted
        self.steps += 1
        for slot in range(emission.verified):
            self.per_slot[slot][0] += 1
        return emission

    def stayed(self, emission: Emission, place: int) -> None:
        """The id at this place of the emission is part of the text."""
        self.emitted += 1
        if place < emission.accepted:
            self.per_slot[place][1] += 1

    def result(self) -> Speculation:
        verified, accepted = (sum(column) for column in zip(*self.per_slot, (0, 0), strict=True))
        return Speculation(
            self.steps, verified, accepted, tuple((v, a) for v, a in self.per_slot),
            self.emitted / self.steps if self.steps else None,
            accepted / verified if verified else None, self.slots, self.trained_slots,
            self.draft_seconds, self.verify_seconds)
