"""A training run in stages: which stage a step is in, which rows it reads, the losses by kind."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from labkit.text.tokenizer import Tokenizer
from labkit.train.batches import Batches
from labkit.train.run import TrainingRun


class StagedRun(TrainingRun, ABC):
    """Its options have `steps` and `stages` (`labkit.train.loop.Stage`)."""

    def __init__(self, folder: Path, options: Any, tokenizer: Tokenizer,
                 seeds: Sequence[int] | None = None) -> None:
        """seeds: of the rows of every stage; None: the options' own, one higher each."""
        super().__init__(folder, options)
        self.tokenizer = tokenizer
        stages = options.stages
        self.batches = [Batches(tokenizer, stage.tokens // stage.length, stage.length, seed,
                                stage.shares, stage.answers)
                        for stage, seed in zip(stages, seeds or [
                            options.seed + number for number in range(len(stages))], strict=True)]
        self.by_kind: dict[str, list[float]] = {}       # losses of the rows since the last log

    @property
    def ends(self) -> list[int]:
        """Of every stage, the first step that is not its."""
        return [round(stage.until * self.options.steps) for stage in self.options.stages]

    def stage(self, step: int) -> tuple[int, int]:
        """The stage of a step, and how many of its steps lie before it."""
        number = sum(step >= end for end in self.ends[:-1])
        return number, step - (self.ends[number - 1] if number else 0)

    @property
    def tokens(self) -> int:
        """Read by the end of the step that is running."""
        return self.tokens_after(self.step + 1)

    def tokens_after(self, steps: int) -> int:
        """Read by the end of so many steps."""
        total, begin = 0, 0
        for stage, end in zip(self.options.stages, self.ends, strict=True):
            total += stage.tokens * max(0, min(steps, end) - begin)
            begin = end
        return total

    @property
    def length(self) -> int:
        """Tokens of the longest rows."""
        return max(stage.length for stage in self.options.stages)

    def keep_losses(self, number: int, within: int, losses: torch.Tensor,
                    weights: torch.Tensor, mark: str = "") -> None:
        """Note the losses [B,T] of a step's rows under their kinds, for the log; those of tokens
        that weigh more than 1 also as `answers`. mark: put behind all these names."""
        answers = losses.detach()[weights > 1]
        if len(answers):
            self.by_kind.setdefault("answers" + mark, []).append(answers.mean().item())
        for (kind, _), value in zip(self.batches[number].kinds(within), losses.mean(1).tolist(),
                                    strict=True):
            self.by_kind.setdefault(kind + mark, []).append(value)

    def log(self, facts: dict[str, Any]) -> None:
        kinds = {kind: round(sum(rows) / len(rows), 4) for kind, rows in self.by_kind.items()}
        self.by_kind = {}
        super().log(facts | ({"loss_by_kind": kinds} if kinds else {}))
