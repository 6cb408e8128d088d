"""Controls: the same model with one mechanism switched off, put back whatever happens inside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from labkit.errors import InputError
from labkit.model.indexer import SELECTING
from labkit.model.transformer import Transformer
from labkit.numerics.blocks import Rounding
from labkit.train import dense


@contextlib.contextmanager
def cache_rounding(model: Transformer, on: Rounding) -> Iterator[None]:
    """Inside, the cache quantisers are on or off, or those named are on."""
    with changed(model, cache_rounding=on):
        yield


@contextlib.contextmanager
def selecting(model: Transformer, how: str) -> Iterator[None]:
    """Inside, `how` picks the compressed entries that a query attends to, one of `SELECTING`."""
    if how not in SELECTING:
        raise InputError(f"selecting is {how!r}: choose one of {', '.join(SELECTING)}")
    with changed(model, selecting=how):
        yield


@contextlib.contextmanager
def all_entries(model: Transformer) -> Iterator[None]:
    """Inside, every query attends to all entries that it may see; on a CPU, by kernels for that."""
    kernels = dense if model.device.type == "cpu" else model.kernels
    with selecting(model, "all"), changed(model, kernels=kernels):
        yield


@contextlib.contextmanager
def muted_engram(model: Transformer) -> Iterator[None]:
    """Inside, Engram adds nothing to the streams: its value projection is zero."""
    weights = [model.get_parameter(f"layers.{layer}.engram.wkv.weight")
               for layer in model.config.engram_layer_ids]
    saved = [w.data for w in weights]
    try:
        for w in weights:
            w.data = torch.zeros_like(w)
        yield
    finally:
        for w, data in zip(weights, saved, strict=True):
            w.data = data


@contextlib.contextmanager
def changed(model: Transformer, **values: Any) -> Iterator[None]:
    """Inside, these attributes of the model have these values."""
    before = {name: getattr(model, name) for name in values}
    try:
        for name, value in values.items():
            setattr(model, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)
