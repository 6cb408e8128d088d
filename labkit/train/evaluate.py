"""What text costs a model: bits per byte, nats a token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import Tokenizer

Window = tuple[list[int], int]  # ids, how many of the last targets count
Group = list[Window]


@dataclass(frozen=True)
class Cost:
    """Cross-entropy of some text, and how much text that was."""

    bits: float
    bytes: int
    tokens: int

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes

    @property
    def nats_per_token(self) -> float:
        return self.bits * math.log(2) / self.tokens


def heldout_window(context: int) -> int:
    """Tokens of a window of held-out text, BOS included: 1,024, or the context."""
    return min(1024, context)


def bits_per_byte(
    model: torch.nn.Module, tokenizer: Tokenizer, texts: Mapping[str, str] | None = None, *,
    length: int = 1024, stride: int = 512, batch: int = 2, limit: int | None = None,
    progress: Callable[[list[Group]], Iterable[Group]] = iter,
) -> float:
    """Bits per UTF-8 byte of the held-out text (or `texts`): `text_cost` in one number."""
    return text_cost(model, tokenizer, texts, length=length, stride=stride, batch=batch,
                     limit=limit, progress=progress).bits_per_byte


@torch.no_grad()
def text_cost(
    model: torch.nn.Module, tokenizer: Tokenizer, texts: Mapping[str, str] | None = None, *,
    length: int = 1024, stride: int = 512, batch: int = 2, limit: int | None = None,
    progress: Callable[[list[Group]], Iterable[Group]] = iter,
) -> Cost:
    """Cross-entropy of the held-out text (or `texts`).

    Every window of `length` tokens begins with BOS; only its last `stride` tokens count (the
    first window of a text counts whole), so a token has `length - stride` tokens of context or
    all there are. limit: windows at most, evenly spread (for a quick look).
    """
    assert tokenizer.bos_id is not None
    windows: list[Window] = []
    for text in (texts if texts is not None else load_corpus("heldout")).values():
        ids = tokenizer.encode(text)
        done = 0
        while done < len(ids):
            new = min(length - 1 if done == 0 else stride, len(ids) - done)
            first = max(0, done + new - (length - 1))
            windows.append(([tokenizer.bos_id, *ids[first : done + new]], new))
            done += new
    if limit is not None and limit < len(windows):
        windows = [windows[i * len(windows) // limit] for i in range(limit)]
    bits, size, tokens = 0.0, 0, 0
    windows.sort(key=lambda w: len(w[0]))
    groups = [windows[i : i + batch] for i in range(0, len(windows), batch)]
    for group in progress(groups):
        lengths = torch.tensor([len(ids) for ids, _ in group])
        rows = torch.full((len(group), int(lengths.max())), tokenizer.bos_id)
        for row, (ids, _) in enumerate(group):
            rows[row, : len(ids)] = torch.tensor(ids)
        logits = model(rows, lengths).logits
        for row, (ids, new) in enumerate(group):
            end = len(ids)
            nats = F.cross_entropy(logits[row, end - 1 - new : end - 1].float(),
                                   rows[row, end - new : end], reduction="sum")
            bits += float(nats) / math.log(2)
            size += len(tokenizer.decode(ids[-new:]).encode("utf-8"))
            tokens += new
    return Cost(bits, size, tokens)
