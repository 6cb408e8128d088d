"""Are the draft's confidences true? Measuring it, and sequential temperature scaling.

Data are N drafts of n slots: the confidence logits, and which slots survived verification. A
slot survives if it and all slots before it were accepted, so a row of `survived` is some True
followed by False. Its prediction is the product a_j = c_1 ... c_j.

Expected calibration error (ECE) of predictions p against outcomes y: `bins` bins of equal width
on [0, 1]; the sum over bins of (share of the data in it) * |mean p in it - mean y in it|.

Sequential temperature scaling (technical report): slot by slot from the left, the temperature on
a grid that makes the ECE of a_j least, with the slots before it as they were just set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labkit.engine.calibration import calibrated, check_temperatures
from labkit.errors import InputError

BINS = 15
GRID = tuple(math.exp(math.log(8) * i / 120) for i in range(-120, 121))  # 1/8 .. 8, 1.75 % apart


@dataclass(frozen=True)
class Bin:
    """One bar of a reliability diagram; `predicted` and `observed` are None in an empty bin."""

    low: float
    high: float
    count: int
    predicted: float | None   # mean of the predictions in it
    observed: float | None    # share that survived


@dataclass(frozen=True)
class Fit:
    """Temperatures by slot, and the ECE of a_j by slot on the data of the fit."""

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def expected_calibration_error(predicted: torch.Tensor, observed: torch.Tensor,
                               bins: int = BINS) -> float:
    """Of predictions [N] in 0..1 and outcomes [N] (bool, or frequencies in 0..1): in 0..1."""
    predicted, observed = _checked(predicted[:, None], observed[:, None], bins)
    return float(_error(predicted.T, observed[:, 0], bins)[0])


def reliability(predicted: torch.Tensor, observed: torch.Tensor, bins: int = BINS) -> list[Bin]:
    """The reliability diagram of predictions [N] and outcomes [N]; bins from 0 to 1."""
    predicted, observed = _checked(predicted[:, None], observed[:, None], bins)
    count, p, y = (t[0].tolist() for t in _sums(predicted.T, observed[:, 0], bins))
    return [Bin(i / bins, (i + 1) / bins, round(count[i]),
                p[i] / count[i] if count[i] else None, y[i] / count[i] if count[i] else None)
            for i in range(bins)]


def survival_errors(confidence_logits: torch.Tensor, survived: torch.Tensor,
                    temperatures: Sequence[float] | None = None,
                    bins: int = BINS) -> tuple[float, ...]:
    """ECE of a_j for every slot j; logits [N,n], survived bool [N,n]; no temperatures: all 1."""
    a, alive = _survival(confidence_logits, survived, temperatures)                 # [N,n]
    return tuple(expected_calibration_error(a[:, j], alive[:, j], bins)
                 for j in range(a.shape[1]))


def reliability_by_slot(confidence_logits: torch.Tensor, survived: torch.Tensor,
                        temperatures: Sequence[float] | None = None,
                        bins: int = BINS) -> list[list[Bin]]:
    """A reliability diagram of a_j for every slot j; arguments as `survival_errors`."""
    a, alive = _survival(confidence_logits, survived, temperatures)
    return [reliability(a[:, j], alive[:, j], bins) for j in range(a.shape[1])]


def _survival(confidence_logits: torch.Tensor, survived: torch.Tensor,
              temperatures: Sequence[float] | None) -> tuple[torch.Tensor, torch.Tensor]:
    logits, alive = _checked_drafts(confidence_logits, survived)
    if temperatures is None:
        temperatures = [1.0] * logits.shape[1]
    return calibrated(logits, temperatures).cumprod(-1), alive


def fit_temperatures(confidence_logits: torch.Tensor, survived: torch.Tensor,
                     grid: Sequence[float] = GRID, bins: int = BINS) -> Fit:
    """Sequential temperature scaling on logits [N,n] and survived bool [N,n].

    Among temperatures of equal error the one nearest to 1 (by its logarithm) is taken, so a
    slot on which there is nothing to be gained stays as the head says it.
    InputError for data of the wrong shape, a row in which a slot survives a rejected one, logits
    that are not finite, an empty or unusable grid.
    """
    logits, alive = _checked_drafts(confidence_logits, survived)
    # Nearest to 1 first: argmin then takes it among equals.
    steps = torch.tensor(sorted(check_temperatures(grid), key=lambda t: abs(math.log(t))),
                         dtype=torch.float64)                                       # [G]
    before = torch.ones(logits.shape[0], dtype=torch.float64)   # a_{j-1}, as set so far
    chosen: list[float] = []
    for j in range(logits.shape[1]):
        a = before * torch.sigmoid(logits[:, j] / steps[:, None])                   # [G,N]
        best = int(_error(a, alive[:, j], bins).argmin())
        chosen.append(float(steps[best]))
        before = a[best]
    return Fit(tuple(chosen), survival_errors(confidence_logits, survived, None, bins),
               survival_errors(confidence_logits, survived, chosen, bins))


# ---- sums over bins, and checks -------------------------------------------------------------


def _sums(predicted: torch.Tensor, observed: torch.Tensor,
          bins: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count, sum of predictions, sum of outcomes) by bin, [G,bins] each; predicted [G,N]."""
    G, N = predicted.shape
    place = (predicted * bins).long().clamp(max=bins - 1)       # 1.0 belongs to the last bin
    place = place + bins * torch.arange(G)[:, None]
    found = []
    for weights in (torch.ones_like(predicted), predicted, observed.expand(G, N)):
        total = torch.bincount(place.flatten(), weights.flatten(), minlength=G * bins)
        found.append(total.view(G, bins))
    return found[0], found[1], found[2]


def _error(predicted: torch.Tensor, observed: torch.Tensor, bins: int) -> torch.Tensor:
    """ECE of each row of predicted [G,N] against observed [N]: [G]."""
    _, p, y = _sums(predicted, observed, bins)
    # count * |p/count - y/count| is |p - y|: an empty bin adds nothing.
    return (p - y).abs().sum(-1) / predicted.shape[1]


def _checked(predicted: torch.Tensor, observed: torch.Tensor,
             bins: int) -> tuple[torch.Tensor, torch.Tensor]:
    predicted, observed = predicted.detach().double().cpu(), observed.detach().double().cpu()
    if bins < 1:
        raise InputError(f"bins is {bins}: there must be at least 1")
    if predicted.shape != observed.shape or predicted.numel() == 0:
        raise InputError(f"predictions {tuple(predicted.shape)} and outcomes "
                         f"{tuple(observed.shape)} must be of one shape and not empty")
    for name, values in (("predictions", predicted), ("outcomes", observed)):
        if not bool(((values >= 0) & (values <= 1)).all()):
            raise InputError(f"{name} must be numbers in 0..1")
    return predicted, observed


def _checked_drafts(logits: torch.Tensor,
                    survived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.detach().double().cpu()
    alive = survived.detach().cpu()
    if logits.ndim != 2 or logits.shape != alive.shape or logits.numel() == 0:
        raise InputError(f"confidence logits {tuple(logits.shape)} and survival "
                         f"{tuple(alive.shape)} must both be [drafts, slots] and not empty")
    if alive.dtype != torch.bool:
        raise InputError(f"survival must be True or False, not {alive.dtype}")
    if not bool(torch.isfinite(logits).all()):
        raise InputError("confidence logits hold NaN or infinity")
    if bool((alive[:, 1:] & ~alive[:, :-1]).any()):
        raise InputError("a slot survives only if all slots before it do: some row of the "
                         "survival data has True behind False")
    return logits, alive.double()
