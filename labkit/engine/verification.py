"""Lossless verification: which drafted tokens stay, and which token follows the last of them.

The draft drew x_1..x_n, each from a distribution p_d of its own; one forward of the target gave
p_t at each of these places and at the one behind them. From left to right, x is accepted with
probability min(1, p_t(x) / p_d(x)). At the first rejection the token is drawn anew from the
normalised positive part of p_t - p_d, and the rest of the block is dropped. If all n are
accepted, a bonus token is drawn from the last p_t.

What is emitted follows p_t exactly, however bad the draft is. At one place

    p_d(v) min(1, p_t(v)/p_d(v)) + P(rejection) residual(v) = min(p_d(v), p_t(v))
                                                              + max(0, p_t(v) - p_d(v)) = p_t(v)

since both P(rejection) and the sum of the positive part are the total variation of the two.
The one condition: whether x_j is verified at all must not depend on x_j or on what was drafted
after it (`engine.scheduling`).

Greedy decoding is temperature 0: the same code on distributions that hold a single 1.

Source: DSpark paper (DeepSpec repository); the rule is that of speculative sampling (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.engine.sampling import sample
from labkit.errors import InputError

SUM = 1e-9      # probabilities may miss the sum 1 by so much: float64 over a large vocabulary


@dataclass(frozen=True)
class Verdict:
    """What one step emits: the first `accepted` drafted ids, then `next_id`.

    bonus  True when nothing was rejected, so that next_id comes from the target's distribution
           behind the block (without drafts: plain sampling); False when it replaces a rejected id
    """

    accepted: int
    next_id: int
    bonus: bool


def verify(targets: Sequence[torch.Tensor], drafts: Sequence[torch.Tensor], ids: Sequence[int],
           generator: torch.Generator) -> Verdict:
    """Verify n drafted ids: n+1 target and n draft distributions [V] of `sampling.distribution`.

    drafts[k] is the distribution that ids[k] was drawn from, after temperature, top_k and top_p;
    targets[k] is the target's at the same place, under the same options.

    The (CPU) generator gives one number per decision, in this order: one per drafted id up to and
    including the first that is rejected, then one for next_id. What is certain takes its number
    too. So a step takes accepted + 2 numbers after a rejection and n + 1 without one; with n = 0
    it is `sampling.sample`, number for number.

    InputError for lengths that do not fit, for what is no distribution, and for an id that is
    outside the vocabulary or that the draft cannot have drawn (p_d = 0).
    """
    targets, drafts = _distributions(targets, drafts, len(ids))
    for k, id in enumerate(ids):
        if not 0 <= id < targets[0].numel():
            raise InputError(f"drafted id {id} of slot {k} is outside the vocabulary of "
                             f"{targets[0].numel()}: draft and target must share it")
        if not drafts[k][id] > 0:
            raise InputError(f"the draft gives id {id} of slot {k} probability 0, so it did not "
                             "draw it: pass the distribution that the id was drawn from")
    for k, id in enumerate(ids):
        if not happens(acceptance(targets[k], drafts[k], id), generator):
            return Verdict(k, sample(residual(targets[k], drafts[k]), generator), bonus=False)
    return Verdict(len(ids), sample(targets[-1], generator), bonus=True)


def acceptance(p_t: torch.Tensor, p_d: torch.Tensor, id: int) -> float:
    """min(1, p_t / p_d) of a drafted id, with p_t and p_d [V]."""
    return min(1.0, float(p_t[id]) / float(p_d[id]))


def residual(p_t: torch.Tensor, p_d: torch.Tensor) -> torch.Tensor:
    """The distribution [V] of the token that replaces a rejected one: max(0, p_t - p_d) / sum.

    If p_t = p_d, nothing is ever rejected and there is no such distribution; p_t is returned,
    so that a rejection by mere rounding (chance about 1e-16) has an answer that is as good.
    """
    (p_t,), (p_d,) = _distributions([p_t], [p_d])
    more = (p_t - p_d).clamp(min=0.0)       # [V]
    total = more.sum()
    return more / total if total > 0 else p_t


def happens(probability: float, generator: torch.Generator) -> bool:
    """True with this probability, by one number of [0, 1): 1 always happens, 0 never."""
    return float(torch.rand((), generator=generator, dtype=torch.float64)) < probability


# ------------------------------------------------------------------------------ checks
def _distributions(targets: Sequence[torch.Tensor], drafts: Sequence[torch.Tensor],
                   ids: int | None = None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Both as float64 on the CPU. ids: how many were drafted; None: one distribution of each."""
    if ids is not None and (len(targets) != ids + 1 or len(drafts) != ids):
        raise InputError(
            f"{ids} drafted ids need {ids} draft and {ids + 1} target distributions (one more, "
            f"for the bonus token), got {len(drafts)} and {len(targets)}")
    made: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for name, given, out in zip(("target", "draft"), (targets, drafts), made, strict=True):
        for k, p in enumerate(given):
            p = p.detach().cpu().double()   # in this order: an MPS device has no float64
            if p.ndim != 1 or p.shape != targets[0].shape:
                raise InputError(f"{name} distribution {k} has shape {list(p.shape)}, target "
                                 f"distribution 0 {list(targets[0].shape)}: all must be [V]")
            least, total = (float(p.min()), float(p.sum())) if p.numel() else (0.0, 0.0)
            if not (least >= 0 and abs(total - 1) <= SUM):      # NaN fails both
                raise InputError(f"{name} distribution {k} is none (least value {least:.6g}, sum "
                                 f"{total:.12g}): make it with engine.sampling.distribution")
            out.append(p)
    return made
