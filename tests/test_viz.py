"""Figures show the numbers of the run and of the config: asserted on fig.data, not on pixels."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html import unescape

import plotly.colors
import plotly.graph_objects as go
import pytest
import torch
from viz_helpers import nano_lab

from labkit.config import ModelConfig
from labkit.engine.transcript import Candidate, Event
from labkit.errors import InputError
from labkit.model.rope import rotate, rotation
from labkit.viz import palette
from labkit.viz.attention import COLUMNS, FULL, attention_over_text, height
from labkit.viz.attention_data import record
from labkit.viz.dataflow import dataflow
from labkit.viz.legend import shape_legend
from labkit.viz.next_token import next_token_bars
from labkit.viz.svg import to_svg
from labkit.viz.tokens import lay_out, pieces, visible

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune,\n\nmust be in want of a wife & so < on.")
PRESETS = ("nano", "mini", "flash")


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def recording(lab):
    return record(lab, TEXT)


def trace(picture, start):
    (found,) = [t for t in picture.figure.data if t.name.startswith(start)]
    return found


# ---------------------------------------------------------------------------------- palette
SETS = {name: getattr(palette, name) for name in ("ROLES", "FLOWS", "ATTENTION", "PROBABILITY")}


@pytest.mark.parametrize("name", SETS)
def test_classes_stay_apart_for_every_reader(name):
    marks = list(SETS[name].values())
    colours = [mark.colour for mark in marks]
    assert len(set(colours)) == len(colours)
    assert palette.smallest_distance(colours)[0] >= 11
    # Never by colour alone: each has its own letter, place or pattern.
    assert len({mark.letter for mark in marks}) == len(marks)


def test_the_colour_check_sees_a_bad_palette():
    assert palette.smallest_distance(plotly.colors.qualitative.Plotly)[0] < 5
    assert palette.distance("#000000", "#FFFFFF") == pytest.approx(100, abs=0.1)
    assert palette.contrast("#000000", "#FFFFFF") == pytest.approx(21, abs=0.01)
    # Red and green of equal lightness are far apart, but not without the green cones.
    red, green = "#C8503C", "#7A7A00"
    assert palette.distance(red, green) > 3 * palette.distance(red, green, "deuteranopia")


def test_letters_on_the_boxes_can_be_read():
    for mark in palette.ROLES.values():
        assert palette.contrast("#000000", mark.colour) >= 4.5
    assert palette.contrast("#FFFFFF", palette.FLOWS["kv"].colour) >= 4.5
    assert palette.contrast("#FFFFFF", palette.ATTENTION["window"].colour) >= 4.5
    for key in ("selection", "candidates"):
        assert palette.contrast("#000000", palette.FLOWS[key].colour) >= 4.5


# ---------------------------------------------------------------------------------- dataflow
@pytest.mark.parametrize("name", PRESETS)
def test_dataflow_is_the_config(name):
    config = ModelConfig.preset(name)
    picture = dataflow(config, name)
    kinds = {}
    for kind, mark in palette.ROLES.items():
        for layer in trace(picture, f"{mark.letter} ").customdata:
            kinds[layer] = kind
    assert kinds == {role.layer: role.kind for role in config.roles}
    for flow, source in (("kv", lambda r: r.kv_source), ("selection", lambda r: r.index_source)):
        arrows = trace(picture, f"{palette.FLOWS[flow].label}: readers")
        pairs = {(source(r), r.layer) for r in config.roles if source(r) not in (None, r.layer)}
        assert {tuple(pair) for pair in arrows.customdata} == pairs
        assert len(arrows.x) == len(pairs)
        for (_, reader), x in zip(arrows.customdata, arrows.x, strict=True):
            assert abs(x - reader) < 0.42  # the arrow head is under the reader's box
    pool = trace(picture, f"{palette.FLOWS['candidates'].label}: readers")
    assert {tuple(p) for p in pool.customdata} == {
        (config.candidate_source_layer_id, r.layer) for r in config.roles if r.uses_candidates}
    assert tuple(trace(picture, "Engram").x) == config.engram_layer_ids
    (split,) = picture.figure.layout.shapes
    assert split.x0 == split.x1 == config.encoder_layers - 0.5
    assert str(config.num_hidden_layers) in picture.alt
    assert sum(row[2] for row in picture.rows) == config.num_hidden_layers


def test_dataflow_of_the_release():
    picture = dataflow(ModelConfig.preset("flash"))
    assert [row[2] for row in picture.rows] == [2, 4, 4, 30]
    assert picture.caption.startswith("4 compressed caches for 38 of 40 layers; window alone: 2.")
    assert "layers 20\u201339" in picture.caption


def test_dataflow_without_pool_or_engram():
    config = ModelConfig.preset("mini").replace(
        candidate_source_layer_id=-1, engram_layer_ids=(), engram_num_embeddings=())
    names = [t.name for t in dataflow(config).figure.data]
    assert not [n for n in names if n.startswith(("candidate", "Engram"))]


# ---------------------------------------------------------------------------------- next token
def event(drawn=7, count=3):
    listed = tuple(Candidate(i, f" w{i}", 0.5 / 2**i, 0.6 / 2**i) for i in range(count))
    return Event(0, drawn, " x", 0.01, 0.02, listed, None)


def test_next_token_bars_are_the_candidates():
    picture = next_token_bars(event())
    wide, narrow, labels = picture.figure.data
    assert list(wide.x) == [0.5, 0.25, 0.125, 0.01]  # what was drawn has its bar
    assert list(narrow.x) == [0.6, 0.3, 0.15, 0.02]
    assert list(wide.customdata) == [0, 1, 2, 7]
    assert list(labels.x) == [0.6, 0.3, 0.15, 0.02]  # behind the longer of the two bars
    assert [t.endswith("drawn") for t in labels.text] == [False, False, False, True]
    assert list(picture.figure.layout.yaxis.ticktext)[0] == "\u2423w0"
    assert tuple(picture.figure.layout.xaxis.range) == (0, 1)
    assert len(next_token_bars(event(drawn=1)).figure.data[0].x) == 3


def test_next_token_bars_of_a_run(lab):
    drawn = next(lab.stream("She was", 1, seed=3, candidates=5))
    picture = next_token_bars(drawn)
    logits = lab.model(torch.tensor([lab.encode("She was")])).logits[0, -1].double()
    expected = torch.softmax(logits, 0).sort(descending=True, stable=True).values[:5]
    assert torch.allclose(torch.tensor(picture.figure.data[0].x[:5]).double(), expected, atol=1e-6)
    with pytest.raises(InputError, match="candidates=8"):
        next_token_bars(next(lab.stream("She was", 1, seed=3)))


# ---------------------------------------------------------------------------------- attention
def by_definition(lab, recording, layer, query, head):
    """Weights in float64 from scores and one softmax with the sink, in plain loops."""
    config, taps = lab.config, recording.taps
    role, W = config.roles[layer], config.sliding_window
    q = taps[f"layers.{layer}.attn.q"][0, query, head].double()
    keys, names = [], []
    for position in range(max(0, query - W + 1), query + 1):
        keys.append(taps[f"layers.{layer}.attn.window"][0, W + position])
        names.append(("window", position))
    if role.ratio:
        for e in taps[f"layers.{role.index_source}.attn.topk_indices"][0, query].tolist():
            if e >= 0:
                keys.append(taps[f"layers.{role.kv_source}.attn.compressed_kv"][0, e])
                names.append(("entry", e))
    scores = torch.stack([k.double() @ q for k in keys]) * config.head_dim**-0.5
    sink = lab.model.layers[layer].attn.attn_sink[head].double()
    weights = torch.softmax(torch.cat([scores, sink[None]]), 0)
    return dict(zip([*names, "sink"], weights.tolist(), strict=True)), torch.stack(keys)


@pytest.mark.parametrize("query", (0, 1, 6, 40))
def test_a_look_is_the_softmax_by_definition(lab, recording, query):
    for role in lab.config.roles:
        for head in (0, 3):
            look = recording.look(role.layer, query, head)
            expected, _ = by_definition(lab, recording, role.layer, query, head)
            found = {("window", p): w for p, w in look.window}
            found |= {("entry", e): w for e, _, _, w in look.entries}
            found["sink"] = look.sink
            assert found.keys() == expected.keys()
            assert all(abs(found[k] - expected[k]) < 1e-5 for k in expected)


def test_looks_are_the_run(lab, recording):
    """Values weighed with the looks' weights give the attention output that was recorded."""
    query = 50
    for role in lab.config.roles:
        attn, heads = lab.model.layers[role.layer].attn, []
        for head in range(lab.config.num_attention_heads):
            look = recording.look(role.layer, query, head)
            weights = [w for _, w in look.window] + [w for *_, w in look.entries]
            _, values = by_definition(lab, recording, role.layer, query, head)
            heads.append(torch.tensor(weights) @ values)
        turns = rotation(lab.config, role.ratio > 0, torch.tensor([query]), torch.float32)
        y = rotate(torch.stack(heads)[None], (turns[0][:, None], turns[1][:, None]), inverse=True)
        out = attn.wo_b(attn.wo_a(y.flatten(-2).unflatten(-1, (lab.config.o_groups, -1))))
        recorded = recording.taps[f"layers.{role.layer}.attn.out"][0, query]
        assert (out[0] - recorded).abs().max() <= 1e-4 * recorded.abs().max()


def test_a_look_over_heads_is_their_mean(lab, recording):
    mean = recording.look(8, 60).entries
    heads = [recording.look(8, 60, h).entries for h in range(lab.config.num_attention_heads)]
    for i, (*place, weight) in enumerate(mean):
        assert all([*h[i][:3]] == place for h in heads)
        assert weight == pytest.approx(sum(h[i][3] for h in heads) / len(heads), abs=1e-6)


def test_entries_cover_r_tokens_of_the_past(lab, recording):
    for role in lab.config.roles:
        for query in (5, 30, len(recording) - 1):
            for entry, first, last, _ in recording.look(role.layer, query).entries:
                assert (first, last) == (entry * role.ratio, (entry + 1) * role.ratio - 1)
                assert last <= query


def test_the_pool_is_what_was_recorded(lab, recording):
    query, source = 60, lab.config.candidate_source_layer_id
    mask = recording.taps[f"layers.{source}.attn.candidates"][0, query]
    looks = [recording.look(role.layer, query) for role in lab.config.roles]
    with_pool = [look.layer for look in looks if look.pool is not None]
    assert with_pool == [6, 8, 9]  # publisher, Reindex behind it, and who reuses its selection
    r = lab.config.compress_ratios[source]
    covered = {p for first, last in recording.look(8, query).pool for p in range(first, last + 1)}
    assert covered == {e * r + j for e in mask.nonzero()[:, 0].tolist() for j in range(r)}
    assert {e for e, *_ in recording.look(8, query).entries} <= set(mask.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("wrong", ({"layer": 10}, {"query": -1}, {"query": 10**6}, {"head": 4}))
def test_a_look_at_nothing_is_refused(recording, wrong):
    with pytest.raises(InputError, match=f"{next(iter(wrong))} is .*this run has 0 to"):
        recording.look(**{"layer": 0, "query": 0, **wrong})


def test_the_figure_holds_the_look(lab, recording):
    look = recording.look(4, 60)
    picture = attention_over_text(recording, 4, 60)
    window, entries = trace(picture, "window tokens"), trace(picture, "selected")
    assert [tuple(row) for row in window.customdata] == [(p, w) for p, w in look.window]
    assert list(window.y) == [-height(w) for _, w in look.window]
    assert {(e, w) for e, w in entries.customdata} == {(e, w) for e, *_, w in look.entries}
    shares = [t.x[0] for t in picture.figure.data[:3]]
    assert shares == pytest.approx(
        [COLUMNS * s for s in (look.window_share, look.entries_share, look.sink)])
    assert sum(shares) == pytest.approx(COLUMNS, abs=1e-3)
    for trace_, wanted in ((trace(picture, "tokens to"), range(61, len(recording))),):
        assert list(trace_.customdata) == list(wanted)
    # Bars stand on their own tokens.
    placed = lay_out(recording.texts, COLUMNS)
    assert list(window.x) == [placed[p].column for p, _ in look.window]


def test_the_figure_follows_layer_query_head_and_weights(lab, recording):
    base = attention_over_text(recording, 4, 60)
    for other in (attention_over_text(recording, 5, 60), attention_over_text(recording, 4, 59),
                  attention_over_text(recording, 4, 60, head=1)):
        assert list(trace(other, "window tokens").y) != list(trace(base, "window tokens").y)
        assert other.caption != base.caption
        assert other.figure.layout.xaxis.range == base.figure.layout.xaxis.range
        assert other.figure.layout.yaxis.range == base.figure.layout.yaxis.range
    weight = lab.model.layers[4].attn.wq_b.weight
    original = weight.clone()
    try:
        weight.mul_(3)
        changed = attention_over_text(record(lab, TEXT), 4, 60)
    finally:
        weight.copy_(original)
    assert list(trace(changed, "window tokens").y) != list(trace(base, "window tokens").y)
    same = attention_over_text(record(lab, TEXT), 4, 60)
    assert list(trace(same, "window tokens").y) == list(trace(base, "window tokens").y)


def test_heights_are_square_roots_with_a_floor_and_a_top():
    assert height(FULL) == height(1.0) == 2 * height(FULL / 4)
    assert 0 < height(0.0) < height(FULL / 4)


# ---------------------------------------------------------------------------------- pictures
def pictures(recording):
    yield from (dataflow(ModelConfig.preset(name), name) for name in PRESETS)
    yield next_token_bars(event())
    yield from (attention_over_text(recording, layer, 60) for layer in (0, 4, 8))


def test_every_picture_tells_its_content_in_words(recording):
    alts = set()
    for picture in pictures(recording):
        meta = picture.figure.layout.meta
        assert meta["alt"] == picture.alt and len(picture.alt) > 40
        assert meta["caption"] == picture.caption and any(c.isdigit() for c in picture.caption)
        assert picture.rows and all(len(row) == len(picture.columns) for row in picture.rows)
        html = picture._repr_mimebundle_()["text/html"]
        assert "<figcaption>" in html and '<th scope="col"' in html and "role=\"img\"" in html
        assert "<script" not in html
        alts.add(picture.alt)
    assert len(alts) == 7


def test_static_pictures_are_whole_svg_files(recording):
    space = "{http://www.w3.org/2000/svg}"
    for picture in pictures(recording):
        static = picture.static()
        root = ElementTree.fromstring(static.svg)
        assert root.attrib["role"] == "img" and root.attrib["aria-label"] == picture.alt
        assert root.find(f"{space}title").text == picture.alt
        bars = sum(len(t.y) for t in picture.figure.data if t.type == "bar")
        assert len(root.findall(f".//{space}rect")) >= bars
        shown = {text.text for text in root.iter(f"{space}text")}
        for t in picture.figure.data:
            if t.type == "scatter" and "text" in t.mode:
                assert {unescape(w) for w in t.text if w} <= shown
        assert len(static.svg) < 300_000
        assert picture.caption in static.markdown()
        assert static.markdown().count("\n|") == len(picture.rows) + 2


def test_a_static_picture_shows_as_image_and_table(recording, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    attention_over_text(recording, 4, 60).static()._ipython_display_()
    assert [next(iter(data)) for data in shown] == ["image/svg+xml", "text/markdown"]


def test_ids_of_several_pictures_in_a_page_differ(recording):
    found = [ElementTree.fromstring(p.static().svg).iter() for p in pictures(recording)]
    ids = [element.attrib["id"] for tree in found for element in tree if "id" in element.attrib]
    assert len(ids) == 4 and len(set(ids)) == len(ids)


def test_the_svg_writer_refuses_what_it_cannot_draw():
    with pytest.raises(InputError, match="width, height and both axis ranges"):
        to_svg(go.Figure(), "empty")
    layout = {"width": 90, "height": 90, "xaxis": {"range": [0, 1]}, "yaxis": {"range": [0, 1]}}
    with pytest.raises(InputError, match="heatmap"):
        to_svg(go.Figure(go.Heatmap(z=[[1]]), layout), "heat")
    with pytest.raises(InputError, match="star"):
        to_svg(go.Figure(go.Scatter(x=[0], y=[0], mode="markers", marker={"symbol": "star"}),
                         layout), "star")


# ---------------------------------------------------------------------------------- tokens
def test_tokens_are_laid_out_without_gaps_or_overlaps(recording):
    placed = lay_out(recording.texts, 40)
    assert [p.index for p in placed] == list(range(len(recording)))
    for before, after in zip(placed, placed[1:], strict=False):
        if after.line == before.line:
            assert after.column == before.column + before.width
        else:
            assert after.line > before.line and after.column == 0
    assert all(p.column + p.width <= 40 for p in placed)
    ends = [p.line for p in placed if "\u23ce" in p.text]
    assert ends and all(p.line > ends[0] for p in placed[placed[-1].index :])


def test_pieces_show_what_is_not_a_character(lab):
    ids = lab.encode("caf\u00e9 \u2014 na\u00efve")
    texts = pieces(lab.tokenizer, ids)
    assert texts[0] == "<bos>" and len(texts) == len(ids)
    assert not any("\ufffd" in text for text in texts)
    assert visible(" a\n\tb\r") == "\u2423a\u23ce\u21e5b"


def test_the_legend_says_what_the_config_says():
    mini, flash = ModelConfig.preset("mini"), ModelConfig.preset("flash")
    legend = shape_legend(mini=mini, flash=flash)
    rows = {row[0]: row[3:] for row in legend.rows}
    assert list(rows) == list("BTDCHdRrSKW")
    assert rows["D"] == (f"{mini.hidden_size:,}", f"{flash.hidden_size:,}")
    assert rows["W"] == (str(mini.sliding_window), str(flash.sliding_window))
    assert rows["r"] == ("2, 1", "2, 1")
    assert "<table>" in legend._repr_mimebundle_()["text/html"]


def test_plotly_is_imported_only_when_something_is_drawn():
    code = ("import sys, labkit.viz.dataflow, labkit.viz.attention, labkit.viz.next_token, "
            "labkit.explorers.attention, labkit.explorers.writing; "
            "assert not {'plotly', 'ipywidgets', 'IPython'} & set(sys.modules), "
            "{'plotly', 'ipywidgets', 'IPython'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True)
