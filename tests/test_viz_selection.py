"""Figures of the selection show the run: every number again, another way."""

import xml.etree.ElementTree as ElementTree
from math import isnan, log2, log10

import pytest
import torch
from viz_helpers import nano_lab

from labkit import mutants
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.work import counting
from labkit.train.ablations import cache_bytes_a_token
from labkit.viz import overlap, palette, selection, selection_cost
from labkit.viz.selection_cost import changed, cost_of_looking, look_cost
from labkit.viz.selection_data import kept_by_layer, record_selections
from labkit.viz.what_if import input_of, window_site, with_numbers

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.")
FLASH = ModelConfig.preset("flash")


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def run(lab):
    return record_selections(lab, TEXT)


def trace(picture, name):
    (found,) = [t for t in picture.figure.data if t.name == name]
    return found


def by_definition(lab, run, layer, query):
    """Attention of one query in plain loops, float64: share of the window, of each entry."""
    config, taps = lab.config, run.taps
    role, W = config.roles[layer], config.sliding_window
    entries = taps[f"layers.{role.kv_source}.attn.compressed_kv"][0].double()
    n = (query + 1) // role.ratio
    window, shares = 0.0, torch.zeros(n, dtype=torch.float64)
    for head in range(config.num_attention_heads):
        q = taps[f"layers.{layer}.attn.q"][0, query, head].double() * config.head_dim**-0.5
        near = [float(taps[f"layers.{layer}.attn.window"][0, W + p].double() @ q)
                for p in range(max(0, query - W + 1), query + 1)]
        both = torch.cat([torch.tensor(near, dtype=torch.float64), entries[:n] @ q]).softmax(0)
        window += float(both[: len(near)].sum()) / config.num_attention_heads
        far = both[len(near) :]
        shares += far / far.sum() / config.num_attention_heads
    return window, shares


# ---------------------------------------------------------------------------------- data
def test_selections_are_those_of_the_run_for_the_models_k(lab, run):
    for layer in lab.config.index_source_layer_ids:
        found = run.selected(layer, torch.arange(len(run)))
        assert torch.equal(found, run.taps[f"layers.{layer}.attn.topk_indices"][0])
        few = run.selected(layer, torch.arange(len(run)), 2)
        for small, all_ in zip(few.tolist(), found.tolist(), strict=True):
            assert set(small) - {-1} <= set(all_)
    with pytest.raises(InputError, match="layer 3 has no index: choose one of 2, 4, 6, 8"):
        run.scores(3, torch.tensor([5]))


@pytest.mark.parametrize("query", (3, 20, 60))
def test_a_ranking_is_the_attention_by_definition(lab, run, query):
    for layer in run.readers:
        ranked = run.ranked(layer, query, 4)
        window, shares = by_definition(lab, run, layer, query)
        assert ranked.window == pytest.approx(window, abs=1e-5)
        assert sorted(ranked.entries) == list(range(len(shares)))
        assert ranked.share == pytest.approx(shares[ranked.entries].tolist(), abs=1e-5)
        assert ranked.share == sorted(ranked.share, reverse=True)
        assert ranked.best == pytest.approx(torch.tensor(ranked.share).cumsum(0).tolist())
        source = lab.config.roles[layer].index_source
        picked = [e for e in run.selected(source, torch.tensor([query]), 4)[0].tolist() if e >= 0]
        assert sorted(e for e, t in zip(ranked.entries, ranked.taken, strict=True) if t) == picked
        assert ranked.kept == pytest.approx(float(shares[picked].sum()), abs=1e-5)
        assert ranked.kept <= ranked.kept_best + 1e-6


def test_the_pool_ends_the_curve_of_the_index(lab, run):
    c = lab.config
    ranked = run.ranked(8, len(run) - 1, 4)                  # behind the pool of layer 6
    pool = run.taps[f"layers.{c.candidate_source_layer_id}.attn.candidates"][0, -1]
    assert len(ranked.by_index) == int(pool.sum()) < len(ranked.entries)
    for entry, place in zip(ranked.entries, ranked.place, strict=True):
        assert (place is None) == (not pool[entry])
    assert "The pool left it" in selection.caption(run, ranked)
    assert run.ranked(8, len(run) - 1, 10**6).kept == ranked.by_index[-1]


@pytest.mark.parametrize("layer, query", ((0, 5), (2, 0), (6, -1), (6, 10**6)))
def test_nothing_to_rank_is_told(run, layer, query):
    with pytest.raises(InputError, match="sees no entries: choose a layer of"):
        run.ranked(layer, query, 4)


def test_the_comparison_is_that_of_sets(lab, run):
    c, compared = lab.config, run.comparison
    names = [column.name for column in compared.columns]
    assert names == ["index 2", "own 2", "own 3", "index 4", "own 4", "own 5", "index 6",
                     "index 8", "own 6", "own 7", "own 8", "own 9"]
    K = c.index_topk
    for query in (30, 61):
        def pick(column, query=query):
            if column.kind == "index":
                return set(run.selected(column.layer, torch.tensor([query]))[0].tolist()) - {-1}
            far = run.dense(column.layer, torch.tensor([query]))[1][0].sum(0)
            return set(far.argsort(descending=True)[:K].tolist())
        sets = [pick(column) for column in compared.columns]
        for i, a in enumerate(compared.columns):
            for j, b in enumerate(compared.columns):
                found, kept = compared.jaccard[query, i, j], compared.kept[query, i, j]
                if a.cache != b.cache:
                    assert isnan(found) and isnan(kept)
                    continue
                assert float(found) == pytest.approx(
                    len(sets[i] & sets[j]) / len(sets[i] | sets[j]))
                assert isnan(kept) == (a.kind == "index")
                if a.kind == "own":
                    _, shares = by_definition(lab, run, a.layer, query)
                    expected = float(shares[list(sets[j])].sum())
                    assert float(kept) == pytest.approx(expected, abs=1e-4)
    assert compared.jaccard[K - 1].isnan().all()             # all that is visible is selected
    assert not compared.jaccard[K, names.index("index 6")].isnan().all()


def test_kept_of_layers_agrees_with_the_measure_of_training(lab, run):
    from labkit.train.attention_mass import _masses

    at = torch.arange(len(run))
    theirs = dict(_masses(lab, run.ids, at, torch.Generator().manual_seed(0)))
    for kept in kept_by_layer(run):
        mean = theirs[kept.layer].double().mean(0).tolist()   # kept, random, entries, ..., best
        assert kept.index == pytest.approx(mean[0], abs=1e-5)
        assert kept.random == pytest.approx(mean[1], abs=0.05)
        assert kept.entries == pytest.approx(mean[2], abs=1e-5)
        assert kept.best == pytest.approx(mean[4], abs=1e-5)
    with pytest.raises(InputError, match="a longer text is needed"):
        selection.kept_of_layers(record_selections(lab, "It is"))


# ---------------------------------------------------------------------------------- figures
def test_the_figure_of_a_query_holds_its_ranking(run):
    ranked, picture = run.ranked(5, 60, 3), selection.kept_of_query(run, 5, 60, 3)
    n = len(ranked.share)
    assert list(trace(picture, "kept: best possible").y) == ranked.best
    assert list(trace(picture, "kept: index").y) == ranked.by_index
    assert list(trace(picture, "kept: at random").y) == [k / n for k in range(1, n + 1)]
    assert list(trace(picture, "kept with K").x) == [log2(3)]
    assert list(trace(picture, "kept with K").y) == [ranked.kept]
    bars = {}
    for name, fate in (("taken by the index", True), ("left out by the index", False)):
        own = trace(picture, name)
        for (entry, rank), y in zip(own.customdata, own.y, strict=True):
            bars[rank] = (entry, y, fate)
    assert [bars[j + 1] for j in range(n)] == list(
        zip(ranked.entries, ranked.share, ranked.taken, strict=True))
    strip = {}
    for name, fate in (("strip: taken", True), ("strip: left out", False)):
        for first, last in trace(picture, name).customdata:
            strip |= {rank: fate for rank in range(first, last + 1)}
    assert [strip[j + 1] for j in range(n)] == ranked.taken
    assert f"{ranked.kept:.1%} with K = 3" in picture.caption
    assert f"{ranked.kept:.1%}" in picture.alt


def test_the_figure_follows_layer_query_k_prompt_and_weights(lab, run):
    base = selection.kept_of_query(run, 5, 60, 3)
    others = [selection.kept_of_query(run, 4, 60, 3), selection.kept_of_query(run, 5, 59, 3),
              selection.kept_of_query(run, 5, 60, 4),
              selection.kept_of_query(record_selections(lab, "No! " + TEXT), 5, 60, 3)]
    weight = lab.model.layers[5].attn.wq_b.weight
    original = weight.clone()
    try:
        weight.mul_(3)
        others.append(selection.kept_of_query(record_selections(lab, TEXT), 5, 60, 3))
    finally:
        weight.copy_(original)
    for other in others:
        assert other.caption != base.caption
    for other in others[:3]:                                # the axes of a run stay
        assert other.figure.layout.xaxis.range == base.figure.layout.xaxis.range
        assert other.figure.layout.yaxis.range == base.figure.layout.yaxis.range
    assert list(trace(others[1], "kept: index").y) != list(trace(base, "kept: index").y)


@pytest.mark.parametrize("measure", overlap.MEASURES)
def test_the_matrix_holds_the_means_and_frames_what_is_read(lab, run, measure):
    compared, picture = run.comparison, overlap.overlap_matrix(run, measure, 20, 50)
    values = getattr(compared, measure)[20:51].nanmean(0)
    cells = picture.figure.data[0]
    for x, base, text, value, ink, colour in zip(
            cells.x, cells.base, cells.text, cells.customdata, cells.insidetextfont.color,
            cells.marker.color, strict=True):
        expected = float(values[int(base + 0.5), x])
        if isnan(expected):
            assert text == "" and colour == overlap.EMPTY
            continue
        assert value == pytest.approx(expected) and text == f"{expected:.0%}"
        assert palette.contrast(ink, colour) >= 4.5
    frames = trace(picture, "what the layer reads")
    corners = list(zip(frames.x, frames.y, strict=True))[::6]
    for (x, y), layer in zip(corners, run.readers, strict=True):
        row, column = compared.columns[round(y + 0.42)], compared.columns[round(x + 0.45)]
        assert (row.name, column.kind) == (f"own {layer}", "index")
        assert column.layer == lab.config.roles[layer].index_source
    framed = [float(values[i, j]) for i, j in overlap.read_cells(compared, lab.config)]
    assert f"{min(framed):.1%}" in picture.caption and f"{max(framed):.1%}" in picture.caption
    assert len(picture.rows) == len(run.readers)


def test_a_range_without_choice_says_so(run):
    picture = overlap.overlap_matrix(run, "jaccard", 0, 4)
    assert "nothing is chosen" in picture.caption and set(picture.figure.data[0].text) == {""}
    assert "no query has to choose" in picture.alt
    assert picture.rows[0][2:] == ("-", "-", "-")


def test_classes_stay_apart_for_every_reader():
    for marks in (palette.SELECTION, palette.DESIGNS):
        assert palette.smallest_distance([m.colour for m in marks.values()])[0] >= 11
        assert len({m.letter for m in marks.values()}) == len(marks)


def test_every_picture_is_a_whole_svg_with_words(run):
    for picture in (selection.kept_of_query(run, 5, 60), selection.kept_of_layers(run),
                    overlap.overlap_matrix(run), cost_of_looking(FLASH, 2**15)):
        static = picture.static()
        root = ElementTree.fromstring(static.svg)
        assert root.attrib["aria-label"] == picture.alt and len(picture.alt) > 60
        assert any(ch.isdigit() for ch in picture.caption)
        assert static.markdown().count("\n|") == len(picture.rows) + 2
        assert len(static.svg) < 60_000
    dashes = [e.attrib["stroke-dasharray"] for e in root.iter() if "stroke-dasharray" in e.attrib]
    assert {"6 4", "2 3", "none"} <= set(dashes)            # in the legend, too


# ---------------------------------------------------------------------------------- cost
@pytest.mark.parametrize("changes", ({}, {"ratio": 4}, {"topk": 3}))
def test_the_cost_is_what_is_counted_while_a_token_is_decoded(lab, run, changes):
    other = with_numbers(lab, **changes)
    session = other.session()
    session.prefill(run.ids[:-1])
    with counting(other.model) as work:
        session.decode(run.ids[-1])
    cost = look_cost(other.config, len(run), "shared")
    assert work.total("attn.scores") + work.total("attn.values") == cost.attention
    assert work.total("indexer.scores") + work.total("indexer.sum") == cost.index
    every = other.config.replace(index_source_layer_ids=tuple(run.readers))
    assert look_cost(other.config, len(run), "own") == look_cost(every, len(run), "shared")


def test_the_cost_of_the_release():
    million = look_cost(FLASH, 10**6)
    assert million.scored == 2_565_536                       # 3 x 0.5 M + 1 M + 4 x 16,384
    assert look_cost(FLASH, 10**6, "own").scored == 29_000_000
    assert look_cost(FLASH, 512, "all").read == look_cost(FLASH, 512, "pool").read
    assert look_cost(FLASH, 16_384, "pool") == look_cost(FLASH, 16_384, "shared")
    assert look_cost(FLASH, 16_386, "pool").scored < look_cost(FLASH, 16_386, "shared").scored


def test_the_curves_are_the_costs():
    picture = cost_of_looking(FLASH, 2**17)
    for design, mark in palette.DESIGNS.items():
        curve = trace(picture, mark.label)
        for x, y in zip(curve.x, curve.y, strict=True):
            assert y == log10(look_cost(FLASH, round(2**x), design).total)
    assert list(trace(picture, "context").x) == [17, 17]
    wide = cost_of_looking(changed(FLASH, ratio=8), 2**17)
    assert [list(t.y) for t in wide.figure.data] != [list(t.y) for t in picture.figure.data]
    assert wide.figure.layout.yaxis.range == picture.figure.layout.yaxis.range
    low = min(look_cost(ModelConfig.preset("mini"), 2**selection_cost.SHORTEST, d).total
              for d in palette.DESIGNS)
    high = look_cost(FLASH, 2**selection_cost.LONGEST, "all").total
    assert picture.figure.layout.yaxis.range[0] <= log10(low)
    assert log10(high) <= picture.figure.layout.yaxis.range[1]


def test_another_ratio_changes_the_encoder_alone():
    config = changed(FLASH, ratio=4, topk=64)
    assert config.compress_ratios[:20] == (0, 0, *[4] * 18) and config.index_topk == 64
    assert config.compress_ratios[20:] == FLASH.compress_ratios[20:]
    assert changed(FLASH) == FLASH
    assert cache_bytes_a_token(FLASH) == 890
    assert cache_bytes_a_token(config) == 356 * (3 / 4 + 1)


# ---------------------------------------------------------------------------------- what if
def test_a_site_is_that_of_the_model_and_does_not_mind_where_it_stands(lab, run):
    x = input_of(lab, "layers.1.attn", run.ids)
    out = lab.trace(run.ids)["layers.1.attn.out"]
    assert torch.allclose(window_site(lab, 1, x, rounded=True), out, atol=1e-6)
    assert not lab.model.get_submodule("layers.1.attn")._forward_pre_hooks
    near, far = (window_site(lab, 1, x, offset) for offset in (0, 1000))
    assert (near - far).abs().max() < 1e-3 * near.abs().max()
    with mutants.active("no_inverse_rotation"):
        near, far = (window_site(lab, 1, x, offset) for offset in (0, 1000))
    assert (near - far).abs().max() > 0.1 * near.abs().max()
    with pytest.raises(InputError, match="choose a window-only layer"):
        window_site(lab, 2, x)


def test_other_numbers_are_another_model_with_the_same_weights(lab, run):
    same = with_numbers(lab).trace(run.ids)["logits"]
    assert torch.equal(same, lab.trace(run.ids)["logits"])
    wide = with_numbers(lab, ratio=4, topk=2)
    taps = wide.trace(run.ids)
    assert taps["layers.2.attn.compressed_kv"].shape[1] == len(run) // 4
    assert taps["layers.6.attn.compressed_kv"].shape[1] == len(run)
    assert taps["layers.2.attn.topk_indices"].shape[2] == 2
    assert lab.config.index_topk == 6
    with pytest.raises(InputError, match="ratio 2 needs .*wgate.weight, which this model has not"):
        with_numbers(with_numbers(lab, ratio=1), ratio=2)
