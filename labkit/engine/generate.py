"""Generation: draw an id, say its text, take it in, until something ends it.

`Generation` is the only loop. Iterating over it yields an `Event` per token as it is drawn;
`Lab.generate` runs it to the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from labkit.engine.replay import decoder_tail
from labkit.engine.sampling import Sampling
from labkit.engine.session import Session, one_thread, prefill_mode
from labkit.engine.speculation import Request
from labkit.engine.speculator import Speculation, Speculator
from labkit.engine.transcript import Event, StopReason, Transcript, check_count
from labkit.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Stats:
    """Counts and times; waiting for the consumer of a stream is not counted.

    prefill_seconds  until the first new token, which the prefill gives
    decode_seconds, tokens_per_second  of the tokens after it (None: there are none yet)
    """

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float | None
    stop_reason: StopReason | None
    seed: int
    speculation: Speculation | None = None


@dataclass(frozen=True)
class Result:
    """text: what the model wrote, without EOS or stop string; ids: all that were drawn."""

    text: str
    ids: tuple[int, ...]
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"text": self.text, "ids": list(self.ids), "stats": asdict(self.stats)}


class Generation(Transcript):
    """A running generation; iterate once. `text`, `ids` and `stats` are current at any moment.

    All arguments are checked at once, before the first token is computed.

    progress: set it before iterating to be told how many tokens of the prompt each pass read
    (several passes only with a chunk).

    speculator: draft and verify several tokens a step; while the events of one step are being
    handed out, the session already holds all that the step accepted.
    """

    progress: Callable[[int], object] | None = None

    def __init__(
        self, session: Session, tokenizer: Tokenizer, prompt: Sequence[int], max_new_tokens: int,
        sampling: Sampling, stop: str | Sequence[str] | None = None, seed: int | None = None,
        candidates: int = 0, prefill: str = "full", halo: str = "window", cut: str = "inside",
        chunk: int | None = None, speculator: Speculator | None = None,
    ) -> None:
        config = session.model.config
        super().__init__(config, tokenizer, prompt, max_new_tokens, sampling, stop, seed,
                         candidates, past=session.length)
        self.session = session
        self.prefill = prefill_mode(prefill)
        decoder_tail(config, halo, cut)  # refuses an unknown halo or cut
        if chunk is not None:
            check_count("chunk", chunk, least=1)
        self.halo, self.cut, self.chunk = halo, cut, chunk
        self.speculator = speculator
        if speculator is not None:
            speculator.begin(session.model, session.cache)
        self._prefill_seconds = self._decode_seconds = 0.0
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def _run(self) -> Iterator[Event]:
        started = time.perf_counter()
        logits = self._read_prompt()                                   # [1,1,V]
        event = self.take(logits[0, -1])
        self._prefill_seconds = time.perf_counter() - started
        yield event
        while self.stop_reason is None:
            if self.speculator is not None:
                yield from self._speculate(self.speculator)
                continue
            started = time.perf_counter()
            logits = self.session.decode(event.id)                     # [1,1,V]
            event = self.take(logits[0, -1])
            self._decode_seconds += time.perf_counter() - started
            yield event

    def _speculate(self, speculator: Speculator) -> Iterator[Event]:
        """One step: an event for each id that it emits, as far as the text goes on."""
        started, cache = time.perf_counter(), self.session.cache
        begin, before = cache.lengths, len(self.ids)
        # The anchor is among the ids; what is drafted must leave room for the target's own token.
        request = Request(self.ids[-1], self.sampling, self.generator,
                          self.max_new_tokens - len(self.ids) - 1)
        try:
            with one_thread(self.session.small):
                emission = speculator.step(self.session.model, cache, request,
                                           self.tokenizer.vocab_size)
            self._decode_seconds += time.perf_counter() - started
            for place, id_ in enumerate(emission.ids):
                started = time.perf_counter()
                event = self.take(emission.logits[place], id_, emission.targets[place])
                speculator.stayed(emission, place)
                self._decode_seconds += time.perf_counter() - started
                yield event
                if self.stop_reason is not None:
                    break
        finally:
            # Ended inside the block: the session holds what it would after plain decoding.
            cache.settle()
            told = begin + len(self.ids) - before
            if bool((cache.lengths > told).any()):
                cache.rewind(told)

    def _read_prompt(self) -> torch.Tensor:
        report = self.progress
        # A pass is over when the model returns.
        hook = None if report is None else self.session.model.register_forward_hook(
            lambda model, args, output: (report(args[0].shape[-1]), None)[1])
        try:
            return self.session.prefill(self.prompt, True, self.prefill, halo=self.halo,
                                        cut=self.cut, chunk=self.chunk)
        finally:
            if hook is not None:
                hook.remove()

    def interrupt(self) -> str:
        """End it where it is (Ctrl-C): the piece of text that was still held back."""
        self._events.close()  # type: ignore[attr-defined]
        return self.end()

    @property
    def stats(self) -> Stats:
        steps = len(self.ids) - 1
        timed = steps > 0 and self._decode_seconds > 0
        return Stats(
            len(self.prompt), len(self.ids), self._prefill_seconds, self._decode_seconds,
            steps / self._decode_seconds if timed else None, self.stop_reason, self.seed,
            self.speculator.result() if self.speculator is not None else None,
        )

    def result(self) -> Result:
        return Result(self.text, tuple(self.ids), self.stats)
