"""Verification is lossless: exactly on toys, by chance with the real generator, edge by edge."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import mutants
from labkit.engine import verification
from labkit.engine.sampling import distribution, sample
from labkit.engine.scheduling import Fixed
from labkit.engine.verification import Verdict, acceptance, happens, residual, verify
from labkit.errors import InputError
from labkit.mutants.chance import chi_square, detectable, limit, power
from labkit.mutants.enumeration import KINDS, bias, law, plain_law, random_toy

EXACT = 1e-12


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def p(*values):
    return torch.tensor(values, dtype=torch.float64)


def one_hot(v, size=4):
    return torch.eye(size, dtype=torch.float64)[v]


@st.composite
def pairs(draw):
    """Two distributions over one vocabulary of 2 to 5, zeros and tiny values among them."""
    size = draw(st.integers(2, 5))
    value = st.one_of(st.just(0.0), st.just(1e-300), st.floats(1e-12, 1))
    made = []
    for _ in range(2):
        weights = draw(st.lists(value, min_size=size, max_size=size))
        if sum(weights) < 1e-12:
            weights[draw(st.integers(0, size - 1))] = 1.0
        made.append(torch.tensor(weights, dtype=torch.float64))
    return [x / x.sum() for x in made]


# ---- one place -------------------------------------------------------------------------------


@settings(max_examples=300)
@given(pairs())
def test_kept_and_replaced_tokens_add_up_to_the_target(pair):
    p_t, p_d = pair
    kept = torch.tensor([float(q) * acceptance(p_t, p_d, v) if q > 0 else 0.0
                         for v, q in enumerate(p_d)], dtype=torch.float64)
    rejected = 1 - float(kept.sum())
    assert rejected == pytest.approx(float((p_t - p_d).abs().sum()) / 2, abs=EXACT)
    torch.testing.assert_close(kept + rejected * residual(p_t, p_d), p_t, rtol=0, atol=EXACT)


@settings(max_examples=300)
@given(pairs())
def test_the_residual_is_a_distribution_without_what_was_rejected(pair):
    p_t, p_d = pair
    r = residual(p_t, p_d)
    assert float(r.sum()) == pytest.approx(1, abs=EXACT) and bool((r >= 0).all())
    if bool((p_t > p_d).any()):
        assert bool((r[p_t <= p_d] == 0).all())
        for v in range(len(p_d)):
            if p_d[v] > 0 and acceptance(p_t, p_d, v) < 1:
                assert r[v] == 0


def test_residual_by_hand():
    torch.testing.assert_close(residual(p(.5, .3, .2), p(.2, .2, .6)), p(.75, .25, 0))
    assert residual(p(0, 1), p(1, 0)).tolist() == [0, 1]
    # Equal ones are never rejected; the answer is the target's distribution all the same.
    assert residual(p(.25, .75), p(.25, .75)).tolist() == [.25, .75]
    near = residual(p(.25, .75), p(.25 + 1e-17, .75))
    assert bool(torch.isfinite(near).all()) and float(near.sum()) == 1


# ---- the law of what is emitted --------------------------------------------------------------


def test_laws_by_hand():
    """The instrument itself: every course of chance once, with its weight."""
    def two_coins():
        first = verification.happens(0.25, None)
        return first, verification.sample(p(.5, 0, .5), None) if first else None
    assert law(two_coins) == {(True, 0): .125, (True, 2): .125, (False, None): .75}
    assert law(lambda: verification.happens(1.0, None)) == {True: 1.0}
    assert law(lambda: "no draw") == {"no draw": 1.0}
    assert verification.sample is sample and verification.happens is happens
    plain = plain_law(random_toy(1), (0,), 3)
    assert len(plain) == 8 and sum(plain.values()) == pytest.approx(1, abs=EXACT)


def test_verdicts_by_hand():
    targets, drafts = [p(.5, .5), p(.2, .8), p(.9, .1)], [p(.8, .2), p(.5, .5)]
    found = law(lambda: verify(targets, drafts, [0, 0], None))
    wanted = {                                  # accept 0: .5/.8; accept 0 again: .2/.5
        Verdict(0, 1, False): 1 - .625,         # residual of slot 0: all on 1
        Verdict(1, 1, False): .625 * .6,        # of slot 1: all on 1
        Verdict(2, 0, True): .625 * .4 * .9,
        Verdict(2, 1, True): .625 * .4 * .1,
    }
    assert found == pytest.approx(wanted, abs=EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block", [0, 1, 2, 3])
@given(seed=st.integers(0, 2**20), vocabulary=st.integers(2, 4))
def test_one_block_then_plain_sampling_is_plain_sampling(kind, block, seed, vocabulary):
    """Draft block, verify, sample what is missing of block + 1 tokens: the law of plain_law."""
    if kind == "disjoint" and vocabulary == 3:
        vocabulary = 4
    toy = random_toy(seed, vocabulary, block, kind)
    found, accepted = Counter(), 0.0
    for ids in itertools.product(range(vocabulary), repeat=block):
        drafts = [toy.draft((), ids[:k]) for k in range(block)]
        chance = math.prod(float(q[v]) for q, v in zip(drafts, ids, strict=True))
        if not chance:
            continue
        targets = [toy.target(ids[:k]) for k in range(block + 1)]
        for verdict, odds in law(lambda t=targets, d=drafts, i=ids: verify(t, d, i, None)).items():
            assert verdict.bonus == (verdict.accepted == block)
            accepted += chance * odds * verdict.accepted
            text = (*ids[: verdict.accepted], verdict.next_id)
            for rest, q in plain_law(toy, text, block + 1 - len(text)).items():
                found[text + rest] += chance * odds * q
    wanted = plain_law(toy, (), block + 1)
    for text in {*found, *wanted}:
        assert found[text] == pytest.approx(wanted.get(text, 0.0), abs=EXACT), text
    if kind == "equal":
        assert accepted == pytest.approx(block, abs=EXACT)
    if kind == "disjoint":
        assert accepted == 0


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**20), block=st.integers(0, 3))
def test_step_after_step_it_stays_plain_sampling(kind, seed, block):
    off, said = bias(random_toy(seed, 2, block, kind), Fixed(block), 1, 4)
    assert off < EXACT, said


def test_each_fault_of_verification_is_seen_on_many_tables():
    """That the exact comparison can fail, and on how many of 20 random tables it does."""
    for name in ("residual_not_subtracted", "residual_not_clipped", "accept_without_ratio",
                 "bonus_from_draft", "bonus_one_row_early"):
        with mutants.active(name):
            off = [bias(random_toy(seed, 3, 2), Fixed(2), 1, 3)[0] for seed in range(20)]
        print(f"{name}: total variation {min(off):.2g} to {max(off):.2g}")
        assert min(off) > 1e-6


# ---- with the generator ----------------------------------------------------------------------


def toy_draws(toy, draws, generator):
    """Emitted pairs of tokens, drafted, verified and completed with real draws."""
    counts = Counter()
    for _ in range(draws):
        ids = ()
        for _ in range(2):
            ids += (sample(toy.draft((), ids), generator),)
        drafts = [toy.draft((), ids[:k]) for k in range(2)]
        targets = [toy.target(ids[:k]) for k in range(3)]
        verdict = verification.verify(targets, drafts, ids, generator)
        text = (*ids[: verdict.accepted], verdict.next_id)
        while len(text) < 2:
            text += (sample(toy.target(text), generator),)
        counts[text[:2]] += 1
    return counts


@pytest.mark.parametrize("kind", ["dense", "top_p"])
def test_real_draws_follow_plain_sampling(kind):
    """Chi-square of the next two tokens, 20,000 blocks, seed fixed, alpha 1e-4."""
    toy = random_toy(7, 4 if kind == "top_p" else 3, 2, kind)
    wanted = plain_law(toy, (), 2)
    assert len(wanted) >= 5
    statistic, most, effect = chi_square(toy_draws(toy, 20_000, seeded(20_250_101)), wanted)
    print(f"{kind}: chi-square {statistic:.1f}, limit {most:.1f}; a total variation of "
          f"{effect:.4f} would be noticed with probability 0.99")
    assert statistic < most
    with mutants.active("residual_not_subtracted"):
        off = bias(toy, Fixed(2), 1, 2)[0]
        wrong = chi_square(toy_draws(toy, 5_000, seeded(20_250_101)), wanted)[0]
    print(f"residual_not_subtracted: chi-square {wrong:.1f} of 5,000 blocks")
    assert wrong > most and off > 2 * effect


def test_the_chi_square_test_knows_its_power():
    # 6 degrees of freedom: 27.856 from tables; power 0.99 needs a noncentrality of 52.
    assert limit(6) == pytest.approx(27.856, abs=1e-3)
    assert power(6, 51) < 0.99 < power(6, 52) + 1e-3
    assert detectable(6, 40_000) == pytest.approx(math.sqrt(52 / 40_000) / 2, rel=0.01)
    assert chi_square({"a": 5, "b": 5}, {"a": 1.0, "b": 0.0})[0] == math.inf


@pytest.mark.parametrize(("ids", "targets", "numbers", "verdict"), [
    ([], [1], 1, Verdict(0, 1, True)),
    ([1], [1, 2], 2, Verdict(1, 2, True)),
    ([1], [3, 2], 2, Verdict(0, 3, False)),
    ([1, 2, 3], [1, 2, 3, 0], 4, Verdict(3, 0, True)),
    ([1, 2, 3], [1, 2, 0, 0], 4, Verdict(2, 0, False)),
    ([1, 2, 3], [1, 0, 3, 0], 3, Verdict(1, 0, False)),
    ([1, 2, 3], [2, 2, 3, 0], 2, Verdict(0, 2, False)),
])  # fmt: skip
def test_greedy_and_the_numbers_that_are_taken(ids, targets, numbers, verdict):
    """One-hot distributions: the longest agreeing prefix; one number per decision."""
    for seed in range(5):
        generator, counted = seeded(seed), seeded(seed)
        drafts = [one_hot(v) for v in ids]
        assert verify([one_hot(v) for v in targets], drafts, ids, generator) == verdict
        torch.rand(numbers, generator=counted, dtype=torch.float64)
        assert torch.equal(generator.get_state(), counted.get_state())


def test_greedy_target_with_a_sampled_draft():
    drafts = [p(.1, .2, .3, .4)]
    for v in range(4):
        found = law(lambda v=v: verify([one_hot(2), one_hot(1)], drafts, [v], None))
        assert found == {(Verdict(1, 1, True) if v == 2 else Verdict(0, 2, False)): 1.0}


@given(pairs(), st.integers(0, 2**32))
def test_without_drafts_it_is_sampling_number_for_number(pair, seed):
    here, there = seeded(seed), seeded(seed)
    for _ in range(3):
        assert verify([pair[0]], [], [], here).next_id == sample(pair[0], there)
    assert torch.equal(here.get_state(), there.get_state())


def test_a_seed_repeats_and_nothing_is_changed():
    logits = torch.randn(4, 50, generator=seeded(1))
    targets = [distribution(x, 0.8, top_p=0.9) for x in logits]
    drafts = [distribution(x, 1.2) for x in torch.randn(3, 50, generator=seeded(2))]
    ids = [int(x.argmax()) for x in drafts]
    before = [x.clone() for x in targets + drafts]
    verdicts = [verify(targets, drafts, ids, seeded(5)) for _ in range(3)]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert all(torch.equal(a, b) for a, b in zip(before, targets + drafts, strict=True))


def test_certain_and_impossible_at_the_ends_of_the_interval(monkeypatch):
    for drawn in (p(0), p(1 - 2**-53)):
        monkeypatch.setattr(torch, "rand", lambda *a, d=drawn, **k: d[0])
        assert happens(1.0, seeded()) and not happens(0.0, seeded())
    monkeypatch.setattr(torch, "rand", lambda *a, **k: p(0)[0])
    # An id that the target never emits is not accepted, whatever the number.
    assert verify([p(0, 1), p(1, 0)], [p(1, 0)], [0], seeded()) == Verdict(0, 1, False)


def test_tiny_probabilities():
    tiny = 5e-324
    assert acceptance(p(1 - tiny, tiny), p(1, tiny), 1) == 1.0
    assert acceptance(p(0, 1), p(1, tiny), 1) == 1.0       # the ratio is beyond float64
    assert acceptance(p(1, tiny), p(0, 1), 1) == tiny
    found = law(lambda: verify([p(1, tiny), p(1, 0)], [p(1, tiny)], [1], None))
    assert found == {Verdict(1, 0, True): 1.0}


# ---- bad input -------------------------------------------------------------------------------

T, D = p(.5, .5), p(.25, .75)


@pytest.mark.parametrize(("targets", "drafts", "ids", "said"), [
    ([T], [D], [0], r"1 drafted ids need 1 draft and 2 target .* got 1 and 1"),
    ([T, T], [], [0], r"got 0 and 2"),
    ([T, T], [D], [], r"0 drafted ids need 0 draft and 1 target"),
    ([], [], [], r"got 0 and 0"),
    ([T, p(.5, .6)], [D], [0], r"target distribution 1 is none .*sum 1.1\).*sampling"),
    ([T, p(.5, .5 + 1e-8)], [D], [0], r"target distribution 1 .*sum 1.00000001"),
    ([T, T], [p(.5, .4)], [0], r"draft distribution 0 is none"),
    ([T, T], [p(1.5, -.5)], [0], r"draft distribution 0 .*least value -0.5"),
    ([p(math.nan, 1), T], [D], [0], r"target distribution 0 .*nan"),
    ([T, T], [p(math.nan, math.nan)], [0], r"draft distribution 0 .*nan"),
    ([T, p(math.inf, 0)], [D], [0], r"target distribution 1 .*inf"),
    ([T, T], [p(.2, .3, .5)], [0], r"draft distribution 0 has shape \[3\].*\[2\]"),
    ([T, T[None]], [D], [0], r"target distribution 1 has shape \[1, 2\]"),
    ([T[None], T[None]], [D[None]], [0], r"must be \[V\]"),
    ([p(), p()], [p()], [0], r"target distribution 0 is none"),
    ([T, T], [D], [2], r"id 2 of slot 0 is outside the vocabulary of 2"),
    ([T, T], [D], [-1], r"id -1 of slot 0 is outside"),
    ([T, T, T], [D, p(1, 0)], [0, 1], r"gives id 1 of slot 1 probability 0.*drawn from"),
])  # fmt: skip
def test_what_cannot_be_verified_is_refused_before_anything_is_drawn(targets, drafts, ids, said):
    generator = seeded()
    with pytest.raises(InputError, match=said):
        verify(targets, drafts, ids, generator)
    assert torch.equal(generator.get_state(), seeded().get_state())


def test_residuals_of_other_things_are_refused():
    with pytest.raises(InputError, match=r"draft distribution 0 has shape \[3\]"):
        residual(T, p(.2, .3, .5))
    with pytest.raises(InputError, match="target distribution 0 is none"):
        residual(p(1, 1), T)
