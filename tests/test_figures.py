"""What is measured of a model: recall, attention mass, controls, replay, kinds of text."""

from __future__ import annotations

import json
import math
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from figures_helpers import nano

import labkit
from labkit.engine.replay import reach
from labkit.errors import InputError
from labkit.kernels import cpu, reference
from labkit.paths import data_dir
from labkit.text.tokenizer import Tokenizer
from labkit.train import attention_mass as mass_module
from labkit.train import dense
from labkit.train import draft_figures as draft_module
from labkit.train.agreement import REUSES, Agreement, Reuse, bounded_replay, held_out
from labkit.train.attention_mass import (
    attention,
    attention_mass,
    best_selection,
    held,
    kept_mass,
    random_selection,
)
from labkit.train.controls import all_entries, cache_rounding, muted_engram, selecting
from labkit.train.draft_figures import judge_draft
from labkit.train.drafter import heldout_rows
from labkit.train.evaluate import bits_per_byte, text_cost
from labkit.train.figure_tables import figures_text
from labkit.train.figures import Effort, Figures, measure
from labkit.train.kinds import KINDS, kind_costs
from labkit.train.recall import (
    CONTROLS,
    DISTANCES,
    controlled,
    distances,
    recall_accuracy,
    recall_curve,
    text_length,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(data_dir() / "mini")


# ---- recall ----------------------------------------------------------------------------------


class Oracle(torch.nn.Module):
    """Guesses the id that followed the longest earlier match of what was read last; `wrong`: says
    for which first ids of a value it guesses another one instead."""

    def __init__(self, vocabulary, wrong=lambda ids: False):
        super().__init__()
        self.vocabulary, self.wrong = vocabulary, wrong
        self.config = SimpleNamespace(max_position_embeddings=300)
        self.calls = []

    def forward(self, ids):
        self.calls.append(tuple(ids.shape))
        logits = torch.zeros(*ids.shape, self.vocabulary)
        for row, text in enumerate(ids.tolist()):
            for t in range(len(text) - 30, len(text)):  # the answer is near the end
                guess = max(range(t), key=lambda s: self.match(text, s, t))
                logits[row, t, (text[guess + 1] + self.wrong(text)) % self.vocabulary] = 1.0
        return SimpleNamespace(logits=logits)

    @staticmethod
    def match(text, s, t):
        n = 0
        while n <= s and text[s - n] == text[t - n]:
            n += 1
        return n


@pytest.mark.parametrize("distance", [20, 90])
def test_recall_of_one_who_always_and_one_who_never_finds_it(tokenizer, distance):
    V = tokenizer.vocab_size
    options = dict(length=160, count=6, batch=4)
    assert recall_accuracy(Oracle(V), tokenizer, distance, **options) == 1.0
    assert recall_accuracy(Oracle(V, lambda ids: True), tokenizer, distance, **options) == 0.0
    seen = []

    def every_other(ids):
        if tuple(ids) not in seen:
            seen.append(tuple(ids))
        return seen.index(tuple(ids)) % 2 == 1

    assert recall_accuracy(Oracle(V, every_other), tokenizer, distance, **options) == 0.5
    assert len(set(seen)) == 6          # drawn fresh


def test_distances_fit_every_context(tokenizer):
    assert distances(2048) == list(DISTANCES)
    for context in (129, 300, 1024, 2048):
        found = distances(context)
        assert found == sorted(set(found)) and found[0] == 20
        assert found[-1] > 0.5 * context or context < 150
        for distance in found:      # none is refused, whichever key is drawn
            length = text_length(distance, context)
            assert length <= context - 1
            for index in range(30 if distance == found[0] else 1):
                labkit.text.synthetic.recall(tokenizer, distance, length, index=index)
    assert distances(128) == []


def test_the_curve_asks_all_controls_the_same(tokenizer, monkeypatch):
    from labkit.train import recall as module

    asked = []
    monkeypatch.setattr(module, "controlled", lambda model, control: (
        asked.append(control), cache_rounding(nano().model, True))[1])
    oracle = Oracle(tokenizer.vocab_size)
    points = recall_curve(oracle, tokenizer, lambda control, distance: (
        2 if control == "as shipped" else int(distance < 64)))
    assert {p.control for p in points} == set(CONTROLS) == set(asked)
    assert [p.distance for p in points if p.control == "as shipped"] == distances(300)
    assert [p.distance for p in points if p.control == "window only"] == [20, 32]
    assert all(p.right == p.count for p in points)
    assert all(shape == (p.count, p.length) for p, shape in zip(points, oracle.calls, strict=True))


# ---- controls ----------------------------------------------------------------------------------


def state(model):
    return (model.cache_rounding, model.selecting, model.kernels,
            {name: (p.data_ptr(), p.sum().item()) for name, p in model.named_parameters()})


def changes():
    yield "rounding", lambda model: cache_rounding(model, False)
    for control in CONTROLS:
        yield control, lambda model, control=control: controlled(model, control)


@pytest.mark.parametrize("name, change", list(changes()))
def test_controls_change_the_model_and_put_it_back(name, change):
    model = nano().model
    ids = torch.arange(5, 69)[None]
    before, logits = state(model), model(ids).logits
    with change(model):
        same = torch.equal(model(ids).logits, logits)
    assert same == (name == "as shipped")
    assert state(model) == before
    with pytest.raises(ZeroDivisionError), change(model):
        raise ZeroDivisionError
    assert state(model) == before and torch.equal(model(ids).logits, logits)


def test_unknown_controls_are_refused():
    with pytest.raises(InputError, match="control is 'half'.*as shipped"):
        with controlled(nano().model, "half"):
            pass
    with pytest.raises(InputError, match="selecting is 'half'.*random"):
        with selecting(nano().model, "half"):
            pass


def test_kernels_of_the_control_equal_the_others():
    lab = nano()
    ids = torch.randint(5, 500, (2, 90), generator=torch.Generator().manual_seed(0))
    with selecting(lab.model, "all"):
        wanted = lab.model(ids, torch.tensor([90, 70])).logits
    with all_entries(lab.model):
        assert lab.model.kernels is dense
        found = lab.model(ids, torch.tensor([90, 70])).logits
    for row, length in ((0, 90), (1, 70)):
        torch.testing.assert_close(found[row, :length], wanted[row, :length], rtol=1e-4, atol=1e-5)
    scores = torch.randn(2, 5, 9).masked_fill(torch.rand(2, 5, 9) < 0.5, -math.inf)
    for k in (3, 9, 12):
        assert torch.equal(dense.select_top(scores, k), cpu.select_top(scores, k))


# ---- attention mass ----------------------------------------------------------------------------


def test_mass_of_a_case_made_by_hand():
    """One query, two heads, d = 4 (scale 1/2): the first head's weights are 1 | 2 3 5, the
    second's all 1; of the window's two keys one exists, of the entries the last is not seen."""
    q = torch.tensor([[[2.0, 0, 0, 0], [0, 2.0, 0, 0]]])                   # [1,H,d]
    def key(weight):
        return torch.tensor([math.log(weight), 0, 0, 0])

    window = torch.stack([key(100), key(1)])[None]
    entries = torch.stack([key(2), key(3), key(5), key(1000)])
    there, seen = torch.tensor([[False, True]]), torch.tensor([[True, True, True, False]])
    kept = torch.tensor([[True, False, True, False]])
    near, far = attention(q, window, there, entries, seen)
    found = kept_mass(near, far, kept)
    assert found.shape == (1, 2)
    assert found[0].tolist() == pytest.approx([(8 / 11 + 3 / 4) / 2, (7 / 10 + 2 / 3) / 2])
    assert kept_mass(near, far, seen)[0].tolist() == pytest.approx([1, 1])
    assert held(torch.tensor([[2, 0, -1]]), 4).equal(kept)


def test_no_selection_keeps_more_than_the_best():
    generator = torch.Generator().manual_seed(2)
    q, entries = (torch.randn(*shape, 4, generator=generator) for shape in ((3, 2), (6,)))
    window, there = torch.randn(3, 2, 4, generator=generator), torch.ones(3, 2, dtype=torch.bool)
    seen = torch.arange(6) < torch.tensor([[4], [5], [6]])
    near, far = attention(q, window, there, entries, seen)
    sizes = torch.tensor([2, 2, 3])
    best = best_selection(far, sizes)
    assert (best.sum(-1) == sizes).all() and not (best & ~seen).any()
    for row, size in enumerate(sizes.tolist()):
        every = torch.zeros(0, 6, dtype=torch.bool)
        for numbers in combinations(range(6), size):
            every = torch.cat([every, held(torch.tensor([numbers]), 6)])
        kept = [kept_mass(near[[row]], far[[row]], one[None])[0, 0].item() for one in every]
        assert kept_mass(near[[row]], far[[row]], best[[row]])[0, 0].item() == pytest.approx(
            max(kept))
        assert min(kept) < max(kept) - 0.05


def test_a_random_selection_has_the_size_and_sees_no_more():
    seen = torch.arange(12) < torch.tensor([[3], [7], [12]])
    sizes = torch.tensor([2, 7, 5])
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([random_selection(seen, sizes, generator) for _ in range(400)])
    assert (draws.sum(-1) == sizes).all() and not (draws & ~seen).any()
    assert draws[:, 2].double().mean(0).sub(5 / 12).abs().max() < 0.1   # each entry as often


def test_mass_is_that_of_the_model_s_attention():
    """Against the reference kernel, given all visible entries and no sink."""
    lab, T = nano(), 60
    c = lab.config
    ids = torch.randint(5, 500, (T,), generator=torch.Generator().manual_seed(1)).tolist()
    queries = torch.tensor([20, 40, 59])
    taps = lab.trace(torch.tensor([ids]))
    found = dict(mass_module._masses(lab, ids, queries, torch.Generator().manual_seed(0)))
    assert set(found) == {role.layer for role in c.roles if role.ratio}
    for layer, masses in found.items():
        role, name = c.roles[layer], f"layers.{layer}.attn"
        entries = taps[f"layers.{role.kv_source}.attn.compressed_kv"]
        S = entries.shape[1]
        number = torch.arange(S).expand(1, T, S)
        every = torch.where(number < ((torch.arange(T) + 1) // role.ratio)[:, None], number, -1)
        weights, _ = reference.attention_probabilities(
            taps[f"{name}.q"], taps[f"{name}.window"], entries, every,
            torch.full((c.num_attention_heads,), -math.inf), torch.zeros(1, dtype=torch.int64))
        chosen = taps[f"layers.{role.index_source}.attn.topk_indices"][0]
        at = queries[(queries + 1) // role.ratio > c.index_topk]
        assert len(at) == len(masses)
        for t, row in zip(at.tolist(), masses, strict=True):
            far = weights[0, t, :, c.sliding_window :]                  # [H,S]
            picked = far[:, chosen[t][chosen[t] >= 0]].sum(-1)
            near = weights[0, t, :, : c.sliding_window].sum(-1)
            # Columns: (a) and (b), each as selected and at random.
            assert row[0].item() == pytest.approx(float((near + picked).mean()), rel=1e-4)
            assert row[2].item() == pytest.approx(float((picked / far.sum(-1)).mean()), rel=1e-4)
            most = near + far.mean(0).topk((chosen[t] >= 0).sum()).values.sum()
            assert row[4].item() == pytest.approx(float(most.mean()), rel=1e-4)
            assert row[4] >= row[0] - 1e-6 and row[4] >= row[1] - 1e-6


def test_everything_selected_keeps_everything(monkeypatch):
    lab = nano()
    monkeypatch.setattr(mass_module, "_novels", lambda lab, rows: iter(
        [(mass_module.NOVELS, list(range(5, 65)), torch.arange(0, 60, 7))]))
    chosen = attention_mass(lab)
    assert chosen and all(m.kept < 0.999 and m.kept_random < 0.999 for m in chosen)
    with selecting(lab.model, "all"):
        for m in attention_mass(lab):
            assert m.kept == pytest.approx(1) and m.kept_entries_random == pytest.approx(1)
    assert {m.source for m in chosen} == set(lab.config.index_source_layer_ids)


# ---- text, replay ------------------------------------------------------------------------------


def test_cost_in_all_units():
    class Even(torch.nn.Module):
        def forward(self, ids, lengths):
            return SimpleNamespace(logits=torch.zeros(*ids.shape, 8))

    class Letters:
        bos_id = 0
        encode = staticmethod(lambda text: [ord(letter) - 96 for letter in text])
        decode = staticmethod(lambda ids: "".join(chr(96 + i) + "!" for i in ids))

    found = text_cost(Even(), Letters(), {"a": "abcabc", "b": "aa"}, length=4, stride=2)
    assert (found.bits, found.bytes, found.tokens) == (pytest.approx(24), 16, 8)
    assert found.bits_per_byte == pytest.approx(1.5)
    assert found.nats_per_token == pytest.approx(math.log(8))
    assert bits_per_byte(Even(), Letters(), {"a": "abcabc"}) == pytest.approx(1.5)


def test_kinds_are_measured_and_engram_is_back():
    lab = nano()
    before = state(lab.model)
    found = kind_costs(lab, 1)
    assert [k.kind for k in found] == [name for name in KINDS if name != "needle"]
    for k in found:
        assert k.tokens > 100 and k.more == pytest.approx(
            k.bits_per_byte_muted - k.bits_per_byte) and k.more != 0
    assert state(lab.model) == before
    with muted_engram(lab.model):
        assert all(k.more == 0 for k in kind_costs(lab, 1))


def test_reuse_is_exact_where_it_says_so_and_bounded_is_not():
    lab = nano()
    hit = reach(lab.config, lab.config.num_hidden_layers) + 20
    ids, other = held_out(lab, 2, hit + 8)
    reuse = Reuse(lab, ids, hit, other[1:9])
    cold = reuse.logits("cold")
    assert cold.shape == (8, lab.config.vocab_size)
    distance = {}
    for kind in REUSES:
        found = Agreement()
        found.add(cold, reuse.logits(kind))
        distance[kind] = found.mean
    print(distance)
    assert max(distance["full hit"], distance["global-only exact"]) < 1e-6
    assert distance["global-only bounded"] > 10 * distance["global-only exact"] + 1e-9
    found = bounded_replay(lab, 2, hit, 8)
    assert len(found.kl) == 16 and 1e-9 < found.mean < 1
    with pytest.raises(InputError, match="kind is 'warm'"):
        reuse.logits("warm")
    with pytest.raises(InputError, match="ask for shorter"):
        held_out(lab, 1, 10**6)


def test_a_draft_is_judged_where_it_was_not_fitted(monkeypatch):
    lab = nano()
    rows = heldout_rows(lab.tokenizer, draft_module.row_length(lab.config))
    seen, whole = [], draft_module.try_drafts
    monkeypatch.setattr(draft_module, "try_drafts", lambda model, text, *a, **k: (
        seen.append(text), whole(model, text, *a, **k))[1])
    found = judge_draft(lab, 30, 3, quiet=True)
    assert all(any(torch.equal(row, other[:31]) for other in rows[1::2]) for row in seen[0])
    assert len(seen[0]) == 3 and torch.equal(seen[0][0], rows[1][:31])
    assert found.temperatures == (1.0,) * 5 and found.ece_after == found.ece_before
    monkeypatch.setattr(lab, "calibration", SimpleNamespace(temperatures=(4.0,) * 5))
    cooler = judge_draft(lab, 30, 3, quiet=True)
    assert cooler.temperatures == (4.0,) * 5 and cooler.ece_after != found.ece_after
    assert (cooler.ece_before, cooler.sampled) == (found.ece_before, found.sampled)


# ---- all together ------------------------------------------------------------------------------


def test_measuring_a_small_model(monkeypatch):
    monkeypatch.setattr("labkit.train.samples.SAMPLE_TOKENS", 5)
    lab = nano()
    before = state(lab.model)
    effort = Effort(1, (1, 1), (1, 1), 1, 1, 1, 1, draft_rows=2, draft_length=24, prompts=1)
    figures = measure(lab, effort, quiet=True)
    assert state(lab.model) == before
    assert Figures.from_dict(json.loads(json.dumps(figures.to_dict()))) == figures
    # Its vocabulary joins words, so needles are out, and that is no pass.
    assert figures.recall == () and figures.plain is None and figures.file_bytes is None
    verdicts = {t["name"]: t["verdict"] for t in figures.to_dict()["targets"]}
    assert verdicts["needle recall at every distance up to 256"] == "not measured"
    assert verdicts["bits per byte of the held-out novels"] == "missed"
    assert figures.draft is not None and figures.draft.code_proposals
    text = figures_text(figures)
    print(text)
    assert f"{figures.parameters:,}" in text and f"{figures.bits_per_byte:.4f}" in text
