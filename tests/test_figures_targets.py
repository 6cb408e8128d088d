"""Targets: which way they point, what is not measured, and what is told of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from figures_helpers import DRAFT, GOOD, changed
from typer.testing import CliRunner

from labkit.cli import app
from labkit.train import figures as figures_module
from labkit.train.figure_tables import figures_text, tables
from labkit.train.figures import Figures
from labkit.train.recall import AS_SHIPPED, RecallPoint, wilson
from labkit.train.targets import Target, missed, targets


@pytest.mark.parametrize("direction, below, at, above", [
    ("<=", True, True, False), ("<", True, False, False),
    (">=", False, True, True), (">", False, False, True)])
def test_directions(direction, below, at, above):
    found = [Target("t", value, direction, 2.0, "so").reached for value in (1.0, 2.0, 3.0)]
    assert found == [below, at, above]


def test_what_is_not_known_is_not_reached():
    for value, bound in ((None, 1.0), (1.0, None), (math.nan, 1.0)):
        for direction in ("<=", "<", ">=", ">"):
            target = Target("t", value, direction, bound, "so")
            assert not target.reached and target.verdict in ("missed", "not measured")
            assert missed([target]) == [target]
    aim = Target("t", 0.0, ">=", 1.0, "so", aim=True)
    assert not aim.reached and missed([aim]) == []


def test_good_figures_reach_all():
    assert missed(targets(GOOD)) == []
    assert len(targets(GOOD)) == 13


@pytest.mark.parametrize("fields, name", [
    (dict(bits_per_byte=1.76, bits_per_byte_unrounded_cache=1.76,
          plain=replace(GOOD.plain, heldout_bits_per_byte=1.9)), "of the held-out novels"),
    (dict(bits_per_byte_unrounded_cache=1.48), "rounding the cache"),
    (dict(plain=replace(GOOD.plain, heldout_bits_per_byte=1.5)), "below a plain"),
    (dict(plain=None), "below a plain"),
    (dict(recall=(*GOOD.recall, RecallPoint(AS_SHIPPED, 32, 160, 60, 64))), "up to 256"),
    (dict(attention_mass=(replace(GOOD.attention_mass[0], kept=0.89),
                          *GOOD.attention_mass[1:])), "mass kept, held-out"),
    (dict(attention_mass=(*GOOD.attention_mass[:2],
                          replace(GOOD.attention_mass[2], kept=0.89))), "mass kept, needle"),
    (dict(attention_mass=GOOD.attention_mass[:2]), "mass kept, needle"),
    (dict(kinds=(replace(GOOD.kinds[0], bits_per_byte_muted=1.509), *GOOD.kinds[1:])),
     "novels, bi"),
    (dict(kinds=(*GOOD.kinds[:2], replace(GOOD.kinds[2], bits_per_byte_muted=1.6))), "verbatim"),
    (dict(replay=replace(GOOD.replay, mean=0.021)), "replay"),
    (dict(draft=replace(DRAFT, sampled_length=1.19)), "prose"),
    (dict(draft=replace(DRAFT, code_sampled_length=1.99)), "drafts, code"),
    (dict(draft=replace(DRAFT, code_sampled_length=None)), "drafts, code"),
    (dict(draft=replace(DRAFT, ece_after=(0.01, 0.051))), "calibration"),
])
def test_each_target_is_missed_alone(fields, name):
    (lost,) = missed(targets(changed(**fields)))
    assert name in lost.name


def test_far_recall_is_an_aim():
    far = changed(recall=(*GOOD.recall, RecallPoint(AS_SHIPPED, 1900, 2028, 0, 16)))
    assert missed(targets(far)) == []
    (told,) = (t for t in targets(far) if not t.reached)
    assert told.aim and "1900" in told.measured


def test_controls_do_not_count_as_recall():
    """The control at 1 of 16 in the good figures would miss the target by far."""
    found = next(t for t in targets(GOOD) if "up to 256" in t.name)
    assert found.value == 62 / 64 and "62 of 64" in found.measured


def test_a_checkpoint_without_draft_misses_three_targets():
    lost = missed(targets(changed(draft=None)))
    assert [t.measured for t in lost] == ["no draft"] * 3
    assert all(t.value is None and t.verdict == "not measured" for t in lost)
    assert "no draft" in figures_text(changed(draft=None))


def test_wilson_interval():
    for right, count, low, high in ((0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0),
                                    (50, 100, 0.4038, 0.5962)):
        assert wilson(right, count) == pytest.approx((low, high), abs=2e-4)


def test_figures_survive_json():
    for figures in (GOOD, changed(draft=None, plain=None, file_bytes=None, recall=())):
        text = json.dumps(figures.to_dict())
        assert Figures.from_dict(json.loads(text)) == figures
        assert len(json.loads(text)["targets"]) == 13


def test_every_figure_is_told():
    text = figures_text(GOOD)
    for value in ("5,000", "2,000", "7,000", "2,048", "1.5000", "1.4990", "1.6000", "2.9000",
                  "2.8000", "1.5100", "98% of 64", "6% of 16", "0.950", "+1.000", "2.30 (1.30)",
                  "2.60 (1.60)", "3.10 (2.10)", "0.010 0.020", "100.0%", "12 of 12 targets"):
        assert value in text, value
    for table in tables(GOOD):
        rows = [line for line in table.markdown() if line.startswith("|")]
        assert len({row.count(" | ") for row in rows}) == 1, table.title
    assert max(map(len, text.splitlines())) < 200


def test_the_command_reports_and_fails_only_when_asked(monkeypatch):
    monkeypatch.setattr("labkit.lab.load", lambda source: source)
    asked = []

    def measured(figures):
        def measure(lab, effort, **options):
            asked.append(effort)
            return figures
        return measure

    def run(*words):
        return CliRunner().invoke(app, ["eval", "mini", *words])

    monkeypatch.setattr(figures_module, "measure", measured(GOOD))
    assert run().exit_code == run("--strict").exit_code == 0
    monkeypatch.setattr(figures_module, "measure", measured(changed(draft=None)))
    assert run().exit_code == 0 and "not measured" in run().stdout
    assert run("--strict").exit_code == 1
    found = json.loads(run("--quick", "--json").stdout)
    assert found["draft"] is None and found["targets"][0]["verdict"] == "reached"
    assert asked[0] == figures_module.FULL and asked[-1] == figures_module.QUICK

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(figures_module, "measure", interrupted)
    result = run()
    assert result.exit_code == 130 and "Traceback" not in result.output
