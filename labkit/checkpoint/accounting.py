"""What a configuration weighs: tensors, bytes and parameters, by part and per token.

Everything is summed over the layout; no figure is written down. A *parameter* is one number of
the plain form (a scale is none; two packed E2M1 codes are two).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

from labkit.checkpoint.layout import (
    Form,
    TensorSpec,
    layout,
    parameters,
    released_specs,
)
from labkit.config import ModelConfig

# part -> what it holds, in the order of the tables
PARTS = {
    "backbone": "embeddings, all layers, head",
    "engram projections": "engram.wkv and the gate weights",
    "engram tables": "engram.embed, looked up and never multiplied",
    "draft": "mtp.*",
    "vision": "ViT, aligner, image vectors",
}


class Totals(NamedTuple):
    tensors: int
    bytes: int
    parameters: int


@dataclass(frozen=True)
class Accounting(Sequence[TensorSpec]):
    """The rows (name, shape, dtype, bytes) of a checkpoint; iterates over them."""

    rows: list[TensorSpec]
    totals: Totals

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorSpec]: ...
    def __getitem__(self, index: int | slice) -> TensorSpec | list[TensorSpec]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.rows)


def accounting(config: ModelConfig, form: Form | None = None) -> Accounting:
    """Every tensor as stored, with totals. form: "released", "plain"; None: as the config says."""
    rows = list(layout(config, form))
    count = sum(math.prod(shape) for _, shape in parameters(config))
    return Accounting(rows, Totals(len(rows), sum(row.bytes for row in rows), count))


def part_of(name: str) -> str:
    """The key of `PARTS` that a tensor belongs to."""
    if name.startswith("mtp."):
        return "draft"
    if name.startswith(("vision.", "aligner.", "image_")):
        return "vision"
    if ".engram." in name:
        return "engram tables" if ".engram.embed." in name else "engram projections"
    return "backbone"


def component_of(name: str) -> str:
    """Finer than `part_of`: the mechanism of a layer that a tensor serves."""
    if not name.startswith(("layers.", "mtp.")):
        return name.removesuffix(".weight") if part_of(name) == "backbone" else "vision"
    module = name.split(".", 2)[2]
    for start, component in _COMPONENTS:
        if module.startswith(start):
            return component
    return "norms" if "norm" in module else "draft heads"


_COMPONENTS = (
    ("engram.embed.", "engram tables"), ("engram.", "engram projections"),
    ("attn.compressor.", "compressor"), ("attn.indexer.", "indexer"),
    ("attn.", "attention"), ("ffn.experts.", "routed experts"),
    ("ffn.shared_experts.", "shared expert"), ("ffn.gate.", "router"),
    ("hc_", "hyper-connections"),
)


def totals_by(config: ModelConfig, key, form: Form | None = None) -> dict[str, Totals]:  # type: ignore[no-untyped-def]
    """Totals grouped by key(parameter name), e.g. `part_of`, `component_of`, `storage_of`."""
    form = form or ("released" if config.quantized else "plain")
    groups: dict[str, list[int]] = {}
    plain = {} if form == "released" else {s.name: s for s in layout(config, form)}
    for name, shape in parameters(config):
        specs = [plain[name]] if plain else released_specs(name, shape)
        group = groups.setdefault(key(name), [0, 0, 0])
        for spec in specs:
            group[0] += 1
            group[1] += spec.bytes
        group[2] += math.prod(shape)
    return {name: Totals(*group) for name, group in groups.items()}


@dataclass(frozen=True)
class Active:
    """Parameters that take part in one token's step.

    counted      what the usual figure counts
    not_counted  what runs too, but the convention leaves out, by name
    convention   the rule in words
    """

    counted: int
    convention: str
    not_counted: dict[str, int] = field(default_factory=dict)


def active_decode(config: ModelConfig) -> Active:
    """One decode step: all layers with the routed experts that a token picks, norm and head."""
    found = _active(config, range(config.num_hidden_layers))
    head = found.pop("head") + found.pop("norm")
    found.pop("embed")
    projections = found.pop("engram projections", 0)
    streams = found.pop("hyper-connections")
    return Active(
        sum(found.values()) + head,
        f"all {config.num_hidden_layers} layers, {config.num_experts_per_tok} of "
        f"{config.n_routed_experts} routed experts, final norm and head; without Engram "
        "projections, without hyper-connections; embedding and Engram rows are looked up, not "
        "multiplied",
        {"engram projections": projections, "hyper-connections": streams},
    )


def active_prefill(config: ModelConfig) -> Active:
    """One prompt token of a CED prefill: the encoder, and the decoder's KV, which is one write."""
    split = config.encoder_layers
    found = _active(config, range(split))
    for name in ("embed", "norm", "head"):
        found.pop(name)
    streams = found.pop("hyper-connections")
    counted = sum(found.values())
    convention = (
        f"layers 0..{split - 1}, {config.num_experts_per_tok} of {config.n_routed_experts} "
        "routed experts, Engram projections of these layers"
    )
    if split < config.num_hidden_layers:
        source = f"layers.{split}.attn."
        keys = tuple(source + n for n in ("compressor.", "indexer.wk.", "indexer.k_norm."))
        counted += sum(math.prod(s) for n, s in parameters(config) if n.startswith(keys))
        convention += f", compressor and index key of layer {split}"
    return Active(
        counted,
        convention + "; without head, without hyper-connections",
        {"hyper-connections": streams},
    )


def _active(config: ModelConfig, layers: range) -> dict[str, int]:
    """Parameters by component that a token of these layers meets, and embed, norm, head."""
    found: dict[str, int] = {}
    for name, shape in parameters(config):
        component = component_of(name)
        in_layers = name.startswith("layers.") and int(name.split(".", 2)[1]) in layers
        if component == "engram tables" or not (in_layers or component in _OUTER):
            continue
        found[component] = found.get(component, 0) + math.prod(shape)
    # A token meets num_experts_per_tok of equally large experts.
    share = found["routed experts"] * config.num_experts_per_tok
    found["routed experts"] = share // config.n_routed_experts
    return found


_OUTER = ("embed", "norm", "head")
STORAGE_NAMES = {
    "fp4_row": "E2M1, a scale per row and 32 columns",
    "fp8_tile": "E4M3, a scale per 32 x 32 tile",
    "fp8_row": "E4M3, a scale per row and 32 columns",
    "bf16": "BF16",
    "fp32": "F32",
}
