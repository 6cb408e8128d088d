"""A text written with the draft, step by step, with everything that decided each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from labkit.engine.calibration import calibrated
from labkit.engine.sampling import Sampling, distribution, sample
from labkit.engine.scheduling import Fixed, Policy
from labkit.engine.session import one_thread
from labkit.engine.speculation import Emission, Proposal, Request, propose, verify
from labkit.engine.verification import acceptance
from labkit.viz.tokens import pieces

if TYPE_CHECKING:
    from labkit.lab import Lab


@dataclass(frozen=True)
class Slot:
    """One drafted token and its fate.

    draft, target  p_d and p_t of the token; target None: its place was never decided
    accept         min(1, p_t / p_d); None where it was never asked for
    confidence     c: survives if all before it do, calibrated; survival: the product a so far
    fate           "kept", "rejected", "dropped" (behind a rejected one) or "not sent"
    """

    id: int
    text: str
    draft: float
    target: float | None
    accept: float | None
    confidence: float
    survival: float
    fate: str


@dataclass(frozen=True)
class Step:
    """One pass of draft and target.

    start     new tokens before it; anchor: text of the newest one
    slots     what was drafted, left to right
    id, text  the token that the target adds, with its p_t and, if it replaces one, its p_d
    bonus     nothing was rejected
    targets, drafts   [V] each: the distributions behind these numbers
    """

    start: int
    anchor: str
    slots: tuple[Slot, ...]
    id: int
    text: str
    target: float
    draft: float | None
    bonus: bool
    targets: tuple[torch.Tensor, ...]
    drafts: tuple[torch.Tensor, ...]

    @property
    def kept(self) -> int:
        return sum(slot.fate == "kept" for slot in self.slots)

    @property
    def sent(self) -> int:
        return sum(slot.fate != "not sent" for slot in self.slots)

    @property
    def expected(self) -> float:
        """Tokens that this step was expected to give: 1 + the survivals of what was sent."""
        return 1.0 + sum(slot.survival for slot in self.slots[: self.sent])


@dataclass(frozen=True)
class Recording:
    """Prompt, new ids and their texts, and the steps that wrote all but the first of them."""

    prompt: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    steps: tuple[Step, ...]
    sampling: Sampling


def record(lab: Lab, prompt: str, max_new_tokens: int = 40, sampling: Sampling | None = None,
           seed: int = 0, policy: Policy | None = None) -> Recording:
    """Write on with the draft as `Lab.generate(..., speculative=True)` does, and keep it all.

    The same options and seed give the same ids. policy None: all slots are verified.
    """
    sampling, policy = sampling or Sampling(), policy or Fixed(lab.config.dspark_block_size)
    policy.reset()
    vocabulary, n = lab.tokenizer.vocab_size, lab.config.dspark_block_size
    temperatures = lab.calibration.temperatures if lab.calibration else None
    generator, session = torch.Generator().manual_seed(seed), lab.session()
    with one_thread(session.small):
        logits = session.prefill(lab.encode(prompt), last_only=True)[0, 0, :vocabulary]
        ids = [sample(distribution(logits, sampling.temperature, sampling.top_k, sampling.top_p),
                      generator)]
        steps = []
        while len(ids) < max_new_tokens and lab.config.eos_token_id not in ids:
            room = max_new_tokens - len(ids) - 1      # the target's own token needs a place
            request = Request(ids[-1], sampling, generator, min(n, room))
            proposals = propose(lab.model, session.cache, [request], vocabulary, temperatures)
            lengths = policy.lengths([proposals[0].survival])
            emission, = verify(lab.model, session.cache, [request], proposals, lengths, vocabulary)
            policy.done()
            steps.append(_step(lab, len(ids), ids[-1], proposals[0], emission, temperatures))
            ids += emission.ids
    if lab.config.eos_token_id in ids:
        ids = ids[: ids.index(lab.config.eos_token_id) + 1]
    return Recording(prompt, tuple(ids), tuple(pieces(lab.tokenizer, ids)), tuple(steps), sampling)


def _step(lab: Lab, start: int, anchor: int, proposal: Proposal, emission: Emission,
          temperatures: Sequence[float] | None) -> Step:
    confidences = calibrated(torch.tensor([proposal.confidence_logits], dtype=torch.float64),
                             temperatures or [1.0])[0].tolist() if proposal.ids else []
    slots = []
    texts = pieces(lab.tokenizer, [anchor, *proposal.ids, emission.ids[-1]])
    for j, (id_, p_d) in enumerate(zip(proposal.ids, proposal.distributions, strict=True)):
        judged = j < min(emission.verified, emission.accepted + 1)
        p_t = emission.targets[j] if judged else None
        fate = ("not sent" if j >= emission.verified else "kept" if j < emission.accepted
                else "rejected" if judged else "dropped")
        slots.append(Slot(
            id_, texts[1 + j], float(p_d[id_]), None if p_t is None else float(p_t[id_]),
            None if p_t is None else acceptance(p_t, p_d, id_), confidences[j],
            proposal.survival[j], fate))
    last, k = emission.ids[-1], emission.accepted
    bonus = k == emission.verified
    return Step(start, texts[0], tuple(slots), last, texts[-1], float(emission.targets[k][last]),
                None if bonus else float(proposal.distributions[k][last]), bonus,
                tuple(emission.targets), tuple(proposal.distributions))
