"""How far a rounded tensor is from the exact one."""

from __future__ import annotations

import math

import torch


def relative_rms(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """sqrt(sum (rounded - exact)^2 / sum exact^2), no unit; 0 for equal tensors."""
    noise, signal = _energies(exact, rounded)
    if noise == 0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def max_error(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Largest |rounded - exact|, in the tensors' own unit."""
    if exact.numel() == 0:
        return 0.0
    return float((rounded.double() - exact.double()).abs().max())


def sqnr_db(exact: torch.Tensor, rounded: torch.Tensor) -> float:
    """Signal to quantisation noise, 10 log10(sum exact^2 / sum error^2), in decibels."""
    noise, signal = _energies(exact, rounded)
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _energies(exact: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    if exact.shape != rounded.shape:
        raise ValueError(f"shapes differ: {tuple(exact.shape)} and {tuple(rounded.shape)}")
    exact = exact.double()
    return float((rounded.double() - exact).square().sum()), float(exact.square().sum())
