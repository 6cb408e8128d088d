"""Explorers driven by their controls: the live figure is always the picture of its state."""

from html import escape

import pytest
from viz_helpers import nano_lab

from labkit.explorers.attention import AttentionExplorer
from labkit.explorers.writing import WritingExplorer
from labkit.viz.attention import attention_over_text
from labkit.viz.attention_data import record
from labkit.viz.next_token import next_token_bars

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.")


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def recording(lab):
    return record(lab, TEXT)


def drawn(figure):
    """All numbers and texts of a figure, as plain values."""
    rows = []
    for trace in figure.data:
        values = {}
        for name in ("x", "y", "base", "width", "text", "customdata", "visible"):
            value = getattr(trace, name, None)
            if hasattr(value, "tolist"):
                value = value.tolist()
            if isinstance(value, (tuple, list)):
                value = [list(v) if isinstance(v, (tuple, list)) else v for v in value]
            values[name] = value
        rows.append((trace.name, values))
    return rows


def assert_shows(explorer, picture):
    assert drawn(explorer.figure) == drawn(picture.figure)
    assert explorer.figure.layout.meta["alt"] == picture.alt
    assert escape(picture.caption) in explorer.caption.value
    assert explorer.table.value.count("<tr>") == len(picture.rows) + 1


# ---------------------------------------------------------------------------------- attention
def test_the_explorer_begins_where_it_was_told(lab, recording):
    explorer = AttentionExplorer(recording=recording, layer=4, query=20, head=1)
    assert_shows(explorer, attention_over_text(recording, 4, 20, 1))
    explorer = AttentionExplorer(lab, TEXT)
    assert (explorer.layer.value, explorer.query.value) == (8, len(recording) - 1)
    assert explorer.head.value == -1


def test_every_move_gives_the_picture_of_the_new_state(lab, recording, capsys):
    explorer = AttentionExplorer(recording=recording, layer=2, query=30)
    traces, ranges = explorer.figure.data, explorer.figure.layout.yaxis.range
    seconds, seen = [], []
    moves = [("query", 31), ("query", 0), ("layer", 0), ("query", 60), ("layer", 8), ("head", 2),
             ("layer", 4), ("head", -1), ("query", 61)]
    for control, value in moves:
        before = drawn(explorer.figure)
        getattr(explorer, control).value = value
        assert drawn(explorer.figure) != before, (control, value)
        head = None if explorer.head.value < 0 else explorer.head.value
        assert_shows(explorer, attention_over_text(
            recording, explorer.layer.value, explorer.query.value, head))
        seconds.append(explorer.seconds)
        seen.append(explorer.caption.value)
    # Updated in place: the same traces on the same axes.
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert explorer.figure.layout.yaxis.range == ranges
    assert len(set(seen)) == len(moves)
    with capsys.disabled():
        print(f"\na move of the attention explorer: at most {max(seconds) * 1000:.0f} ms "
              f"({len(recording)} tokens; the aim is 100 ms)")


def test_a_click_on_a_token_asks_for_it(recording):
    explorer = AttentionExplorer(recording=recording, layer=4, query=50)
    (tokens,) = [t for t in explorer.figure.data if t.name == "tokens"]
    points = type("Points", (), {"point_inds": [17]})()
    explorer._clicked(tokens, points, None)
    assert explorer.query.value == tokens.customdata[17] == 17


def test_controls_have_names_and_are_not_switched_off(lab, recording):
    explorer = AttentionExplorer(recording=recording)
    writer = WritingExplorer(lab, "She", 4)
    for control in (explorer.layer, explorer.query, explorer.head, writer.prompt, writer.next,
                    writer.more, writer.again):
        assert control.description and not control.disabled
    assert 'aria-live="polite"' in explorer.caption.value


def test_the_static_picture_is_that_of_the_moment(recording):
    explorer = AttentionExplorer(recording=recording, layer=4, query=50)
    before = explorer.static()
    explorer.query.value = 51
    assert explorer.static().svg != before.svg
    assert explorer.static().svg == attention_over_text(recording, 4, 51).static().svg


# ---------------------------------------------------------------------------------- writing
def test_the_writer_writes_what_the_model_generates(lab):
    writer = WritingExplorer(lab, "She was", 12, seed=5, temperature=1.0)
    first = writer.generation.text
    assert writer.progress.value == 1
    text = first + writer.step() + writer.run(4)
    assert writer.progress.value == len(writer.generation.ids) == 6
    assert writer.progress.description == "6 of 12"
    text += writer.run(100)  # ends by itself
    assert writer.progress.value == 12
    assert writer.step() == ""
    expected = lab.generate("She was", 12, seed=5, temperature=1.0)
    assert text == writer.generation.text == expected.text
    assert tuple(writer.generation.ids) == expected.ids


def test_the_writers_figure_is_the_last_draw(lab):
    writer = WritingExplorer(lab, "She was", 12, seed=5)
    traces = writer.figure.data
    seen = set()
    for _ in range(4):
        writer.next.click()
        picture = next_token_bars(writer.event)
        assert drawn(writer.figure) == drawn(picture.figure)
        assert writer.figure.layout.yaxis.ticktext == picture.figure.layout.yaxis.ticktext
        assert writer.event.id == writer.generation.ids[-1]
        assert len(writer.event.candidates) == 8
        seen.add(tuple(writer.figure.data[0].x))
    assert len(seen) == 4
    assert all(a is b for a, b in zip(traces, writer.figure.data, strict=True))
    assert tuple(writer.figure.layout.xaxis.range) == (0, 1)


def test_a_new_prompt_starts_over_and_a_bad_one_is_told(lab):
    writer = WritingExplorer(lab, "She was", 12, seed=5)
    writer.more.click()
    assert writer.progress.value == 12
    writer.prompt.value = "He had"
    assert writer.progress.value == 1 and "He had" in writer.text.value
    writer.prompt.value = ""
    assert 'role="alert"' in writer.text.value and "prompt is empty" in writer.text.value
    writer.prompt.value = "She was"
    writer.again.click()
    assert writer.run(100) and writer.progress.value == 12


def test_the_writers_static_picture_has_the_text(lab):
    writer = WritingExplorer(lab, "She was", 12, seed=5)
    writer.run(3)
    static = writer.static()
    assert f"She was{writer.generation.text}" in static.caption
    assert static.svg.startswith("<svg")
