"""Writing a checkpoint: plain or released form, one file or shards, all or nothing.

Everything is first written to a hidden folder beside the target files, then renamed into place,
so an error or Ctrl-C leaves the old checkpoint as it was and no partial file.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from labkit.checkpoint.files import ENGRAM_DIGEST, INDEX, SINGLE, some_names
from labkit.checkpoint.layout import (
    ITEM_BYTES,
    SAFETENSORS_DTYPE,
    Form,
    TensorSpec,
    parameters,
    released_specs,
    scale_name,
    storage_of,
)
from labkit.checkpoint.weights import quantize_weight
from labkit.config import ModelConfig
from labkit.errors import CheckpointError

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def write_checkpoint(
    folder: str | Path,
    config: ModelConfig,
    state: Mapping[str, torch.Tensor],
    form: Form = "released",
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5_000_000_000,
    *,
    engram_digest: str | None = None,
) -> list[Path]:
    """Write config.json and the weights; the paths written.

    state  every parameter under its plain name, finite, any float dtype; `mtp.*` may be wholly
           absent
    form   "released": rounded as in `checkpoint.weights`, the rest bf16, some fp32.
           "plain": every tensor in `dtype`, those that the release keeps in fp32 never narrower
    max_shard_bytes  above it the tensors go to model-0000i-of-0000n.safetensors with an index
    engram_digest    `text.engram_map.class_digest` of the map that the model was trained with:
           written into each file, so that loading can refuse a tokenizer with another map

    Older weights in the folder are replaced, other files stay. CheckpointError before anything
    is written if `state` does not fit `config`.
    """
    folder = Path(folder)
    names = _check_state(config, state)
    shards = _split(config, names, form, dtype, max_shard_bytes)
    created = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        metadata = {"format": "pt"}
        if engram_digest is not None:
            metadata[ENGRAM_DIGEST] = engram_digest
        written = _stage(staging, config, state, shards, form, dtype, metadata)
        try:
            _commit(staging, folder, written)
        except KeyboardInterrupt:
            _commit(staging, folder, written)  # a few renames: finish them, then stop
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if created and not any(folder.iterdir()):
            folder.rmdir()
    return [folder / name for name in written]


def _check_state(config: ModelConfig, state: Mapping[str, torch.Tensor]) -> list[str]:
    has_draft = any(name.startswith("mtp.") for name in state)
    wanted = {n: s for n, s in parameters(config) if has_draft or not n.startswith("mtp.")}
    check_fit(wanted, state)
    return list(wanted)


def check_fit(wanted: Mapping[str, tuple[int, ...]], state: Mapping[str, torch.Tensor]) -> None:
    """CheckpointError unless state holds exactly these names and shapes, as finite floats."""
    missing = [n for n in wanted if n not in state]
    unexpected = [n for n in state if n not in wanted]
    if missing or unexpected:
        said = [f"{len(missing):,} missing: {some_names(missing)}"] if missing else []
        said += [f"{len(unexpected):,} unexpected: {some_names(unexpected)}"] if unexpected else []
        raise CheckpointError(f"the state does not fit its config: {'; '.join(said)}")
    for name, shape in wanted.items():
        if tuple(state[name].shape) != shape:
            raise CheckpointError(
                f"{name} has shape {list(state[name].shape)}, the config needs {list(shape)}"
            )
        if not state[name].is_floating_point() or state[name].dtype.itemsize < 2:
            raise CheckpointError(
                f"{name} is {state[name].dtype}: the state must hold plain floats of 16 bits "
                "or more"
            )
        if not bool(torch.isfinite(state[name]).all()):
            raise CheckpointError(f"{name} holds NaN or infinity: nothing was saved")


def _specs(
    name: str, shape: tuple[int, ...], form: Form, dtype: torch.dtype
) -> list[TensorSpec]:
    if form == "released":
        return list(released_specs(name, shape))
    stored = SAFETENSORS_DTYPE[_dtype_name(_plain_dtype(name, dtype))]
    return [TensorSpec(name, shape, stored, ITEM_BYTES[stored] * torch.Size(shape).numel())]


def _split(
    config: ModelConfig, names: list[str], form: Form, dtype: torch.dtype, most: int
) -> list[list[str]]:
    """Parameters in layout order, cut where a shard would pass `most` bytes."""
    if form not in ("released", "plain"):
        raise CheckpointError(f"unknown form {form!r}: choose 'released' or 'plain'")
    if _dtype_name(dtype) not in SAFETENSORS_DTYPE:
        raise CheckpointError(f"cannot write {dtype}: choose {', '.join(SAFETENSORS_DTYPE)}")
    wanted = set(names)
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in parameters(config):
        if name not in wanted:
            continue
        more = sum(spec.bytes for spec in _specs(name, shape, form, dtype))
        if shards[-1] and size + more > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += more
    return shards


def _stage(
    staging: Path, config: ModelConfig, state: Mapping[str, torch.Tensor],
    shards: list[list[str]], form: Form, dtype: torch.dtype, metadata: dict[str, str],
) -> list[str]:
    """Write all files into `staging`; their names, weights first, config.json last."""
    written: list[str] = []
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else SINGLE
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors |= stored_form(name, state[name], form, dtype)
        save_file(tensors, staging / file, metadata=metadata)
        order_metadata(staging / file)
        flush(staging / file)
        written.append(file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(staging / INDEX, index)
        written.append(INDEX)
    stored_dtype = "bfloat16" if form == "released" else _dtype_name(dtype)
    config = config.replace(quantized=form == "released", dtype=stored_dtype)
    _write_json(staging / "config.json", config.to_dict())
    return [*written, "config.json"]


def order_metadata(file: Path) -> None:
    """Sort the header's metadata in place: safetensors writes several keys in random order."""
    with file.open("rb+") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "the header is compact JSON already, padded with spaces"
        stream.seek(8)
        stream.write(text.ljust(length))


def stored_form(
    name: str, value: torch.Tensor, form: Form, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    value = value.detach().cpu()
    scale = None
    if form == "released":
        stored, scale = quantize_weight(name, value)
    else:
        stored = value.to(_plain_dtype(name, dtype))
    # bf16 and fp16 round the largest fp32 numbers to infinity.
    if stored.dtype.itemsize > 1 and not bool(torch.isfinite(stored).all()):
        raise CheckpointError(f"{name} exceeds the range of {stored.dtype}: nothing was saved")
    tensors = {name: _own(stored)}
    if scale is not None:
        tensors[scale_name(name)] = _own(scale)
    return tensors


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with storage of its own: safetensors refuses shared memory."""
    tensor = tensor.contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _plain_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    keep = storage_of(name) == "fp32" and dtype != torch.float64
    return torch.float32 if keep else dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    flush(path)


def flush(path: Path) -> None:
    """Have the bytes on disk before a rename makes them the checkpoint."""
    with path.open("rb+") as stream:
        os.fsync(stream.fileno())


def _commit(staging: Path, folder: Path, written: list[str]) -> None:
    """Rename into place, then drop weights of an older checkpoint. May be called again."""
    for name in written:
        if (staging / name).exists():
            os.replace(staging / name, folder / name)
    for old in folder.iterdir():
        if _OURS.fullmatch(old.name) and old.name not in written:
            old.unlink(missing_ok=True)
