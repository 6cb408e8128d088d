"""The state of a training run on disk: safetensors and JSON, replaced by one rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from labkit.errors import CheckpointError


def save_run(folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer],
             facts: dict[str, Any]) -> None:
    """Weights and optimiser state in one file, `facts` (step, options) in its header."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}
    for number, optimizer in enumerate(optimizers):
        for p, state in optimizer.state.items():
            for key, value in state.items():
                tensors[f"optimizer.{number}.{names[p]}.{key}"] = torch.as_tensor(value)
    staging = folder / "state.safetensors.part"
    save_file({k: v.contiguous() for k, v in tensors.items()}, staging,
              metadata={"facts": json.dumps(facts)})
    os.replace(staging, folder / "state.safetensors")


def load_run(folder: Path, model: nn.Module,
             optimizers: list[torch.optim.Optimizer]) -> dict[str, Any] | None:
    """Restore what `save_run` wrote and return its facts; None if there is nothing."""
    path = folder / "state.safetensors"
    if not path.exists():
        return None
    parameters = dict(model.named_parameters())
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["facts"])
            lost = {f"model.{name}" for name in parameters} - set(file.keys())
            if lost:
                raise KeyError(f"it lacks {min(lost)}")
            for key in file.keys():  # noqa: SIM118 - not a dict
                part, rest = key.split(".", 1)
                if part == "model":
                    parameters[rest].data.copy_(file.get_tensor(key))
                    continue
                number, rest = rest.split(".", 1)
                name, what = rest.rsplit(".", 1)
                optimizers[int(number)].state[parameters[name]][what] = file.get_tensor(key)
    except Exception as error:
        raise CheckpointError(
            f"{path} does not continue this run ({error}): delete the folder {folder} or start "
            "with --fresh") from error
    return facts  # type: ignore[no-any-return]


def read_weights(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(weights by checkpoint key, facts) of a saved run."""
    path = folder / "state.safetensors"
    if not path.exists():
        raise CheckpointError(
            f"no training run at {folder}: start one with labkit train --run {folder}")
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        return {key.removeprefix("model."): file.get_tensor(key)
                for key in file.keys() if key.startswith("model.")}, facts  # noqa: SIM118
