"""Continuous batching: requests that come and go share the passes of draft and target.

A step is one pass of the draft and one of the target, however many requests there are. Each of
them has its own length, its own number of drafts to be verified, and leaves as soon as it ends;
another takes its place. The rows of a pass differ in length, and only live tokens are computed
(`labkit.model.run`), so a step costs what its B tokens cost, R anchors and all verified drafts.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from labkit.cache import Cache
from labkit.cache.rows import join, select
from labkit.engine.counts import Counts, Step
from labkit.engine.drafting import block_note, checked_slots
from labkit.engine.replay import decoder_tail
from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import NoDraft, Policy, StepRate
from labkit.engine.session import Session, is_small, one_thread, prefill_mode
from labkit.engine.speculation import Request, needs_draft, propose, verify
from labkit.engine.transcript import Event, Transcript, check_count
from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.text.tokenizer import Tokenizer

MAX_STEPS = 10_000  # steps that are remembered one by one
TRIES = 50          # steps of a profile, until one has the width that is wanted
GREEDY = Sampling(temperature=0)


class Job(Transcript):
    """A request in a batch: what it has written, and what was computed for it.

    error  why its prompt could not be read, or its text not go on; it has left then
    """

    error: Exception | None = None

    def __init__(self, model: Transformer, tokenizer: Tokenizer, prompt: Sequence[int],
                 max_new_tokens: int, sampling: Sampling, stop: str | Sequence[str] | None,
                 seed: int | None, candidates: int) -> None:
        super().__init__(model.config, tokenizer, prompt, max_new_tokens, sampling, stop, seed,
                         candidates)
        self.counts = Counts()

    @property
    def done(self) -> bool:
        return self.stop_reason is not None


@dataclass(frozen=True)
class _Due:
    """An id that is decided and not yet said; None: to be drawn, the first of a text."""

    job: Job
    place: int                      # in its text
    id: int | None
    logits: torch.Tensor            # [V]
    target: torch.Tensor | None     # [V]: the distribution that they came to
    draft: bool


Told = list[tuple[Job, Event]]


class Batch:
    """Requests that are decoded together; more may be added at any time.

    policy        how many drafts of each request are verified; None: plain decoding
    slots         drafted in a step at most; None: as many as the draft was trained for, which
                  are `trained_slots`; a longer block is labelled where the batch is printed
    temperatures  of the confidence head (`Calibration`); None: 1
    limit         requests that run at once; the others wait for a place
    form, page_tokens               of their caches; prefill, halo, cut, chunk: `Session.prefill`
    counts, steps what was computed so far; `steps` one by one, the last 10,000

    A step that is cut short (Ctrl-C) has happened or has not; the next call goes on from there,
    and what it had to tell is told by that call. A request that fails leaves with the error
    (`Job.error`), which is raised; the others go on with the next call. Every request's text is,
    with any policy, distributed as if the request were alone, and its greedy text is the same.
    InputError, here or in `add`, for options that the model, or a request, cannot take.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, policy: Policy | None = None,
                 slots: int | None = None, temperatures: Sequence[float] | None = None, *,
                 limit: int = 64, form: str | None = None, page_tokens: int | None = None,
                 prefill: str = "full", halo: str = "window", cut: str = "inside",
                 chunk: int | None = None) -> None:
        check_count("limit", limit, least=1)
        if chunk is not None:
            check_count("chunk", chunk, least=1)
        if policy is not None and not isinstance(policy, Policy):
            raise InputError(f"policy is {policy!r}: give one of labkit.engine.scheduling")
        self.prefill = prefill_mode(prefill)
        decoder_tail(model.config, halo, cut)   # refuses an unknown halo or cut
        self.model, self.tokenizer = model, tokenizer
        self.policy = policy or NoDraft()
        self.trained_slots = model.config.dspark_block_size
        self.slots = checked_slots(slots, self.trained_slots) if self.policy.drafts else 0
        if self.policy.limit is not None:
            self.slots = min(self.slots, self.policy.limit)
        self.temperatures, self.limit = temperatures, limit
        self.form, self.page_tokens = form, page_tokens
        self.halo, self.cut, self.chunk = halo, cut, chunk
        if self.slots:
            needs_draft(model, self._session().cache)
        self.policy.reset()
        self.counts = Counts()
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._cache: Cache | None = None        # row i is that of running[i]
        self._entering: list[tuple[Job, Cache]] = []    # read, and not yet among the rows
        self._due: deque[_Due] = deque()
        self._told: Told = []
        self._small = is_small(model)

    def add(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling | None = None,
            stop: str | Sequence[str] | None = None, seed: int | None = None,
            candidates: int = 0) -> Job:
        """A request; it is read as soon as a place is free (`Transcript` has the arguments)."""
        job = Job(self.model, self.tokenizer, prompt, max_new_tokens, sampling or Sampling(),
                  stop, seed, candidates)
        self.waiting.append(job)
        return job

    def leave(self, job: Job) -> str:
        """End a request where it is; the piece of its text that was still held back."""
        piece = job.end()
        if job in self.waiting:
            self.waiting.remove(job)
        return piece

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do or to tell."""
        return bool(self.waiting or self._entering or self.running or self._due or self._told)

    def __repr__(self) -> str:
        note = block_note(self.slots, self.trained_slots)
        return (f"Batch({len(self.running) + len(self._entering)} running, "
                f"{len(self.waiting)} waiting; {type(self.policy).__name__}"
                + (f"; {note})" if note else ")"))

    def run(self) -> Iterator[tuple[Job, Event]]:
        """Steps until all requests have ended, those included that are added meanwhile."""
        while self.busy:
            yield from self.step()

    @torch.no_grad()
    def step(self) -> Told:
        """Requests enter, one pass of draft and target, requests leave -> what was written."""
        with one_thread(self._small):
            self._say()                         # what a call that was cut short has left
            self._dismiss()
            while self.waiting and len(self.running) + len(self._entering) < self.limit:
                self._read_next()
            self._enter()
            if self.running:
                self._advance()
        told, self._told = self._told, []
        return told

    # ------------------------------------------------------------------ coming and going
    def _session(self) -> Session:
        return Session(self.model, self.form, self.page_tokens, draft=self.slots > 0)

    def _read_next(self) -> None:
        """Read the prompt that has waited longest and draw its first token."""
        job, session = self.waiting[0], self._session()
        try:
            logits = session.prefill(job.prompt, True, self.prefill, halo=self.halo,
                                     cut=self.cut, chunk=self.chunk)    # [1,1,V]
        except Exception as error:
            self._give_up(job, error)
            raise
        self.waiting.popleft()
        self._entering.append((job, session.cache))
        self._due.append(_Due(job, 0, None, logits[0, -1], None, False))
        for counts in (self.counts, job.counts):
            counts.prefills += 1
            counts.prompt_tokens += len(job.prompt)
        self._say()
        self._dismiss()                 # a text may end with its first token

    def _enter(self) -> None:
        """All that were read get their rows, which are copied once."""
        if self._entering:
            caches = [cache for _, cache in self._entering]
            if self._cache is not None:
                caches.insert(0, self._cache)
            cache = join(caches) if len(caches) > 1 else caches[0]
            self.running = [*self.running, *(job for job, _ in self._entering)]
            self._cache, self._entering = cache, []

    def _dismiss(self) -> None:
        """Requests that have ended give up their rows."""
        self._entering = [(job, cache) for job, cache in self._entering if not job.done]
        stay = [row for row, job in enumerate(self.running) if not job.done]
        if len(stay) == len(self.running):
            return
        assert self._cache is not None
        cache = select(self._cache, stay) if stay else None
        self.running, self._cache = [self.running[row] for row in stay], cache

    def _give_up(self, job: Job, error: Exception) -> None:
        """A request that failed leaves: it would fail again, and the others wait."""
        job.error = error
        self.leave(job)

    # ------------------------------------------------------------------ a step
    def _advance(self) -> None:
        jobs, cache = self.running, self._cache
        assert cache is not None
        started = time.perf_counter()
        # The target's own token needs room too, so the last one is never drafted.
        requests = [Request(job.ids[-1], job.sampling, job.generator,
                            min(self.slots, job.max_new_tokens - len(job.ids) - 1))
                    for job in jobs]
        start, sources = cache.lengths, [job.generator.get_state() for job in jobs]
        try:
            proposals = propose(self.model, cache, requests, self.tokenizer.vocab_size,
                                self.temperatures)
            drafted = time.perf_counter()
            lengths = self.policy.lengths([p.survival for p in proposals])
            emissions = verify(self.model, cache, requests, proposals, lengths,
                               self.tokenizer.vocab_size)
            due = [_Due(job, len(job.ids) + place, id_, logits, target, place < emission.accepted)
                   for job, emission in zip(jobs, emissions, strict=True)
                   for place, (id_, logits, target) in enumerate(
                       zip(emission.ids, emission.logits, emission.targets, strict=True))]
        except BaseException:
            cache.settle()
            if not torch.equal(cache.lengths, start):
                cache.rewind(start)
            for job, source in zip(jobs, sources, strict=True):
                job.generator.set_state(source)
            raise
        self._due.extend(due)
        self.policy.done()
        verified, before = time.perf_counter(), self.counts.emitted
        self.counts.steps += 1
        for job, proposal, emission in zip(jobs, proposals, emissions, strict=True):
            job.counts.steps += 1
            for counts in (self.counts, job.counts):
                counts.add(proposal, emission)
        self._say()
        self.steps.append(Step(
            len(jobs), len(jobs) + sum(lengths), self.counts.emitted - before,
            drafted - started, verified - drafted, time.perf_counter() - started))
        self._dismiss()

    def _say(self) -> None:
        """Turn decided ids into text. What lies behind the end of a text is dropped."""
        while self._due:
            due = self._due[0]
            job = due.job
            if not job.done and due.place == len(job.ids):
                try:
                    event = job.take(due.logits, due.id, due.target)
                except Exception as error:
                    self._give_up(job, error)
                    raise
                self._told.append((job, event))
                if due.place:
                    self.counts.stayed(due.draft)
                    job.counts.stayed(due.draft)
            self._due.popleft()


# ---------------------------------------------------------------------- the step rate
@dataclass(frozen=True)
class Measured:
    """Seconds of a step of R requests with B tokens: the median of so many steps."""

    requests: int
    tokens: int
    seconds: float
    repeats: int


class _Chosen(Policy):
    """Lengths that were chosen beforehand, as far as there are drafts."""

    wanted: Sequence[int] = ()

    def lengths(self, survival: Sequence[Sequence[float]]) -> list[int]:
        # A request may have ended at its first token: then there are fewer rows.
        return [min(n, len(row)) for n, row in zip(self.wanted, survival, strict=False)]


def spread(total: int, requests: int, slots: int, generator: torch.Generator) -> list[int]:
    """`total` drafts shared out at random among so many requests, none with more than `slots`."""
    places = torch.randperm(requests * slots, generator=generator)[:total] // max(1, slots)
    return torch.bincount(places, minlength=requests).tolist()


def measure_steps(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]],
                  requests: Sequence[int], slots: int | None = None, repeats: int = 5,
                  sampling: Sampling | None = None, **options: Any) -> list[Measured]:
    """Times whole steps of a running `Batch`, draft and texts included, at real verify widths.

    For every number R of requests, which go on from the prompts in turn, and for several B from R
    to R (1 + slots): lengths are drawn anew in each step, so rows are ragged as they are in use.
    All B take turns, `repeats` times after a first round that warms up, so that what else happens
    on the machine, and texts that grow, meet all alike. sampling None: greedy; options: `Batch`'s.
    """
    check_count("repeats", repeats, least=1)
    for R in requests:
        check_count("requests", R, least=1)
    if not prompts or not requests:
        raise InputError("a step is measured behind at least one prompt" if not prompts else
                         f"requests are {requests!r}: give at least one number of them")
    source, found = torch.Generator().manual_seed(0), []
    for R in requests:
        policy = NoDraft() if slots == 0 else _Chosen()
        batch = Batch(model, tokenizer, policy, slots, limit=R, **options)
        seconds: dict[int, list[float]] = {tokens: [] for tokens in _widths(R, batch.slots)}
        for number in range(repeats + 1):
            for at in torch.randperm(len(seconds), generator=source).tolist():
                tokens = list(seconds)[at]
                took = _timed_step(batch, prompts, R, tokens, sampling or GREEDY, source)
                if number:
                    seconds[tokens].append(took)
        found += [Measured(R, tokens, statistics.median(s), repeats)
                  for tokens, s in seconds.items()]
    return found


def profile_steps(model: Transformer, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]],
                  requests: Sequence[int], slots: int | None = None, repeats: int = 5,
                  sampling: Sampling | None = None, **options: Any) -> StepRate:
    """SPS(B) of the running engine, from `measure_steps`.

    A step also costs something for each request, whatever it verifies; where several numbers of
    requests have the same B, their mean time counts. For one load alone give its number alone.
    """
    by_tokens: dict[int, list[float]] = {}
    for m in measure_steps(model, tokenizer, prompts, requests, slots, repeats, sampling,
                           **options):
        by_tokens.setdefault(m.tokens, []).append(m.seconds)
    return StepRate({tokens: 1 / statistics.mean(s) for tokens, s in by_tokens.items()})


def _widths(requests: int, slots: int) -> list[int]:
    """Tokens of a step from R to R (1 + slots): all of them if they are few."""
    most = requests * slots
    shares = (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
    return sorted({requests + n for n in (
        range(most + 1) if most < len(shares) else (round(most * share) for share in shares))})


def _timed_step(batch: Batch, prompts: Sequence[Sequence[int]], requests: int, tokens: int,
                sampling: Sampling, source: torch.Generator) -> float:
    """Seconds of a step of so many requests and tokens; others, as texts end, do not count."""
    for _ in range(TRIES):
        while len(batch.waiting) + len(batch.running) < requests:
            prompt = prompts[(batch.counts.prefills + len(batch.waiting)) % len(prompts)]
            room = batch.model.config.max_position_embeddings - len(prompt)
            batch.add(prompt, max(1, room), sampling)
        if isinstance(batch.policy, _Chosen):
            batch.policy.wanted = spread(tokens - requests, requests, batch.slots, source)
        before = batch.counts.steps
        batch.step()
        last = batch.steps[-1] if batch.counts.steps > before else None
        if last is not None and (last.requests, last.tokens) == (requests, tokens):
            return last.seconds
    raise InputError(f"{requests} requests never had a step of {tokens} tokens: their texts end "
                     "too soon behind these prompts; give shorter or other ones")
