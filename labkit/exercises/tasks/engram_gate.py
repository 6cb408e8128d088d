"""Exercise 2.3: the gate of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from labkit.exercises.record import Case, Mistake
from labkit.trace import Taps

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "2.3", "A gate for every stream", "gates_of"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 3, 4
TOLERANCE = 1e-4
OBJECTIVE = """
A looked-up memory may be wrong: two n-grams can share a row. So each of the C streams has a key
for the memory and opens its own gate. Write the gates [T,C]: the dot product over D of the
*normed* stream and the *normed* key (norm: divide by the root of the mean square, plus eps under
the root), weighted channel by channel with `q_weight * k_weight`, divided by the root of D. Of
that agreement take the root of its absolute value with its sign, and of this the sigmoid.
"""
HELP = (
    """Shapes first: streams and keys are [T,C,D], the weights [C,D] fit behind them, the gates are
    [T,C]. Everything is per stream: nothing is summed or averaged over C.""",
    """The signed root is `a.sign() * a.abs().sqrt()`. It spreads small agreements apart: 0.01
    becomes 0.1. The norm has no learned weight of its own; `q_weight` and `k_weight` are that.""",
    """```python
    def normed(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    agreement = (normed(streams) * normed(keys) * ...).sum(-1) / ...
    return torch.sigmoid(...)
    ```""",
)
AFTER = """These are the gates of the run, from the streams that it really had. A gate says how much
of the value enters a stream, not whether that helped; muting Engram shows what it is worth. The
check cannot see the floor under the root, which keeps gradients finite: it is too
small to show here."""


def solution(streams, keys, q_weight, k_weight, eps):
    """Gates [T,C] of streams [T,C,D] for the keys [T,C,D] of looked-up memory.

    q_weight, k_weight [C,D]: learned weights of the channels.
    """
    def normed(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    D = streams.shape[-1]
    agreement = (normed(streams) * normed(keys) * q_weight * k_weight).sum(-1) / D**0.5
    return torch.sigmoid(agreement.sign() * agreement.abs().sqrt())


def alternative(streams, keys, q_weight, k_weight, eps):
    """Norms outside the sum."""
    dot = torch.einsum("tcd,tcd->tc", streams * q_weight, keys * k_weight)
    size = streams.square().mean(-1).add(eps).sqrt() * keys.square().mean(-1).add(eps).sqrt()
    a = dot / size / streams.shape[-1] ** 0.5
    return 1 / (1 + torch.exp(-torch.where(a < 0, -1.0, 1.0) * a.abs() ** 0.5))


def _with(streams, keys, q_weight, k_weight, eps, *, root=True, sign=True, norm=True,
          scale=True, mean=False):
    def normed(x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) if norm else x

    a = (normed(streams) * normed(keys) * q_weight * k_weight).sum(-1)
    a = a / streams.shape[-1] ** 0.5 if scale else a
    a = a.mean(-1, keepdim=True).expand_as(a) if mean else a
    if root:
        a = (a.sign() if sign else 1.0) * a.abs().sqrt()
    return torch.sigmoid(a)


def without_the_root(*args):
    return _with(*args, root=False)


def without_the_sign(*args):
    return _with(*args, sign=False)


def without_the_norms(*args):
    return _with(*args, norm=False)


def without_the_scale(*args):
    return _with(*args, scale=False)


def one_gate_for_all(*args):
    return _with(*args, mean=True)


MISTAKES = (
    Mistake(without_the_root, "the sigmoid is taken of the agreement itself; between them stands "
            "the signed root.", "a formula copied without its root"),
    Mistake(without_the_sign, "the root lost the sign, so a memory that contradicts the stream "
            "opens the gate as widely as one that agrees.", "sqrt(abs(x)) alone"),
    Mistake(without_the_norms, "stream and key are not normed: the gate then grows with the length "
            "of the stream, which grows from layer to layer.", "a plain dot product"),
    Mistake(without_the_scale, "the division by the root of D is missing, as in attention without "
            "its scale.", "forgotten scale"),
    Mistake(one_gate_for_all, "one gate for all streams: each stream has a key and a gate of its "
            "own.", "Engram ported to a model with one stream"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    ids = torch.tensor([lab.encode("She was not at all afraid of the rain")])
    for number, layer in enumerate(c.engram_layer_ids):
        taps = Taps([f"layers.{layer}.streams_in", "engram_hash_ids"])
        lab.model(ids, taps=taps)
        layers: Any = lab.model.layers
        own = layers[layer].engram
        rows = taps["engram_hash_ids"][0, :, number].to(own.embed.weight.device)
        memory = own.wkv(own.embed(rows).flatten(-2)).detach().float().cpu()     # [T,(C+1)*D]
        keys = memory.unflatten(-1, (c.hc_mult + 1, c.hidden_size))[:, :-1]      # [T,C,D]
        yield Case(f"the gates of the run in layer {layer}", (
            taps[f"layers.{layer}.streams_in"][0].float().cpu(), keys,
            own.q_weight.detach().float().cpu(), own.k_weight.detach().float().cpu(),
            c.rms_norm_eps))
