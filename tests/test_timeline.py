"""A recorded conversation: kinds of hit follow the pauses, bytes are those of the stores."""

import json

import pytest
from typer.testing import CliRunner

import labkit
from labkit.cli import app
from labkit.engine.cache_view import conversation_view, talk
from labkit.engine.timeline import Conversation, ManualClock
from labkit.errors import InputError


@pytest.fixture(scope="module")
def lab():
    return labkit.load("mini")


def test_pauses_decide_what_is_found(lab):
    told = talk(lab.model, lab.tokenizer, 6, [30.0, 600.0])
    kinds = [turn.hit.kind for turn in told.turns]
    known = [turn.hit.known for turn in told.turns]
    assert kinds[0] == "cold" and kinds[2] == kinds[4] == "full"
    for before, turn in zip(told.turns, told.turns[1:], strict=False):
        pause = turn.at - before.at
        assert pause == (600 if turn.number % 2 == 0 else 30)
        if turn.hit.kind == "full":
            assert pause == 30 and turn.hit.known == before.length and turn.hit.replayed == 0
        else:  # pages of 128 tokens are left, and at most a window is saved of the first 64
            assert pause == 600 and turn.hit.known in (0, before.length // 128 * 128)
            assert turn.hit.replayed == (64 if turn.hit.kind == "global-only" else 0)
            assert turn.lost["windows"] >= 1
        assert turn.hit.computed == turn.hit.prompt - turn.hit.known + turn.hit.replayed
        assert turn.length == before.length + turn.said + turn.new
    assert "global-only" in kinds and max(known) > 256
    assert [t.length for t in told.turns] == sorted(t.length for t in told.turns)
    view = conversation_view(told)
    assert "layer 4 index_keys" in view and "global-only" in view
    json.dumps([turn.to_dict() for turn in told.turns])


def test_a_second_talk_finds_the_first_ones_pages(lab, tmp_path):
    first = talk(lab.model, lab.tokenizer, 4, [1.0], store=str(tmp_path))
    again = talk(lab.model, lab.tokenizer, 4, [1.0], store=str(tmp_path))
    assert [t.hit.kind for t in first.turns][0] == "cold"
    assert again.turns[-1].stores["disk"] >= first.turns[-1].stores["disk"] > 0
    assert first.turns[-1].length == again.turns[-1].length
    assert sum(t.hit.tiers.get("disk", 0) for t in again.turns) > 0


def test_windows_of_a_draft_are_listed_and_weigh_the_same_in_every_turn():
    with pytest.warns(UserWarning, match="random"):
        lab = labkit.load("nano")
    told = talk(lab.model, lab.tokenizer, 3, [1.0], form="packed", reply=4)
    stages, window = len(lab.model.mtp), told.session.cache.draft_windows[0].nbytes
    assert [turn.session["draft"] for turn in told.turns] == [stages * window] * 3
    row, = (r for r in conversation_view(told).splitlines() if r.startswith("windows of the draft"))
    assert f"{stages} stages" in row and row.split()[-2:] == [f"{stages * window:,}", "0"]
    # The pool holds a state a turn, the draft's windows in each.
    pooled = [turn.stores["windows"] for turn in told.turns]
    assert all(b - a > stages * window for a, b in zip(pooled, pooled[1:], strict=False))
    lab = labkit.load("mini")
    bare = talk(lab.model, lab.tokenizer, 1, [1.0], reply=1)
    if lab.model.mtp is None:
        assert "draft" not in conversation_view(bare) and bare.turns[0].session["draft"] == 0


def test_what_does_not_fit_changes_nothing(lab):
    clock = ManualClock()
    with lab.prefix_cache(clock=clock) as cache:
        told = Conversation(cache, lab.tokenizer, clock)
        told.say("She was", 2)
        before = list(told.ids)
        with pytest.raises(InputError, match="do not fit the context of 2048"):
            told.say("word " * 2100)
        with pytest.raises(InputError, match="empty"):
            told.say("")
        with pytest.raises(InputError, match="does not go back"):
            clock.wait(-1)
        assert told.ids == before and len(told.turns) == 1
    with pytest.raises(InputError, match="at least 1"):
        talk(lab.model, lab.tokenizer, 0, [1.0])


def test_inspect_cache_prints_both_tables():
    found = CliRunner().invoke(app, ["inspect", "cache", "--turns", "3", "--wait", "5"])
    assert found.exit_code == 0, found.output
    assert "104." in found.output or "105." in found.output  # bytes a token of mini
    assert found.output.count("full") >= 2
    found = CliRunner().invoke(app, ["inspect", "cache", "--turns", "2", "--json"])
    turns = json.loads(found.output)
    assert len(turns) == 2 and turns[0]["hit"]["kind"] == "cold"
