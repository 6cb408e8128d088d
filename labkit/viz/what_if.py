"""One number of a model changed and everything else kept: where a text stands, the ratio.

For questions that a recorded run alone cannot answer. Nothing of the model is changed for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from labkit.errors import InputError
from labkit.kernels.reference import sparse_attention
from labkit.model.rope import rotation
from labkit.numerics.blocks import fake_quantize

if TYPE_CHECKING:
    from labkit.lab import Lab


def input_of(lab: Lab, module: str, ids: Sequence[int]) -> torch.Tensor:
    """What the module of that name is given first, in one pass over ids [T]: [1,T,D]."""
    seen: list[torch.Tensor] = []
    hook = lab.model.get_submodule(module).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].detach()))
    try:
        with torch.no_grad():
            lab.model(torch.tensor([list(ids)]))
    finally:
        hook.remove()
    return seen[0]


@torch.no_grad()
def window_site(lab: Lab, layer: int, x: torch.Tensor, offset: int = 0,
                rounded: bool = False) -> torch.Tensor:
    """The attention site of a window-only layer on x [1,T,D], whose first token stands at
    position `offset` and is the first that there is: [1,T,D].

    rounded: the window holds FP8, as in the model. InputError for a layer that reads entries.
    """
    layers: Any = lab.model.layers
    attn = layers[layer].attn
    if attn.role.ratio:
        raise InputError(f"layer {layer} reads entries: choose a window-only layer")
    T, W = x.shape[1], lab.config.sliding_window
    turns = rotation(lab.config, False, offset + torch.arange(T)[None], x.dtype)
    _, q = attn.queries(x, turns)                                       # [1,T,H,d]
    kv = attn.key_values(x, turns)                                      # [1,T,d]
    kv = fake_quantize(kv, "fp8") if rounded else kv
    window = torch.cat([kv.new_zeros(1, W, kv.shape[-1]), kv], dim=1)   # [1,W+T,d]
    y = sparse_attention(q, window, None, None, attn.attn_sink, torch.tensor([0]))
    return attn.output(y.to(x.dtype), turns)


def with_numbers(lab: Lab, ratio: int | None = None, topk: int | None = None) -> Lab:
    """The same weights with another ratio in the encoder's compressed layers, or another K in
    all: a new `Lab`. Nothing is trained for it.

    InputError where the weights have nothing for it: no gates at ratio 1, so no larger groups.
    """
    from labkit.lab import Lab
    from labkit.model.transformer import Transformer
    from labkit.viz.selection_cost import changed

    config = changed(lab.config, ratio, topk)
    model = Transformer(config, lab.model.engram_classes, cache_rounding=lab.model.cache_rounding,
                        device=lab.model.device)
    have = dict(lab.model.named_parameters())
    missing = [name for name, _ in model.named_parameters() if name not in have]
    if missing:
        raise InputError(f"ratio {ratio} needs {missing[0]}, which this model has not learnt")
    model.load_state_dict({name: have[name] for name, _ in model.named_parameters()}, assign=True)
    return Lab(model.requires_grad_(False).eval(), lab.tokenizer, lab.source)
