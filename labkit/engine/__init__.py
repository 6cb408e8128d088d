"""From logits to text: sampling, sessions, generation token by token, many requests at once."""

from labkit.engine.batching import Batch, Job
from labkit.engine.generate import Generation, Result, Stats
from labkit.engine.sampling import distribution, sample
from labkit.engine.session import Session, Snapshot
from labkit.engine.transcript import Candidate, Event

__all__ = [
    "Batch", "Candidate", "Event", "Generation", "Job", "Result", "Session", "Snapshot", "Stats",
    "distribution", "sample",
]
