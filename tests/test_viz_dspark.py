"""Figures of speculative decoding: their numbers are the run's, computed another way."""

import warnings

import pytest
import torch

import labkit
from labkit.engine.batching import Measured
from labkit.engine.sampling import Sampling, distribution
from labkit.engine.scheduling import PrefixScheduler, StepRate, Threshold
from labkit.mutants import active
from labkit.train.calibration import expected_calibration_error
from labkit.train.draft_figures import Trials
from labkit.viz import palette
from labkit.viz.draft_slots import draft_slots, guesses
from labkit.viz.load import throughput
from labkit.viz.load_data import DELAY, MIXED, STEPS, load, mean, plane, pooled
from labkit.viz.one_place import one_place, place
from labkit.viz.reliability import diagrams, pooled_error, reliability_diagram
from labkit.viz.speculation import speculation_step
from labkit.viz.speculation_data import record

TEXT = "It is a truth universally acknowledged, that a single man in possession"
SAMPLINGS = (Sampling(0.0), Sampling(0.8, 0, 0.95), Sampling(1.0))


@pytest.fixture(scope="module")
def labs():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: labkit.load(name, device="cpu") for name in ("nano", "mini")}


def trace(picture, name):
    (found,) = [t for t in picture.figure.data if t.name.startswith(name)]
    return found


@pytest.mark.parametrize("name", ("DRAFTING", "SLOT", "EMITTED", "CALIBRATION", "POLICIES"))
def test_marks_stay_apart_for_every_reader(name):
    marks = list(getattr(palette, name).values())
    assert palette.smallest_distance([m.colour for m in marks])[0] >= 11
    assert len({m.letter for m in marks}) == len(marks)


# ---- a text, step by step ----------------------------------------------------------------------
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda s: f"t{s.temperature}")
def test_a_recording_is_what_generate_writes(labs, sampling):
    for name, policy in (("nano", None), ("mini", None), ("mini", Threshold(0.4))):
        lab = labs[name]
        found = record(lab, TEXT, 24, sampling, 5, policy)
        expected = lab.generate(TEXT, 24, seed=5, temperature=sampling.temperature, top_k=0,
                                top_p=sampling.top_p, speculative=True, policy=policy)
        assert found.ids == expected.ids
        told = expected.stats.speculation
        assert len(found.steps) == told.steps
        assert sum(s.sent for s in found.steps) == told.verified
        assert abs(sum(s.kept for s in found.steps) - told.accepted) <= 5    # cut by the end


def test_the_numbers_of_a_step_are_the_targets_and_the_drafts(labs):
    lab = labs["mini"]
    found = record(lab, TEXT, 24, Sampling(1.0), 5)
    assert {slot.fate for step in found.steps for slot in step.slots} >= {
        "kept", "rejected", "dropped"}
    prompt = lab.encode(TEXT)
    for step in found.steps:
        # The target's logits once more, in one pass without a cache of drafts.
        ids = [*prompt, *found.ids[: step.start], *(s.id for s in step.slots)]
        logits = lab.trace(ids)["logits"][0, len(prompt) + step.start - 1 :]
        for j, slot in enumerate(step.slots):
            p_t = distribution(logits[j, : lab.tokenizer.vocab_size])
            if slot.target is not None:
                assert slot.target == pytest.approx(float(p_t[slot.id]), rel=0.03, abs=1e-5)
                assert slot.accept == pytest.approx(min(1, slot.target / slot.draft))
        assert (step.draft is None) == step.bonus
        assert step.id == found.ids[step.start + step.kept] or step is found.steps[-1]


def test_the_figure_of_a_step_shows_its_numbers(labs):
    found = record(labs["mini"], TEXT, 24, Sampling(1.0), 5)
    for number, step in enumerate(found.steps):
        picture = speculation_step(found, number, 5)
        judged = [s.target for s in step.slots if s.target is not None]
        assert list(trace(picture, "target").x) == [*judged, step.target]
        assert list(trace(picture, "draft").x)[: len(step.slots)] == [s.draft for s in step.slots]
        assert list(trace(picture, "survival").x) == [s.survival for s in step.slots]
        notes = trace(picture, "fates").text
        for note, slot in zip(notes, step.slots, strict=False):
            assert slot.fate in note
        assert ("bonus" in notes[-1]) == step.bonus
        assert f"{step.kept} of {step.sent} drafts stay" in picture.caption
        assert f"{step.expected:.2f}" in picture.caption and f"step {number + 1}" in picture.alt
        assert len(picture.rows) == len(step.slots) + 1
        assert picture.static().svg.count("<title>") == 1
    other = record(labs["nano"], TEXT, 24, Sampling(1.0), 5)
    assert speculation_step(other, 0, 5).alt != speculation_step(found, 0, 5).alt


def test_plain_steps_and_those_that_send_nothing(labs):
    found = record(labs["nano"], TEXT, 6, Sampling(1.0), 5, Threshold(1.0))
    assert len(found.steps) == 5 and all(s.bonus and s.sent == 0 for s in found.steps)
    assert "plain: nothing was sent" in trace(speculation_step(found, 0, 5), "fates").text[-1]
    assert speculation_step(found, 0, 5).rows[0][-1] == "not sent"


# ---- slots -------------------------------------------------------------------------------------
def test_slots_are_the_drafts_with_and_without_the_bias(labs):
    for lab in labs.values():
        ids = lab.encode(TEXT)
        run, V = lab.draft(ids, [8]), lab.tokenizer.vocab_size
        found = guesses(lab, ids, 8)
        assert len(found) == lab.config.dspark_block_size
        for k, guess in enumerate(found):
            base = torch.softmax(run["dspark.base_logits"][0, k, :V].double(), -1)
            both = run["dspark.base_logits"][0, k, :V].double() + lab.model.mtp.markov_logits(
                run["dspark.previous_token_ids"][0, k])[:V].double()
            assert torch.allclose(guess.base, base, atol=1e-9)
            assert torch.allclose(guess.biased, torch.softmax(both, -1), atol=1e-6)
        picture = draft_slots(lab, ids, 8)
        wide, narrow = (trace(picture, mark.label) for mark in palette.SLOT.values())
        assert list(wide.x) == [float(g.base[i]) for g in found for i in g.ids]
        assert list(narrow.x) == [float(g.biased[i]) for g in found for i in g.ids]
        assert list(wide.y) == list(picture.figure.layout.yaxis.tickvals)
        assert f"in {sum(g.changed for g in found)} of 5 slots" in picture.caption
        assert picture.static().svg


def test_other_tokens_before_change_the_bias_alone(labs):
    ids = labs["mini"].encode(TEXT)
    one, two = guesses(labs["mini"], ids, 8), guesses(labs["mini"], ids, 8, [7, 8, 9, 10, 11])
    for a, b in zip(one, two, strict=True):
        assert torch.equal(a.base, b.base)
    assert any(not torch.equal(a.biased, b.biased) for a, b in zip(one, two, strict=True))


# ---- one place ---------------------------------------------------------------------------------
def test_one_place_adds_up_and_says_so_where_it_does_not():
    p_t = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    p_d = torch.tensor([0.2, 0.2, 0.1, 0.5], dtype=torch.float64)
    found = place(p_t, p_d)
    assert torch.allclose(found.kept, torch.minimum(p_t, p_d), atol=1e-15)
    assert found.rejected == pytest.approx(0.45)
    picture = one_place(p_t, p_d, "abcd")
    assert "rejected with 45.0%" in picture.caption and "p_t exactly" in picture.caption
    ends = [a + b for a, b in zip(trace(picture, "drafted and kept").x,
                                  trace(picture, "put in").x, strict=True)]
    assert ends == pytest.approx(p_t.tolist())
    assert [x for x in trace(picture, "p_t").x if x is not None][::2] == p_t.tolist()
    assert list(trace(picture, "put in").base) == found.kept.tolist()
    with active("residual_not_subtracted"):
        wrong = one_place(p_t, p_d, "abcd")
    # Put in: 45 % of p_t instead of p_t - p_d.
    off = float((0.45 * p_t - (p_t - p_d).clamp(min=0)).abs().sum()) / 2
    assert f"off by {off:.1%}" in wrong.caption
    assert len(one_place(p_t, p_d, "ad", [0, 3]).rows) == 2
    assert one_place(p_t, p_t, "abcd").rows[0][2:4] == ("50.0%", "0.0%")


# ---- reliability -------------------------------------------------------------------------------
def made(N=400, n=3, seed=0):
    """Trials whose slots survive as the head says at temperature 2."""
    source = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(N, n, generator=source, dtype=torch.float64)
    stays = torch.rand(N, n, generator=source, dtype=torch.float64) < torch.sigmoid(logits / 2)
    return Trials(logits, stays.cumprod(-1).bool(), torch.arange(N))


def test_the_reliability_diagram_is_the_data():
    trials, T = made(), [2.0, 2.0, 2.0]
    picture = reliability_diagram(trials, T)
    for name, mark in palette.CALIBRATION.items():
        points = trace(picture, mark.label)
        own = [1.0] * 3 if name == "before" else T
        a = torch.sigmoid(trials.confidence_logits / torch.tensor(own)).cumprod(-1).flatten()
        alive = trials.survived.flatten().double()
        at = (a * 10).long().clamp(max=9)
        kept = [b for b in range(10) if (at == b).any()]
        assert list(points.x) == pytest.approx([float(a[at == b].mean()) for b in kept])
        assert list(points.y) == pytest.approx([float(alive[at == b].mean()) for b in kept])
        assert sum(points.customdata) == trials.survived.numel()
        found = diagrams(trials, T)[name]
        assert pooled_error(found) == pytest.approx(expected_calibration_error(a, alive, 10))
        assert f"{pooled_error(found):.1%}" in picture.caption
    before, after = (pooled_error(d) for d in diagrams(trials, T).values())
    assert after < before / 2
    assert len(picture.rows) == 3 and picture.rows[1][4] == "2.00"
    one = reliability_diagram(trials, T, 1)
    assert "slot 2" in one.caption and sum(trace(one, "with the").customdata) == 400
    assert picture.alt.count("became") > 10 and picture.static().svg


# ---- load --------------------------------------------------------------------------------------
def times(fixed, request, token, scatter=0.0, requests=(1, 4, 8), n=3, plain=False):
    source = torch.Generator().manual_seed(1)
    found = []
    for R in requests:
        for tokens in [R] if plain else range(R, R * (1 + n) + 1):
            noise = scatter * float(torch.randn((), generator=source))
            found.append(Measured(R, tokens, fixed + request * R + token * tokens + noise, 3))
    return found


def study(scatter=0.0, **more):
    drafting = times(0.02, 0.001, 0.0005, scatter)
    without = times(0.012, 0.0012, 0.0, 0.0, plain=True)
    pools = {"prose": made(60, seed=1), "code": made(40, seed=2)}
    rates = plane(drafting, without, 3) if not scatter else pooled(drafting, without)
    return load(pools, [2.0, 2.0, 2.0], rates)


def test_the_plane_is_found_and_pooled_rates_are_means():
    found = plane(times(0.02, 0.001, 0.0005), times(0.012, 0.0012, 0, plain=True), 3)
    assert found.largest == 8
    for R, B in ((1, 3), (6, 6), (8, 32)):
        assert 1 / found.with_draft(R)(B) == pytest.approx(0.02 + 0.001 * R + 0.0005 * B)
        assert 1 / found.plain(R) == pytest.approx(0.012 + 0.0012 * R)
    mixed = pooled([Measured(1, 4, 0.1, 1), Measured(4, 4, 0.3, 1)], [Measured(4, 4, 0.1, 1)])
    assert 1 / mixed.with_draft(2)(4) == pytest.approx(0.2)
    # Steps that seem to get faster with B do not let throughput rise without end.
    falling = plane(times(0.02, 0.001, -0.0001), times(0.012, 0.0012, 0, plain=True), 3)
    curve = falling.with_draft(4)
    assert curve(4) == pytest.approx(curve(16))


@pytest.mark.parametrize("kind", ("prose", "code", MIXED))
def test_choices_are_the_policies_on_the_pools(kind):
    found = study()
    for R in (1, 5, 8):
        choices = found.choices(kind, R)
        rate = StepRate({b: 1 / (0.02 + 0.001 * R + 0.0005 * b) for b in range(R, 4 * R + 1)})
        for step in (0, 7):
            rows, outcomes = found.batch(kind, R, step)
            more, _ = found.batch(kind, 8, step)
            assert more[:R] == rows                         # a load grows at its end
            assert choices["none"][step].throughput == pytest.approx(R / (0.012 + 0.0012 * R))
            assert list(choices["scheduler"][step].lengths) == PrefixScheduler(rate).lengths(rows)
            every = choices["fixed"][step]
            assert every.tokens == 4 * R and every.observed == R + sum(outcomes)
            assert every.expected == pytest.approx(R + sum(map(sum, rows)))
            curve = found.curve(kind, R, step)
            assert [b for b, _ in curve] == list(range(R, R + len(curve)))
            assert max(y for _, y in curve) == pytest.approx(
                choices["scheduler"][step].throughput)       # one summit, and it is found
            assert curve[-1][1] == pytest.approx(every.throughput)
            assert max(y for _, y in curve) < found.highest
        assert sum(choices["delayed"][0].lengths) == sum(choices["delayed"][1].lengths) == 0
        counted = choices["scheduler"][DELAY:]
        assert len(counted) == STEPS - DELAY
        assert mean(choices["scheduler"]).expected == pytest.approx(
            sum(c.expected for c in counted) / sum(1 / c.rate for c in counted))


def test_expected_and_observed_tokens_agree_where_survivals_are_true():
    choices = study().choices("prose", 8)
    for name in ("fixed", "threshold"):
        found = mean(choices[name])
        assert found.observed == pytest.approx(found.expected, rel=0.12)


def test_the_figure_of_a_load_shows_the_choices():
    for found in (study(), study(0.004)):
        picture = throughput(found, "prose", 5, 3)
        choices = found.choices("prose", 5)
        for name, mark in palette.POLICIES.items():
            point = trace(picture, mark.label)
            assert (point.x[0], point.y[0]) == (choices[name][3].tokens,
                                                choices[name][3].throughput)
        curve = trace(picture, "best slots first")
        assert list(zip(curve.x, curve.y, strict=True)) == found.curve("prose", 5, 3)
        own = choices["scheduler"][3]
        assert f"verifies {sum(own.lengths)} of 15 slots (B = {own.tokens})" in picture.caption
        assert "5 requests of prose" in picture.alt and len(picture.rows) == 5
        assert picture.static().svg
        ranges = [throughput(found, kind, R, 3).figure.layout.yaxis.range
                  for kind, R in (("prose", 1), (MIXED, 8))]
        assert ranges[0] == ranges[1]
    with pytest.raises(labkit.errors.InputError, match="measured for 1 to 8"):
        found.choices("prose", 9)
