"""Figures and explorers of prefill and of causality: their numbers are those of the runs."""

from __future__ import annotations

import pytest
import torch
from viz_helpers import nano_lab

import labkit
from labkit.engine.replay import reach
from labkit.errors import InputError
from labkit.exercises.tasks import ced_active, ced_passes
from labkit.explorers.causal import MODELS, CausalExplorer
from labkit.explorers.passes import PrefillExplorer
from labkit.viz import causal, passes


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def ids(lab):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(5, lab.config.vocab_size, (90,), generator=generator).tolist()


def longest(lab):
    """A text that the exact halo does not read whole."""
    c = lab.config
    return reach(c, c.num_hidden_layers - c.encoder_layers) + 9


# ---- prefill -----------------------------------------------------------------------------------
def test_counters_agree_with_the_formula_that_learners_write(lab):
    c = lab.config
    W, L, E = c.sliding_window, c.num_hidden_layers, c.encoder_layers
    ids = list(range(5, 5 + longest(lab)))
    for mode, exact in (("CED, last window", False), ("CED, exact halo", True)):
        found = passes.prefill(lab, ids, mode)
        assert found.work.passes.total() == ced_passes.solution(len(ids), W, L, E, exact)
        for layer in range(L):        # a prefill computes the end of a prompt, in every layer
            assert found.computed(layer) == (len(ids) if layer < E else found.computed(L - 1))
    after = passes.prefill(lab, ids, "CED, cut after the source")
    assert after.computed(E) == len(ids) and after.computed(E + 1) == W


def test_the_parameters_that_learners_count_are_those_of_the_accounting():
    from labkit.checkpoint.accounting import active_prefill

    for name in ("mini", "flash", "nano"):
        c = labkit.ModelConfig.preset(name)
        assert ced_active.solution(ced_active.rows_of(c), c.encoder_layers, c.num_experts_per_tok,
                                   c.n_routed_experts) == active_prefill(c).counted


def test_kl_is_that_of_the_next_token(lab, ids):
    full, short = (passes.prefill(lab, ids, m) for m in ("full", "CED, last window"))
    p, q = full.logits.double().softmax(-1), short.logits.double().softmax(-1)
    assert passes.kl(full, short) == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    assert passes.kl(full, full) == 0 < passes.kl(full, short)


def test_the_map_shows_what_was_counted(lab, ids):
    c = lab.config
    run, full = passes.prefill(lab, ids, "CED, last window"), passes.prefill(lab, ids, "full")
    picture = passes.passes_map(c, run, full, 100)
    bars = {trace.name: trace for trace in picture.figure.data}
    computed = {layer: n for name, trace in bars.items() if name.endswith(": computed")
                for layer, n in zip(trace.y, trace.x, strict=True)}
    assert computed == {layer: run.work.passes[layer] for layer in range(c.num_hidden_layers)}
    stored = bars["entries stored"]
    assert list(stored.y) == list(c.kv_source_layer_ids)
    assert all(n + start == len(ids) for n, start in zip(stored.x, stored.base, strict=True))
    share = run.work.passes.total() / full.work.passes.total()
    assert f"{share:.0%} of a full prefill" in picture.caption and "Layers 0 to" in picture.alt
    assert picture.static().svg.startswith("<svg")


def test_every_choice_gives_its_own_picture(lab, ids, capsys):
    explorer = PrefillExplorer(lab, ids, lengths=(30, 60, 90))
    seen, seconds = set(), []
    for mode in passes.MODES:
        for tokens in (30, 60, 90):
            explorer.mode.value, explorer.tokens.value = mode, tokens
            picture = explorer.picture()
            for live, new in zip(explorer.figure.data, picture.figure.data, strict=True):
                for name in ("x", "y", "base"):
                    a, b = getattr(live, name, None), getattr(new, name, None)
                    assert (a is None) == (b is None) and (a is None or list(a) == list(b))
            assert explorer.figure.layout.meta["alt"] == picture.alt
            assert (explorer.run.mode, explorer.run.tokens) == (mode, tokens)
            seen.add(picture.alt)
            seconds.append(explorer.seconds)
    assert len(seen) == 12 and explorer.static().alt == explorer.picture().alt
    with capsys.disabled():
        print(f"\na move of the prefill explorer: 95 % within "
              f"{sorted(seconds)[int(0.95 * len(seconds))] * 1000:.0f} ms (aim 100)")
    with pytest.raises(InputError, match="has 90 tokens, fewer than 128"):
        PrefillExplorer(lab, ids, lengths=(128,))


# ---- causality ---------------------------------------------------------------------------------
def test_a_causal_model_keeps_what_comes_before(lab, ids):
    before = causal.streams(lab, ids)
    other = causal.streams(lab, causal.replaced(ids, 50, 7 if ids[50] != 7 else 8))
    found = causal.change(before, other, 50)
    assert found.first == (50,) * lab.config.num_hidden_layers and found.logits == 50
    assert found.reusable == 50 and "serves both texts" in causal.caption(found)


def test_an_encoder_that_reads_both_ways_reaches_back_and_leaves_no_trace(lab, ids):
    c = lab.config
    ahead = c.sliding_window // 2
    before = causal.streams(lab, ids)
    after = causal.streams(lab, causal.replaced(ids, 70, 7 if ids[70] != 7 else 8), both=True)
    found = causal.change(causal.streams(lab, ids, both=True), after, 70)
    assert found.first[0] == 70 - ahead
    assert all(b <= a for a, b in zip(found.first, found.first[1:], strict=False))
    assert found.reusable < 70 - ahead
    # What was patched is as before.
    assert all(torch.equal(a, b)
               for a, b in zip(before, causal.streams(lab, ids), strict=True))


def test_what_cannot_be_replaced_is_told(ids):
    with pytest.raises(InputError, match="position is 90: the text has positions 0 to 89"):
        causal.replaced(ids, 90, 1)
    with pytest.raises(InputError, match="holds id .* already"):
        causal.replaced(ids, 3, ids[3])


def test_the_causal_explorer_follows_its_controls(lab, ids, capsys):
    explorer = CausalExplorer(lab, ids, other="the", position=50)
    assert explorer.found.reusable == 50
    shown, seconds = set(), []
    for model in MODELS:
        explorer.model.value = model
        for position in (60, 40):
            explorer.position.value = position
            picture = explorer.picture()
            assert explorer.found.position == position
            for live, new in zip(explorer.figure.data, picture.figure.data, strict=True):
                assert list(live.x) == list(new.x) and list(live.y) == list(new.y)
            assert explorer.figure.layout.meta["caption"] == picture.caption
            shown.add(picture.alt)
            seconds.append(explorer.seconds)
    assert len(shown) == 4 and "moved" in explorer.caption.value
    assert explorer.static().svg.startswith("<svg")
    with capsys.disabled():
        print(f"\na move of the causal explorer: 95 % within {max(seconds) * 1000:.0f} ms "
              "(aim 100)")
