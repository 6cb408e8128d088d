"""Every tensor of a checkpoint, derived from the config: name, shape, dtype, bytes.

Two forms. *Plain*: one tensor per parameter. *Released*: most matrices are quantised, and
`X.weight` has a companion `X.scale` (one UE8M0 byte per block):

    fp8_tile   E4M3, a scale per 32 x 32 tile       attention, shared experts, index queries,
                                                    Engram projection, draft input
    fp8_row    E4M3, a scale per row per 32 columns Engram tables
    fp4_row    E2M1 two a byte, scale as fp8_row    routed experts

The rest is bf16, except what is small and sensitive (fp32): hyper-connections, attention sinks,
routing biases. Dtypes carry the names of the safetensors header. A last block may be narrower
than 32: scales then count ceil(n / 32).

Nothing here needs torch, and everything is a generator: the 96,085 tensors of the released
checkpoint are never built as a list unless asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from labkit.config import ModelConfig
from labkit.errors import CheckpointError

BLOCK = 32
ITEM_BYTES = {
    "F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1,
}
SAFETENSORS_DTYPE = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16",
}
Storage = Literal["fp32", "bf16", "fp8_tile", "fp8_row", "fp4_row"]
Form = Literal["released", "plain"]

_FP8_TILE = {
    ("attn", "wq_a"), ("attn", "wq_b"), ("attn", "wkv"), ("attn", "wo_a"), ("attn", "wo_b"),
    ("indexer", "wq_b"), ("engram", "wkv"),
    ("shared_experts", "w1"), ("shared_experts", "w2"), ("shared_experts", "w3"),
}  # fmt: skip


class TensorSpec(NamedTuple):
    """One tensor as stored: `dtype` in safetensors names, `bytes` of its data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def storage_of(name: str) -> Storage:
    """How the release stores a parameter (plain name); see the module docstring."""
    parts = name.split(".")
    if parts[0] in ("vision", "aligner"):
        return "bf16"
    last = parts[-1]
    if last.startswith("hc_") or last in ("attn_sink", "bias", "bias_vl"):
        return "fp32"
    if last != "weight" or len(parts) < 3:
        return "bf16"
    if len(parts) > 3 and parts[-4] == "experts":
        return "fp4_row"
    pair = (parts[-3], parts[-2])
    if pair in _FP8_TILE or parts[-2] == "main_proj":
        return "fp8_tile"
    return "fp8_row" if pair == ("engram", "embed") else "bf16"


def layout(
    config: ModelConfig, form: Form | None = None, dtype: str | None = None
) -> Iterator[TensorSpec]:
    """All tensors in reading order, each scale right after its weight.

    form   "released" or "plain"; None: by `config.quantized`
    dtype  of plain tensors, "bfloat16", "float32", ...; None: `config.dtype`. What the release
           keeps in fp32 is never narrowed.
    """
    form = form or ("released" if config.quantized else "plain")
    plain = SAFETENSORS_DTYPE[dtype or config.dtype]
    for name, shape in parameters(config):
        if form == "plain":
            fp32 = storage_of(name) == "fp32" and plain != "F64"
            yield _spec(name, shape, "F32" if fp32 else plain)
        else:
            yield from released_specs(name, shape)


def released_specs(name: str, shape: tuple[int, ...]) -> Iterator[TensorSpec]:
    """A parameter -> its one or two tensors in the released form."""
    storage = storage_of(name)
    if storage in ("fp32", "bf16"):
        yield _spec(name, shape, "F32" if storage == "fp32" else "BF16")
        return
    rows, columns = shape
    if storage == "fp4_row":
        if columns % 2:
            raise CheckpointError(
                f"{name} has {columns} columns: two E2M1 codes share a byte, so the released "
                "form needs an even number (the plain form takes any)"
            )
        yield _spec(name, (rows, columns // 2), "I8")
    else:
        yield _spec(name, shape, "F8_E4M3")
    scale_rows = math.ceil(rows / BLOCK) if storage == "fp8_tile" else rows
    yield _spec(scale_name(name), (scale_rows, math.ceil(columns / BLOCK)), "F8_E8M0")


def scale_name(weight: str) -> str:
    """`X.weight` -> `X.scale`."""
    return weight.removesuffix(".weight") + ".scale"


def _spec(name: str, shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(name, shape, dtype, math.prod(shape) * ITEM_BYTES[dtype])


# ------------------------------------------------------------------ parameters, in plain form
Parameter = tuple[str, tuple[int, ...]]


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """(name, shape) of every parameter, in the order of the forward pass."""
    c = config
    yield "embed.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        yield from _layer(c, layer)
    yield "norm.weight", (c.hidden_size,)
    yield "head.weight", (c.vocab_size, c.hidden_size)
    yield from _draft(c)
    if c.vision.num_hidden_layers:
        yield from _vision(c)


def _layer(c: ModelConfig, layer: int) -> Iterator[Parameter]:
    prefix = f"layers.{layer}"
    role = c.roles[layer]
    if role.engram:
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer)]
        yield from _engram(c, f"{prefix}.engram", rows)
    yield from _attention(c, f"{prefix}.attn")
    if role.kind == "full":
        yield from _compressor(c, f"{prefix}.attn.compressor", role.ratio)
    if role.kind in ("full", "reindex"):
        yield from _indexer(c, f"{prefix}.attn.indexer", has_keys=role.kind == "full")
    yield from _moe(c, f"{prefix}.ffn", c.n_routed_experts)
    yield from _norms_and_streams(c, prefix)


def _engram(c: ModelConfig, prefix: str, rows: int) -> Iterator[Parameter]:
    streams, width = c.hc_mult, c.hidden_size
    yield f"{prefix}.embed.weight", (rows, c.engram_head_dim)
    # one key per stream, then one value
    yield f"{prefix}.wkv.weight", ((streams + 1) * width, c.engram_tables * c.engram_head_dim)
    yield f"{prefix}.q_weight", (streams, width)
    yield f"{prefix}.k_weight", (streams, width)


def _attention(c: ModelConfig, prefix: str) -> Iterator[Parameter]:
    heads, width = c.num_attention_heads, c.hidden_size
    inner = c.o_groups * c.o_lora_rank
    yield f"{prefix}.wq_a.weight", (c.q_lora_rank, width)
    yield f"{prefix}.q_norm.weight", (c.q_lora_rank,)
    yield f"{prefix}.wq_b.weight", (heads * c.head_dim, c.q_lora_rank)
    yield f"{prefix}.wkv.weight", (c.head_dim, width)
    yield f"{prefix}.kv_norm.weight", (c.head_dim,)
    yield f"{prefix}.attn_sink", (heads,)
    # block-diagonal: each group of heads has its own o_lora_rank rows
    yield f"{prefix}.wo_a.weight", (inner, heads * c.head_dim // c.o_groups)
    yield f"{prefix}.wo_b.weight", (width, inner)


def _compressor(c: ModelConfig, prefix: str, ratio: int) -> Iterator[Parameter]:
    yield f"{prefix}.wkv.weight", (c.head_dim, c.hidden_size)
    if ratio > 1:  # a group of one token has nothing to weigh
        yield f"{prefix}.wgate.weight", (c.head_dim, c.hidden_size)
    yield f"{prefix}.norm.weight", (c.head_dim,)


def _indexer(c: ModelConfig, prefix: str, has_keys: bool) -> Iterator[Parameter]:
    yield f"{prefix}.wq_b.weight", (c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield f"{prefix}.weights_proj.weight", (c.index_n_heads, c.hidden_size)
    if has_keys:
        yield f"{prefix}.wk.weight", (c.index_head_dim, c.head_dim)
        yield f"{prefix}.k_norm.weight", (c.index_head_dim,)


def _moe(c: ModelConfig, prefix: str, experts: int) -> Iterator[Parameter]:
    width, inner = c.hidden_size, c.moe_intermediate_size
    yield f"{prefix}.gate.weight", (experts, width)
    yield f"{prefix}.gate.bias", (experts,)
    yield f"{prefix}.gate.bias_vl", (experts,)
    for expert in [f"experts.{i}" for i in range(experts)] + ["shared_experts"]:
        yield f"{prefix}.{expert}.w1.weight", (inner, width)
        yield f"{prefix}.{expert}.w2.weight", (width, inner)
        yield f"{prefix}.{expert}.w3.weight", (inner, width)


def _norms_and_streams(c: ModelConfig, prefix: str) -> Iterator[Parameter]:
    yield f"{prefix}.attn_norm.weight", (c.hidden_size,)
    yield f"{prefix}.ffn_norm.weight", (c.hidden_size,)
    mixes = c.hc_mult * (c.hc_mult + 2)  # pre, post, comb
    for site in ("attn", "ffn"):
        yield f"{prefix}.hc_{site}_fn", (mixes, c.hc_mult * c.hidden_size)
        yield f"{prefix}.hc_{site}_base", (mixes,)
        yield f"{prefix}.hc_{site}_scale", (3,)


def _draft(c: ModelConfig) -> Iterator[Parameter]:
    stages, width = c.num_nextn_predict_layers, c.hidden_size
    for stage in range(stages):
        prefix = f"mtp.{stage}"
        if stage == 0:
            yield f"{prefix}.main_proj.weight", (width, len(c.dspark_target_layer_ids) * width)
            yield f"{prefix}.main_norm.weight", (width,)
        yield from _attention(c, f"{prefix}.attn")
        yield from _moe(c, f"{prefix}.ffn", c.dspark_n_routed_experts)
        yield from _norms_and_streams(c, prefix)
        if stage == stages - 1:
            rank = c.dspark_markov_rank
            yield f"{prefix}.norm.weight", (width,)
            yield f"{prefix}.markov_head.embed.weight", (c.vocab_size, rank)
            yield f"{prefix}.markov_head.head.weight", (c.vocab_size, rank)
            yield f"{prefix}.confidence_head.proj.weight", (1, width + rank)


def _vision(c: ModelConfig) -> Iterator[Parameter]:
    v, width = c.vision, c.hidden_size
    yield "vision.patch_embed.proj.weight", (v.hidden_size, 3 * v.patch_size**2)
    yield "vision.patch_embed.proj.bias", (v.hidden_size,)
    for block in range(v.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        yield f"{prefix}.norm1.weight", (v.hidden_size,)
        yield f"{prefix}.attn.wqkv.weight", (3 * v.hidden_size, v.hidden_size)
        yield f"{prefix}.attn.wqkv.bias", (3 * v.hidden_size,)
        yield f"{prefix}.attn.wo.weight", (v.hidden_size, v.hidden_size)
        yield f"{prefix}.attn.wo.bias", (v.hidden_size,)
        yield f"{prefix}.norm2.weight", (v.hidden_size,)
        yield f"{prefix}.mlp.w1.weight", (2 * v.intermediate_size, v.hidden_size)  # gate, up
        yield f"{prefix}.mlp.w2.weight", (v.hidden_size, v.intermediate_size)
    yield "vision.norm.weight", (v.hidden_size,)
    yield "aligner.w1.weight", (width, v.downsample_ratio**2 * v.hidden_size)
    yield "aligner.w1.bias", (width,)
    yield "aligner.w2.weight", (width, width)
    yield "aligner.w2.bias", (width,)
    for name in ("image_start", "image_newline", "image_end"):
        yield name, (width,)
