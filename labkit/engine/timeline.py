"""A conversation, recorded turn by turn: what was found, what was read again, what it weighs.

The data of pictures of a cache at work. Time is set by hand, so that an hour's pause takes none
and a recording is the same on every machine but for its seconds of work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from labkit.engine.prefix_cache import Hit, PrefixCache
from labkit.engine.session import Session
from labkit.errors import InputError
from labkit.text.tokenizer import Tokenizer


class ManualClock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        if not seconds >= 0:
            raise InputError(f"wait is {seconds} s: time does not go back")
        self.now += seconds


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation.

    at        seconds since the recording began
    text      what the user added; said, new: tokens of it, and of the reply
    length    tokens of the whole conversation after the reply
    hit       what its prompt (all that was said so far) found
    session   bytes of the session after the reply, by part (`Cache.nbytes`)
    stores    bytes of the prefix cache after the turn: device, host, disk, windows
    lost      blocks and window states that went since the turn before
    """

    number: int
    at: float
    text: str
    said: int
    new: int
    length: int
    hit: Hit
    session: dict[str, int]
    stores: dict[str, int]
    lost: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Conversation:
    """Turns over a prefix cache; the session itself is forgotten after each, as in a service."""

    def __init__(self, cache: PrefixCache, tokenizer: Tokenizer, clock: ManualClock,
                 prefill: str = "full") -> None:
        """clock: the one that the prefix cache was made with."""
        self.cache, self.tokenizer, self.clock, self.prefill = cache, tokenizer, clock, prefill
        self.ids = [cache.model.config.bos_token_id]
        self.turns: list[Turn] = []
        self.session: Session | None = None     # of the last turn, to be looked at
        self._started, self._gone = clock(), self._counts()

    def say(self, text: str, reply: int = 16) -> Turn:
        """Read the conversation with `text` behind it and answer with `reply` greedy tokens.

        InputError when it does not fit the context; nothing has happened then.
        """
        said = self.tokenizer.encode(text)
        limit = self.cache.model.config.max_position_embeddings
        if len(self.ids) + len(said) + reply > limit:
            raise InputError(f"{len(self.ids)} tokens of conversation, {len(said)} new ones and "
                             f"{reply} of reply do not fit the context of {limit}: say less")
        if not said:
            raise InputError("the turn is empty: say something")
        session, logits, hit = self.cache.prefill([*self.ids, *said], self.prefill)
        for _ in range(reply):
            id_ = int(logits[0, -1, : self.tokenizer.vocab_size].argmax())
            logits = session.decode(id_)
        self.ids, self.session = session.ids, session
        self.cache.keep(session)
        counts = self._counts()
        lost = {name: count - self._gone[name] for name, count in counts.items()}
        self._gone = counts
        turn = Turn(len(self.turns) + 1, self.clock() - self._started, text, len(said), reply,
                    len(self.ids), hit, session.nbytes(), self.cache.nbytes(), lost)
        self.turns.append(turn)
        return turn

    def _counts(self) -> dict[str, int]:
        stats = self.cache.tiers.stats
        return {"to host": stats.moved_to_host, "blocks": stats.lost,
                "windows": self.cache.pool.evictions}


def record(cache: PrefixCache, tokenizer: Tokenizer, clock: ManualClock, texts: Sequence[str],
           waits: Sequence[float], reply: int = 16, prefill: str = "full") -> Conversation:
    """Say each text after its wait in seconds (waits are repeated as needed)."""
    if not texts or not waits:
        raise InputError("a conversation needs texts, and waits before them")
    conversation = Conversation(cache, tokenizer, clock, prefill)
    for number, text in enumerate(texts):
        clock.wait(waits[number % len(waits)])
        conversation.say(text, reply)
    return conversation
