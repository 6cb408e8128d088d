"""The record of a model: runs of the present form and of the first, their log, the sections."""

from __future__ import annotations

import json

import pytest
from figures_helpers import DRAFT, GOOD, changed

from labkit.config import ModelConfig
from labkit.errors import CheckpointError
from labkit.train.readme import readme_part
from labkit.train.record import command, training_record
from labkit.train.runs import (
    logs_of,
    read_plain,
    read_runs,
    stage_steps,
    tokens_read,
)

FIRST = {
    "step": 100, "seconds": 600.0, "cpu_seconds": 540.0, "threads": 2, "options": {
        "steps": 100, "seed": 3, "cooldown": 0.0, "rounding_from": 0.85, "start": "", "lr": 1e-3,
        "stages": [
            {"until": 0.25, "tokens": 1024, "length": 128, "selecting": "all",
             "shares": {"copy": 1.0}},
            {"until": 1.0, "tokens": 2048, "length": 256, "selecting": "index",
             "shares": {"novels": 0.5, "facts": 0.5}}]}}
SECOND = {
    "step": 40, "seconds": 120.0, "threads": 1, "options": {
        "steps": 50, "seed": 0, "cooldown": 0.5, "rounding_from": 0.5, "start": "abc",
        "stages": [{"until": 1.0, "tokens": 4096, "length": 2048, "selecting": "index",
                    "shares": {"novels": 0.9, "facts": 0.1}}]}}
OLD = {"step": 20, "seconds": 60.0, "threads": 1, "options": {
    "steps": 20, "batch": 2, "length": 1024, "seed": 0, "rounding_from": 0.8}}


def line(step, **more):
    return {"step": step, "loss": 3.0, "index_loss": 0.1, "expert_load_max": 1.5,
            "rounding": False, **more}


LOG = [line(50, run=1, tokens=76800, loss_by_kind={"novels": 4.25, "facts": 1.5}),
       line(100, run=1, tokens=179200, heldout_bits_per_byte=1.9),
       line(40, run=2, tokens=163840, loss_by_kind={"novels": 4.0})]


def write(folder, runs):
    (folder / "run.json").write_text(json.dumps(runs), encoding="utf-8")
    return read_runs(folder)


def test_runs_are_read_in_both_forms(tmp_path):
    assert read_runs(tmp_path) == []
    assert write(tmp_path, [FIRST, SECOND]) == [FIRST, SECOND]
    assert write(tmp_path, FIRST) == [FIRST]
    (old,) = write(tmp_path, OLD)
    assert tokens_read(old) == 20 * 2048 and tokens_read(old, 5) == 5 * 2048
    assert logs_of([old], [line(10)])[0][0]["tokens"] == 10 * 2048


def test_stages_are_counted():
    assert stage_steps(FIRST) == [25, 75] and stage_steps(FIRST, 30) == [25, 5]
    assert tokens_read(FIRST) == 25 * 1024 + 75 * 2048
    assert stage_steps(SECOND) == [40] and tokens_read(SECOND) == 40 * 4096   # stopped early


def test_the_command_is_told():
    assert command(FIRST) == "labkit train --steps 100 --seed 3 --cooldown 0.0"
    assert command(SECOND) == "labkit train --steps 50 --rounding-from 0.5 --start CHECKPOINT"


def test_a_log_must_fit_the_runs():
    first, second = logs_of([FIRST, SECOND], LOG)
    assert [e["step"] for e in first] == [50, 100] and [e["step"] for e in second] == [40]
    with pytest.raises(CheckpointError, match='2 runs.*of 1: .*"run"'):
        logs_of([FIRST, SECOND], LOG[:2])


def test_the_record_tells_each_run():
    config = ModelConfig.preset("nano")
    text = training_record(config, [FIRST, SECOND], LOG, GOOD)
    assert "held out, and text written by code (`labkit/text/synthetic.py`): copy, facts." in text
    first, second = text.split("### Run 2")
    assert "100 steps, 179,200 tokens, 10 minutes on a CPU, 2 threads; 9 minutes of processor" \
        in first
    assert "| 1 | 25 | 1,024 | 128 | all | 100% |  |  |" in first
    assert "| 2 | 75 | 2,048 | 256 | index |  | 50% | 50% |" in first
    assert "40 steps, 163,840 tokens, 2 minutes on a CPU, 1 thread." in second
    assert "starting from the run before" in second
    assert "| 50 | 76,800 | 3.000 | 1.50 | 4.25 | 0.1000 |  | 1.5 | off |" in second
    assert "| 100 | 179,200 | 3.000 |  |  | 0.1000 | 1.9 | 1.5 | off |" in second
    assert "### Targets" in text and "| reached |" in text and "missed" not in text
    assert "> **It is** a truth" in text
    one = training_record(config, [FIRST], LOG[:2], changed(draft=DRAFT, replay=GOOD.replay))
    assert "Run 1" not in one and "### Targets" in one


def test_the_readme_part_shows_what_there_is():
    text = readme_part(GOOD, [FIRST, SECOND], None)
    assert "trained for 12 minutes on one CPU core, on 0.3 million tokens" in text
    assert "| as shipped (weights and cache rounded) | 1.500 |" in text
    assert "on the same rows | 1.510 |" in text
    assert "| tokens back | 64 | 256 | 1024 |" in text
    assert "| as shipped | 98 % | 97 % | 100 % |" in text
    assert "| window only | 6 % | - | - |" in text
    assert "> It is a truth" in text and "Of five drafted tokens 1.30 are accepted" in text
    bare = readme_part(changed(plain=None, draft=None, recall=(), samples=()), [FIRST], None)
    assert "plain transformer" not in bare and "tokens back" not in bare and ">" not in bare


def test_the_comparison_is_read(tmp_path):
    assert read_plain(tmp_path) is None
    known = {"parameters": 1, "tokens": 2, "steps": 3, "heldout_bits_per_byte": 1.8,
             "seconds": 4.0, "command": "labkit train-plain"}
    path = tmp_path / "plain.json"
    path.write_text(json.dumps({**known, "more": 5}))
    assert read_plain(tmp_path).heldout_bits_per_byte == 1.8
    path.write_text(json.dumps({"parameters": 1}))
    with pytest.raises(CheckpointError, match="lacks tokens, steps.*train-plain"):
        read_plain(tmp_path)
