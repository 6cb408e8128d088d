"""The explorers of a block and of rounding: the live figure is the picture of its state."""

import statistics
from html import escape

import pytest
from viz_helpers import nano_lab

import labkit
from labkit.explorers.blocks import FACTORS, BlockExplorer
from labkit.explorers.rounding import RoundingExplorer
from labkit.viz.blocks import block_picture, unrounded
from labkit.viz.rounding import measure, rounding_picture

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife.")


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def tensors():
    return unrounded(labkit.load("mini", device="cpu"), TEXT)


@pytest.fixture(scope="module")
def chains(lab):
    return measure(lab, TEXT)


def plain(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    return [plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def drawn(figure):
    rows = []
    for trace in figure.data:
        values = {name: plain(getattr(trace, name, None))
                  for name in ("x", "y", "base", "text", "customdata", "textposition")}
        rows.append((trace.name, values, getattr(trace.marker, "symbol", None)))
    return rows


def assert_shows(explorer, picture):
    assert drawn(explorer.figure) == drawn(picture.figure)
    assert explorer.figure.layout.meta["alt"] == picture.alt
    assert explorer.figure.layout.meta["caption"] == picture.caption
    assert escape(picture.caption) in explorer.caption.value
    assert explorer.table.value.count("<tr>") == len(picture.rows) + 1
    assert explorer.static().svg == picture.static().svg


def report(capsys, name, seconds):
    with capsys.disabled():
        print(f"\na move of the {name} explorer: 95 % within "
              f"{statistics.quantiles(seconds, n=20)[-1] * 1000:.0f} ms of {len(seconds)} moves "
              "(the aim is 100 ms)")


def test_every_move_of_the_block_gives_the_picture_of_the_new_state(tensors, capsys):
    explorer = BlockExplorer(tensors=tensors, tensor="entry of layer 1", row=5)
    traces, ranges = explorer.figure.data, explorer.figure.layout.yaxis.range
    seconds = []
    moves = [("row", 6), ("outlier", 16), ("channels", 32), ("tensor", "window key of layer 4"),
             ("row", 20), ("outlier", 1024), ("tensor", "index key of layer 4"), ("outlier", 3),
             ("channels", 0), *(("outlier", f) for f in FACTORS if f != 3)]
    for control, value in moves:
        before = drawn(explorer.figure)
        getattr(explorer, control).value = value
        assert drawn(explorer.figure) != before, (control, value)
        assert_shows(explorer, block_picture(
            tensors, explorer.tensor.value, explorer.row.value, explorer.channels.value,
            explorer.outlier.value))
        seconds.append(explorer.seconds)
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert explorer.figure.layout.yaxis.range == ranges
    report(capsys, "block", seconds)


def test_fewer_rows_and_other_widths_are_kept_within(lab, tensors):
    explorer = BlockExplorer(tensors=tensors, tensor="window key of layer 1", row=0)
    explorer.row.value = explorer.row.max
    explorer.tensor.value = "entry of layer 1"
    assert explorer.row.value == explorer.row.max == tensors["entry of layer 1"].rows.shape[0] - 1
    other = BlockExplorer(lab, TEXT)
    widths = {t.rows.shape[1] for t in other.tensors.values()}
    assert max(first for _, first in other.channels.options) <= max(widths) - 32
    for name in other.tensors:
        other.tensor.value = name
        assert_shows(other, block_picture(other.tensors, name, 0, other.channels.value, 1))


def test_every_choice_of_recipes_gives_its_picture(chains, capsys):
    explorer = RoundingExplorer(chains=chains)
    traces, seconds, seen = explorer.figure.data, [], set()
    assert_shows(explorer, rounding_picture(chains, ["fp8", "nvfp4", "mxfp4"]))
    for name in ("fp8", "nvfp4", "fp8", "mxfp4", "fp8", "nvfp4", "fp8", "mxfp4"):
        before = drawn(explorer.figure)
        explorer.boxes[name].value = not explorer.boxes[name].value
        assert drawn(explorer.figure) != before
        assert_shows(explorer, rounding_picture(chains, explorer.on))
        seconds.append(explorer.seconds)
        seen.add(explorer.caption.value)
    assert len(seen) == 8
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    report(capsys, "rounding", seconds)


def test_the_explorers_run_what_they_are_given(lab, chains):
    explorer = RoundingExplorer(lab, TEXT, on=["fp8"])
    assert explorer.on == ["fp8"]
    assert explorer.chains[frozenset(["fp8"])].kl == chains[frozenset(["fp8"])].kl
    other = RoundingExplorer(lab, TEXT[:90])
    assert other.chains[frozenset(["fp8"])].kl != chains[frozenset(["fp8"])].kl


def test_controls_have_names_and_are_not_switched_off(tensors, chains):
    block, rounding = BlockExplorer(tensors=tensors), RoundingExplorer(chains=chains)
    for control in (block.tensor, block.row, block.channels, block.outlier,
                    *rounding.boxes.values()):
        assert control.description and not control.disabled
    assert 'aria-live="polite"' in block.caption.value
