"""Traces of the golden vectors' models, loaded as a user's checkpoint is."""

import functools
import shutil
import tempfile
from pathlib import Path

import torch
from golden_model import GOLDEN, make_folder

import labkit
from labkit.mutants import golden
from labkit.mutants.schedules import one_pass

KERNELS = ("reference", "cpu")
_FOLDERS = Path(tempfile.mkdtemp(prefix="labkit-golden-"))

__all__ = ["GOLDEN", "KERNELS", "lab", "remove_folders", "trace", "trace_float64"]


@functools.cache
def lab(case, rounding, kernels="reference"):
    dtype = torch.bfloat16 if golden.case(case).config.dtype == "bfloat16" else torch.float32
    folder = _FOLDERS / case
    if not folder.exists():
        make_folder(folder, case)
    return labkit.load(folder, dtype=dtype, device="cpu", kernels=kernels, cache_rounding=rounding)


@functools.cache
def trace(case, rounding, kernels="reference"):
    """The case's inputs through `lab.trace`, once per session."""
    vector = golden.case(case)
    return lab(case, rounding, kernels).trace(vector.ids, vector.lengths)


@functools.cache
def trace_float64(case, kernels="reference"):
    """The same in float64 with cache rounding: no noise, so nothing flips but by a fault."""
    vector = golden.case(case)
    model = golden.in_float64(lab(case, True, kernels).model)
    return one_pass(model, vector.ids, vector.lengths)


def remove_folders():
    shutil.rmtree(_FOLDERS, ignore_errors=True)
