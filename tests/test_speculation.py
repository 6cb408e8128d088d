"""Speculative decoding on small models: lossless, undone without a trace, whatever ends it."""

import dataclasses

import pytest
import torch
from draft_helpers import GREEDY, Letters, V, echo, generator, model, session_of
from hypothesis import given
from hypothesis import strategies as st
from reuse_helpers import same_state, text

from labkit.cache.rows import join
from labkit.engine import speculation, transcript
from labkit.engine.generate import Generation
from labkit.engine.sampling import Sampling, distribution
from labkit.engine.scheduling import DelayedBudget, Fixed, NoDraft, StepRate, Threshold
from labkit.engine.session import Session
from labkit.engine.speculation import Proposal, Request, propose, verify
from labkit.engine.speculator import Speculator
from labkit.errors import InputError
from labkit.mutants.models import DRAFT, random_model, small_config


def greedy(ids, count):
    """(the next `count` ids of plain greedy decoding, the session behind all but the last)."""
    session = session_of(ids[:-1])
    found = [ids[-1]]
    for _ in range(count):
        found.append(int(session.decode(found[-1])[0, -1].argmax()))
    return found[1:], session


def one_hot(id_):
    return torch.zeros(V, dtype=torch.float64).index_fill_(0, torch.tensor(id_), 1.0)


# ---- undoing what was rejected -------------------------------------------------------------


@pytest.mark.parametrize("start", (1, 4, 7, 18))
@pytest.mark.parametrize("accepted", range(6))
def test_the_state_after_a_step_is_that_of_plain_decoding(start, accepted):
    """All patterns 0..5 of 5 from even and odd starts; W = 4, so rings wrap inside the block."""
    ids = text(model(), start + 1)
    right, plain = greedy(ids, accepted + 1)
    drafts = [i if k < accepted else (i + 1) % V for k, i in enumerate(greedy(ids, 5)[0])]
    session = session_of(ids[:-1])
    emission, = verify(model(), session.cache, [Request(ids[-1], GREEDY, generator(), 5)],
                       [Proposal(drafts, [one_hot(i) for i in drafts], [1.0] * 5)], [5], V)
    assert (emission.ids, emission.accepted, emission.verified) == (right, accepted, 5)
    same_state(plain.cache, session.cache)
    follow = right[-1]
    assert torch.allclose(plain.decode(follow), session.decode(follow), atol=1e-9, rtol=0)
    again = [ring.read(session.cache.lengths)[1].tolist() for ring in session.cache.draft_windows]
    assert again == [[min(4, session.length)]] * 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
       st.integers(1, 9))
def test_any_sequence_of_lengths_and_acceptances_leaves_the_plain_state(steps, start):
    ids = text(model(), start + 1, seed=start)
    session = session_of(ids[:-1])
    said, anchor = [], ids[-1]
    for length, good in steps:
        right = greedy([*ids, *said], length + 1)[0]
        drafts = [i if k < good else (i + 1) % V for k, i in enumerate(right[:length])]
        emission, = verify(model(), session.cache, [Request(anchor, GREEDY, generator(), length)],
                           [Proposal(drafts, [one_hot(i) for i in drafts], [1.0] * length)],
                           [length], V)
        assert emission.accepted == min(length, good)
        said += emission.ids
        anchor = said[-1]
    right, plain = greedy(ids, len(said))
    assert said == right
    same_state(plain.cache, session.cache)


def test_rows_of_a_batch_keep_different_numbers():
    texts = [text(model(), n, seed=n) for n in (3, 8, 14, 5)]
    lengths, good = [5, 0, 3, 4], [5, 0, 1, 0]
    cache = join([session_of(ids[:-1]).cache for ids in texts])
    requests, proposals, rights = [], [], []
    for ids, n, k in zip(texts, lengths, good, strict=True):
        right = greedy(ids, n + 1)[0]
        drafts = [i if j < k else (i + 1) % V for j, i in enumerate(right[:n])]
        requests.append(Request(ids[-1], GREEDY, generator(), n))
        proposals.append(Proposal(drafts, [one_hot(i) for i in drafts], [1.0] * n))
        rights.append(right)
    emissions = verify(model(), cache, requests, proposals, lengths, V)
    assert [e.accepted for e in emissions] == good
    for row, (ids, emission, right) in enumerate(zip(texts, emissions, rights, strict=True)):
        assert emission.ids == right[: len(emission.ids)]
        same_state(greedy(ids, len(emission.ids))[1].cache, cache, [(0, row)])


# ---- generation --------------------------------------------------------------------------------


def generation(ids, count, speculator=None, sampling=GREEDY, seed=0, stop=None, target=None,
               **options):
    session = Session(target or model(), page_tokens=4)
    return Generation(session, Letters(), ids, count, sampling, stop, seed, speculator=speculator,
                      **options)


def speculator(slots=None, policy=None, target=None, **options):
    return Speculator(target or model(), slots, policy, **options)


@pytest.mark.parametrize("slots", (0, 1, 3, 16))
@pytest.mark.parametrize("target", (model, echo), ids=("far", "near"))
def test_greedy_text_is_that_of_plain_decoding(target, slots):
    target = target()
    for seed in range(2):
        ids = text(target, 3 + 5 * seed, seed=seed)
        plain = generation(ids, 40, target=target)
        spec = generation(ids, 40, speculator(slots, target=target), target=target)
        list(plain), list(spec)
        assert spec.ids == plain.ids and spec.stop_reason == plain.stop_reason
        same_state(plain.session.cache, spec.session.cache)
        stats = spec.stats.speculation
        assert stats.slots == slots and stats.trained_slots == 3
        assert stats.steps + stats.accepted >= len(spec.ids) - 1
        if not slots:
            assert stats.verified == 0 and stats.acceptance is None
            assert stats.steps == len(spec.ids) - 1
        elif slots == 3:
            print(f"{stats.tokens_per_step:.2f} tokens a step, {stats.acceptance:.2f} accepted")
            assert (stats.acceptance > 0.3) == (target is echo())


@pytest.mark.parametrize("mode", ({"prefill": "ced"}, {"prefill": "ced", "halo": "exact"},
                                  {"prefill": "ced", "chunk": 5}, {"chunk": 3}), ids=str)
def test_greedy_text_after_every_kind_of_prefill(mode):
    ids = text(model(), 23)
    plain, spec = generation(ids, 20, **mode), generation(ids, 20, speculator(), **mode)
    list(plain), list(spec)
    assert spec.ids == plain.ids
    same_state(plain.session.cache, spec.session.cache)


@pytest.mark.parametrize("sampling", (
    Sampling(0.8, 0, 0.95), Sampling(1e-6), Sampling(50.0), Sampling(1.0, 0, 1e-9),
    Sampling(1.0, 1, 1.0)), ids=str)
def test_a_seed_gives_one_text_and_extremes_are_greedy(sampling):
    ids = text(model(), 7)
    runs = [generation(ids, 24, speculator(), sampling, seed=s) for s in (3, 3, 4)]
    for run in runs:
        list(run)
    assert runs[0].ids == runs[1].ids
    certain = sampling.temperature == 1e-6 or sampling.top_p == 1e-9 or sampling.top_k == 1
    plain = generation(ids, 24)
    list(plain)
    assert (runs[0].ids == runs[2].ids) == certain == (runs[0].ids == plain.ids)


@pytest.mark.parametrize("count", range(1, 9))
def test_a_text_that_ends_inside_a_block_leaves_the_plain_state(count):
    ids = text(echo(), 6, seed=3)
    plain = generation(ids, count, target=echo())
    spec = generation(ids, count, speculator(5, target=echo()), target=echo())
    list(plain), list(spec)
    assert spec.ids == plain.ids and len(spec.ids) == count
    same_state(plain.session.cache, spec.session.cache)


def forced(monkeypatch, right):
    """The draft proposes what plain decoding says: every slot is accepted."""
    def oracle(target, cache, requests, vocabulary, temperatures=None):
        at = int(cache.lengths[0]) - right[0]
        ids = right[1][at : at + requests[0].slots]
        return [Proposal(ids, [one_hot(i) for i in ids], [1.0] * len(ids))]
    monkeypatch.setattr("labkit.engine.speculator.propose", oracle)


@pytest.mark.parametrize("place", range(2, 9))
def test_stop_strings_and_eos_inside_an_accepted_block(place, monkeypatch):
    ids = text(model(), 9, seed=6)
    plain = generation(ids, 20)
    list(plain)
    forced(monkeypatch, (len(ids), plain.ids[1:]))
    spec = generation(ids, 20, speculator(5))
    list(spec)
    assert spec.ids == plain.ids and spec.stats.speculation.steps == 4     # 19 = 6 + 6 + 6 + 1
    stop = chr(0x4E00 + plain.ids[place])
    runs = [generation(ids, 20, s, stop=stop) for s in (None, speculator(5))]
    for run in runs:
        list(run)
    assert runs[0].ids == runs[1].ids and runs[1].stop_reason == "stop"
    same_state(runs[0].session.cache, runs[1].session.cache)


@pytest.mark.parametrize("place", range(1, 8))
def test_leaving_a_stream_inside_a_block(place, monkeypatch):
    ids = text(model(), 9, seed=6)
    plain = generation(ids, 20)
    told = [next(plain) for _ in range(place)]
    list(right := generation(ids, 20))
    forced(monkeypatch, (len(ids), right.ids[1:]))
    spec = generation(ids, 20, speculator(5))
    assert [next(spec).id for _ in range(place)] == [event.id for event in told]
    spec.interrupt(), plain.interrupt()
    same_state(plain.session.cache, spec.session.cache)


PLACES = ("labkit.engine.speculation.propose", "labkit.engine.speculation.distribution",
          "labkit.engine.verification.verify", "labkit.cache.cache.Cache.rewind",
          "labkit.cache.window.WindowRing.rewind", "labkit.cache.window.WindowRing.commit",
          "labkit.cache.tail.Tail.rewind", "labkit.model.dspark.DSpark.forward",
          "labkit.model.dspark.DSpark.take_in", "labkit.model.transformer.Transformer.forward")


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_at_any_call_loses_nothing(place, monkeypatch):
    """Cut at the first, second, .. call of a function; the text goes on as if nothing was."""
    ids = text(model(), 6, seed=1)
    list(whole := generation(ids, 12))
    import importlib

    owner, _, name = place.rpartition(".")
    try:
        owner = importlib.import_module(owner)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        owner = getattr(importlib.import_module(module), kind)
    original = getattr(owner, name)
    cuts = 0
    for call in (1, 2, 3, 5, 8, 14, 30):
        session = session_of(ids)
        anchor = whole.ids[0]
        seen = 0

        def cut(*args, _call=call, **kwargs):
            nonlocal seen
            seen += 1
            if seen == _call:
                raise KeyboardInterrupt
            return original(*args, **kwargs)

        request = Request(anchor, GREEDY, generator(), 3)
        before = session.fork()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, cut)
            try:
                proposals = speculation.propose(model(), session.cache, [request], V)
                speculation.verify(model(), session.cache, [request], proposals, [3], V)
            except KeyboardInterrupt:
                cuts += 1
        if seen < call:
            break
        same_state(before.cache, session.cache)
        proposals = propose(model(), session.cache, [request], V)
        emission, = verify(model(), session.cache, [request], proposals, [3], V)
        assert emission.ids[0] == whole.ids[1]
    assert cuts, f"{place} was never called"


def test_the_policy_decides_how_much_is_verified():
    ids = text(model(), 9)
    for policy, most in ((NoDraft(), 0), (Fixed(1), 1), (Threshold(1.0), 0), (Threshold(0.0), 3)):
        run = generation(ids, 12, speculator(policy=policy))
        list(run)
        per_slot = run.stats.speculation.per_slot
        assert all(v == 0 for v, _ in per_slot[most:]) and (most == 0 or per_slot[most - 1][0] > 0)
        assert run.stats.speculation.steps > 0


def test_temperatures_change_what_the_draft_believes():
    ids = text(model(), 9)
    session = session_of(ids[:-1])
    request = Request(ids[-1], GREEDY, generator(), 3)
    plain, = propose(model(), session.cache, [request], V)
    warm, = propose(model(), session.cache, [request], V, [2.0, 1.0, 1.0])
    logit = torch.tensor(plain.survival[0]).logit()
    assert warm.survival[0] == pytest.approx(float(torch.sigmoid(logit / 2)), abs=1e-6)
    assert warm.ids == plain.ids


@pytest.mark.parametrize("slots", (-1, 17, 2.0, True, "5"))
def test_draft_lengths_that_there_are_not(slots):
    with pytest.raises(InputError, match="draft length is"):
        speculator(slots)


def test_a_model_or_a_session_without_a_draft_is_refused():
    bare = random_model(small_config())
    session = Session(bare)
    session.prefill([3, 4])
    with pytest.raises(InputError, match="needs a draft"):
        propose(bare, session.cache, [Request(5, GREEDY, generator(), 2)], V)
    session = Session(model(), draft=False)
    session.prefill([3, 4])
    with pytest.raises(InputError, match="draft=True"):
        propose(model(), session.cache, [Request(5, GREEDY, generator(), 2)], V)
    with pytest.raises(InputError, match="draft=True"):
        Generation(session, Letters(), [1, 2], 5, GREEDY, speculator=speculator())


@pytest.mark.parametrize("options", ({"slots": 0}, {"policy": NoDraft()}), ids=str)
def test_no_slots_need_no_draft(options):
    bare, ids = random_model(small_config()), [3, 4, 5]
    made = [Generation(Session(bare, draft=False), Letters(), ids, 9, GREEDY,
                       speculator=s) for s in (None, Speculator(bare, **options))]
    for one in made:
        list(one)
    assert made[0].ids == made[1].ids
    assert made[1].stats.speculation.tokens_per_step == 1.0


def test_a_speculator_counts_each_sequence_anew():
    used = speculator(target=echo())
    for seed in (1, 2):
        ids = text(echo(), 5, seed)
        runs = [generation(ids, 15, s, target=echo()) for s in (used, speculator(target=echo()))]
        for run in runs:
            list(run)
        again, fresh = (dataclasses.asdict(run.stats.speculation) for run in runs)
        assert again["accepted"] > 0
        for name in set(fresh) - {"draft_seconds", "verify_seconds"}:
            assert again[name] == fresh[name], name


def test_a_step_that_fails_tells_the_policy_nothing(monkeypatch):
    ids = text(model(), 6)
    session, policy = session_of(ids[:-1]), DelayedBudget(StepRate({1: 1.0, 4: 1.0}), delay=1)
    made, request = speculator(policy=policy), Request(ids[-1], GREEDY, generator(), 3)
    with monkeypatch.context() as patch:
        patch.setattr("labkit.engine.verification.verify", lambda *args: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                made.step(model(), session.cache, request, V)
    assert not policy.history and made.steps == 0
    emission = made.step(model(), session.cache, request, V)
    assert emission.verified == 0 and len(policy.history) == 1      # the first step has no past


def test_distributions_of_the_target_are_made_once(monkeypatch):
    """And events say of each id what it was drawn from."""
    sampling, made = Sampling(0.8, 0, 0.95), []
    monkeypatch.setattr(transcript, "distribution",
                        lambda *a: made.append(a) or distribution(*a))
    run = generation(text(echo(), 6), 20, speculator(target=echo()), sampling, target=echo())
    events = list(run)
    assert run.stats.speculation.accepted > 0
    assert len(made) == len(events) + 1        # the model's own; the prefill's token needs both
    by_hand = [distribution(a[0], 0.8, 0, 0.95) for a in made[:1] + made[2:]]
    for event, p in zip(events, by_hand, strict=True):
        assert event.sampled == float(p[event.id]) > 0


def test_a_proposal_keeps_what_the_head_said():
    """Also where the probability is 0 or 1 in every digit."""
    sharp = random_model(small_config(**DRAFT))
    with torch.no_grad():
        sharp.mtp.last.confidence_head.proj.weight.mul_(1e4)
    seen = []
    for target, temperatures in ((model(), [2.0, 1.0, 0.5]), (sharp, None)):
        ids = text(target, 9)
        found, = propose(target, session_of(ids[:-1], target).cache,
                         [Request(ids[-1], GREEDY, generator(), 3)], V, temperatures)
        said = torch.tensor(found.confidence_logits, dtype=torch.float64)
        sure = torch.sigmoid(said / torch.tensor(temperatures or [1.0])).cumprod(0)
        assert torch.allclose(torch.tensor(found.survival).double(), sure, atol=1e-6)
        seen.append(found.confidence_logits)
    assert all(abs(y) > 50 and y == pytest.approx(1e4 * x, rel=1e-6)
               for x, y in zip(seen[0][:1], seen[1][:1], strict=True))
