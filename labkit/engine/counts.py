"""What continuous batching counts (`labkit.engine.batching`)."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.engine.speculation import Emission, Proposal


@dataclass
class Counts:
    """What was computed for all requests of a batch, or for one of them.

    prefills, prompt_tokens   passes over prompts (one a request) and what they read
    steps       passes of the target over running requests; of one request: those it was part of
    tokens      that they read: an anchor each, and the verified drafts
    drafted     slots that the draft filled; verified: that the target read; accepted: that stayed
                in a text, which may end inside a block
    emitted     tokens of the texts. The first of each comes from its prefill and does not count
    """

    prefills: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    emitted: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gives; None before the first."""
        return self.emitted / self.steps if self.steps else None

    @property
    def acceptance(self) -> float | None:
        """Share of the verified drafts that stayed; None if none was verified."""
        return self.accepted / self.verified if self.verified else None

    def add(self, proposal: Proposal, emission: Emission) -> None:
        """What one request had of a step; of its tokens, `stayed` tells."""
        self.tokens += 1 + emission.verified
        self.drafted += len(proposal.ids)
        self.verified += emission.verified

    def stayed(self, draft: bool) -> None:
        """A token of a step is part of a text: a draft, or the target's own."""
        self.emitted += 1
        self.accepted += draft


@dataclass(frozen=True)
class Step:
    """One step that has been taken: R requests, B tokens, what it gave and what it took."""

    requests: int
    tokens: int
    emitted: int
    draft_seconds: float
    verify_seconds: float
    seconds: float      # of the whole step, with the texts; without what entered and left
