"""The rules that a V4.1 config must keep; each refusal names field, value and rule."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from labkit.errors import ConfigError

if TYPE_CHECKING:
    from labkit.config import ModelConfig

BLOCK = 32  # quantisation block of fp8 and mxfp4; dimensions that are quantised divide by it


def check(c: ModelConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    _check_finite(c)
    _check_positive(c)
    _check_dimensions(c)
    _check_schedule(c)
    _check_candidates(c)
    _check_engram(c)
    _check_draft(c)
    _check_vision(c)


def _refuse(field: str, value: object, rule: str) -> None:
    raise ConfigError(f"{field} is {value!r}: {rule}")


def _check_finite(c: ModelConfig) -> None:
    """JSON as Python reads it may hold NaN and Infinity; the comparisons below need numbers."""
    for start, part in (("", c), ("rope_scaling.", c.rope_scaling), ("vision_config.", c.vision)):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                _refuse(start + field.name, value, "must be a finite number")


def _check_positive(c: ModelConfig) -> None:
    for name in (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers",
        "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank",
        "o_groups", "n_routed_experts", "num_experts_per_tok", "sliding_window", "index_n_heads",
        "index_head_dim", "index_topk", "max_position_embeddings", "hc_mult", "hc_sinkhorn_iters",
    ):
        if getattr(c, name) < 1:
            _refuse(name, getattr(c, name), "must be at least 1")
    for name in ("rope_theta", "compress_rope_theta"):
        if not getattr(c, name) > 1:
            _refuse(name, getattr(c, name), "must be greater than 1, so that frequencies fall")
    for name in ("hc_eps", "rms_norm_eps", "swiglu_limit"):
        if not getattr(c, name) > 0:
            _refuse(name, getattr(c, name), "must be greater than 0")
    if c.dtype not in ("bfloat16", "float32", "float64", "float16"):
        _refuse("dtype", c.dtype, "must be bfloat16, float16, float32 or float64")


def _check_dimensions(c: ModelConfig) -> None:
    for name in ("head_dim", "index_head_dim"):
        if getattr(c, name) % BLOCK:
            _refuse(name, getattr(c, name), f"must divide by {BLOCK}, the width of a cache block")
        if c.qk_rope_head_dim > getattr(c, name):
            _refuse("qk_rope_head_dim", c.qk_rope_head_dim,
                    f"must not exceed {name} {getattr(c, name)}")
    if c.qk_rope_head_dim % 2:
        _refuse("qk_rope_head_dim", c.qk_rope_head_dim,
                "rotation pairs channels, so it must be even")
    if c.num_attention_heads % c.o_groups:
        _refuse("o_groups", c.o_groups, f"must divide num_attention_heads {c.num_attention_heads}")
    if c.num_experts_per_tok > c.n_routed_experts:
        _refuse("num_experts_per_tok", c.num_experts_per_tok,
                f"must not exceed n_routed_experts {c.n_routed_experts}")
    s = c.rope_scaling
    if s.original_max_position_embeddings < 0 or s.factor < 1:
        _refuse("rope_scaling", s, "needs factor >= 1 and original_max_position_embeddings >= 0")
    if not s.beta_slow > 0:
        _refuse("rope_scaling.beta_slow", s.beta_slow, "must be greater than 0")
    if not s.beta_fast >= s.beta_slow:
        _refuse("rope_scaling.beta_fast", s.beta_fast,
                f"must be at least rope_scaling.beta_slow {s.beta_slow}")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if not 0 <= getattr(c, name) < c.vocab_size:
            _refuse(name, getattr(c, name), f"must be an id below vocab_size {c.vocab_size}")


def _check_schedule(c: ModelConfig) -> None:
    layers = c.num_hidden_layers
    if len(c.compress_ratios) < layers:
        _refuse("compress_ratios", list(c.compress_ratios),
                f"needs an entry for each of {layers} layers")
    if any(r < 0 for r in c.compress_ratios):
        _refuse("compress_ratios", list(c.compress_ratios), "entries must be 0 or more")
    if any(c.compress_ratios[layers:]):
        _refuse("compress_ratios", list(c.compress_ratios),
                "draft entries after the backbone must be 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        if list(ids) != sorted(set(ids)):
            _refuse(name, list(ids), "layer ids must be increasing and unique")
        if any(not 0 <= i < layers for i in ids):
            _refuse(name, list(ids), f"layer ids must lie in 0..{layers - 1}")
    for i in c.kv_source_layer_ids:
        if i not in c.index_source_layer_ids:
            _refuse("index_source_layer_ids", list(c.index_source_layer_ids),
                    f"must contain every KV source, but lacks layer {i}")
    for i in c.index_source_layer_ids:
        if c.compress_ratios[i] == 0:
            _refuse("index_source_layer_ids", list(c.index_source_layer_ids),
                    f"layer {i} has compress_ratios 0 and nothing to select from")
    source = None
    for i in range(layers):
        ratio = c.compress_ratios[i]
        if i in c.kv_source_layer_ids:
            source = i
        elif ratio and source is None:
            _refuse("kv_source_layer_ids", list(c.kv_source_layer_ids),
                    f"compressed layer {i} has no Full layer before it")
        elif ratio and ratio != c.compress_ratios[source or 0]:
            _refuse("compress_ratios", list(c.compress_ratios),
                    f"layer {i} has ratio {ratio} but reads layer {source} of ratio "
                    f"{c.compress_ratios[source or 0]}")


def _check_candidates(c: ModelConfig) -> None:
    source = c.candidate_source_layer_id
    if source < 0:
        return
    if source not in c.kv_source_layer_ids:
        _refuse("candidate_source_layer_id", source,
                "must be a Full layer (in kv_source_layer_ids)")
    for name in ("candidate_topk_blocks", "candidate_block_size"):
        if getattr(c, name) < 1:
            _refuse(name, getattr(c, name), "must be at least 1 when a candidate source is set")
    for i in c.index_source_layer_ids:
        if i > source and c.compress_ratios[i] != c.compress_ratios[source]:
            _refuse("candidate_source_layer_id", source,
                    f"later index source {i} has ratio {c.compress_ratios[i]}, the pool has "
                    f"{c.compress_ratios[source]}")


def _check_engram(c: ModelConfig) -> None:
    # Also without Engram layers: the cache is as wide as the look-back.
    if c.engram_max_ngram_size < 2:
        _refuse("engram_max_ngram_size", c.engram_max_ngram_size, "must be at least 2")
    if not c.engram_layer_ids:
        return
    for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim",
                 "engram_compressed_vocab_size"):
        if getattr(c, name) < 1:
            _refuse(name, getattr(c, name), "must be at least 1 when Engram layers are set")
    if not 0 <= c.engram_pad_id < c.vocab_size:
        _refuse("engram_pad_id", c.engram_pad_id, f"must be an id below vocab_size {c.vocab_size}")
    if len(c.engram_num_embeddings) != len(c.engram_layer_ids):
        _refuse("engram_num_embeddings", list(c.engram_num_embeddings),
                f"needs one entry per Engram layer {list(c.engram_layer_ids)}")
    from labkit.primes import engram_rows

    rows = engram_rows(c)
    if list(c.engram_num_embeddings) != rows:
        _refuse("engram_num_embeddings", list(c.engram_num_embeddings),
                f"must be the sums of the hash primes, {rows}")


def _check_draft(c: ModelConfig) -> None:
    if c.num_nextn_predict_layers < 0:
        _refuse("num_nextn_predict_layers", c.num_nextn_predict_layers, "must be 0 or more")
    if not c.num_nextn_predict_layers:
        return
    for name in ("dspark_block_size", "dspark_markov_rank", "dspark_n_routed_experts",
                 "dspark_num_experts_per_tok"):
        if getattr(c, name) < 1:
            _refuse(name, getattr(c, name), "must be at least 1 when draft stages are set")
    if c.dspark_num_experts_per_tok > c.dspark_n_routed_experts:
        _refuse("dspark_num_experts_per_tok", c.dspark_num_experts_per_tok,
                f"must not exceed dspark_n_routed_experts {c.dspark_n_routed_experts}")
    if not 0 <= c.dspark_noise_token_id < c.vocab_size:
        _refuse("dspark_noise_token_id", c.dspark_noise_token_id,
                f"must be an id below vocab_size {c.vocab_size}")
    targets = c.dspark_target_layer_ids
    if not targets or any(not 0 <= i < c.num_hidden_layers for i in targets):
        _refuse("dspark_target_layer_ids", list(targets),
                f"needs layers in 0..{c.num_hidden_layers - 1}")


def _check_vision(c: ModelConfig) -> None:
    v = c.vision
    least = 1 if v.num_hidden_layers > 0 else 0
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size",
                 "patch_size", "downsample_ratio", "max_image_tokens", "min_pixels"):
        if getattr(v, name) < least:
            _refuse(f"vision_config.{name}", getattr(v, name), f"must be at least {least}")
    if not v.rope_theta > 1:
        _refuse("vision_config.rope_theta", v.rope_theta, "must be greater than 1")
    if v.num_hidden_layers and v.hidden_size % (v.num_attention_heads * 4):
        _refuse("vision_config.hidden_size", v.hidden_size,
                "head dimension must divide by 4 for the two-dimensional rotation")
    if not (0 if v.num_hidden_layers else -1) <= c.image_token_id < c.vocab_size:
        rule = f"must be an id below vocab_size {c.vocab_size}"
        _refuse("image_token_id", c.image_token_id,
                rule if v.num_hidden_layers else f"{rule}, or -1 for none")
