#!/usr/bin/env python3
"""DSpark: what drafts cost, how many are accepted, what speculation gains, alone and under load.

Every speed-up is taken from paired runs: the same prompts, plain and speculative in turn, in one
process. Greedy texts are compared token for token. Counting is a domain of its own, since it
flatters every draft. A step of R requests reads B tokens; SPS(B) is how many such steps the
running engine makes in a second, measured here, and the scheduler's only knowledge of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from labkit.engine.batching import TRIES, Batch, Counts, profile_steps
from labkit.engine.calibration import calibrated
from labkit.engine.drafting import block_note, checked_slots
from labkit.engine.generate import Result
from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import (
    DelayedBudget,
    Fixed,
    NoDraft,
    Policy,
    PrefixScheduler,
    StepRate,
    Threshold,
)
from labkit.engine.session import Session, is_small, one_thread
from labkit.engine.speculation import Proposal, Request, propose, verify
from labkit.errors import InputError, LabError
from labkit.lab import Lab
from labkit.tables import (
    check_context,
    check_counts,
    heading,
    load_model,
    print_tables,
    table_parser,
)
from labkit.text.prompts import DOMAINS, prompts
from labkit.train.calibration import expected_calibration_error, reliability, survival_errors
from labkit.train.draft_figures import GREEDY, SAMPLED, try_drafts
from labkit.train.drafter import heldout_rows

TABLES = ("pairs", "costs", "confidence", "load")
AGES = 7            # requests under load write as many more tokens as 0 .. 6, in turn

EXAMPLES = """examples:
  labkit bench dspark                             every table (about ten minutes)
  labkit bench dspark --quick                     the same with little text, for a first look
  labkit bench dspark --only pairs --temperature 0.8 --top-p 0.95
  labkit bench dspark --only load --requests 1 8 64
  labkit bench dspark --only pairs costs --slots 3 --model path/to/checkpoint
"""


def main() -> None:
    parser = table_parser(__doc__, EXAMPLES, TABLES, threads=1)
    parser.add_argument("--prompts", type=int, default=6, metavar="N",
                        help="prompts of each domain (default 6)")
    parser.add_argument("--length", type=int, default=128, metavar="T",
                        help="tokens of a prompt (default 128)")
    parser.add_argument("--new-tokens", type=int, default=96, metavar="T",
                        help="tokens written behind each (default 96)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="default 1: nothing is cut off")
    parser.add_argument("--slots", type=int, default=None, metavar="N",
                        help="slots drafted a step (default as trained)")
    parser.add_argument("--min-survival", type=float, default=0.5, metavar="P",
                        help="of the threshold policy (default 0.5)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64],
                        metavar="R", help="requests at once, in the table of loads")
    parser.add_argument("--repeats", type=int, default=5, metavar="N",
                        help="timed steps of each cost and width, of which the median counts")
    parser.add_argument("--quick", action="store_true", help="one prompt, few tokens, two loads")
    options = parser.parse_args()
    # The first token of a text comes from its prompt, a second one from a step.
    check_counts(parser, options, {"prompts": 1, "length": 2, "new_tokens": 2, "repeats": 1,
                                   "threads": 1, "slots": 1, "requests": 1})
    if options.quick:
        options.prompts, options.length, options.new_tokens = 1, 64, 24
        options.repeats, options.requests = 2, [1, 4]
    lab = load_model(options)
    checked_slots(options.slots, lab.config.dspark_block_size)
    if not lab.has_draft:
        raise SystemExit(f"{options.model} has no draft (mtp.*), so there is nothing to measure: "
                         "train one with labkit train-draft")
    options.slots = options.slots or lab.config.dspark_block_size
    needed = {"--length and --new-tokens": options.length + options.new_tokens}
    if "costs" in options.only:
        needed["--length and --slots"] = options.length + options.slots
    if "load" in options.only:
        needed[f"--length, --new-tokens and {AGES - 1} for requests of different age"] = (
            options.length + options.new_tokens + AGES - 1)
    check_context(parser, options, lab, needed)
    print_tables(lab, options, {"pairs": pairs_table, "costs": costs_table,
                                "confidence": confidence_table, "load": load_table})


def title(text: str, lab: Lab, options: argparse.Namespace, sizes: str) -> None:
    heading(text, lab, options.threads, sizes)


def slots_drafted(lab: Lab, options: argparse.Namespace) -> str:
    """How many slots, and how many in training where that is fewer."""
    return (block_note(options.slots, lab.config.dspark_block_size)
            or f"drafted {options.slots} slots")


def temperatures(lab: Lab) -> Sequence[float] | None:
    return lab.calibration.temperatures if lab.calibration else None


# ---- one request ----------------------------------------------------------------------------


@dataclass
class Paired:
    """Sums over the prompts of one domain and policy; used: those whose texts had a step."""

    used: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    same: int = 0
    per_slot: list[list[int]] = field(default_factory=list)


def pairs_table(lab: Lab, options: argparse.Namespace) -> None:
    """Tokens a step, acceptance by slot and speed, by domain and policy."""
    policies: dict[str, Policy] = {
        f"fixed {options.slots}": Fixed(options.slots),
        f"survival > {options.min_survival}": Threshold(options.min_survival)}
    if options.slots > 2:
        policies = {"fixed 2": Fixed(2), **policies}
    greedy = options.temperature == 0
    title("Speculation against plain decoding, one request", lab, options,
          f"{options.prompts} prompts of {options.length} tokens a domain, {options.new_tokens} "
          f"new ones; temperature {options.temperature:g}, top_p {options.top_p:g}; "
          f"{slots_drafted(lab, options)}; runs in turn, either first in every other pair")
    print(f"  {'domain':<10}{'policy':<16}{'tokens/step':>12}{'accepted':>10}  "
          f"{'of the verified, by slot':<34}{'plain':>8}{'spec':>8}{'ratio':>7}{'prompts':>9}"
          + (f"{'same text':>11}" if greedy else ""))
    warm_up(lab, options)
    for domain in DOMAINS:
        texts = prompts(domain, lab.tokenizer, options.prompts, options.length)
        for name, policy in policies.items():
            found = Paired(per_slot=[[0, 0] for _ in range(options.slots)])
            for number, prompt in enumerate(texts):
                pair(lab, options, prompt, number, policy, found)
            if not found.used:
                print(f"  {domain:<10}{name:<16}  every text ended at its first token: there was "
                      "no step to be measured", flush=True)
                continue
            verified = sum(v for v, _ in found.per_slot)
            accepted = sum(a for _, a in found.per_slot)
            slots = " ".join(f"{a / v:5.0%}" if v else "    -" for v, a in found.per_slot)
            print(f"  {domain:<10}{name:<16}{found.tokens / found.steps:12.2f}"
                  f"{accepted / verified if verified else 0:10.0%}  {slots:<34}"
                  f"{found.tokens / found.plain_seconds:8.1f}{found.tokens / found.seconds:8.1f}"
                  f"{found.plain_seconds / found.seconds:7.2f}"
                  f"{found.used:>7}/{len(texts)}"
                  + (f"{found.same:>9}/{found.used}" if greedy else ""), flush=True)
    print("  plain, spec: tokens a second behind the first; ratio: of the two; prompts: those "
          "whose texts had a second token")


def warm_up(lab: Lab, options: argparse.Namespace) -> None:
    """The first passes of a process are slower; they are not to be anyone's."""
    prompt = prompts("prose", lab.tokenizer, 1, options.length)[0]
    for speculative in (False, True):
        lab.generate(prompt, min(8, options.new_tokens), temperature=0, speculative=speculative)


def pair(lab: Lab, options: argparse.Namespace, prompt: list[int], number: int, policy: Policy,
         found: Paired) -> None:
    """One prompt, plain and speculative; its number is the seed and says which comes first."""
    same = dict(max_new_tokens=options.new_tokens, temperature=options.temperature,
                top_p=options.top_p, seed=number)

    def speculative() -> Result:
        return lab.generate(prompt, **same, speculative=True, draft_slots=options.slots,
                            policy=policy)

    if number % 2:
        spec, plain = speculative(), lab.generate(prompt, **same)
    else:
        plain, spec = lab.generate(prompt, **same), speculative()
    told = spec.stats.speculation
    assert told is not None
    # A text may end early (EOS), at different places when it is sampled: seconds a token count.
    written = spec.stats.new_tokens - 1
    if written < 1 or plain.stats.new_tokens < 2:
        return
    found.used += 1
    found.plain_seconds += plain.stats.decode_seconds / (plain.stats.new_tokens - 1) * written
    found.seconds += spec.stats.decode_seconds
    found.tokens += written
    found.steps += told.steps
    found.same += plain.ids == spec.ids
    for slot, (verified, accepted) in enumerate(told.per_slot):
        found.per_slot[slot][0] += verified
        found.per_slot[slot][1] += accepted


# ---- what a step costs ----------------------------------------------------------------------


def costs_table(lab: Lab, options: argparse.Namespace) -> None:
    """Draft, verification and a plain step; what must be accepted to gain anything."""
    model, n = lab.model, options.slots
    text = prompts("prose", lab.tokenizer, 1, options.length)[0]
    vocabulary = lab.tokenizer.vocab_size
    session, bare = Session(model), Session(model, draft=False)  # plain decoding fills no windows
    for each in (session, bare):
        each.prefill(text[:-1])
    request = Request(text[-1], Sampling(temperature=0), torch.Generator().manual_seed(0), n)
    kept: list[Proposal] = propose(model, session.cache, [request], vocabulary)

    def plain() -> None:
        verify(model, bare.fork().cache, [request], [Proposal()], [0], vocabulary)

    def draft() -> None:
        propose(model, session.cache, [request], vocabulary)

    def check() -> None:
        verify(model, session.fork().cache, [request], kept, [n], vocabulary)

    with one_thread(is_small(model)):
        step, drafted, checked = median([plain, draft, check], options.repeats * 8)
    title("What a step costs, one request", lab, options,
          f"behind {options.length} tokens; {slots_drafted(lab, options)}; "
          f"medians of {options.repeats * 8} rounds, in turn")
    print(f"  {'':<28}{'ms':>8}{'of plain':>10}")
    for name, seconds in (("plain step (1 token)", step), (f"draft ({n} slots)", drafted),
                          (f"verification ({n + 1} tokens)", checked),
                          ("draft + verification", drafted + checked)):
        print(f"  {name:<28}{1e3 * seconds:8.2f}{seconds / step:10.2f}")
    wanted = (drafted + checked) / step
    print(f"  break-even: {wanted:.2f} tokens a step", end="")
    if wanted >= n + 1:
        print(f", more than the {n + 1} that a step can give: there is nothing to gain here")
    else:
        print(f", reached if every slot is accepted with probability "
              f"{even_acceptance(wanted, n):.2f} once those before it are")


def median(runs: Sequence[Callable[[], None]], rounds: int) -> list[float]:
    """Median seconds of each, run in turn; the first round does not count."""
    found: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for seconds, run in zip(found, runs, strict=True):
            started = time.perf_counter()
            run()
            if number:
                seconds.append(time.perf_counter() - started)
    return [statistics.median(seconds) for seconds in found]


def even_acceptance(tokens: float, slots: int) -> float:
    """p with 1 + p + .. + p^slots = tokens."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = ((middle, high) if sum(middle**k for k in range(slots + 1)) < tokens
                     else (low, middle))
    return high


# ---- confidence -----------------------------------------------------------------------------


def confidence_table(lab: Lab, options: argparse.Namespace) -> None:
    """Is what the draft believes of its slots true?"""
    rows = heldout_rows(lab.tokenizer, min(512, lab.config.max_position_embeddings - 1),
                        4 if options.quick else 16)
    if len(rows) > 1:
        rows = rows[1::2]                       # temperatures are fitted on the even ones
    for name, sampling in (("sampled, temperature 1", SAMPLED), ("greedy", GREEDY)):
        trials = try_drafts(lab.model, rows, sampling, vocabulary=lab.tokenizer.vocab_size)
        title(f"Survival of slots, believed and seen ({name})", lab, options,
              f"{len(trials.survived)} proposals behind held-out text")
        fitted = temperatures(lab) or [1.0] * trials.survived.shape[1]
        before = survival_errors(trials.confidence_logits, trials.survived, None)
        after = survival_errors(trials.confidence_logits, trials.survived, fitted)
        seen = trials.survived.double().mean(0).tolist()
        print(f"  {'slot':<8}{'survived':>10}{'temperature':>13}{'ECE at 1':>10}{'ECE':>8}")
        for slot, row in enumerate(zip(seen, fitted, before, after, strict=True), 1):
            print(f"  {slot:<8}{row[0]:10.3f}{row[1]:13.2f}{row[2]:10.3f}{row[3]:8.3f}")
        sure = calibrated(trials.confidence_logits, fitted).cumprod(1)
        print(f"  all slots together: ECE "
              f"{expected_calibration_error(sure.flatten(), trials.survived.flatten()):.3f}; "
              f"accepted drafts a step {trials.accepted:.2f}")
        print(f"  {'believed':<14}{'proposed':>10}{'mean':>8}{'survived':>10}")
        for bar in reliability(sure.flatten(), trials.survived.flatten(), bins=10):
            if bar.count:
                print(f"  {bar.low:.1f} .. {bar.high:.1f}    {bar.count:>10}{bar.predicted:8.2f}"
                      f"{bar.observed:10.2f}")


# ---- many requests --------------------------------------------------------------------------


def load_table(lab: Lab, options: argparse.Namespace) -> None:
    """Throughput of R requests at once: no drafts, fixed length, threshold, schedulers."""
    title("Requests at once: SPS and throughput by policy", lab, options,
          f"prose prompts of {options.length} tokens, greedy; {slots_drafted(lab, options)}; "
          f"SPS(B): medians of {options.repeats} steps at each of several widths; every policy "
          f"writes {options.new_tokens} tokens a request in two turns, a request that ends is "
          "replaced")
    texts = prompts("prose", lab.tokenizer, max(options.requests), options.length)
    for R in options.requests:
        def profile(slots: int, R: int = R) -> StepRate:
            return profile_steps(lab.model, lab.tokenizer, texts, [R], slots, options.repeats,
                                 temperatures=temperatures(lab))

        plain, rate = profile(0), profile(options.slots)
        points = "  ".join(f"{tokens}: {per:.1f}" for tokens, per in rate.points.items())
        print(f"\n  R = {R}: SPS without drafts {plain(R):.1f}; with drafts, by B  {points}")
        print(f"  {'policy':<18}{'B a step':>10}{'tokens/step':>13}{'accepted':>10}"
              f"{'tokens/s':>10}{'of none':>9}{'from SPS':>10}")
        policies: list[tuple[str, Policy]] = [
            ("none", NoDraft()), (f"fixed {options.slots}", Fixed(options.slots)),
            (f"survival > {options.min_survival}", Threshold(options.min_survival)),
            ("scheduler", PrefixScheduler(rate)), ("delayed budget", DelayedBudget(rate))]
        loads = [Load(lab, options, policy, texts[:R]) for _, policy in policies]
        for _ in range(2):
            for load in loads:
                load.write(R * options.new_tokens // 2)
        for (name, _), load in zip(policies, loads, strict=True):
            speed = load.emitted / load.seconds
            known = plain if name == "none" else rate
            expected = load.emitted / sum(n / known(b) for b, n in load.widths.items())
            c = load.counts
            print(f"  {name:<18}{sum(b * n for b, n in load.widths.items()) / load.steps:10.1f}"
                  f"{load.emitted / load.steps / R:13.2f}"
                  + (f"{c.acceptance:10.0%}" if c.acceptance is not None else f"{'-':>10}")
                  + f"{speed:10.1f}{speed * loads[0].seconds / loads[0].emitted:9.2f}"
                  f"{expected:10.1f}", flush=True)
    print("\n  tokens/step: of one request; tokens/s: of all together; from SPS: what the measured "
          "step rates say for the same steps\n  tokens/s leaves out prefill and the copies as rows "
          "enter and leave the batch")


class Load:
    """R requests that a policy keeps busy; only steps of all R count."""

    def __init__(self, lab: Lab, options: argparse.Namespace, policy: Policy,
                 texts: list[list[int]]) -> None:
        self.batch = Batch(lab.model, lab.tokenizer, policy, options.slots, temperatures(lab),
                           limit=len(texts))
        self.texts, self.room = texts, options.new_tokens
        self.emitted = self.steps = self.given = 0
        self.seconds = 0.0
        self.widths: dict[int, int] = {}        # tokens of a step -> how many such steps

    @property
    def counts(self) -> Counts:
        return self.batch.counts

    def write(self, tokens: int) -> None:
        """Steps until so many more tokens were written."""
        goal, R, tries = self.emitted + tokens, len(self.texts), 0
        while self.emitted < goal:
            while len(self.batch.waiting) + len(self.batch.running) < R:
                # Texts of different age: else all of them would end in the same step.
                self.batch.add(self.texts[self.given % R],
                               self.room + self.given % AGES, Sampling(temperature=0))
                self.given += 1
            before = self.counts.steps
            self.batch.step()
            if self.counts.steps == before or self.batch.steps[-1].requests < R:
                tries += 1
                if tries == TRIES:
                    raise InputError(f"{R} requests never had a step together: their texts end too "
                                     "soon behind these prompts; give another --length")
                continue
            step, tries = self.batch.steps[-1], 0
            self.steps += 1
            self.emitted += step.emitted
            self.seconds += step.seconds
            self.widths[step.tokens] = self.widths.get(step.tokens, 0) + 1


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        raise SystemExit(f"labkit: {error}") from None
