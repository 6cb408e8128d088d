"""Exercise 7.3: which experts a token visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "7.3", "Which experts a token visits", "route"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 1e-5
OBJECTIVE = """
Write the router. A token's score for an expert is the root of the softplus of its logit. The k
experts with the largest score *plus bias* are picked; the bias balances loads and does nothing
else. The weights are the scores of the picked ones without the bias, divided by their sum and
multiplied by `scale`. Give the picked numbers in ascending order, with their weights [N,k].
"""
HELP = (
    """`F.softplus(logits).sqrt()` are the scores. Keep them: the biased ones are used once, for
    the choice.""",
    """`torch.topk(scores + bias, k).indices.sort(-1).values` are the numbers in order;
    `scores.gather(-1, picked)` are their weights before they are normed.""",
    """```python
    scores = F.softplus(logits).sqrt()
    picked = torch.topk(..., k).indices.sort(-1).values
    weights = scores.gather(-1, ...)
    return picked, ... * scale
    ```""",
)
AFTER = """The experts are those that the run visited. Training moves the biases towards equal
load without touching a gradient. The check cannot see whether loads are equal, only whether a bias
changes who is picked and not how much they count."""


def solution(logits, bias, k, scale):
    """(picked [N,k] in ascending order, weights [N,k]).

    logits [N,E]: one for each expert; bias [E]; scale: routed_scaling_factor.
    """
    scores = F.softplus(logits).sqrt()
    picked = torch.topk(scores + bias, k).indices.sort(-1).values
    weights = scores.gather(-1, picked)
    return picked, weights / weights.sum(-1, keepdim=True) * scale


def alternative(logits, bias, k, scale):
    """With a mask instead of a gather."""
    scores = torch.log1p(torch.exp(-logits.abs())).add(logits.clamp(min=0)).sqrt()
    order = (scores + bias).argsort(-1, descending=True)[:, :k]
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
    kept = scores * mask
    weights = scale * kept / kept.sum(-1, keepdim=True)
    picked = mask.nonzero()[:, 1].view(-1, k)
    return picked, weights[mask].view(-1, k)


def _with(logits, bias, k, scale, *, score=lambda x: F.softplus(x).sqrt(), biased=False,
          normed=True, balance=True):
    scores = score(logits)
    picked = torch.topk(scores + bias * balance, k).indices.sort(-1).values
    weights = (scores + bias if biased else scores).gather(-1, picked)
    if normed:
        weights = weights / weights.sum(-1, keepdim=True)
    return picked, weights * scale


def bias_in_weights(*args):
    return _with(*args, biased=True)


def bias_ignored(*args):
    return _with(*args, balance=False)


def softmax_scores(*args):
    return _with(*args, score=lambda x: x.softmax(-1))


def sigmoid_scores(*args):
    return _with(*args, score=torch.sigmoid)


def not_normed(*args):
    return _with(*args, normed=False)


def scale_forgotten(logits, bias, k, scale):
    return _with(logits, bias, k, 1.0)


MISTAKES = (
    Mistake(bias_in_weights, "the bias is in the weights; it only picks.",
            "mutant `bias_in_weights`"),
    Mistake(bias_ignored, "the bias is not used for the choice.", "a bias that is loaded and "
            "never read"),
    Mistake(softmax_scores, "the scores are a softmax over experts; here each expert's score is "
            "its own, the root of a softplus.", "routers of earlier mixtures"),
    Mistake(sigmoid_scores, "the scores are sigmoids, as in DeepSeek-V3; here they are roots of "
            "softplus (scoring_func sqrtsoftplus).", "DeepSeek-V3"),
    Mistake(not_normed, "the weights of the picked experts are not divided by their sum.",
            "norm_topk_prob left out"),
    Mistake(scale_forgotten, "the weights are not multiplied by routed_scaling_factor.",
            "a factor that is 1 in other models"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    model: Any = lab.model
    inputs: dict[int, torch.Tensor] = {}
    layers = (0, c.num_hidden_layers - 1)
    hooks = [model.layers[i].ffn.gate.register_forward_pre_hook(
        lambda module, args, i=i: inputs.__setitem__(i, args[0])) for i in layers]
    try:
        lab.model(torch.tensor([lab.encode("She was not at all afraid of the rain")]))
    finally:
        for hook in hooks:
            hook.remove()
    for layer in layers:
        gate = model.layers[layer].ffn.gate
        logits = F.linear(inputs[layer].float(), gate.weight.float()).detach().cpu()
        yield Case(f"the experts of the run in layer {layer}",
                   (logits, gate.bias.detach().float().cpu(), c.num_experts_per_tok,
                    float(c.routed_scaling_factor)))
    generator = torch.Generator().manual_seed(3)
    yield Case("a bias that changes the choice",
               (torch.randn(6, 8, generator=generator),
                torch.linspace(1, -1, 8), 3, 2.5))
