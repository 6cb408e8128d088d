"""From logits to text: sampling, one sequence's session, generation token by token."""

from labkit.engine.generate import Candidate, Event, Generation, Result, Stats
from labkit.engine.sampling import distribution, sample
from labkit.engine.session import Session, Snapshot

__all__ = [
    "Candidate", "Event", "Generation", "Result", "Session", "Snapshot", "Stats", "distribution",
    "sample",
]
