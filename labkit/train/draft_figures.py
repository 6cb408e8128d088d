"""What is measured of a draft on held-out text, and the calibration that comes of it.

Anchors lie every few tokens in the text. Behind each the draft proposes as in service, drawing
its own tokens left to right, the target verifies them, and then the *text* goes on: every anchor
has true text before it. The temperatures are fitted on one half of the rows (the even ones) and
judged on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from labkit.config import ModelConfig
from labkit.engine.calibration import Calibration, draft_digest, target_digest
from labkit.engine.sampling import Sampling
from labkit.engine.speculation import Request, propose, verify
from labkit.lab import Lab
from labkit.model.transformer import Transformer
from labkit.text.synthetic import SHORTEST_DOCUMENT, documents
from labkit.text.tokenizer import Tokenizer
from labkit.train.calibration import fit_temperatures, survival_errors
from labkit.train.drafter import acceptance, heldout_rows

SAMPLED, GREEDY = Sampling(temperature=1.0), Sampling(temperature=0.0)
EVERY = 8           # tokens from one anchor to the next
ROWS_AT_ONCE = 32   # rows of text that share the passes
CODE_ROWS, CODE_LENGTH = 16, 512  # of code, at most; tokens of a row


@dataclass(frozen=True)
class Trials:
    """N proposals of n slots and what became of them; tensors on the CPU.

    confidence_logits  [N,n] as the head says them (temperature 1)
    survived           [N,n] bool: the slot and all before it were accepted
    rows               [N] row of the text that each comes from
    """

    confidence_logits: torch.Tensor
    survived: torch.Tensor
    rows: torch.Tensor

    def of_rows(self, odd: bool) -> Trials:
        """The half of the odd or of the even rows."""
        kept = (self.rows % 2 == 1) == odd
        return Trials(self.confidence_logits[kept], self.survived[kept], self.rows[kept])

    @property
    def accepted(self) -> float:
        """Mean number of drafts that were accepted; the step emits one token more."""
        return float(self.survived.sum(1).double().mean())


@torch.no_grad()
def try_drafts(model: Transformer, text: torch.Tensor, sampling: Sampling, *, every: int = EVERY,
               seed: int = 0, vocabulary: int | None = None,
               progress: Callable[[Sequence[int]], Iterable[int]] = iter) -> Trials:
    """Propose and verify behind every `every`-th token of text [rows,T].

    vocabulary: ids from there on are never drawn. progress wraps the positions of each group.
    """
    n = model.config.dspark_block_size
    vocabulary = vocabulary or model.config.vocab_size
    logits, survived, rows = [], [], []
    for first in range(0, len(text), ROWS_AT_ONCE):
        part = text[first : first + ROWS_AT_ONCE]
        cache = model.new_cache(len(part), draft=True)
        generators = [torch.Generator().manual_seed(seed * 1_000_003 + first + i)
                      for i in range(len(part))]
        done = 0                                              # tokens that the cache holds
        for anchor in progress(range(every, part.shape[1] - n, every)):
            model(part[:, done:anchor], cache=cache)
            requests = [Request(int(a), sampling, g, n)
                        for a, g in zip(part[:, anchor], generators, strict=True)]
            proposals = propose(model, cache, requests, vocabulary)
            emissions = verify(model, cache, requests, proposals, [n] * len(part), vocabulary)
            done = anchor + 1                                 # keep the anchor: it is of the text
            cache.rewind(torch.full((len(part),), done, device=model.device))
            logits.append(torch.tensor([p.confidence_logits for p in proposals],
                                       dtype=torch.float64))                            # [R,n]
            count = torch.tensor([e.accepted for e in emissions])
            survived.append(torch.arange(n) < count[:, None])
            rows.append(torch.arange(first, first + len(part)))
    return Trials(torch.cat(logits), torch.cat(survived), torch.cat(rows))


def code_rows(tokenizer: Tokenizer, length: int, count: int) -> torch.Tensor:
    """The first `length` tokens of held-out documents of code that have so many, each behind
    BOS: ids [count,length+1]."""
    assert tokenizer.bos_id is not None
    found = documents("code", tokenizer, split="heldout",
                      length=2 * max(length, SHORTEST_DOCUMENT))
    long = (document.ids for document in found if len(document.ids) >= length)
    return torch.tensor([[tokenizer.bos_id, *ids[:length]] for ids in islice(long, count)])


@dataclass(frozen=True)
class DraftFigures:
    """Of a draft on held-out text, the novels but for `code_*`; lists are by slot.

    acceptance     1 - total variation at temperature 1, the tokens before each slot from the text
    sampled, greedy  share of proposals whose slot survived, drafts being the draft's own:
                   at temperature 1, and at 0
    sampled_length, greedy_length  mean number of accepted drafts; a step emits one token more
    ece_*          expected calibration error of the survival products, on the rows that the
                   temperatures were not fitted on: sampled, before and after; greedy, after
    code_*         the same on held-out code (`labkit.text.synthetic`); None: not measured
    """

    parameters: int
    proposals: int
    acceptance: tuple[float, ...]
    sampled: tuple[float, ...]
    sampled_length: float
    greedy: tuple[float, ...]
    greedy_length: float
    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    ece_greedy_before: tuple[float, ...]
    ece_greedy_after: tuple[float, ...]
    code_proposals: int | None = None
    code_sampled_length: float | None = None
    code_greedy_length: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DraftFigures:
        """What `to_dict` gave, also by way of JSON."""
        known: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**known)


def row_length(config: ModelConfig) -> int:
    """Tokens of the rows of text that temperatures are fitted on: 1,024 or what fits."""
    return min(1024, config.max_position_embeddings - 1)


def measure_draft(lab: Lab, length: int | None = None, limit: int | None = None,
                  quiet: bool = False) -> tuple[DraftFigures, Calibration]:
    """Every figure of a lab's draft, and its calibration, fitted on the way.

    length: tokens of a row of text, by default `row_length`; limit: rows.
    """
    model = lab.model
    length = length or row_length(lab.config)
    text = heldout_rows(lab.tokenizer, length, limit)
    tried = _try_all(lab, text, quiet)
    fitted, judged = tried[0].of_rows(odd=False), tried[0].of_rows(odd=True)
    figures = _figures(lab, tried, judged, tried[1].of_rows(odd=True), fit_temperatures(
        fitted.confidence_logits, fitted.survived).temperatures, length, limit)
    assert model.mtp is not None
    return figures, Calibration(
        figures.temperatures, figures.ece_before, figures.ece_after,
        {"text": "held-out text of the corpus: fitted on the even rows, errors of the odd ones",
         "temperature": SAMPLED.temperature, "tokens_a_row": length, "rows": len(text),
         "proposals_fitted": len(fitted.survived), "proposals_judged": len(judged.survived)},
        draft_digest(model.mtp.last.confidence_head.proj.weight), target_digest(model))


def judge_draft(lab: Lab, length: int, limit: int, quiet: bool = False) -> DraftFigures:
    """The figures of a lab's draft with the calibration that it came with, all 1 without one.

    On the first `length` tokens of at most `limit` of those rows on which `measure_draft` does
    not fit, so that all of them can judge.
    """
    rows = heldout_rows(lab.tokenizer, row_length(lab.config))[1::2]
    count = min(limit, len(rows))
    text = rows[[i * len(rows) // count for i in range(count)], : length + 1]
    tried = _try_all(lab, text, quiet)
    temperatures = (lab.calibration.temperatures if lab.calibration
                    else (1.0,) * lab.config.dspark_block_size)
    return _figures(lab, tried, tried[0], tried[1], temperatures, text.shape[1] - 1, limit)


# ---- what both do ------------------------------------------------------------------------------

Tried = tuple[Trials, Trials, Trials, Trials]  # of text, sampled and greedy; of code


def _try_all(lab: Lab, text: torch.Tensor, quiet: bool) -> Tried:
    """Behind text [rows,T], and behind as many rows of code, no longer."""
    from tqdm import tqdm

    assert lab.model.mtp is not None
    code = code_rows(lab.tokenizer, min(CODE_LENGTH, text.shape[1] - 1),
                     min(CODE_ROWS, len(text)))

    def trials(rows: torch.Tensor, sampling: Sampling, title: str) -> Trials:
        def bar(positions: Sequence[int]) -> Iterable[int]:
            return tqdm(positions, desc=title, unit="step", disable=quiet, leave=False)

        return try_drafts(lab.model, rows, sampling, vocabulary=lab.tokenizer.vocab_size,
                          progress=bar)

    return (trials(text, SAMPLED, "drafts, sampled"), trials(text, GREEDY, "drafts, greedy"),
            trials(code, SAMPLED, "drafts of code, sampled"),
            trials(code, GREEDY, "drafts of code, greedy"))


def _figures(lab: Lab, tried: Tried, judged: Trials, judged_greedy: Trials,
             temperatures: Sequence[float], length: int, limit: int | None) -> DraftFigures:
    """judged: what the temperatures are judged on. length and limit: of the rows whose total
    variation is measured."""
    sampled, greedy, code_sampled, code_greedy = tried

    def errors(trials: Trials, temperatures: Sequence[float] | None) -> tuple[float, ...]:
        found = survival_errors(trials.confidence_logits, trials.survived, temperatures)
        return tuple(round(e, 5) for e in found)

    def shares(trials: Trials) -> tuple[float, ...]:
        return tuple(round(s, 4) for s in trials.survived.double().mean(0).tolist())

    assert lab.model.mtp is not None
    found = acceptance(lab.model, lab.tokenizer, length, limit)
    return DraftFigures(
        parameters=sum(p.numel() for p in lab.model.mtp.parameters()),
        proposals=len(sampled.survived), acceptance=tuple(round(a, 4) for a in found),
        sampled=shares(sampled), sampled_length=round(sampled.accepted, 3),
        greedy=shares(greedy), greedy_length=round(greedy.accepted, 3),
        temperatures=tuple(round(t, 4) for t in temperatures),
        ece_before=errors(judged, None), ece_after=errors(judged, temperatures),
        ece_greedy_before=errors(judged_greedy, None),
        ece_greedy_after=errors(judged_greedy, temperatures),
        code_proposals=len(code_sampled.survived),
        code_sampled_length=round(code_sampled.accepted, 3),
        code_greedy_length=round(code_greedy.accepted, 3),
    )
