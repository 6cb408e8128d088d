"""Where training starts: seeded random weights, scaled so that every site does something.

What only the ratio of two scales decides is chosen once: all readers normalise what they read
(RMSNorm before each site, in the hyper-connections, in the Engram gate and before the head), so
the size of the streams is free and only embedding against updates matters.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import nn

from labkit.model.block import Block
from labkit.model.rope import inverse_frequencies
from labkit.model.transformer import Transformer

EMBED_STD = 0.5         # about what all 2L updates add up to at the start: neither drowns the other
TABLE_STD = 0.02        # Engram rows: one that training never meets must add next to nothing
HEAD_STD = 0.02         # logits near 0, so the first loss is near ln(vocabulary)
GATE_STD = 0.02         # routing scores nearly equal; top-k looks at their order only
PRE_LOGIT = 2.0         # sigmoid: 0.88 of the stream whose turn it is, 0.12 of the others
COMB_LOGIT = 4.0        # softmax over 4 streams: 0.95 on the diagonal
MIX_SCALE = 0.01        # how much the mixing depends on the token at first
LOOK_BACK = 4           # heads of layer 0 that look at the token 1, 2, ... back, as copying does
CONSTANT = 2.0          # channel 0 of every embedding, what those heads are made from
TURNING_PAIRS = 4       # channel pairs that turn fast enough to tell neighbours apart
QUERY, KEY = 2.2, 1.1   # of the constant, in those pairs: 2/3 of the attention on the token meant
MARKOV_STD = 1.0        # of the draft's rows by previous token; its bias starts near 0 by HEAD_STD


@torch.no_grad()
def init_weights(model: Transformer, seed: int = 0) -> Transformer:
    """Fill every parameter in place; the same seed gives the same bits on every device.

    Projections: normal with variance 1/fan_in, which keeps the scale; those that write into the
    streams (`wo_b`, `w2`) are divided by sqrt(2 L), so that the 2 L updates together have the
    scale of one; L is the number of layers, in a draft (`mtp.*`) of its stages. Norm weights 1,
    sinks and biases 0. Then what copying is made of (`_init_copying`). The backbone is drawn
    first: it is the same with and without a draft.
    Returns the model.
    """
    generator = torch.Generator().manual_seed(seed)
    c = model.config

    def normal(p: nn.Parameter, std: float) -> None:
        # Drawn in fp32 on the CPU whatever the model's dtype and device.
        p.copy_(torch.randn(p.shape, generator=generator) * std)

    for name, p in model.named_parameters():
        kind = name.rsplit(".", 2)[-2:]                  # e.g. ["wo_b", "weight"]
        draft = name.startswith("mtp.")
        depth = math.sqrt(2 * (c.num_nextn_predict_layers if draft else c.num_hidden_layers))
        if name == "embed.weight":
            normal(p, EMBED_STD)
        elif name == "head.weight" or name.endswith(("markov_head.head.weight",
                                                     "confidence_head.proj.weight")):
            normal(p, HEAD_STD)
        elif name.endswith("markov_head.embed.weight"):
            normal(p, MARKOV_STD)
        elif name.endswith("engram.embed.weight"):
            normal(p, TABLE_STD)
        elif name.endswith("gate.weight"):
            normal(p, GATE_STD)
        elif kind[-1].startswith("hc_"):
            _init_mixing(name, p, model, normal)
        elif kind[-1] in ("attn_sink", "bias", "bias_vl"):
            p.zero_()
        elif p.ndim == 1 or kind[-1] in ("q_weight", "k_weight"):
            p.fill_(1.0)
        else:
            std = p.shape[1] ** -0.5                     # [out, in]; also the grouped wo_a
            normal(p, std / depth if kind[0] in ("wo_b", "w2") else std)
    _init_copying(model)
    return model


def _init_copying(model: Transformer) -> None:
    """What copying a token that followed once before is made of, there from the start.

    The head is the embedding, smaller: "say what you see there" is one linear map for all tokens,
    also rare ones. And some heads of layer 0 look back by a fixed number of tokens: a key that
    turns with position from the same angle everywhere, a query that is ahead of it by so much.
    Both come from a constant channel, since projections here have no bias. In one trial each, a
    mini with these heads copied 95 % of repeated words after 225 steps of nothing else, one
    without them 40 % after 300; what the head adds was not tried apart.
    """
    c, attention = model.config, cast(Block, model.layers[0]).attn
    embed, head = model.embed.weight.float(), model.head.weight
    head.copy_(embed * (HEAD_STD / EMBED_STD))
    head[:, 0] = 0.0                                     # no token is likelier for the constant
    model.embed.weight[:, 0] = CONSTANT
    attention.wq_a.weight[0] = 0.0
    attention.wq_a.weight[0, 0] = 1.0                    # the constant, alone in latent 0
    rates = inverse_frequencies(c, compressed=attention.role.ratio > 0)
    first = c.head_dim - c.qk_rope_head_dim              # of the channels that turn

    def shift(p: torch.Tensor, row: int, by: float) -> None:
        p[row, 0] = p[row, 0].float() + by               # in fp32 whatever the dtype, as drawn

    for pair in range(min(TURNING_PAIRS, len(rates))):
        even = first + 2 * pair
        shift(attention.wkv.weight, even, KEY)
        for number in range(min(LOOK_BACK, c.num_attention_heads // 2)):
            row, angle = number * c.head_dim + even, rates[pair] * (number + 1)
            shift(attention.wq_b.weight, row, QUERY * math.cos(angle))
            shift(attention.wq_b.weight, row + 1, -QUERY * math.sin(angle))


def _init_mixing(name: str, p: nn.Parameter, model: Transformer, normal) -> None:  # type: ignore[no-untyped-def]
    """Hyper-connections: streams pass almost unmixed, sites take turns in reading them.

    All streams begin as copies of the embedding and every site writes to all of them alike, so
    with equal `pre` everywhere they would stay copies. The turns tell them apart.
    """
    C = model.config.hc_mult
    if name.endswith("_fn"):
        normal(p, p.shape[1] ** -0.5)
    elif name.endswith("_scale"):
        p.fill_(MIX_SCALE)
    else:
        layer = int(name.split(".")[1])                  # or the stage: a draft has its own streams
        site = 2 * layer + (1 if "hc_ffn" in name else 0)
        pre = torch.full((C,), -PRE_LOGIT)
        pre[(site + 1) % C] = PRE_LOGIT                  # for the next site; site 0 reads stream 0
        post = torch.zeros(C)                            # 2 * sigmoid(0) = 1: written as it is
        comb = COMB_LOGIT * torch.eye(C)
        p.copy_(torch.cat([pre, post, comb.flatten()]))
