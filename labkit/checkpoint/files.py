"""The safetensors files of a checkpoint folder: which tensor lies where, and are they whole?

A file is: 8 bytes header length (little endian), a JSON header with dtype, shape and data
offsets of every tensor, then the data. Only headers are read here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from labkit.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ENGRAM_DIGEST = "engram_class_digest"  # key in the metadata of each file
_HEADER_LIMIT = 100_000_000  # the format's own limit


class StoredTensor(NamedTuple):
    """Where a tensor lies. `dtype` in safetensors names, `begin` and `end` in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def find_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name. CheckpointError for what is missing or damaged.

    Looks for an index with its shards, then for model.safetensors, then for any model*.safetensors.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: name one that holds config.json and "
                              "safetensors")
    index = folder / INDEX
    weight_map = _read_index(index) if index.exists() else None
    if weight_map is not None:
        files = [folder / name for name in sorted(set(weight_map.values()))]
        lacking = [f.name for f in files if not f.exists()]
        if lacking:
            raise CheckpointError(
                f"{folder} lacks {some_names(lacking)}, of {len(files)} shards that {INDEX} names: "
                "download what is missing"
            )
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no weights: it needs {SINGLE}, or {INDEX} with its shards"
        )
    found: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in found:
                raise CheckpointError(
                    f"{name} lies in {found[name].file.name} and in {file.name}: remove the file "
                    "that does not belong to this checkpoint"
                )
            found[name] = tensor
    for name, shard in (weight_map or {}).items():
        if name not in found or found[name].file.name != shard:
            raise CheckpointError(
                f"{INDEX} places {name} in {shard}, which does not hold it: the files come from "
                "different checkpoints, download them again"
            )
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map: download it again")
    for shard in weight_map.values():
        # A plain file name: an index must not reach outside its folder.
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise CheckpointError(f"{path} names the shard {shard!r}: must be a file beside it")
    return weight_map


def read_header(file: Path) -> dict[str, StoredTensor]:
    """One file's tensors. CheckpointError with both sizes when the file is cut or too long."""
    actual = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if actual < 8 or not 2 <= length <= _HEADER_LIMIT:
            raise CheckpointError(
                f"{file} ({actual:,} bytes) is no safetensors file: download it again"
            )
        header = stream.read(length)
    if len(header) < length:
        raise CheckpointError(
            f"{file} is truncated: its header alone needs {8 + length:,} bytes, the file has "
            f"{actual:,}; download it again"
        )
    try:
        raw = json.loads(header)
        raw.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(
                file, str(entry["dtype"]), tuple(map(int, entry["shape"])),
                8 + length + int(entry["data_offsets"][0]),
                8 + length + int(entry["data_offsets"][1]),
            )
            for name, entry in raw.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise CheckpointError(
            f"{file} has a damaged safetensors header: download it again"
        ) from None
    expected = max((t.end for t in tensors.values()), default=8 + length)
    if actual != expected:
        what = "truncated" if actual < expected else "longer than its header says"
        raise CheckpointError(
            f"{file} is {what}: expected {expected:,} bytes, found {actual:,}; download it again"
        )
    return tensors


def stored_engram_digest(folder: str | Path) -> str | None:
    """The digest of the Engram class map that was stored with the weights; None if none was."""
    digests = set()
    for file in {tensor.file for tensor in find_tensors(folder).values()}:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            metadata = json.loads(stream.read(length)).get("__metadata__")
        if isinstance(metadata, dict) and ENGRAM_DIGEST in metadata:
            digests.add(str(metadata[ENGRAM_DIGEST]))
    if len(digests) > 1:
        raise CheckpointError(f"the files in {folder} hold different values of {ENGRAM_DIGEST}: "
                              "they come from different checkpoints, download them again")
    return digests.pop() if digests else None


def some_names(names: list[str], most: int = 3) -> str:
    """The first few names, and how many more."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest:,} more" if rest > 0 else "")
