"""The draft on a text that is there already: what it would have guessed behind given tokens."""

from __future__ import annotations

import torch

from labkit.errors import InputError
from labkit.model.dspark import windows_at
from labkit.model.transformer import Transformer
from labkit.trace import Taps

MAX_SLOTS = 16
"""Longest block that may be asked for; a draft is trained for `dspark_block_size` slots."""


def checked_slots(slots: object, trained: int) -> int:
    """Slots of a block, by default as many as trained. InputError for what is no such number."""
    if slots is None:
        return trained
    most = max(MAX_SLOTS, trained)
    if not isinstance(slots, int) or isinstance(slots, bool) or not 0 <= slots <= most:
        raise InputError(f"draft length is {slots!r}: it must be a whole number from 0 (no draft) "
                         f"to {most}; the draft was trained for {trained}")
    return slots


def block_note(slots: int, trained: int) -> str:
    """What must be said of a block that is longer than in training; "" for any other."""
    return f"drafted {slots} slots, trained for {trained}" if slots > trained else ""


def draft_at(model: Transformer, ids: torch.Tensor, anchors: torch.Tensor,
             previous: torch.Tensor | None = None, slots: int | None = None) -> Taps:
    """See `Lab.draft`: ids [B,T], anchors [B,A], previous [B,A*n] -> taps `dspark.*`."""
    assert model.mtp is not None
    c, ids = model.config, ids.to(model.device)
    if ids.ndim == 1:
        ids = ids[None]
    n = checked_slots(slots, c.dspark_block_size)
    if n == 0:
        raise InputError("slots is 0: ask for at least one slot")
    anchors = anchors.to(ids.device)
    if anchors.ndim == 1:
        anchors = anchors[None].expand(len(ids), -1)
    if anchors.ndim != 2 or len(anchors) != len(ids) or not anchors.numel():
        raise InputError(f"anchor_positions must have shape [A] or [{len(ids)},A], got "
                         f"{list(anchors.shape)}")
    T = ids.shape[-1]
    if int(anchors.min()) < 0 or int(anchors.max()) >= T:
        raise InputError(f"anchor_positions must lie in 0..{T - 1}, got {int(anchors.min())}.."
                         f"{int(anchors.max())}")
    B, A = anchors.shape
    if previous is not None:
        previous = previous.to(ids.device).reshape(B, -1)
        if previous.shape[1] != A * n:
            raise InputError(f"previous_token_ids must have shape [{B},{A * n}], one a slot, got "
                             f"{list(previous.shape)}")
        if int(previous.min()) < 0 or int(previous.max()) >= c.vocab_size:
            raise InputError(f"previous_token_ids must lie in 0..{c.vocab_size - 1}")
    taps = Taps(["mtp.*.attn.window", "dspark.*"])
    with torch.no_grad():
        model(ids, cache=model.new_cache(B, "plain", draft=True), taps=taps)
        rows = [taps[f"mtp.{stage}.attn.window"] for stage in range(len(model.mtp))]
        found = model.draft(ids.gather(1, anchors).flatten(), anchors.flatten(),
                            windows_at(rows, anchors, c.sliding_window), n)
        previous_slots, bias = _markov(model, found.base_logits, ids.gather(1, anchors).flatten(),
                                       None if previous is None else previous.reshape(B * A, n))
        confidence = model.mtp.confidence_logits(found.raw_hidden, previous_slots)
    out = Taps()
    out.put("dspark.target_features", taps["dspark.target_features"])
    out.put("dspark.anchor_positions", anchors)
    for name, value in (("raw_hidden", found.raw_hidden), ("base_logits", found.base_logits),
                        ("normalized_hidden", found.normalized_hidden), ("markov_logits", bias),
                        ("confidence_logits", confidence), ("previous_token_ids", previous_slots)):
        out.put(f"dspark.{name}", value.reshape(B, A * n, *value.shape[2:]))
    return out


def _markov(model: Transformer, base: torch.Tensor, anchors: torch.Tensor,
            previous: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Previous ids [N,n] and the bias that follows from them, [N,n,V]."""
    assert model.mtp is not None
    if previous is not None:
        return previous, model.mtp.markov_logits(previous)
    ids, biases = [anchors], []
    for slot in range(base.shape[1]):
        biases.append(model.mtp.markov_logits(ids[-1]))                 # [N,V]
        ids.append((base[:, slot] + biases[-1]).argmax(-1))
    return torch.stack(ids[:-1], dim=1), torch.stack(biases, dim=1)
