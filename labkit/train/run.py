"""A training run in a folder: steps, a log, a state to go on from, an end after a whole step."""

from __future__ import annotations

import dataclasses
import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from labkit.errors import InputError
from labkit.train.state import load_run, save_run


class TrainingRun(ABC):
    """One run in one folder: `log.jsonl`, `state.safetensors`.

    A subclass calls `resume` at the end of its constructor and says what a step is (`one_step`),
    what is looked at from time to time (`glance`) and what the progress bar shows (`postfix`).
    """

    log_every = 20

    def __init__(self, folder: Path, options: Any) -> None:
        """options: a dataclass with `steps` at least."""
        self.folder, self.options = folder, options
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.stopping = False

    def resume(self, trained: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Say what is trained and saved; go on from what an earlier run has saved of it."""
        self.trained, self.optimizers = trained, optimizers
        facts = load_run(self.folder, trained, optimizers)
        if facts is not None:
            self._check_options(facts["options"])
            self.step, self.seconds = facts["step"], facts["seconds"]
            self.cpu_seconds = facts.get("cpu_seconds", 0.0)

    def _check_options(self, saved: dict[str, Any]) -> None:
        """A run goes on with the options that it began with; only its length may change."""
        for name, value in json.loads(json.dumps(dataclasses.asdict(self.options))).items():
            if name != "steps" and saved.get(name) != value:
                raise InputError(
                    f"the run in {self.folder} has {name} {saved.get(name)}, not {value}: give "
                    "the same value, another folder, or --fresh")

    def stop(self) -> None:
        """End after the step that is running: a step is done whole or not at all."""
        self.stopping = True

    def run(self, save_every: float = 300.0, look_every: int = 250, quiet: bool = False) -> None:
        """Train to the last step, or until `stop`; saves, and a later call goes on from there.

        Without a handler that calls `stop`, Ctrl-C leaves at once with the last saved state.
        """
        self.stopping = False
        bar = tqdm(total=self.options.steps, initial=self.step, unit="step", disable=quiet,
                   mininterval=5)
        saved = time.monotonic()
        try:
            while self.step < self.options.steps and not self.stopping:
                begun, begun_cpu = time.monotonic(), time.process_time()
                facts = self.one_step()
                self.step += 1
                self.seconds += time.monotonic() - begun
                self.cpu_seconds += time.process_time() - begun_cpu
                facts["seconds"] = round(self.seconds, 1)
                looking = self.step % look_every == 0 or self.step == self.options.steps
                if looking:
                    facts |= self.glance()
                if self.step % self.log_every == 0 or looking:
                    self.log(facts)
                bar.update()
                bar.set_postfix(self.postfix(facts))
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
            self.save()
        finally:
            bar.close()

    @abstractmethod
    def one_step(self) -> dict[str, Any]:
        """Forward, backward, update; what the log records of it."""

    @abstractmethod
    def glance(self) -> dict[str, Any]:
        """What the log records at times, of the model as it would be shipped."""

    @abstractmethod
    def postfix(self, facts: dict[str, Any]) -> dict[str, str]:
        """What the progress bar shows of a step."""

    def set_rates(self, factor: float) -> None:
        """Learning rates of the coming update: `factor` of every group's peak."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor

    def update(self, factor: float, clip: float) -> float:
        """Clip, move by the gradients, drop them; the norm that they had."""
        norm = torch.nn.utils.clip_grad_norm_(
            [p for p in self.trained.parameters() if p.grad is not None], clip)
        self.set_rates(factor)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(norm)

    def log(self, facts: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(facts) + "\n")

    def save(self) -> None:
        save_run(self.folder, self.trained, self.optimizers, {
            "step": self.step, "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),  # without the time that others computed
            "threads": torch.get_num_threads(),
            "options": dataclasses.asdict(self.options)})
