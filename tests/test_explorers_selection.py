"""Explorers of the selection driven by their controls: the live figure is that of their state."""

from html import escape

import pytest
from test_explorers import drawn
from viz_helpers import nano_lab

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.explorers.selection import CostExplorer, OverlapExplorer, SelectionExplorer
from labkit.viz.overlap import overlap_matrix
from labkit.viz.selection import kept_of_query
from labkit.viz.selection_data import record_selections

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.")


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def run(lab):
    return record_selections(lab, TEXT)


def look(figure):
    """What `drawn` gives, and the colours of cells."""
    def plain(value):
        return list(value) if isinstance(value, (tuple, list)) else value
    return repr(drawn(figure)), [plain(getattr(t.marker, "color", None)) for t in figure.data]


def moved(explorer, moves, capsys, what, changes=True):
    """Make the moves; each changes the figure in place and gives the picture of the state."""
    traces, ranges = explorer.figure.data, explorer.figure.layout.yaxis.range
    seconds = []
    for control, value in moves:
        before = look(explorer.figure)
        getattr(explorer, control).value = value
        assert not changes or look(explorer.figure) != before, (control, value)
        picture = explorer.picture()
        assert look(explorer.figure) == look(picture.figure)
        assert explorer.figure.layout.meta["alt"] == picture.alt
        assert escape(picture.caption) in explorer.caption.value
        assert explorer.table.value.count("<tr>") == len(picture.rows) + 1
        seconds.append(explorer.seconds)
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert explorer.figure.layout.yaxis.range == ranges
    assert explorer.static().svg == explorer.picture().static().svg
    with capsys.disabled():
        late = sorted(seconds)[int(0.95 * (len(seconds) - 1))]
        print(f"\na move of the {what}: 95th percentile {late * 1000:.0f} ms, at most "
              f"{max(seconds) * 1000:.0f} ms (aim: 100 ms)")


def test_every_move_of_the_selection_gives_its_picture(run, capsys):
    explorer = SelectionExplorer(run, layer=5, query=40)
    assert explorer.topk.value == run.config.index_topk
    moved(explorer, [("topk", 1), ("query", 60), ("layer", 8), ("topk", 20), ("query", 4),
                     ("layer", 2), ("query", 61), ("topk", 3), ("layer", 9), ("query", 33)],
          capsys, "selection explorer")
    assert explorer.static().svg == kept_of_query(run, 9, 33, 3).static().svg
    assert SelectionExplorer(run).layer.value == 8


def test_every_query_and_k_that_the_sliders_allow_can_be_shown(run):
    explorer = SelectionExplorer(run, layer=2, query=1, topk=1)
    explorer.query.value, explorer.topk.value = explorer.query.min, explorer.topk.max
    assert "on its 1 visible entries" in explorer.caption.value


def test_every_move_of_the_matrix_gives_its_picture(lab, run, capsys):
    other = record_selections(lab, "No! " + TEXT)
    explorer = OverlapExplorer({"one": run, "other": other})
    moved(explorer, [("queries", (20, 40)), ("measure", "kept"), ("text", "other"),
                     ("queries", (20, 60)), ("queries", (0, 3)), ("measure", "jaccard"),
                     ("queries", (50, 60)), ("text", "one")],
          capsys, "overlap explorer", changes=False)
    assert explorer.static().svg == overlap_matrix(run, "jaccard", 50, 60).static().svg
    before = look(explorer.figure)
    for control, value in (("queries", (10, 60)), ("measure", "kept"), ("text", "other")):
        getattr(explorer, control).value = value
        assert look(explorer.figure) != before
        before = look(explorer.figure)
    with pytest.raises(InputError, match="runs is empty"):
        OverlapExplorer({})


def test_every_move_of_the_cost_gives_its_picture(capsys):
    flash, mini = ModelConfig.preset("flash"), ModelConfig.preset("mini")
    explorer = CostExplorer({"flash": flash, "mini": mini})
    assert explorer.config == flash and "890 bytes" in explorer.caption.value
    moved(explorer, [("context", 2**13), ("ratio", 8), ("topk", 64), ("model", "mini"),
                     ("ratio", 16), ("topk", 4096), ("context", 128), ("ratio", 1)],
          capsys, "cost explorer")
    explorer.model.value = "flash"
    assert explorer.config == flash                     # a model begins with its own numbers


def test_controls_have_names_and_are_not_switched_off(run):
    cost = CostExplorer({"flash": ModelConfig.preset("flash")})
    one, all_ = SelectionExplorer(run), OverlapExplorer({"text": run})
    for control in (one.layer, one.query, one.topk, all_.text, all_.measure, all_.queries,
                    cost.model, cost.context, cost.ratio, cost.topk):
        assert control.description and not control.disabled
    for explorer in (one, all_, cost):
        assert 'aria-live="polite"' in explorer.caption.value
