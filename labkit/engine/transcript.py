"""What one request writes: ids that are drawn one after the other, their text, and its end.

One request or many at once, plain or speculative: whoever computes the logits hands them to the
request's `Transcript`, which draws (or is told) the id and says what it means for the text.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from labkit.config import ModelConfig
from labkit.engine.sampling import Sampling, distribution, sample
from labkit.engine.session import one_thread
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


class Transcript:
    """The text of one request so far: `ids`, `text`, `stop_reason` (None: it goes on).

    All arguments are checked here. past: tokens that the model knows before the prompt. seed:
    without one it is drawn, and kept, so that any run can be repeated.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, prompt: Sequence[int],
                 max_new_tokens: int, sampling: Sampling,
                 stop: str | Sequence[str] | None = None, seed: int | None = None,
                 candidates: int = 0, past: int = 0) -> None:
        check_count("max_new_tokens", max_new_tokens, least=1)
        check_count("candidates", candidates, least=0)
        if seed is not None and (
            not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63
        ):
            raise InputError(f"seed is {seed!r}: it must be a whole number from 0 to 2**63 - 1")
        _check_prompt(prompt, config.vocab_size)
        total = past + len(prompt) + max_new_tokens
        if total > config.max_position_embeddings:
            raise InputError(
                f"{past + len(prompt)} prompt tokens and {max_new_tokens} new ones make "
                f"{total}, more than the context of {config.max_position_embeddings} "
                "(max_position_embeddings): shorten the prompt or lower max_new_tokens")
        self.tokenizer, self.sampling = tokenizer, sampling
        self.prompt, self.max_new_tokens = list(prompt), max_new_tokens
        self.candidates = candidates
        self.seed = secrets.randbits(32) if seed is None else seed
        self.generator = torch.Generator().manual_seed(self.seed)
        self.ids: list[int] = []
        self.text = ""
        self.stop_reason: StopReason | None = None
        self._eos = config.eos_token_id
        self._decoder = tokenizer.stream()
        self._filter = StopFilter(checked_stops(stop))

    def take(self, logits: torch.Tensor, decided: int | None = None,
             drawn_from: torch.Tensor | None = None) -> Event:
        """Logits [V] -> the next id (drawn here, or decided), its text, whether it was the last.

        drawn_from: their `distribution` under `sampling`, where it is known already.
        """
        # Ids that pad the vocabulary have no text; they cannot be drawn.
        logits = logits[: self.tokenizer.vocab_size]
        s = self.sampling
        with one_thread():                                              # V numbers: one is enough
            model = distribution(logits)
            if drawn_from is None:
                drawn_from = (model if s == Sampling() else
                              distribution(logits, s.temperature, s.top_k, s.top_p))
            candidates = self._likeliest(model, drawn_from)
            id_ = sample(drawn_from, self.generator) if decided is None else decided
        reason: StopReason | None = None
        piece = ""
        if id_ == self._eos:
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
                      candidates, reason)
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

    def end(self) -> str:
        """End it where it is: the piece of text that was still held back."""
        if self.stop_reason is not None:
            return ""
        self.stop_reason = "interrupted"
        piece = self._rest()
        self.text += piece
        return piece


def check_count(name: str, value: object, least: int) -> None:
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
