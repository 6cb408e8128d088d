"""Next-token distributions of one computation against another; what a lost window costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from labkit.errors import InputError
from labkit.lab import Lab
from labkit.text.corpus import load_corpus


@dataclass
class Agreement:
    """Next-token distributions against others at the same positions."""

    kl: list[float] = field(default_factory=list)       # nats
    same: int = 0                                       # positions with the same likeliest token

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Logits [n,V] each: KL(expected || found)."""
        p, q = (x.double().log_softmax(-1) for x in (expected, found))
        self.kl += (p.exp() * (p - q)).sum(-1).clamp(min=0).tolist()
        self.same += int((p.argmax(-1) == q.argmax(-1)).sum())

    @property
    def mean(self) -> float:
        return statistics.fmean(self.kl)

    HEAD = f"{'KL mean':>11}{'KL max':>11}{'same argmax':>20}"

    def __str__(self) -> str:
        share = f"{self.same}/{len(self.kl)} {100 * self.same / len(self.kl):.1f}%"
        return f"{self.mean:11.2e}{max(self.kl):11.2e}{share:>20}"


def held_out(lab: Lab, count: int, length: int) -> list[list[int]]:
    """`count` texts of `length` ids with BOS, from places spread over the held-out novels.

    InputError for a length that a novel does not have.
    """
    novels = [lab.tokenizer.encode(text) for text in load_corpus("heldout").values()]
    texts = []
    for i in range(count):
        novel = novels[i % len(novels)]
        room = len(novel) - (length - 1)
        if room < 1:
            raise InputError(f"a held-out novel has {len(novel)} tokens, fewer than {length}: ask "
                             "for shorter texts")
        turn, turns = i // len(novels), -(-count // len(novels))
        at = room * turn // turns
        texts.append([lab.config.bos_token_id, *novel[at : at + length - 1]])
    return texts


# ---- reuse -----------------------------------------------------------------------------------

REUSES = ("cold", "full hit", "global-only bounded", "global-only exact")


class Reuse:
    """A prompt whose beginning was read before, by a session that then went on in another way.

    Its windows are those of the other way, so only the global entries of the beginning are
    there: what a user meets who returns after minutes.
    """

    def __init__(self, lab: Lab, ids: list[int], hit: int, elsewhere: list[int]) -> None:
        """hit: tokens of ids that were read before; elsewhere: ids that were read after them."""
        self.lab, self.past, self.new = lab, ids[:hit], ids[hit:]
        self.kept = lab.session()
        self.kept.prefill(self.past, last_only=True)
        self.saved = self.kept.snapshot()
        self.kept.prefill(elsewhere, last_only=True)

    def logits(self, kind: str) -> torch.Tensor:
        """[T,V] of the ids behind the hit, read in one of the ways `REUSES`.

        cold                 nothing is there: all is read
        full hit             entries and windows of that moment are there (`Session.restore`)
        global-only bounded, global-only exact
                             the entries are there, the windows are read again (`Session.crop`)
        """
        if kind not in REUSES:
            raise InputError(f"kind is {kind!r}: choose one of {', '.join(REUSES)}")
        if kind == "cold":
            return self.lab.session().prefill([*self.past, *self.new])[0, len(self.past) :]
        session = self.kept.fork()
        if kind == "full hit":
            session.restore(self.saved)
        else:
            session.crop(len(self.past), kind.split()[-1])
        return session.prefill(self.new)[0]


def elsewhere(lab: Lab, text: list[int], hit: int) -> list[int]:
    """Ids for a session to go on with in another way: a window of them where the context allows."""
    room = lab.config.max_position_embeddings - hit
    return text[1 : 1 + min(lab.config.sliding_window, room)]


def bounded_replay(lab: Lab, texts: int, hit: int, suffix: int,
                   progress: Callable[[list[list[int]]], Iterable[list[int]]] = iter) -> Agreement:
    """KL(cold || global-only bounded) of the `suffix` ids behind `hit` ids, on held-out texts."""
    found = Agreement()
    rows = held_out(lab, texts, hit + suffix)
    other = elsewhere(lab, rows[-1], hit)
    for ids in progress(rows):
        reuse = Reuse(lab, ids, hit, other)
        found.add(reuse.logits("cold"), reuse.logits("global-only bounded"))
    return found
