"""What a config or checkpoint holds, as text: numbers, layer roles, tensors, one of them whole."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from safetensors import safe_open

from labkit.checkpoint.files import StoredTensor
from labkit.checkpoint.layout import layout, scale_name, storage_of
from labkit.checkpoint.weights import dequantize_weight
from labkit.config import ModelConfig
from labkit.errors import InputError

# Of a larger tensor the first rows are read: an Engram table of the release has 98 billion values.
MOST_VALUES = 1 << 26
BINS, BAR = 20, 40
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")  # layers.7.ffn: a whole part of a name


def describe(config: ModelConfig, stored: dict[str, StoredTensor] | None = None) -> str:
    """Three tables: config, one row per layer, tensors (of the layout where none are stored)."""
    parts = [config_table(config), roles_table(config)]
    if stored is None:
        rows = [(t.name, t.dtype, t.shape, t.bytes) for t in layout(config)]
        parts.append("tensors that its checkpoint has\n" + tensor_table(rows))
    else:
        rows = [(n, t.dtype, t.shape, t.end - t.begin) for n, t in stored.items()]
        parts.append("tensors stored\n" + tensor_table(rows))
    return "\n\n".join(parts)


def config_table(c: ModelConfig) -> str:
    """The numbers that shape the model, with their symbols."""
    rows = [
        ("hidden size D", c.hidden_size), ("residual streams C", c.hc_mult),
        ("layers", f"{c.num_hidden_layers} ({c.encoder_layers} encoder, "
                   f"{c.num_hidden_layers - c.encoder_layers} decoder)"),
        ("heads H x width d", f"{c.num_attention_heads} x {c.head_dim}, "
                              f"{c.qk_rope_head_dim} channels rotated"),
        ("sliding window W", c.sliding_window), ("selected entries K", c.index_topk),
        ("index heads x width", f"{c.index_n_heads} x {c.index_head_dim}"),
        ("candidate pool", "none" if c.candidate_source_layer_id < 0 else
         f"{c.candidate_topk_blocks} blocks of {c.candidate_block_size}, from layer "
         f"{c.candidate_source_layer_id}"),
        ("experts", f"{c.n_routed_experts} routed, {c.num_experts_per_tok} a token, 1 shared; "
                    f"width {c.moe_intermediate_size}"),
        ("Engram", "none" if not c.engram_layer_ids else
         f"layers {', '.join(map(str, c.engram_layer_ids))}; rows "
         f"{', '.join(f'{n:,}' for n in c.engram_num_embeddings)}; {c.engram_tables} a token"),
        ("vocabulary V", f"{c.vocab_size:,}"), ("context", f"{c.max_position_embeddings:,}"),
        ("draft stages", c.num_nextn_predict_layers),
        ("vision layers", c.vision.num_hidden_layers),
        ("stored form", "released (quantised)" if c.quantized else f"plain {c.dtype}"),
    ]
    return columns([(name, str(value)) for name, value in rows])


def roles_table(config: ModelConfig) -> str:
    """One row per layer: what it reads and what it publishes."""
    rows = [("layer", "kind", "ratio", "reads KV of", "selection of", "candidates", "engram")]
    for r in config.roles:
        pool = "publishes" if r.publishes_candidates else "uses" if r.uses_candidates else ""
        rows.append((
            str(r.layer), r.kind, str(r.ratio or ""),
            "" if r.kv_source is None else str(r.kv_source),
            "" if r.index_source is None else str(r.index_source), pool,
            "yes" if r.engram else "",
        ))
    return columns(rows)


def tensor_table(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> str:
    """(name, dtype, shape, bytes) of each -> a row per kind; numbers in names are gathered."""
    kinds: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, int]]] = {}
    for name, dtype, shape, size in tensors:
        key = (_NUMBER.sub("#", name), dtype, tuple(shape))
        kinds.setdefault(key, []).append((name, size))
    rows = [("count", "name", "dtype", "shape", "bytes")]
    for (_, dtype, shape), members in kinds.items():
        rows.append((f"{len(members):,}", _common_name([n for n, _ in members]), dtype,
                     " x ".join(map(str, shape)) or "scalar", f"{sum(s for _, s in members):,}"))
    everything = [size for members in kinds.values() for _, size in members]
    rows.append((f"{len(everything):,}", "in all", "", "", f"{sum(everything):,}"))
    return columns(rows)


def _common_name(names: list[str]) -> str:
    """layers.0.x, layers.1.x -> layers.{0..1}.x; with gaps layers.{2,4,8}.x"""
    parts = [_NUMBER.split(name) for name in names]
    told = []
    for column in zip(*parts, strict=True):
        if len(set(column)) == 1:
            told.append(column[0])
            continue
        numbers = sorted({int(part) for part in column})
        low, high = numbers[0], numbers[-1]
        whole = len(numbers) == high - low + 1
        told.append(f"{{{low}..{high}}}" if whole else f"{{{','.join(map(str, numbers))}}}")
    return "".join(told)


def read_tensor(stored: dict[str, StoredTensor], name: str) -> tuple[torch.Tensor, str]:
    """A stored tensor, scales multiplied in, and a remark on what was read (may be "")."""
    if name not in stored:
        close = difflib.get_close_matches(name, stored, n=2)
        hint = f", but {' and '.join(close)}" if close else ""
        raise InputError(f"there is no tensor {name!r}{hint}: `labkit inspect` without --tensor "
                         "lists them all")
    found = stored[name]
    remarks = [f"stored as {found.dtype} in {found.file.name}"]
    rows = found.shape[0] if found.shape else 1
    take = rows
    if math.prod(found.shape) > MOST_VALUES:
        # In whole scale tiles of 32 rows.
        take = min(rows, max(32, MOST_VALUES // math.prod(found.shape[1:]) // 32 * 32))
        remarks.append(f"the first {take:,} of {rows:,} rows")
    value = _rows(found, name, take)
    scale = scale_name(name)
    if scale in stored and scale != name:
        tile = 32 if storage_of(name) == "fp8_tile" else 1
        value = dequantize_weight(storage_of(name), value,
                                  _rows(stored[scale], scale, math.ceil(take / tile)))
        remarks.append(f"multiplied by {scale}")
    elif found.dtype == "F8_E8M0":
        value = value.float()
    return value, "; ".join(remarks)


def _rows(tensor: StoredTensor, name: str, count: int) -> torch.Tensor:
    with safe_open(tensor.file, framework="pt") as file:
        return file.get_slice(name)[:count] if tensor.shape else file.get_tensor(name)


def tensor_report(name: str, value: torch.Tensor, remark: str = "") -> str:
    """Shape, extremes, mean, spread and a histogram in characters."""
    x = value.detach().float().flatten()
    lines = [f"{name}  [{', '.join(map(str, value.shape))}]" + (f"  ({remark})" if remark else "")]
    bad = int((~torch.isfinite(x)).sum())
    x = x[torch.isfinite(x)]
    if bad:
        lines.append(f"{bad:,} values are NaN or infinite")
    if not x.numel():
        return "\n".join([*lines, "no finite values"])
    mean = float(x.mean(dtype=torch.float64))
    std = math.sqrt(float((x - mean).square().mean(dtype=torch.float64)))
    zeros = int((x == 0).sum()) / x.numel()
    lines.append(f"min {x.min():.6g}   max {x.max():.6g}   mean {mean:.6g}   std {std:.6g}   "
                 f"zeros {zeros:.2%}")
    low, high = float(x.min()), float(x.max())
    if low < high:
        counts = torch.histc(x, BINS, low, high).long().tolist()
        step = (high - low) / BINS
        for i, count in enumerate(counts):
            bar = "#" * math.ceil(BAR * count / max(counts))
            lines.append(f"{low + i * step:>12.4g} .. {low + (i + 1) * step:<12.4g}"
                         f"{count:>13,} {bar}".rstrip())
    return "\n".join(lines)


def columns(rows: list[tuple[Any, ...]]) -> str:
    """Rows of strings, each column as wide as its widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
