"""The golden vectors: inputs and outputs of an independent implementation.

They lie in the source tree (`tests/golden`), not in the installed package. `folder()` says so
when they are missing. Positions beyond a row's `lengths` are void and never compared.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from labkit.checkpoint import read_state
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.mutants import rules
from labkit.numerics.blocks import Rounding
from labkit.text import Tokenizer, engram_map

Rule = Callable[[str, torch.Tensor, torch.Tensor], str | None]


def available() -> bool:
    return (_place() / "text" / "expected_unrounded.safetensors").is_file()


def folder() -> Path:
    """tests/golden of the source tree; InputError without it."""
    if not available():
        raise InputError("the golden vectors are not here: they are in tests/golden of the source "
                         "tree, so run this from a clone of the repository")
    return _place()


def _place() -> Path:
    return Path(__file__).resolve().parents[2] / "tests" / "golden"


@dataclass(frozen=True)
class Case:
    """One vector: `unrounded` is None where only the rounded outputs are given."""

    name: str
    config: ModelConfig
    ids: torch.Tensor                      # [B,T]
    lengths: torch.Tensor | None           # [B]
    rounded: dict[str, torch.Tensor]
    unrounded: dict[str, torch.Tensor] | None

    def live(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What of a tap may be compared: [B,T,...] -> [live tokens, ...], caches likewise."""
        if self.lengths is None:
            return value
        counts = self.lengths
        if name.endswith(("compressed_kv", "index_keys")):
            counts = counts // self.config.compress_ratios[int(name.split(".")[1])]
        return value[torch.arange(value.shape[1]) < counts[:, None]]

    def difference(self, taps: Mapping[str, torch.Tensor], rule: Rule = rules.unrounded,
                   rounding: bool = False) -> str | None:
        """The first tensor that breaks the rule, in a sentence; None if all keep it."""
        expected = self.rounded if rounding else self.unrounded
        assert expected is not None
        for name, value in expected.items():
            if name in ("input_ids", "lengths") or name.startswith("dspark."):
                continue
            if name not in taps:
                return f"{name}: not computed"
            wrong = rule(name, self.live(name, value), self.live(name, taps[name]))
            if wrong:
                return f"{self.name}: {wrong}"
        return None


@functools.cache
def case(name: str) -> Case:
    place = folder() / name
    whole = load_file(place / "expected.safetensors")
    other = place / "expected_unrounded.safetensors"
    return Case(name, ModelConfig.from_file(place), whole["input_ids"], whole.get("lengths"), whole,
                load_file(other) if other.exists() else None)


def weights_folder(name: str) -> Path:
    """Where the weights of a case are: its own folder or the one that `weights_from` names."""
    raw = json.loads((folder() / name / "config.json").read_text(encoding="utf-8"))
    return folder() / raw.get("weights_from", name)


def classes() -> tuple[torch.Tensor, int]:
    """The class map of the vectors' vocabulary, and how many classes there are."""
    return engram_map.engram_classes(Tokenizer.from_file(folder() / "tokenizer.json"))


@functools.cache
def _state(place: Path, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return read_state(place, config, dtype)


def model(name: str, rounding: bool = False, kernel_set: str = "reference",
          fresh: bool = False) -> Transformer:
    """The model of a case with its weights; `fresh`: read the weights anew, with today's code."""
    config = case(name).config
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    if fresh:
        state = read_state(weights_folder(name), config, dtype)
    else:
        state = _state(weights_folder(name), config, dtype)
    return build(config, state, rounding, kernel_set)


def in_float64(model: Transformer) -> Transformer:
    """The same weights in float64, where no processor's noise reaches a rounding boundary."""
    state = {name: p.double() for name, p in model.state_dict().items()}
    kernels = model.kernels.__name__.rsplit(".", 1)[-1]
    return build(model.config, state, model.cache_rounding, kernels, model.engram_classes)


def build(config: ModelConfig, state: Mapping[str, torch.Tensor], rounding: Rounding = False,
          kernel_set: str = "reference", class_map: torch.Tensor | None = None) -> Transformer:
    """A model that holds `state` itself (no copy), each parameter in the dtype it has there."""
    if class_map is None:
        class_map = classes()[0]
    draft = any(name.startswith("mtp.") for name in state)
    with torch.device("meta"):
        out = Transformer(config, torch.empty(0, dtype=torch.int64), kernel_set, rounding,
                          draft=draft)
    out.load_state_dict(dict(state), strict=True, assign=True)
    out.engram_classes = class_map
    return out.eval()
