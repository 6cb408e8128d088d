"""Temperatures of the draft's confidence head, and the file beside a checkpoint that keeps them.

The head says for every slot k how likely the slot is to be accepted once all slots before it
were: c_k = sigmoid(logit_k). Products of these decide how much is verified, so it matters that
they are true frequencies. A temperature a slot, c_k = sigmoid(logit_k / T_k), makes them so
without changing which of two drafts is trusted more in a slot. `labkit.train.calibration` fits
them (sequential temperature scaling); what is fitted once is read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.errors import CheckpointError, InputError

FILE = "draft_calibration.json"
CONFIDENCE_WEIGHT = "confidence_head.proj.weight"  # under mtp.{last stage}


def calibrated(confidence_logits: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """sigmoid(logit / T of its slot), fp32 or wider; [..., n] -> [..., n].

    Temperature 1 leaves a slot as the head says it. Where there are more slots than
    temperatures (a block longer than the draft was trained with), the last one repeats.
    """
    found = check_temperatures(temperatures)
    n = confidence_logits.shape[-1]
    found += [found[-1]] * (n - len(found))
    kind = torch.promote_types(confidence_logits.dtype, torch.float32)
    scale = torch.tensor(found[:n], dtype=kind, device=confidence_logits.device)
    return torch.sigmoid(confidence_logits.to(kind) / scale)


def check_temperatures(temperatures: Sequence[float]) -> list[float]:
    """The same as a list of floats; InputError unless there are some, all finite and above 0."""
    found = [float(t) for t in temperatures]
    if not found or not all(math.isfinite(t) and t > 0 for t in found):
        raise InputError(f"temperatures are {found}: give one number above 0 for every slot")
    return found


@dataclass(frozen=True)
class Calibration:
    """What `draft_calibration.json` holds.

    temperatures  T_k of slot k = 1..n
    ece_before    expected calibration error of the survival product a_k, by slot, all T = 1
    ece_after     the same with the temperatures; both on text that was not fitted on, if
                  `fitted_on` says so
    fitted_on     what the temperatures were fitted on, in words and numbers
    draft         `draft_digest` of the confidence head that they belong to
    target        `target_digest` of the model that the draft was trained for
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    fitted_on: Mapping[str, Any]
    draft: str
    target: str

    def to_dict(self) -> dict[str, Any]:
        return {"temperatures": list(self.temperatures), "ece_before": list(self.ece_before),
                "ece_after": list(self.ece_after), "fitted_on": dict(self.fitted_on),
                "draft": self.draft, "target": self.target}


def draft_digest(confidence_weight: torch.Tensor) -> str:
    """SHA-256 of a confidence head [1, D+rank], its values taken as bf16, as they are released.

    Temperatures mean nothing for another head; this tells when a draft was trained anew.
    """
    values = confidence_weight.detach().cpu().to(torch.bfloat16).contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def target_digest(model: nn.Module) -> str:
    """SHA-256 of all weights but the draft's, as fp32, shortened.

    A draft fits the weights that it saw only, and its tensors alone do not tell which these were.
    """
    found = hashlib.sha256()
    for name, p in model.named_parameters():
        if not name.startswith("mtp."):
            found.update(p.detach().cpu().float().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def save_calibration(folder: str | Path, calibration: Calibration) -> Path:
    """Write the file beside a checkpoint, whole or not at all; its path."""
    path = Path(folder) / FILE
    staging = path.with_name(path.name + ".part")
    text = json.dumps(calibration.to_dict(), indent=1, ensure_ascii=False) + "\n"
    staging.write_text(text, encoding="utf-8")
    os.replace(staging, path)
    return path


def load_calibration(folder: str | Path, slots: int,
                     confidence_weight: torch.Tensor | None = None,
                     target: str | None = None) -> Calibration | None:
    """The calibration beside a checkpoint; None where the folder has none (all T = 1).

    slots              of the draft, config field dspark_block_size
    confidence_weight  of the draft that is loaded: refuse temperatures of another one
    target             `target_digest` of the model: refuse the draft of another model
    CheckpointError for a file that is malformed, of other slots, of another draft or model.
    """
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        found = _parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(f"{path} is not a calibration ({reason}): delete it, or write it "
                              "anew with labkit train-draft") from error
    if len(found.temperatures) != slots:
        raise CheckpointError(
            f"{path} has temperatures of {len(found.temperatures)} slots, the draft has {slots} "
            "(dspark_block_size): delete it, or write it anew with labkit train-draft")
    if confidence_weight is not None and found.draft != draft_digest(confidence_weight):
        raise CheckpointError(f"{path} was fitted on another draft than the one beside it: delete "
                              "it, or write it anew with labkit train-draft")
    if target is not None and found.target != target:
        raise CheckpointError(f"the draft (mtp.*) beside {path} was trained for another model than "
                              "the one here: delete that file, then train a draft for this model "
                              "with labkit train-draft (or use this one all the same)")
    return found


def _parse(raw: Any) -> Calibration:
    """ValueError, TypeError or KeyError (a field that is missing) for anything unexpected."""
    if not isinstance(raw, dict):
        raise ValueError("it must be a JSON object")
    temperatures = check_temperatures(_numbers(raw, "temperatures"))
    errors = [_numbers(raw, name) for name in ("ece_before", "ece_after")]
    for name, values in zip(("ece_before", "ece_after"), errors, strict=True):
        if len(values) != len(temperatures) or not all(0 <= v <= 1 for v in values):
            raise ValueError(f"{name} must be {len(temperatures)} numbers in 0..1")
    fitted_on, draft, target = raw["fitted_on"], raw["draft"], raw["target"]
    if not isinstance(fitted_on, dict) or not isinstance(draft, str) or not isinstance(target, str):
        raise ValueError("fitted_on must be an object, draft and target strings")
    return Calibration(tuple(temperatures), tuple(errors[0]), tuple(errors[1]), fitted_on, draft,
                       target)


def _numbers(raw: dict[str, Any], name: str) -> list[float]:
    values = raw[name]
    if not isinstance(values, list) or any(
            isinstance(v, bool) or not isinstance(v, (int, float)) for v in values):
        raise ValueError(f"{name} must be a list of numbers")
    return [float(v) for v in values]
