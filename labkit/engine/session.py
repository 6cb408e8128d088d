"""One sequence and its cache: fill it, step it, save it, go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from labkit.cache import Cache
from labkit.errors import InputError
from labkit.model.transformer import Transformer

# Parameters below which a pass has too little work for several threads.
SMALL_MODEL = 50_000_000


@dataclass(frozen=True)
class Snapshot:
    """A saved state of a session; `restore` may use it any number of times."""

    cache: Cache


class Session:
    """What one conversation owns: everything the model remembers of its tokens so far.

    `prefill` and `decode` are the same pass over the same cache, of many tokens or of one. A
    pass that is cut short (Ctrl-C) leaves the cache half-written: the session then refuses to
    go on until `restore` brings an earlier state back.
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.cache = model.new_cache()
        self._small = (model.device.type == "cpu"
                       and sum(p.numel() for p in model.parameters()) < SMALL_MODEL)

    @property
    def length(self) -> int:
        """Tokens taken in so far, at most the context (max_position_embeddings)."""
        return int(self.cache.lengths[0])

    def prefill(self, ids: torch.Tensor | Sequence[int], last_only: bool = False,
                mode: str = "full") -> torch.Tensor:
        """Take in ids [T] or [1,T] -> logits [1,T,V] (last_only: [1,1,V]); may be called again.

        mode "ced": the decoder sees the last `sliding_window` ids only, and so do the logits
        (`Transformer.forward`).

        InputError for ids outside the vocabulary, no ids, or more than the context holds; the
        session is then as before.
        """
        ids = as_ids(ids)
        if ids.ndim == 0 or (ids.ndim == 2 and ids.shape[0] != 1):
            raise InputError(f"a session holds one sequence: ids must be [T] or [1,T], got "
                             f"{list(ids.shape)}")
        with torch.no_grad(), one_thread(self._small):
            return self.model(ids, cache=self.cache, last_only=last_only,
                              ced=prefill_mode(mode) == "ced").logits

    def decode(self, id: int | torch.Tensor) -> torch.Tensor:
        """Take in one id -> logits [1,1,V] of what follows it."""
        ids = as_ids(id)
        if ids.numel() != 1:
            raise InputError(f"decode takes one id, got {ids.numel()}: use prefill for several")
        with torch.no_grad(), one_thread(self._small):
            return self.model(ids.reshape(1, 1), cache=self.cache).logits

    def snapshot(self) -> Snapshot:
        """An independent copy of the state."""
        return Snapshot(self.cache.snapshot())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a saved state, also after an interrupted pass; the snapshot stays usable."""
        if not isinstance(snapshot, Snapshot):
            raise InputError(f"restore takes what snapshot() gave, not {type(snapshot).__name__}")
        if snapshot.cache.config != self.model.config:
            raise InputError("the snapshot belongs to a model with another config: restore it "
                             "into a session of that model")
        kept, own = ((t.dtype, t.device) for t in (snapshot.cache.windows[0].buffer,
                                                   self.cache.windows[0].buffer))
        if kept != own:
            raise InputError(f"the snapshot is {kept[0]} on {kept[1]} and the session {own[0]} on "
                             f"{own[1]}: restore it into a session of the model that it is from")
        self.cache = snapshot.cache.snapshot()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated: global_kv, index_keys, window, remainder, engram, draft, reserved.

        `reserved` is room that the growing parts hold but have not filled yet.
        """
        return self.cache.nbytes()


def prefill_mode(mode: str) -> str:
    """`mode` itself; InputError if there is no such prefill."""
    if mode not in ("full", "ced"):
        raise InputError(f"prefill is {mode!r}: choose 'full' or 'ced'")
    return mode


def as_ids(values: object, name: str = "ids") -> torch.Tensor:
    """Ids (or other whole numbers) as a tensor; InputError for what is none."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} must be whole numbers in rows of one length ({error})") from None
    if not tensor.numel():
        return tensor.long()  # an empty list has no type of its own
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} must be whole numbers, not {tensor.dtype}")
    return tensor


@contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Run the body on one thread of torch, then set the old number again.

    The operations of a small model are so short that several threads gain little, and while
    another program keeps the cores busy they wait for each other at every operation.
    """
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
