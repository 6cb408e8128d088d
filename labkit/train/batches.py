"""Token batches from the corpus: the batch of step n depends on the seed and n alone."""

from __future__ import annotations

import numpy as np
import torch

from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import Tokenizer


class Batches:
    """Windows of `length` tokens, each a document of its own that begins with BOS.

    Every epoch cuts each novel anew, at a random phase, and shuffles the pieces. Being a pure
    function of the step, a resumed run sees the batches that an uninterrupted one would.
    """

    def __init__(self, tokenizer: Tokenizer, batch: int, length: int, seed: int) -> None:
        assert tokenizer.bos_id is not None and tokenizer.eos_id is not None
        self.bos = tokenizer.bos_id
        self.novels = [
            np.array([*tokenizer.encode(text), tokenizer.eos_id], dtype=np.int32)
            for text in load_corpus("train").values()
        ]
        self.batch, self.length, self.seed = batch, length, seed
        # Pieces per epoch do not depend on the phase: one piece of every novel is given up for it.
        self.pieces = sum((len(n) - length) // length for n in self.novels)
        self.steps_per_epoch = self.pieces // batch
        self._epoch = -1
        self._order: list[tuple[int, int]] = []

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

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, targets) of a step, int64 [batch, length] each."""
        epoch, place = divmod(step, self.steps_per_epoch)
        chosen = self._pieces(epoch)[place * self.batch : (place + 1) * self.batch]
        rows = np.stack([
            np.concatenate([[self.bos], self.novels[n][first : first + self.length]])
            for n, first in chosen
        ])
        tokens = torch.from_numpy(rows.astype(np.int64))                # [batch, 1+length]
        return tokens[:, :-1], tokens[:, 1:]
