"""Does the model find a value again that was stated once, so many tokens ago?"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from labkit.text.synthetic import Document, recall
from labkit.text.tokenizer import Tokenizer


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
