"""Putting a draft beside a model that is there: its tensors join the file, the rest stays as is.

Rounding a rounded weight again gives the same values, but not always the same bytes (a scale may
drop a step). So the backbone's tensors are not read and written anew: their bytes are copied.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from labkit.checkpoint.files import SINGLE, find_tensors
from labkit.checkpoint.layout import Form, parameters
from labkit.checkpoint.writer import check_fit, flush, order_metadata, stored_form
from labkit.config import ModelConfig
from labkit.errors import CheckpointError


def write_draft(folder: str | Path, state: Mapping[str, torch.Tensor]) -> Path:
    """Write `mtp.*` of state into the model.safetensors of a folder, in the form that it has.

    A draft that is there already is replaced; every other tensor keeps its bytes. CheckpointError
    before anything is written if the state is not the draft of the folder's config.json, or the
    weights lie in several files. Stopped half-way, the folder is as it was.
    """
    folder = Path(folder)
    config = ModelConfig.from_file(folder)
    wanted = {n: s for n, s in parameters(config) if n.startswith("mtp.")}
    if not wanted:
        raise CheckpointError(f"the config.json in {folder} has no draft "
                              "(num_nextn_predict_layers is 0)")
    check_fit(wanted, state)
    stored = find_tensors(folder)
    files = sorted({tensor.file.name for tensor in stored.values()})
    if files != [SINGLE]:
        raise CheckpointError(f"{folder} holds its weights in {len(files)} files, first "
                              f"{files[0]}: a draft can be added to one {SINGLE} only")
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(folder / SINGLE, framework="pt") as file:
        metadata = file.metadata() or {"format": "pt"}
        for name in stored:
            if not name.startswith("mtp."):
                tensors[name] = file.get_tensor(name)
    form: Form = "released" if config.quantized else "plain"
    for name in wanted:
        tensors |= stored_form(name, state[name], form, getattr(torch, config.dtype))
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        save_file(tensors, staging / SINGLE, metadata=metadata)
        order_metadata(staging / SINGLE)
        flush(staging / SINGLE)
        shutil.copymode(folder / SINGLE, staging / SINGLE)
        os.replace(staging / SINGLE, folder / SINGLE)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder / SINGLE
