"""From logits to text: sampling, one sequence's session, generation token by token."""

from labkit.engine.generate import Generation, Result, Stats
from labkit.engine.sampling import distribution, sample
from labkit.engine.session import Session, Snapshot
from labkit.engine.transcript import Candidate, Event

__all__ = [
    "Candidate", "Event", "Generation", "Result", "Session", "Snapshot", "Stats", "distribution",
    "sample",
]
