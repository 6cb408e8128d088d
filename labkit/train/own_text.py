"""Text that a target writes itself, for its draft to learn from.

On the novels that it was trained on a small target is surer than anywhere else, and a draft that
has seen nothing else expects that. What the target writes is as new to it as held-out text.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from labkit.model.transformer import Transformer
from labkit.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from labkit.train.batches import Novels

FILE = "own_text.safetensors"
PROMPT = 32   # tokens of a novel that a row begins with
ROWS = 256    # written side by side


@torch.no_grad()
def write_rows(model: Transformer, tokenizer: Tokenizer, count: int, length: int, seed: int,
               progress: Callable[[range], Iterable[int]] = iter) -> torch.Tensor:
    """`count` rows of BOS and `length` tokens at temperature 1, int32 [count,1+length].

    A row depends on the seed and its number alone, up to rounding. Special tokens are not drawn:
    a row is one text.
    """
    beginnings = Novels(tokenizer, PROMPT, seed)
    special = [id_ for role in SPECIAL_TOKENS if (id_ := tokenizer.special_id(role)) is not None]
    groups = [list(range(first, min(first + ROWS, count))) for first in range(0, count, ROWS)]
    steps = iter(progress(range(len(groups) * (length - PROMPT))))
    rows = []
    for numbers in groups:
        chance = [torch.Generator().manual_seed(seed * 1_000_003 + n) for n in numbers]
        ids = torch.stack([torch.from_numpy(beginnings(n)).long() for n in numbers])  # [n,1+PROMPT]
        cache, new, parts = model.new_cache(len(numbers), "plain", draft=False), ids, [ids]
        for _ in range(length - PROMPT):
            next(steps)
            logits = model(new, cache=cache, last_only=True).logits[:, -1].float()   # [n,V]
            logits[:, special] = float("-inf")
            # One number a row: its place among the sums of the odds is the token.
            drawn = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in chance])
            sums = logits.double().softmax(-1).cumsum(-1)                           # [n,V]
            new = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)
            parts.append(new)
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows).int()


def own_text(folder: Path, model: Transformer, tokenizer: Tokenizer, count: int, length: int,
             seed: int, progress: Callable[[range], Iterable[int]] = iter) -> torch.Tensor:
    """The rows in a run's folder, written now if they are not there: int32 [count,1+length]."""
    path = folder / FILE
    if path.is_file():
        return load_file(path)["ids"]
    rows = write_rows(model, tokenizer, count, length, seed, progress)
    folder.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".part")
    save_file({"ids": rows}, staging)
    os.replace(staging, path)
    return rows
