"""The explorers of speculative decoding, driven by their controls."""

from html import escape

import pytest
from test_viz_dspark import study
from viz_helpers import nano_lab

import labkit
from labkit.explorers.load import LoadExplorer
from labkit.explorers.speculation import SpeculationExplorer
from labkit.viz.load import throughput
from labkit.viz.load_data import MIXED
from labkit.viz.speculation import speculation_step


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


def drawn(figure):
    return [(t.name, list(t.x), list(t.y), None if t.text is None else list(t.text))
            for t in figure.data]


def p95(seconds):
    return sorted(seconds)[int(0.95 * (len(seconds) - 1))]


def assert_shows(explorer, picture):
    assert drawn(explorer.figure) == drawn(picture.figure)
    assert explorer.figure.layout.meta["alt"] == picture.alt
    assert escape(picture.caption) in explorer.caption.value
    assert explorer.table.value.count("<tr>") == len(picture.rows) + 1


def test_steps_of_a_text(lab, capsys):
    explorer = SpeculationExplorer(lab, "She was not", 24, seed=3)
    traces, seconds, seen = explorer.figure.data, [], set()
    assert explorer.step.max == len(explorer.recording.steps) > 3
    for number in [*range(2, explorer.step.max + 1), 1]:
        before = drawn(explorer.figure)
        explorer.step.value = number
        assert drawn(explorer.figure) != before
        picture = speculation_step(explorer.recording, number - 1, 5)
        assert drawn(explorer.figure) == drawn(picture.figure)
        assert tuple(explorer.figure.layout.yaxis.ticktext) == tuple(
            picture.figure.layout.yaxis.ticktext)
        assert escape(picture.caption) in explorer.caption.value
        assert_shows(explorer, explorer.picture())
        seconds.append(explorer.seconds)
        seen.add(explorer.caption.value)
    assert len(seen) == explorer.step.max
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert tuple(explorer.figure.layout.xaxis.range) == (0, 1)
    with capsys.disabled():
        print(f"\na move of the speculation explorer: p95 {p95(seconds) * 1000:.0f} ms (aim 100)")


def test_every_other_control_writes_another_text(lab):
    explorer = SpeculationExplorer(lab, "She was not", 12, seed=3)
    for control, value in (("temperature", 0.0), ("prompt", "He had"), ("policy", 0.5),
                           ("temperature", 0.7)):
        explorer.step.value = 2
        before = drawn(explorer.figure), explorer.recording
        getattr(explorer, control).value = value
        assert explorer.step.value == 1 and explorer.recording is not before[1]
        assert drawn(explorer.figure) != before[0]
        assert explorer.step.max == len(explorer.recording.steps)
        assert_shows(explorer, explorer.picture())
    assert explorer.recording.prompt == "He had" in explorer.text.value
    expected = lab.generate("He had", 12, seed=3, temperature=0.7, top_p=1.0, speculative=True,
                            policy=labkit.engine.scheduling.Threshold(0.5))
    assert explorer.recording.ids == expected.ids


def test_a_bad_prompt_is_told_and_the_text_stays(lab):
    explorer = SpeculationExplorer(lab, "She was not", 12, seed=3)
    kept = explorer.recording
    explorer.prompt.value = ""
    assert 'role="alert"' in explorer.text.value and "prompt is empty" in explorer.text.value
    assert explorer.recording is kept


def test_loads(capsys):
    explorer = LoadExplorer({"on the plane": study(), "as measured": study(0.004)}, requests=4)
    traces, seconds = explorer.figure.data, []
    ranges = explorer.figure.layout.xaxis.range, explorer.figure.layout.yaxis.range
    for control, value in (("requests", 1), ("requests", 8), ("kind", "code"), ("kind", MIXED),
                           ("step", 9), ("rates", "as measured"), ("requests", 5), ("step", 2)):
        before = drawn(explorer.figure)
        getattr(explorer, control).value = value
        assert drawn(explorer.figure) != before, control
        assert_shows(explorer, throughput(explorer.load, explorer.kind.value,
                                          explorer.requests.value, explorer.step.value))
        seconds.append(explorer.seconds)
    assert all(a is b for a, b in zip(traces, explorer.figure.data, strict=True))
    assert (explorer.figure.layout.xaxis.range, explorer.figure.layout.yaxis.range) == ranges
    with capsys.disabled():
        print(f"\na move of the load explorer: p95 {p95(seconds) * 1000:.0f} ms (aim 100)")


def test_controls_have_names_and_the_static_picture_is_of_the_moment(lab):
    loads = LoadExplorer({"on the plane": study()}, requests=4)
    steps = SpeculationExplorer(lab, "She was not", 12, seed=3)
    for control in (loads.requests, loads.kind, loads.rates, loads.step, steps.prompt,
                    steps.temperature, steps.policy, steps.step):
        assert control.description and not control.disabled
    for explorer, control in ((loads, loads.requests), (steps, steps.step)):
        before = explorer.static().svg
        control.value += 1
        assert explorer.static().svg == explorer.picture().static().svg != before
