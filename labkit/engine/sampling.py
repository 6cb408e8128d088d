"""How the next token is chosen: logits -> probabilities -> one id. Pure functions.

Everything runs on the CPU in float64, whatever the model runs on. Then the same logits and seed
give the same id on every device, and the sum over a vocabulary of 129,280 is exact enough to
cut at `top_p`; fp32 would be off in the seventh digit, about one rare token's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from labkit.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """The choices of a caller, checked. InputError names the option, the value and the rule.

    temperature  0: always the most likely id (greedy); 1: the model's own distribution
    top_k        keep the k most likely ids; 0: all
    top_p        keep the smallest set of likely ids that holds this share of the mass
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not _number(self.temperature) or not 0 <= self.temperature < math.inf:
            _refuse("temperature", self.temperature, "must be 0 (greedy) or a positive number")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            _refuse("top_p", self.top_p, "must be above 0 and at most 1 (1 keeps all)")
        if not isinstance(self.top_k, int) or isinstance(self.top_k, bool) or self.top_k < 0:
            _refuse("top_k", self.top_k, "must be a whole number, 0 (keep all) or more")


def distribution(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0,
                 top_p: float = 1.0) -> torch.Tensor:
    """Logits [V] -> probabilities [V], float64 on the CPU, summing to 1.

    In this order: temperature, top_k, top_p. Equally likely ids are kept lowest id first, so
    exactly `top_k` remain. InputError for a bad option or logits without a finite largest one.
    """
    Sampling(temperature, top_k, top_p)
    x = logits.detach().cpu().double()      # in this order: an MPS device has no float64
    if x.ndim != 1 or x.numel() == 0:
        raise InputError(f"logits must have shape [V], got {list(x.shape)}")
    largest = x.max()
    if not math.isfinite(largest):
        raise InputError("the logits hold NaN or infinity: the weights or the cache are damaged")
    if temperature == 0:
        return torch.zeros_like(x).index_fill_(0, x.argmax(), 1.0)
    # Shifted first: the largest is 0 and stays 0 at any temperature, however small.
    p = torch.softmax((x - largest) / temperature, dim=0)
    if not top_k and top_p == 1:
        return p
    ordered, ids = torch.sort(p, descending=True, stable=True)
    if top_k:
        ordered[top_k:] = 0.0
        ordered = ordered / ordered.sum()
    if top_p < 1:
        before = ordered.cumsum(0) - ordered      # mass of all that are likelier: 0 for the first
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        ordered = ordered / ordered.sum()
    return torch.zeros_like(p).scatter_(0, ids, ordered)


def sample(probabilities: torch.Tensor, generator: torch.Generator) -> int:
    """One id drawn from probabilities [V], with one number from the (CPU) generator.

    The inverse of the cumulative distribution: the first id at which it exceeds the number. An
    id of probability 0 is never drawn.
    """
    total = probabilities.cpu().double().cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * total[-1]
    found = int(torch.searchsorted(total, drawn, right=True))
    if found == total.numel():  # the product was rounded up to the total
        found = int(torch.searchsorted(total, total[-1]))
    return found


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse(name: str, value: object, rule: str) -> None:
    raise InputError(f"{name} is {value!r}: it {rule}")
