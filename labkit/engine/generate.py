"""Generation: draw an id, say its text, take it in, until something ends it.

`Generation` is the only loop. Iterating over it yields an `Event` per token as it is drawn;
`Lab.generate` runs it to the end.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from labkit.engine.replay import decoder_tail
from labkit.engine.sampling import Sampling, distribution, sample
from labkit.engine.session import Session, one_thread, prefill_mode
from labkit.engine.speculation import Request
from labkit.engine.speculator import Speculation, Speculator
from labkit.engine.stopping import StopFilter, checked_stops
from labkit.errors import InputError
from labkit.text.tokenizer import Tokenizer

StopReason = Literal["eos", "stop", "length", "interrupted"]


@dataclass(frozen=True)
class Candidate:
    """An id that could have come next.

    probability  the model's own: softmax of the logits
    sampled      after temperature, top_k and top_p; what the draw is made from
    """

    id: int
    text: str
    probability: float
    sampled: float


@dataclass(frozen=True)
class Event:
    """One drawn id. The texts of all events join to the text of the generation.

    text         what became sure with this id: "" inside a character of several ids, and while
                 a stop string may be under way
    probability, sampled   as in `Candidate`
    candidates   the likeliest ids by `probability`, likeliest first, as many as asked for
    stop_reason  on the last event: eos, stop (a stop string) or length (max_new_tokens)
    """

    index: int
    id: int
    text: str
    probability: float
    sampled: float
    candidates: tuple[Candidate, ...]
    stop_reason: StopReason | None


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


class Generation:
    """A running generation; iterate once. `text`, `ids` and `stats` are current at any moment.

    All arguments are checked here, before the first token is computed.

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
        _check_count("max_new_tokens", max_new_tokens, least=1)
        _check_count("candidates", candidates, least=0)
        if seed is not None and (
            not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63
        ):
            raise InputError(f"seed is {seed!r}: it must be a whole number from 0 to 2**63 - 1")
        _check_prompt(prompt, config.vocab_size)
        total = session.length + len(prompt) + max_new_tokens
        if total > config.max_position_embeddings:
            raise InputError(
                f"{session.length + len(prompt)} prompt tokens and {max_new_tokens} new ones make "
                f"{total}, more than the context of {config.max_position_embeddings} "
                "(max_position_embeddings): shorten the prompt or lower max_new_tokens")
        self.session, self.tokenizer, self.sampling = session, tokenizer, sampling
        self.prompt, self.max_new_tokens = list(prompt), max_new_tokens
        self.candidates = candidates
        self.prefill = prefill_mode(prefill)
        decoder_tail(config, halo, cut)  # refuses an unknown halo or cut
        if chunk is not None:
            _check_count("chunk", chunk, least=1)
        self.halo, self.cut, self.chunk = halo, cut, chunk
        # Without a seed one is drawn, and reported, so that any run can be repeated.
        self.seed = secrets.randbits(32) if seed is None else seed
        self.speculator = speculator
        if speculator is not None:
            speculator.begin(session.model, session.cache)
        self.ids: list[int] = []
        self.text = ""
        self.stop_reason: StopReason | None = None
        self._generator = torch.Generator().manual_seed(self.seed)
        self._decoder = tokenizer.stream()
        self._filter = StopFilter(checked_stops(stop))
        self._prefill_seconds = self._decode_seconds = 0.0
        self._events = self._run()

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def _run(self) -> Iterator[Event]:
        started = time.perf_counter()
        logits = self._read_prompt()                                   # [1,1,V]
        event = self._event(logits[0, -1])
        self._prefill_seconds = time.perf_counter() - started
        yield event
        while self.stop_reason is None:
            if self.speculator is not None:
                yield from self._speculate(self.speculator)
                continue
            started = time.perf_counter()
            logits = self.session.decode(event.id)                     # [1,1,V]
            event = self._event(logits[0, -1])
            self._decode_seconds += time.perf_counter() - started
            yield event

    def _speculate(self, speculator: Speculator) -> Iterator[Event]:
        """One step: an event for each id that it emits, as far as the text goes on."""
        started, cache = time.perf_counter(), self.session.cache
        begin, before = cache.lengths, len(self.ids)
        # The anchor is among the ids; what is drafted must leave room for the target's own token.
        request = Request(self.ids[-1], self.sampling, self._generator,
                          self.max_new_tokens - len(self.ids) - 1)
        try:
            with one_thread(self.session.small):
                emission = speculator.step(self.session.model, cache, request,
                                           self.tokenizer.vocab_size)
            self._decode_seconds += time.perf_counter() - started
            for id_, logits in zip(emission.ids, emission.logits, strict=True):
                started = time.perf_counter()
                event = self._event(logits, id_)
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

    def _event(self, logits: torch.Tensor, decided: int | None = None) -> Event:
        """Logits [V] -> the next id (drawn here, or decided), its text, whether it was the last."""
        # Ids that pad the vocabulary have no text; they cannot be drawn.
        logits = logits[: self.tokenizer.vocab_size]
        s = self.sampling
        with one_thread():                                              # V numbers: one is enough
            model = distribution(logits)
            drawn_from = distribution(logits, s.temperature, s.top_k, s.top_p)
            id_ = sample(drawn_from, self._generator) if decided is None else decided
        reason: StopReason | None = None
        piece = ""
        if id_ == self.session.model.config.eos_token_id:
            reason = "eos"
        else:
            piece = self._filter.push(self._decoder.push(id_))
            if self._filter.stopped:
                reason = "stop"
            elif len(self.ids) + 1 == self.max_new_tokens:
                reason = "length"
        if reason in ("eos", "length"):
            piece += self._rest()
        event = Event(len(self.ids), id_, piece, float(model[id_]), float(drawn_from[id_]),
                      self._likeliest(model, drawn_from), reason)
        self.ids.append(id_)
        self.text += piece
        self.stop_reason = reason
        return event

    def _likeliest(self, model: torch.Tensor, drawn_from: torch.Tensor) -> tuple[Candidate, ...]:
        if not self.candidates:
            return ()
        ids = torch.sort(model, descending=True, stable=True).indices[: self.candidates].tolist()
        return tuple(
            Candidate(i, text, float(model[i]), float(drawn_from[i]))
            for i, text in zip(ids, self.tokenizer.decode_each(ids), strict=True)
        )

    def _rest(self) -> str:
        """The end of the text: an unfinished character and what the filter held back."""
        piece = self._filter.push(self._decoder.finish())
        return piece + self._filter.finish()

    def interrupt(self) -> str:
        """End it where it is (Ctrl-C): the piece of text that was still held back."""
        self._events.close()  # type: ignore[attr-defined]
        if self.stop_reason is not None:
            return ""
        self.stop_reason = "interrupted"
        piece = self._rest()
        self.text += piece
        return piece

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


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}: it must be a whole number, at least {least}")


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise InputError("the prompt is empty: give at least one token")
    for id_ in prompt:
        if not isinstance(id_, int) or isinstance(id_, bool):
            raise InputError(f"the prompt holds {id_!r}: a list of ids takes whole numbers only")
        if not 0 <= id_ < vocab_size:
            raise InputError(f"token id {id_} is outside the vocabulary 0..{vocab_size - 1}")
