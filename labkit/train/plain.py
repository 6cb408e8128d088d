"""What a V4.1 is compared with: a plain transformer, trained on the same rows in the same way.

Pre-norm, rotary attention over the whole context with keys and values of every head, SwiGLU;
no streams, no compression, no selection, no experts, no Engram.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from labkit.errors import InputError
from labkit.model.norm import RMSNorm
from labkit.model.transformer import Output


@dataclass(frozen=True)
class PlainConfig:
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-20

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def parameters(self) -> int:
        return self.active_parameters + self.vocab_size * self.hidden_size

    @property
    def active_parameters(self) -> int:
        """All but the embedding, which is looked up (as `checkpoint.accounting.active_decode`)."""
        D, L = self.hidden_size, self.num_hidden_layers
        layer = 4 * D * D + 3 * D * self.intermediate_size + 2 * D
        return L * layer + D + self.vocab_size * D

    @property
    def cache_bytes_a_token(self) -> int:
        """Keys and values of all heads and layers in bf16."""
        return 2 * 2 * self.hidden_size * self.num_hidden_layers


EMBED_STD, HEAD_STD = 0.5, 0.02     # as of the V4.1 models trained here
LOOK_BACK, TURNING_PAIRS, CONSTANT = 4, 4, 2.0
SHARPNESS = 4.0      # of their logits: about 2/3 of the attention on the token meant

FFN_RATIO = 8 / 3    # intermediate over hidden size: as large as the usual 4 without a gate
FFN_STEP = 8         # intermediate sizes are multiples of it
TOLERANCE = 0.03     # how far the active parameters may be from those asked for


def plain_config(active: int, vocab_size: int, layers: int, head_dim: int = 32) -> PlainConfig:
    """A plain transformer of so many active parameters, within 3 %, in so many layers.

    Of all hidden sizes that are whole heads, the one whose FFN is nearest to the usual size.
    InputError where there is none.
    """
    if layers < 1 or head_dim not in (32, 64):
        raise InputError(f"a plain transformer with {layers} layers and heads of {head_dim}: give "
                         "1 layer or more and heads of 32 or 64")
    found: list[tuple[float, PlainConfig]] = []
    for heads in range(1, 1 + active // (vocab_size * head_dim)):
        D = heads * head_dim
        bare = PlainConfig(vocab_size, D, layers, heads, 0)
        wanted = (active - bare.active_parameters) / (3 * D * layers)
        F_ = round(wanted / FFN_STEP) * FFN_STEP
        config = PlainConfig(vocab_size, D, layers, heads, F_)
        if F_ > 0 and abs(config.active_parameters / active - 1) <= TOLERANCE:
            found.append((abs(math.log(F_ / D / FFN_RATIO)), config))
    if not found:
        raise InputError(f"no plain transformer of {layers} layers, a vocabulary of "
                         f"{vocab_size:,} and heads of {head_dim} has about {active:,} active "
                         "parameters: the head alone may be larger; compare with a larger model")
    return min(found, key=lambda pair: pair[0])[1]


class PlainBlock(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        D, self.heads = config.hidden_size, config.num_attention_heads
        self.attn_norm, self.ffn_norm = (RMSNorm(D, config.rms_norm_eps) for _ in range(2))
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(D, config.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(config.intermediate_size, D, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x [B,T,D] -> [B,T,D]; cos, sin [T,d/2]."""
        y = self.attn_norm(x)
        q, k, v = (w(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)     # [B,H,T,d]
                   for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of [B,H,T,d], halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(x.dtype)


class PlainTransformer(nn.Module):
    """`model(ids).logits`, as of a `Transformer`."""

    def __init__(self, config: PlainConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """As `labkit.model.init`: variance 1/fan_in, what writes into the stream / sqrt(2 L), and
        the same head start in copying, so that neither model has to find it and the other not.
        """
        generator = torch.Generator().manual_seed(seed)
        depth = (2 * self.config.num_hidden_layers) ** 0.5
        for name, p in self.named_parameters():
            if p.ndim == 1:
                continue
            std = EMBED_STD if name == "embed.weight" else p.shape[1] ** -0.5
            p.copy_(torch.randn(p.shape, generator=generator) * std)
            if name.endswith(("wo.weight", "w2.weight")):
                p.div_(depth)
        self._init_copying()

    def _init_copying(self) -> None:
        """The head is the embedding, smaller; up to 4 heads of layer 0 look 1, 2, ... tokens back.

        Their keys turn with position from the same angle everywhere and their queries are ahead
        by so many tokens; both come from a constant channel of the embedding.
        """
        c, layer = self.config, self.layers[0]
        assert isinstance(layer, PlainBlock)
        self.head.weight.copy_(self.embed.weight * (HEAD_STD / EMBED_STD))
        self.head.weight[:, 0] = 0.0                        # no token is likelier for it
        self.embed.weight[:, 0] = CONSTANT
        normed = CONSTANT / (EMBED_STD**2 + CONSTANT**2 / c.hidden_size) ** 0.5
        gain = (SHARPNESS * c.head_dim**0.5) ** 0.5 / normed
        rates = self.rates(torch.device("cpu"))[:TURNING_PAIRS]
        for head in range(min(LOOK_BACK, c.num_attention_heads // 2)):
            for pair, rate in enumerate(rates.tolist()):
                one, other = (head * c.head_dim + pair + k * (c.head_dim // 2) for k in (0, 1))
                angle = rate * (head + 1)
                layer.wk.weight[one, 0] += gain
                layer.wq.weight[one, 0] += gain * math.cos(angle)
                layer.wq.weight[other, 0] -= gain * math.sin(angle)

    def rates(self, device: torch.device) -> torch.Tensor:
        """Radians a token by which the channel pairs turn, [d/2]."""
        half = self.config.head_dim // 2
        return self.config.rope_theta ** -(torch.arange(half, device=device) / half)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor | None = None) -> Output:
        """ids [B,T] -> logits [B,T,V]; lengths: right padding changes nothing before it."""
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None] * self.rates(ids.device)
        x = self.embed(ids)                                 # [B,T,D]; angle [T,d/2]
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return Output(self.head(self.norm(x)))
