"""Wrong variants of speculative decoding: texts that read well, distributed as no target's."""

from __future__ import annotations

from labkit.mutants.record import Patch, everywhere, method, mutant

NO_DRAWS = "the golden vectors hold no draws"
NO_LENGTHS = "the golden vectors hold no verify lengths"


# ------------------------------------------------------------------ verification
@mutant("verification", "A rejected token is replaced by one drawn from p_t itself.",
        "Rejection taken for plain sampling: the draft's favourites are counted twice.",
        "P(next token) where draft and target differ: too much mass where p_d is high", NO_DRAWS)
def residual_not_subtracted() -> list[Patch]:
    from labkit.engine.verification import residual
    return everywhere(residual, lambda p_t, p_d: p_t)


@mutant("verification", "The residual is |p_t - p_d|, its negative part not cut off.",
        "An absolute value instead of a positive part: both have the same sum on each side.",
        "A rejected token may come back at once as its own replacement", NO_DRAWS)
def residual_not_clipped() -> list[Patch]:
    from labkit.engine.verification import residual

    def absolute(p_t, p_d):
        off = (p_t - p_d).abs()
        return off / off.sum() if off.sum() > 0 else p_t
    return everywhere(residual, absolute)


@mutant("verification", "A drafted token is accepted with probability p_t instead of p_t / p_d.",
        "The rule for a draft that is certain (p_d = 1), used for one that was sampled.",
        "Greedy texts are right; sampled ones accept too little and lean to the residual", NO_DRAWS)
def accept_without_ratio() -> list[Patch]:
    from labkit.engine.verification import acceptance
    return everywhere(acceptance, lambda p_t, p_d, id: float(p_t[id]))


@mutant("verification", "The bonus token is drawn from the draft's last distribution.",
        "The token behind the block taken from what was at hand, the draft's own next guess.",
        "The token after a block that was accepted as a whole", NO_DRAWS)
def bonus_from_draft() -> list[Patch]:
    return _bonus_from(lambda targets, drafts: drafts[-1])


@mutant("verification", "The bonus token is drawn from the target's last row but one.",
        "Off by one in the logits: n drafted tokens have n + 1 rows, the anchor's first.",
        "The token after a block that was accepted as a whole", NO_DRAWS)
def bonus_one_row_early() -> list[Patch]:
    return _bonus_from(lambda targets, drafts: targets[-2])


def _bonus_from(choose) -> list[Patch]:
    from labkit.engine.verification import verify

    def wrong(targets, drafts, ids, generator):
        if len(ids):
            targets = [*targets[:-1], choose(targets, drafts)]
        return verify(targets, drafts, ids, generator)
    return everywhere(verify, wrong)


# ------------------------------------------------------------------ scheduling
@mutant("scheduling", "The prefix scheduler searches the whole curve instead of stopping early.",
        "A global optimum looks better than a greedy one; on a jagged curve it looks ahead.",
        "A drafted 1 is verified oftener than a drafted 0: the toy `coin` with the rates `STAIRS`",
        NO_LENGTHS)
def scheduler_looks_ahead() -> list[Patch]:
    from labkit.engine.scheduling import PrefixScheduler, best_first

    def lengths(self, survival):
        found, best, tau = [0] * len(survival), [0] * len(survival), float(len(survival))
        highest = tau * self.rate(len(survival))
        for n, (a, _, request) in enumerate(best_first(survival), len(survival) + 1):
            tau += a
            found[request] += 1
            if n <= self.rate.largest and tau * self.rate(n) > highest:
                highest, best = tau * self.rate(n), list(found)
        return best
    return [Patch(PrefixScheduler, "lengths", lengths)]


@mutant("scheduling", "A block is verified as a whole or not at all, by its mean survival.",
        "One length for a batch, for the sake of fixed shapes, from an average over the slots.",
        "Whether the first slot is verified hangs on what was drafted in it", NO_LENGTHS)
def threshold_looks_ahead() -> list[Patch]:
    from labkit.engine.scheduling import Threshold

    def lengths(self, survival):
        return [len(row) if row and sum(row) / len(row) >= self.min_survival else 0
                for row in survival]
    return [Patch(Threshold, "lengths", lengths)]


@mutant("scheduling", "The delayed budget is made from the confidences of this very step.",
        "The delay taken for a matter of speed, and removed where the scheduler is fast enough.",
        "The same search is harmless with old confidences and biased with today's", NO_LENGTHS)
def budget_of_today() -> list[Patch]:
    from labkit.engine.scheduling import DelayedBudget, best_first

    def around(original):
        def lengths(self, survival):
            self.history.extend([[a for a, _, _ in best_first(survival)]] * self.delay)
            return original(self, survival)
        return lengths
    return method(DelayedBudget, "lengths", around)
