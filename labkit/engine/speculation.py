"""One step of speculative decoding for R requests: the draft proposes, the target verifies.

`propose` runs the draft once for all requests and draws its slots left to right; `verify` runs
the target once over anchor and drafts of every request, keeps of each what `verification.verify`
accepts, and takes the rest back (`Cache.rewind`). Generation uses both with R = 1, the batched
loop with as many requests as there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from labkit.cache import Cache
from labkit.engine import verification
from labkit.engine.calibration import calibrated
from labkit.engine.sampling import Sampling, distribution, sample
from labkit.engine.scheduling import survival
from labkit.errors import InputError
from labkit.model.transformer import Transformer


@dataclass
class Request:
    """What a request needs to be stepped.

    anchor     its newest id, which the target has not read yet
    generator  its own (CPU) source of random numbers
    slots      the most slots that it can use in this step
    """

    anchor: int
    sampling: Sampling
    generator: torch.Generator
    slots: int


@dataclass
class Proposal:
    """What the draft proposes to one request.

    ids            drafted, at most `slots` of them
    distributions  [V] each: what the ids were drawn from
    survival       a_1 >= a_2 >= ..: probability that the slot and all before it are accepted,
                   as the draft believes (calibrated)
    confidence_logits  what the head said of each slot, before any temperature
    """

    ids: list[int] = field(default_factory=list)
    distributions: list[torch.Tensor] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    confidence_logits: list[float] = field(default_factory=list)


@dataclass
class Emission:
    """What a step gives one request.

    ids       the accepted drafts, then the token that the target adds: at least one
    logits    [len(ids), V] of the target, where each id was decided
    verified  how many drafts it read; accepted: how many of them stayed
    targets   [V] each: what the logits came to under the request's sampling
    """

    ids: list[int]
    logits: torch.Tensor
    verified: int
    accepted: int
    targets: list[torch.Tensor]


def needs_draft(model: Transformer, cache: Cache) -> None:
    """InputError where nothing can be drafted: no draft, or a past without its windows."""
    if model.mtp is None:
        raise InputError("speculation needs a draft, and this model's checkpoint holds no mtp.* "
                         "tensors: train one with `labkit train-draft`")
    if not cache.draft_windows:
        raise InputError("speculation needs a session with the draft's windows: make it with "
                         "draft=True")


@torch.no_grad()
def propose(model: Transformer, cache: Cache, requests: Sequence[Request], vocabulary: int,
            temperatures: Sequence[float] | None = None) -> list[Proposal]:
    """One pass of the draft behind the R rows of a cache -> what it proposes to each request.

    vocabulary    ids from there on pad the vocabulary and are never drawn
    temperatures  of the confidence head, one a slot (`Calibration`); None: 1
    The cache is read, not changed. One number of a request's generator per drafted id.
    """
    proposals = [Proposal() for _ in requests]
    wanted = max((r.slots for r in requests), default=0)
    if wanted < 1:
        return proposals
    needs_draft(model, cache)
    assert model.mtp is not None
    # Slots see each other, so the block is as long as in training even if fewer are of use.
    n = max(wanted, model.config.dspark_block_size)
    cache.settle()
    windows = [ring.read(cache.lengths) for ring in cache.draft_windows]
    previous = torch.tensor([r.anchor for r in requests], device=model.device)      # [R]
    block = model.draft(previous, cache.lengths, windows, n)
    confidences = []                                                    # [R] each
    for slot in range(wanted):
        logits = block.base_logits[:, slot] + model.mtp.markov_logits(previous)     # [R,V]
        confidences.append(model.mtp.confidence_logits(block.raw_hidden[:, slot], previous))
        previous = previous.clone()
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            if slot < request.slots:
                s = request.sampling
                p = distribution(logits[row, :vocabulary], s.temperature, s.top_k, s.top_p)
                previous[row] = id_ = sample(p, request.generator)
                proposal.ids.append(id_)
                proposal.distributions.append(p)
    said = torch.stack(confidences, dim=1)                                          # [R,n]
    sure = calibrated(said, temperatures or [1.0])
    for request, proposal, row, logits_row in zip(
            requests, proposals, sure.tolist(), said.tolist(), strict=True):
        proposal.survival = survival(row[: max(0, request.slots)])
        proposal.confidence_logits = logits_row[: max(0, request.slots)]
    return proposals


@torch.no_grad()
def verify(model: Transformer, cache: Cache, requests: Sequence[Request],
           proposals: Sequence[Proposal], lengths: Sequence[int], vocabulary: int
           ) -> list[Emission]:
    """One pass of the target over each anchor and the first lengths[r] drafts behind it.

    Afterwards the cache holds, of each request, its anchor and the accepted drafts; the last id
    of its emission is the next anchor. A step that is cut short leaves the cache as before.
    InputError for lengths that are not one a request, each within what was drafted for it.
    """
    _check_lengths(lengths, proposals)
    counts = torch.tensor([1 + n for n in lengths], device=model.device)            # [R]
    ids = torch.zeros(len(requests), 1 + max(lengths), dtype=torch.int64)           # [R,T]
    for row, (request, proposal, n) in enumerate(zip(requests, proposals, lengths, strict=True)):
        ids[row, : 1 + n] = torch.tensor([request.anchor, *proposal.ids[:n]])
    cache.settle()
    start = cache.lengths
    try:
        logits = model(ids.to(model.device), counts, cache=cache, keep=True).logits
        logits = logits[..., :vocabulary]                                           # [R,T,V]
        emissions = [
            _judge(request, proposal, n, logits[row, : 1 + n])
            for row, (request, proposal, n)
            in enumerate(zip(requests, proposals, lengths, strict=True))
        ]
        stay = start + torch.tensor([len(e.ids) for e in emissions], device=start.device)
        if not torch.equal(stay, cache.lengths):
            cache.rewind(stay)
    except BaseException:
        cache.settle()
        if not torch.equal(cache.lengths, start):
            cache.rewind(start)
        raise
    return emissions


def _judge(request: Request, proposal: Proposal, n: int, logits: torch.Tensor) -> Emission:
    """logits [1+n, V]: of the places of n drafts and of the one behind them."""
    s = request.sampling
    targets = [distribution(row, s.temperature, s.top_k, s.top_p) for row in logits]
    verdict = verification.verify(targets, proposal.distributions[:n], proposal.ids[:n],
                                  request.generator)
    ids = [*proposal.ids[: verdict.accepted], verdict.next_id]
    return Emission(ids, logits[: len(ids)], n, verdict.accepted, targets[: len(ids)])


def _check_lengths(lengths: Sequence[int], proposals: Sequence[Proposal]) -> None:
    drafted = [len(proposal.ids) for proposal in proposals]
    if len(lengths) != len(drafted) or any(
            not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= most
            for n, most in zip(lengths, drafted, strict=True)):
        raise InputError(f"the policy's lengths are {list(lengths)} and {drafted} slots were "
                         "drafted: it must give one whole number for each request, from 0 to "
                         "its slots")
