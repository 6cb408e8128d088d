"""From a checkpoint folder to plain tensors, after comparing every tensor with the layout.

Nothing is skipped and nothing is guessed: a tensor that is missing, unexpected, of another shape
or dtype, a quantised weight without its scale or a scale without its weight is an error that
names it. Two parts may be absent as a whole: the draft (`mtp.*`), and vision, which the config
switches off itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from labkit.checkpoint.files import StoredTensor, find_tensors, some_names
from labkit.checkpoint.layout import parameters, released_specs, scale_name, storage_of
from labkit.checkpoint.weights import dequantize_weight, target_dtype
from labkit.config import ModelConfig
from labkit.errors import CheckpointError

_PLAIN = ("F64", "F32", "BF16", "F16")
_QUANTISED = {"F8_E4M3", "I8", "U8"}
# The same bits under another name.
_SAME_BITS = {"I8": ("I8", "U8"), "F8_E8M0": ("F8_E8M0", "U8")}


def read_state(
    folder: str | Path, config: ModelConfig | None = None, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """All parameters under their plain names, in the order of `layout.parameters`.

    folder  config.json with model.safetensors, or with an index and its shards
    config  None: read from the folder
    dtype   of the model; `target_dtype` says which parameters keep fp32. Quantised weights are
            multiplied out in fp32, then cast.
    The tensors are copies: the files are closed again. Without a draft there are no `mtp.*` keys.
    Raises ConfigError or CheckpointError, one sentence each.
    """
    folder = Path(folder)
    config = config or ModelConfig.from_file(folder)
    stored = find_tensors(folder)
    names = check_tensors(folder, config, stored)
    state = {}
    for name, value in _read(names, stored):
        if bool(torch.isnan(value).any()):
            raise CheckpointError(f"{name} in {stored[name].file} holds NaN: download it again")
        # copy=True: the tensor must outlive the file
        state[name] = value.to(target_dtype(name, config, dtype), copy=True)
    return state


def _read(
    names: list[str], stored: dict[str, StoredTensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    with ExitStack() as open_files:
        files = {}
        for path in {t.file for t in stored.values()}:
            try:
                files[path] = open_files.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged ({error}): download it again") from None
        for name in names:
            value = files[stored[name].file].get_tensor(name)
            if stored[name].dtype in _QUANTISED:
                # A scale may lie in another shard than its weight.
                scale = scale_name(name)
                value = dequantize_weight(
                    storage_of(name), value, files[stored[scale].file].get_tensor(scale)
                )
            yield name, value


def check_tensors(
    folder: str | Path, config: ModelConfig, stored: dict[str, StoredTensor]
) -> list[str]:
    """Compare with the layout; the parameters to read, or CheckpointError with all faults."""
    has_draft = any(name.startswith("mtp.") for name in stored)
    faults: dict[str, list[str]] = {
        kind: [] for kind in ("missing", "of wrong shape", "of wrong dtype", "without its scale",
                              "a scale without its quantised weight", "unexpected")
    }
    names, scales = [], set()
    for name, shape in parameters(config):
        if name.startswith("mtp.") and not has_draft:
            continue
        names.append(name)
        quantised = storage_of(name) in ("fp8_tile", "fp8_row", "fp4_row")
        if quantised:
            scales.add(scale_name(name))
        found = stored.get(name)
        if found is None:
            faults["missing"].append(name)
        elif found.dtype in _PLAIN:
            _check_shape(name, found, shape, faults)
            if quantised and scale_name(name) in stored:
                faults["a scale without its quantised weight"].append(scale_name(name))
        elif not quantised:
            faults["of wrong dtype"].append(f"{name} is {found.dtype}")
        else:
            _check_pair(name, shape, stored, faults)
    expected = scales.union(names)
    faults["unexpected"] = sorted(set(stored) - expected)
    # A scale whose weight is gone is said as such; the weight is listed as missing already.
    faults["a scale without its quantised weight"] += [
        n for n in stored if n in scales and n.removesuffix(".scale") + ".weight" not in stored
    ]
    if any(faults.values()):
        said = "; ".join(f"{len(v):,} {kind}: {some_names(v)}" for kind, v in faults.items() if v)
        draft = ""
        if has_draft and any(n.startswith("mtp.") for n in faults["missing"]):
            draft = " (the draft, mtp.*, must be whole or wholly absent)"
        raise CheckpointError(
            f"the tensors in {folder} do not fit its config.json: {said}{draft}; use the files "
            "and the config of one checkpoint"
        )
    return names


def _check_shape(
    name: str, found: StoredTensor, shape: tuple[int, ...], faults: dict[str, list[str]]
) -> None:
    if found.shape != shape:
        faults["of wrong shape"].append(f"{name} is {list(found.shape)}, needs {list(shape)}")


def _check_pair(
    name: str, shape: tuple[int, ...], stored: dict[str, StoredTensor],
    faults: dict[str, list[str]],
) -> None:
    """A quantised weight and its scale against the released form."""
    for spec in released_specs(name, shape):
        found = stored.get(spec.name)
        if found is None:
            faults["without its scale"].append(name)
        elif found.dtype not in _SAME_BITS.get(spec.dtype, (spec.dtype,)):
            faults["of wrong dtype"].append(f"{spec.name} is {found.dtype}, needs {spec.dtype}")
        else:
            _check_shape(spec.name, found, spec.shape, faults)
