"""Engram's explorers driven by their controls: the figure is always the picture of its state."""

import statistics
from html import escape

import pytest
from viz_helpers import nano_lab

from labkit.explorers.collisions import CollisionExplorer
from labkit.explorers.engram import EngramExplorer
from labkit.text.corpus import load_corpus
from labkit.viz.engram import engram_over_text
from labkit.viz.engram_data import record_engram
from labkit.viz.ngram_data import census
from labkit.viz.ngrams import collisions

TEXT = "It is a truth universally acknowledged, that a single man"


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def counted(lab):
    texts = [lab.encode(text[:20_000]) for text in load_corpus("heldout").values()]
    return census(lab.config, lab.model.engram_classes, texts, 1)


def drawn(figure):
    """All numbers and texts of a figure, as plain values."""
    def plain(value):
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, (tuple, list)):
            return [plain(v) for v in value]
        return value
    return [(trace.name, [plain(getattr(trace, name, None))
                          for name in ("x", "y", "base", "width", "text", "customdata")])
            for trace in figure.data]


def assert_shows(explorer, picture):
    assert drawn(explorer.figure) == drawn(picture.figure)
    assert explorer.figure.layout.meta["alt"] == picture.alt
    assert escape(picture.caption) in explorer.caption.value
    assert explorer.table.value.count("<tr>") == len(picture.rows) + 1
    assert explorer.static().svg == picture.static().svg


def report(what, seconds):
    p95 = statistics.quantiles(seconds, n=20)[-1]
    return f"\n{what}: 95 % of moves within {p95 * 1000:.0f} ms (the aim is 100 ms)"


def test_the_engram_explorer_begins_where_it_was_told(lab):
    explorer = EngramExplorer(lab, TEXT, token=3, layer=4)
    assert_shows(explorer, engram_over_text(record_engram(lab, TEXT), 4, 3))
    explorer = EngramExplorer(lab, TEXT)
    assert explorer.token.value == len(lab.encode(TEXT)) - 1
    assert explorer.layer.value == lab.config.engram_layer_ids[0]


def test_every_move_gives_the_picture_of_the_new_state(lab, capsys):
    explorer = EngramExplorer(lab, TEXT, token=9)
    traces, ranges = explorer.figure.data, explorer.figure.layout.yaxis.range
    seconds, texts = [], []
    moves = [("token", 3), ("token", 0), ("layer", 4), ("token", 8),
             ("text", "THE rain & the <sea>"), ("token", 2), ("layer", 1),
             ("text", TEXT * 4), ("token", 60), ("token", 5), ("text", TEXT),
             ("token", 4), ("layer", 4)]
    for control, value in moves:
        before = drawn(explorer.figure)
        getattr(explorer, control).value = value
        assert drawn(explorer.figure) != before, (control, value)
        (texts if control == "text" else seconds).append(explorer.seconds)
        recording = record_engram(lab, explorer.text.value)
        if control == "text":
            assert explorer.token.value == explorer.token.max == len(recording) - 1
        assert_shows(explorer, engram_over_text(recording, explorer.layer.value,
                                                explorer.token.value))
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert explorer.figure.layout.yaxis.range == ranges
    with capsys.disabled():
        print(report("token or layer of the Engram explorer", seconds),
              report("a new text in it, with the run", texts))


def test_a_bad_text_is_told_and_changes_nothing(lab):
    explorer = EngramExplorer(lab, TEXT, token=4)
    before = drawn(explorer.figure)
    explorer.text.value = ""
    assert 'role="alert"' in explorer.problem.value and "prompt is empty" in explorer.problem.value
    assert drawn(explorer.figure) == before
    explorer.token.value = 2                       # the old run is still there
    assert_shows(explorer, engram_over_text(record_engram(lab, TEXT), 1, 2))
    explorer.text.value = "She"
    assert explorer.problem.value == ""


def test_a_click_on_a_token_asks_for_it(lab):
    explorer = EngramExplorer(lab, TEXT, token=9)
    (tokens,) = [t for t in explorer.figure.data if t.name == "tokens"]
    explorer._clicked(tokens, type("Points", (), {"point_inds": [7]})(), None)
    assert explorer.token.value == tokens.customdata[7] == 4
    explorer._clicked(tokens, type("Points", (), {"point_inds": [0]})(), None)   # padding
    assert explorer.token.value == 0


def test_the_collision_explorer_hashes_anew(counted, capsys):
    explorer = CollisionExplorer(counted, 16_000_057)
    assert explorer.rows.value == 101
    traces, seconds, captions = explorer.figure.data, [], set()
    ranges = (explorer.figure.layout.xaxis.range, explorer.figure.layout.yaxis.range)
    for _, size in explorer.rows.options:
        if size == explorer.rows.value:
            continue
        before = drawn(explorer.figure)
        explorer.rows.value = size
        assert drawn(explorer.figure) != before
        assert_shows(explorer, collisions(counted, size))
        seconds.append(explorer.seconds)
        captions.add(explorer.caption.value)
    assert len(captions) == len(seconds)
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert ranges == (explorer.figure.layout.xaxis.range, explorer.figure.layout.yaxis.range)
    with capsys.disabled():
        print(report(f"a table size in the collision explorer ({counted.tokens:,} tokens)",
                     seconds))


def test_controls_have_names_and_are_not_switched_off(lab, counted):
    engram, tables = EngramExplorer(lab, TEXT), CollisionExplorer(counted, 10_007)
    for control in (engram.text, engram.token, engram.layer, tables.rows):
        assert control.description and not control.disabled
    for explorer in (engram, tables):
        assert 'aria-live="polite"' in explorer.caption.value
