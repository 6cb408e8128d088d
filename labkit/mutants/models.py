"""Small models with random weights in which no mechanism is degenerate.

Fresh weights hide faults: zero sinks, zero biases, unit norms and symmetric mixing all behave
alike in right and wrong code. `fill` draws every tensor at a scale at which it matters.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from labkit.config import ModelConfig, RopeScaling
from labkit.model.transformer import Transformer
from labkit.primes import engram_rows

SMALL: dict[str, Any] = dict(
    vocab_size=64, hidden_size=16, moe_intermediate_size=12, num_hidden_layers=7,
    num_attention_heads=4, head_dim=32, qk_rope_head_dim=8, q_lora_rank=16, o_lora_rank=8,
    o_groups=2, n_routed_experts=5, num_experts_per_tok=2, sliding_window=4,
    compress_ratios=(0, 2, 2, 2, 1, 1, 1), kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 3, 4, 6), index_n_heads=2, index_head_dim=32, index_topk=3,
    candidate_source_layer_id=4, candidate_topk_blocks=2, candidate_block_size=3,
    max_position_embeddings=4096, rope_scaling=RopeScaling(16.0, 32.0, 1.0, 64),
    swiglu_limit=1.0, engram_layer_ids=(1, 4), engram_max_ngram_size=3, engram_vocab_size=31,
    engram_n_heads=2, engram_head_dim=8, engram_pad_id=5, engram_compressed_vocab_size=40,
)
"""Every mechanism in seven layers: window-only, Full, Reindex and Reuse layers of ratios 2 and
1, a candidate pool that is full after six entries, and a SwiGLU limit that is really met."""

DRAFT: dict[str, Any] = dict(
    num_nextn_predict_layers=2, dspark_block_size=3, dspark_noise_token_id=7,
    dspark_target_layer_ids=(3, 4, 6), dspark_markov_rank=4, dspark_n_routed_experts=3,
    dspark_num_experts_per_tok=2, compress_ratios=(*SMALL["compress_ratios"], 0, 0),
)
"""What makes `SMALL` a target with a draft of two stages and three slots; one of its target
layers lies in the encoder and one has an Engram update."""


def small_config(**changes: Any) -> ModelConfig:
    """`SMALL` with changes, the Engram tables sized to fit, validated."""
    config = ModelConfig(**{**SMALL, **changes})
    config = dataclasses.replace(config, engram_num_embeddings=tuple(engram_rows(config)))
    config.validate()
    return config


def small_classes(config: ModelConfig, seed: int = 0) -> torch.Tensor:
    """A class map [V] that uses every class and gives the pad id a class unlike the id."""
    made = torch.Generator().manual_seed(seed)
    count = config.engram_compressed_vocab_size
    if not count:
        return torch.zeros(config.vocab_size, dtype=torch.int64)
    classes = torch.randint(count, (config.vocab_size,), generator=made)
    classes[torch.randperm(config.vocab_size, generator=made)[:count]] = torch.arange(count)
    if int(classes[config.engram_pad_id]) == config.engram_pad_id:
        classes = (classes + 1) % count
    return classes


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Random values for every parameter, the same for every dtype of the model."""
    made = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        noise = torch.randn(p.shape, generator=made, dtype=torch.float64)
        if name.endswith(("norm.weight", "q_weight", "k_weight")):
            value = 1 + 0.15 * noise
        elif name.endswith("_scale"):
            value = 1 + 0.3 * noise
        elif name.endswith(("_base", "bias", "bias_vl")):
            value = 0.5 * noise
        elif name.endswith(("attn_sink", "embed.weight")):
            value = noise
        else:  # [out, in]
            value = noise * p.shape[-1] ** -0.5
        p.copy_(value)


def random_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float64,
                 cache_rounding: bool = False, kernel_set: str = "reference") -> Transformer:
    """With a draft if the config has one (`DRAFT`)."""
    model = Transformer(config, small_classes(config, seed), kernel_set, cache_rounding,
                        draft=True)
    fill(model, seed)
    return model.to(dtype).eval()


def random_ids(config: ModelConfig, length: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """[rows, length]; the Engram pad id occurs in it as ordinary text."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (rows, length), generator=made)
    ids[torch.rand(ids.shape, generator=made) < 0.08] = config.engram_pad_id
    return ids
