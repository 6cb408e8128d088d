"""One sequence and its cache: fill it, step it, save it, go back."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from labkit.cache import Cache
from labkit.engine.replay import decoder_tail, drop_windows, passes, replay_start
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
    pass that is cut short (Ctrl-C) leaves the session as it was before it.

    form, page_tokens, stale_index_keys, draft: see `labkit.cache.Cache`.
    """

    def __init__(self, model: Transformer, form: str | None = None,
                 page_tokens: int | None = None, stale_index_keys: bool = False,
                 draft: bool | None = None) -> None:
        self.model = model
        self.cache = model.new_cache(1, form, page_tokens, stale_index_keys, draft)
        self.small = is_small(model)

    @property
    def length(self) -> int:
        """Tokens taken in so far, at most the context (max_position_embeddings)."""
        self.cache.settle()
        return int(self.cache.lengths[0])

    @property
    def ids(self) -> list[int]:
        """The tokens taken in so far."""
        self.cache.settle()
        return list(self.cache.tokens[0])

    def prefill(self, ids: torch.Tensor | Sequence[int], last_only: bool = False,
                mode: str = "full", *, halo: str = "window", cut: str = "inside",
                chunk: int | None = None) -> torch.Tensor:
        """Take in ids [T] or [1,T] -> logits [1,T,V] (last_only: [1,1,V]); may be called again.

        mode "ced": the decoder sees the end of these ids only, and so do the logits. halo: how
        much of it, "window" (the last sliding_window tokens, as in production) or "exact" (so
        many more that the windows left behind and the last logits are those of a full prefill);
        cut: "inside" or "after" the last KV source (`Transformer.forward`).
        chunk: read at most so many tokens in a pass, which bounds the memory of a long prompt;
        Ctrl-C then leaves the passes that were finished.

        InputError for ids outside the vocabulary, no ids, or more than the context holds; the
        session is then as before.
        """
        ids = as_ids(ids)
        if ids.ndim == 0 or (ids.ndim == 2 and ids.shape[0] != 1):
            raise InputError(f"a session holds one sequence: ids must be [T] or [1,T], got "
                             f"{list(ids.shape)}")
        ids = ids.reshape(1, -1)
        tail = None
        if prefill_mode(mode) == "ced":
            tail = decoder_tail(self.model.config, halo, cut)
        limit = self.model.config.max_position_embeddings
        if self.length + ids.shape[1] > limit:  # before the first of several passes
            raise InputError(
                f"{self.length + ids.shape[1]} tokens do not fit the context of {limit} "
                "(max_position_embeddings): shorten the prompt or ask for fewer new tokens")
        with torch.no_grad(), one_thread(self.small):
            logits = [self.model(part, cache=self.cache, last_only=last_only, tail=size,
                                 cut=cut).logits
                      for part, size in passes(ids, tail, chunk)]
        return logits[-1] if last_only or len(logits) == 1 else torch.cat(logits, dim=1)

    def decode(self, id: int | torch.Tensor) -> torch.Tensor:
        """Take in one id -> logits [1,1,V] of what follows it."""
        ids = as_ids(id)
        if ids.numel() != 1:
            raise InputError(f"decode takes one id, got {ids.numel()}: use prefill for several")
        with torch.no_grad(), one_thread(self.small):
            return self.model(ids.reshape(1, 1), cache=self.cache).logits

    # ---------------------------------------------------------------- other pasts
    def fork(self) -> Session:
        """A second session with the same past, which shares its pages (copy on write)."""
        twin = copy.copy(self)
        twin.cache = self.cache.fork()
        return twin

    def crop(self, length: int, replay: str = "bounded") -> None:
        """Go back to the first `length` tokens.

        Their global entries stay as they are. The windows of that moment are gone, so the last
        tokens are read again: bounded or exact, see `replay_start`. A text no longer than the
        window is read anew. InputError when there are fewer tokens than that.
        """
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise InputError(f"length is {length!r}: it must be a whole number, at least 0")
        if length > self.length:
            raise InputError(f"cannot crop to {length} tokens: the session holds {self.length}")
        if length == self.length:
            return
        ids = self.ids[:length]
        cache = self.cache.fork()  # the session changes when all is done, or not at all
        start = replay_start(self.model.config, length, replay)
        if length:
            drop_windows(self.model, cache, ids, start)
            with torch.no_grad(), one_thread(self.small):
                self.model(torch.tensor([ids[start:]]), cache=cache, last_only=True)
        else:
            cache = self.cache.empty()
        self.cache = cache

    def snapshot(self) -> Snapshot:
        """The state of this moment; what follows in the session does not touch it."""
        return Snapshot(self.cache.fork())

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a saved state, window and all; the snapshot stays usable."""
        if not isinstance(snapshot, Snapshot):
            raise InputError(f"restore takes what snapshot() gave, not {type(snapshot).__name__}")
        kept, own = snapshot.cache, self.cache
        if kept.config != self.model.config:
            raise InputError("the snapshot belongs to a model with another config: restore it "
                             "into a session of that model")
        if (kept.dtype, kept.device) != (own.dtype, own.device):
            raise InputError(f"the snapshot is {kept.dtype} on {kept.device} and the session "
                             f"{own.dtype} on {own.device}: restore it into a session of the "
                             "model that it is from")
        if bool(kept.draft_windows) != bool(own.draft_windows):
            has = bool(kept.draft_windows)
            raise InputError(f"the snapshot is {'with' if has else 'without'} the draft's windows "
                             f"and the session is not: make the session with draft={has}")
        self.cache = kept.fork()

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated: global_kv, index_keys, window, remainder, engram, draft, reserved.

        `reserved` is room that the growing parts hold but have not filled yet.
        """
        return self.cache.nbytes()


def is_small(model: Transformer) -> bool:
    """Whether a pass has so little work that one thread is best."""
    return (model.device.type == "cpu"
            and sum(p.numel() for p in model.parameters()) < SMALL_MODEL)


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
