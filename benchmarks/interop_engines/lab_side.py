"""labkit in the rounding mode of an engine: logits, greedy texts, traces, and forced choices."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import labkit
from labkit.lab import Lab
from labkit.model.run import Run
from labkit.numerics import fake_quantize
from labkit.numerics.precision import wide

from .compare import padded

# Linear layers whose weights are FP8 or FP4 in the release: its kernels take FP8 inputs.
INPUTS = re.compile(r"layers\.\d+\.(attn\.(wq_a|wq_b|wkv|wo_b|indexer\.wq_b)|"
                    r"ffn\.(shared_experts|experts\.\d+)\.w[123]|engram\.wkv)$")
WO_A = re.compile(r"layers\.\d+\.attn\.wo_a$")
TRACED = ("window", "compressed_kv", "index_keys", "index_queries", "candidates", "topk_indices")


def load(folder: Path, mode: dict[str, Any], dtype: torch.dtype | None = None,
         nudge: int | None = None) -> Lab:
    """The checkpoint in a mode; `dtype` in place of the mode's arithmetic.

    nudge: a seed; embeddings are moved by one unit in the last place of the arithmetic, up, down
    or not at all.
    """
    if dtype is None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[mode["arithmetic"]]
    lab = labkit.load(folder, dtype=dtype, kernels="reference", cache_rounding=mode["cache"])
    if mode["linear"] != "none":
        wanted = [INPUTS] + [WO_A] * (mode["linear"] == "all")
        for name, module in lab.model.named_modules():
            if any(pattern.match(name) for pattern in wanted):
                module.register_forward_pre_hook(_round_input)
    if nudge is not None:
        weight = lab.model.embed.weight
        way = torch.randint(-1, 2, weight.shape, generator=torch.Generator().manual_seed(nudge))
        with torch.no_grad():
            weight.copy_(torch.nextafter(weight, weight + way))
    return lab


def _round_input(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Input [..., n] in blocks of 32, E4M3 with power-of-two scales, as the window's vectors."""
    return (fake_quantize(args[0], "fp8"), *args[1:])


@torch.no_grad()
def logits(lab: Lab, ids: Sequence[int]) -> np.ndarray:
    """[T] -> [T,V] fp32, one pass."""
    return lab.model(torch.tensor([list(ids)])).logits[0].float().numpy()


def greedy(lab: Lab, prompt: Sequence[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Tokens of token-by-token decoding, and the logits [steps,V] that each was taken from."""
    session = lab.session()
    row = session.prefill(list(prompt), last_only=True)[0, -1]
    tokens, rows = [int(row.argmax())], [row]
    while len(tokens) < steps:
        row = session.decode(tokens[-1])[0, -1]
        rows.append(row)
        tokens.append(int(row.argmax()))
    return tokens, torch.stack(rows).float().numpy()


def trace(lab: Lab, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """What the quantisers and the choices give, by name, and the logits; batch axis dropped."""
    taps = lab.trace(list(ids), patterns=[*(f"layers.*.attn.{name}" for name in TRACED),
                                          "layers.*.ffn.picked", "logits"])
    found = {}
    for name, tensor in taps.items():
        value = tensor[0]
        if name.endswith(".window"):
            value = value[-len(ids):]  # the void columns before the first token are left out
        found[name] = (value.float() if value.is_floating_point() else value).numpy()
    return found


def forced(folder: Path, mode: dict[str, Any], ids: Sequence[int],
           engine: dict[str, np.ndarray]) -> np.ndarray:
    """Logits [T,V] of labkit when it is handed an engine's rounded vectors and choices.

    Window vectors, compressed entries, selections and picked experts are the engine's; all
    arithmetic between them is labkit's. What is left of a difference is not rounding's.
    """
    lab = load(folder, mode)
    layers: Any = lab.model.layers
    for number, layer in enumerate(layers):
        name = f"layers.{number}"
        attention = layer.attn
        attention.key_values = _constant(engine[f"{name}.attn.window"][None])
        if attention.role.kind == "full":
            attention.publish = _publish(
                attention, number, torch.from_numpy(engine[f"{name}.attn.compressed_kv"][None]),
                torch.from_numpy(engine[f"{name}.attn.index_keys"][None]))
        if attention.role.kind in ("full", "reindex"):
            selection = padded(engine[f"{name}.attn.topk_indices"], lab.config.index_topk)
            attention.indexer.forward = _constant(selection[None])
        layer.ffn.gate.forward = _gate(layer.ffn.gate, engine[f"{name}.ffn.picked"])
    return logits(lab, ids)


def _constant(array: np.ndarray) -> Callable[..., torch.Tensor]:
    tensor = torch.from_numpy(array)
    return lambda *args: tensor


def _publish(attention: Any, number: int, kv: torch.Tensor,
             keys: torch.Tensor) -> Callable[[torch.Tensor, Run], None]:
    plain = attention.publish

    def publish(x: torch.Tensor, run: Run) -> None:
        store: Any = run.cache.stores[number]
        append = store.append
        store.append = lambda own_kv, own_keys, first, complete: append(kv, keys, first, complete)
        plain(x, run)

    return publish


def _gate(gate: Any, picked: np.ndarray) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    chosen = torch.from_numpy(np.sort(picked, axis=-1).astype(np.int64))  # [T,k]

    def forward(x: torch.Tensor, run: Run, image: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softplus(F.linear(wide(x), wide(gate.weight))).sqrt()
        weights = scores.gather(-1, chosen)
        if gate.per_token > 1 and gate.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * gate.config.routed_scaling_factor

    return forward
