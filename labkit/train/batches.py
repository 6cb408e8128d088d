"""Token batches: the batch of step n depends on the seed and n alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from labkit.errors import InputError
from labkit.text.corpus import load_corpus
from labkit.text.synthetic import KINDS, SHORTEST_DOCUMENT, document
from labkit.text.tokenizer import Tokenizer

DOCUMENTS_A_ROW = 1024  # numbers reserved for the documents of a row: more than fit any


class Novels:
    """Rows of `length` tokens of the novels, each a document of its own that begins with BOS.

    Every epoch cuts each novel anew, at a random phase, and shuffles the pieces.
    """

    def __init__(self, tokenizer: Tokenizer, length: int, seed: int) -> None:
        assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
        self.bos = tokenizer.bos_id
        self.novels = [
            np.array([*tokenizer.encode(text), tokenizer.eos_id], dtype=np.int32)
            for text in load_corpus("train").values()
        ]
        self.length, self.seed = length, seed
        # Pieces per epoch do not depend on the phase: one piece of every novel is given up for it.
        self.pieces = sum((len(n) - length) // length for n in self.novels)
        self._epoch = -1
        self._order: list[tuple[int, int]] = []

    def __call__(self, number: int) -> np.ndarray:
        """Row `number`: int32 [1+length]."""
        epoch, place = divmod(number, self.pieces)
        novel, first = self._pieces(epoch)[place]
        return np.concatenate([[self.bos], self.novels[novel][first : first + self.length]])

    def _pieces(self, epoch: int) -> list[tuple[int, int]]:
        """(novel, first token) of every piece of an epoch, shuffled."""
        if epoch != self._epoch:
            rng = np.random.default_rng((self.seed, epoch))
            order = []
            for number, novel in enumerate(self.novels):
                count = (len(novel) - self.length) // self.length
                phase = int(rng.integers(len(novel) - count * self.length + 1))
                order += [(number, phase + i * self.length) for i in range(count)]
            rng.shuffle(order)
            self._epoch, self._order = epoch, order
        return self._order


class Batches:
    """Rows of one kind each, the kinds by their shares: novels, or documents one after another.

    Being a pure function of the step, a resumed run sees the batches that an uninterrupted one
    would. The documents of a row begin with BOS each; the last is cut where the row ends.
    """

    def __init__(self, tokenizer: Tokenizer, batch: int, length: int, seed: int,
                 shares: Mapping[str, float] | None = None, answers: float = 1.0) -> None:
        """shares: kind (`labkit.text.synthetic.KINDS`) -> part of the rows; None: novels alone.
        answers: weight of the tokens of an answer (`Document.answers`); of all others it is 1.
        """
        self.tokenizer, self.batch, self.length, self.seed = tokenizer, batch, length, seed
        self.answers = answers
        self.shares = dict(shares or {"novels": 1.0})
        unknown = set(self.shares) - set(KINDS)
        if unknown or min(self.shares.values()) < 0 or abs(sum(self.shares.values()) - 1) > 1e-6:
            raise InputError(f"shares are {self.shares}: give parts of {', '.join(KINDS)} that "
                             "are 0 or more and together 1")
        if set(self.shares) != {"novels"} and length < SHORTEST_DOCUMENT:
            raise InputError(f"length is {length}: documents take {SHORTEST_DOCUMENT} tokens")
        self.novels = Novels(tokenizer, length, seed)
        if batch < 1:
            raise InputError(f"a step has no row of {length} tokens: give it more tokens")
        if batch > self.novels.pieces:
            raise InputError(f"batch {batch} is more than the {self.novels.pieces} pieces of "
                             f"{length} tokens that the novels give")
        self._kinds: list[tuple[str, int]] = []                 # of the rows so far
        self._given = dict.fromkeys(self.shares, 0)             # rows of every kind among them

    def kind(self, row: int) -> tuple[str, int]:
        """Kind of a row and its number among those of its kind: next is who is furthest behind."""
        while len(self._kinds) <= row:
            kind = max(self.shares, key=lambda k: (
                self.shares[k] * (len(self._kinds) + 1) - self._given[k]))
            self._kinds.append((kind, self._given[kind]))
            self._given[kind] += 1
        return self._kinds[row]

    def row(self, kind: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Row `number` of a kind, int32 [1+length], and the weight of each token, fp32."""
        weights = np.ones(1 + self.length, dtype=np.float32)
        if kind == "novels":
            return self.novels(number), weights
        ids: list[int] = []
        index = number * DOCUMENTS_A_ROW
        while len(ids) < self.length + 1:
            room = max(SHORTEST_DOCUMENT, self.length - len(ids))
            found = document(kind, self.tokenizer, seed=self.seed, index=index, length=room)
            ids.append(self.novels.bos)
            for answer in found.answers:
                weights[len(ids) + answer.at : len(ids) + answer.at + answer.size] = self.answers
            ids += found.ids
            index += 1
        return np.array(ids[: self.length + 1], dtype=np.int32), weights

    def kinds(self, step: int) -> list[tuple[str, int]]:
        """`kind` of every row of a step."""
        return [self.kind(step * self.batch + row) for row in range(self.batch)]

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(ids, targets, weights of the targets) of a step, [batch, length] each; int64, fp32."""
        rows, weights = zip(*(self.row(kind, number) for kind, number in self.kinds(step)),
                            strict=True)
        tokens = torch.from_numpy(np.stack(rows).astype(np.int64))      # [batch, 1+length]
        return tokens[:, :-1], tokens[:, 1:], torch.from_numpy(np.stack(weights))[:, 1:]
