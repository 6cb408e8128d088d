"""Does the model find a value again that was stated once, so many tokens ago?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.text.synthetic import SHORTEST_DOCUMENT, Document, recall
from labkit.text.tokenizer import Tokenizer
from labkit.train.controls import all_entries, changed, muted_engram, selecting

DISTANCES = (20, 32, 64, 128, 256, 512, 1024, 1536, 1900)
"""A statement takes up to 18 tokens of the shipped vocabulary, and no question is nearer."""
NEAR = 256           # the target holds up to here
MARGIN = 128         # tokens of text beyond the distance, in which other statements stand
# Tokens x entries of a batch: a score matrix of every head is made of them.
PRODUCTS = 1 << 22


@dataclass(frozen=True)
class RecallPoint:
    """`right` of `count` values recalled whole, `distance` tokens after their statement, in
    texts of `length` tokens, by the model under a control."""

    control: str
    distance: int
    length: int
    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.right, self.count)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share; z = 1.96: 95 %."""
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / count / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


# ---- the model as shipped, and with one thing changed ----------------------------------------

AS_SHIPPED = "as shipped"
_CHANGES: dict[str, Callable[[Transformer], contextlib.AbstractContextManager[None]]] = {
    AS_SHIPPED: lambda model: selecting(model, "index"),
    "all entries": lambda model: all_entries(model),
    "window only": lambda model: selecting(model, "none"),
    # Which half finds it: the other one sees its windows alone.
    "encoder blind": lambda model: changed(model, blind="encoder"),
    "decoder blind": lambda model: changed(model, blind="decoder"),
    "random selection": lambda model: selecting(model, "random"),
    "Engram muted": muted_engram,
}
CONTROLS = tuple(_CHANGES)


@contextlib.contextmanager
def controlled(model: Transformer, control: str) -> Iterator[None]:
    """Inside, the model is as the control says, one of `CONTROLS`."""
    if control not in _CHANGES:
        raise InputError(f"control is {control!r}: choose one of {', '.join(CONTROLS)}")
    with _CHANGES[control](model):
        yield


def distances(context: int) -> list[int]:
    """Those of `DISTANCES` that fit the context, and the farthest that surely does; of a context
    too short for any text, none."""
    if context - 1 < SHORTEST_DOCUMENT:
        return []
    farthest = context - 1 - 48  # room for the statement and its question, and some words
    found = [d for d in DISTANCES if d <= farthest]
    return found if farthest - found[-1] < found[-1] // 4 else [*found, farthest // 20 * 20]


def text_length(distance: int, context: int) -> int:
    """Tokens of the texts, without BOS."""
    return min(context - 1, max(SHORTEST_DOCUMENT, distance + MARGIN))


def needles_fit(tokenizer: Tokenizer) -> bool:
    """Whether distances in tokens can be set with this vocabulary."""
    try:
        recall(tokenizer, DISTANCES[1], SHORTEST_DOCUMENT)
    except InputError:
        return False
    return True


def recall_curve(
    model: Transformer, tokenizer: Tokenizer, counts: Callable[[str, int], int],
    progress: Callable[[list[tuple[str, int]]], Iterable[tuple[str, int]]] = iter,
) -> tuple[RecallPoint, ...]:
    """Every control at every distance; the examples of a distance are the same for all, as many
    as `counts(control, distance)` says (0: none)."""
    context = model.config.max_position_embeddings
    jobs = [(control, distance) for control in CONTROLS for distance in distances(context)
            if counts(control, distance)]
    points = []
    for control, distance in progress(jobs):
        length, count = text_length(distance, context), counts(control, distance)
        batch = max(1, min(8, PRODUCTS // length**2))
        with controlled(model, control):
            share = recall_accuracy(model, tokenizer, distance, length=length, count=count,
                                    batch=batch)
        points.append(RecallPoint(control, distance, length, round(share * count), count))
    return tuple(points)


# ---- one distance ----------------------------------------------------------------------------


@torch.no_grad()
def recall_accuracy(
    model: torch.nn.Module, tokenizer: Tokenizer, distance: int, *, length: int, count: int = 32,
    batch: int = 8, seed: int = 0, progress: Callable[[range], Iterable[int]] = iter,
) -> float:
    """Share of `count` values recalled whole, by greedy decoding behind the text.

    Each is stated once in a text of exactly `length` tokens (held-out filler, three other
    statements, keys and values drawn fresh) and asked `distance` tokens later. As the value is
    all that is read of the answer, greedy decoding is right if every token of it is the best
    guess behind the tokens before it.
    """
    right = 0
    for first in progress(range(0, count, batch)):
        found = [recall(tokenizer, distance, length, seed=seed, index=index)
                 for index in range(first, min(first + batch, count))]
        right += sum(_recalled(model, tokenizer, found))
    return right / count


def _recalled(model: torch.nn.Module, tokenizer: Tokenizer, found: list[Document]) -> list[bool]:
    assert tokenizer.bos_id is not None
    ids = torch.tensor([[tokenizer.bos_id, *document.ids] for document in found])    # [n,1+length]
    guesses = model(ids[:, :-1]).logits.argmax(-1)                                   # [n,length]
    out = []
    for row, document in enumerate(found):
        (answer,) = document.answers
        place = slice(answer.at, answer.at + answer.size)  # of the guesses: BOS shifts them by one
        out.append(guesses[row, place].tolist() == list(document.ids[place]))
    return out
