"""Footprints and the ledger: their numbers follow from what they say they follow from."""

from __future__ import annotations

import pytest

from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.exercises.tasks import ledger_bytes
from labkit.explorers.footprint import CONTEXTS, FootprintExplorer
from labkit.viz.footprint import counted, designs, footprint, grouped_query, told
from labkit.viz.ledger import CLAIMS, TEXTS, VERDICTS, Ledger

FLASH = ModelConfig.preset("flash")


# ---- footprints --------------------------------------------------------------------------------
def test_bytes_counted_in_stores_are_those_that_learners_compute():
    for name in ("flash", "mini", "nano"):
        c = ModelConfig.preset(name)
        ratios = [c.compress_ratios[i] for i in c.kv_source_layer_ids]
        assert counted(c) == ledger_bytes.solution(ratios, c.head_dim, c.index_head_dim)
    assert counted(FLASH) == 890


def test_designs_by_hand():
    by_name = {d.name: d.bytes_a_token for d in designs(FLASH)}
    assert by_name["V1 67B"] == 389_120 and by_name["V3.2"] == 48_068
    assert round(by_name["V4-Flash"]) == 3_514 and by_name["MLA, 40 layers"] == 46_080
    assert grouped_query(2, 3, 4, size=1) == 48
    sizes = [d.bytes_a_token for d in designs(FLASH)]
    assert sizes == sorted(sizes, reverse=True)
    assert [told(x) for x in (999, 1500, 2.5e6, 9.33e8, 1.31e11, 2e12)] == [
        "999 B", "1.5 KB", "2.5 MB", "933 MB", "131 GB", "2 TB"]


def test_bars_are_logarithms_and_the_table_counts_what_fits():
    listed = designs(FLASH)
    picture = footprint(listed, 4096, 1e9)
    bars = picture.figure.data[0]
    for design, start, length, row in zip(listed, bars.base, bars.x, picture.rows, strict=True):
        assert 10 ** (start + length) == pytest.approx(design.bytes_a_token * 4096)
        assert row[3] == f"{int(1e9 // (design.bytes_a_token * 4096)):,}"
    assert "V4.1-Flash" in picture.caption and "4,096 tokens" in picture.alt
    assert picture.static().svg.startswith("<svg")
    with pytest.raises(InputError, match="tokens is 0"):
        footprint(listed, 0, 1e9)


def test_the_explorer_follows_its_controls(capsys):
    explorer = FootprintExplorer(designs(FLASH), {"small": 5e11, "large": 1e12, "huge": 4e12},
                                 weights=510_286_023_000)
    assert len(explorer.memory.options) == 2, "a machine that lacks room for weights is left out"
    seconds, seen = [], set()
    for tokens in (CONTEXTS[0], CONTEXTS[5]):
        for _, memory in explorer.memory.options[::-1]:
            explorer.tokens.value, explorer.memory.value = tokens, memory
            picture = explorer.picture()
            for live, new in zip(explorer.figure.data, picture.figure.data, strict=True):
                assert list(live.x) == list(new.x)
            assert explorer.figure.layout.meta["caption"] == picture.caption
            seen.add(picture.caption)
            seconds.append(explorer.seconds)
    assert len(seen) == 4
    with capsys.disabled():
        print(f"\na move of the footprint explorer: at most {max(seconds) * 1000:.0f} ms "
              "(aim 100)")


# ---- the ledger --------------------------------------------------------------------------------
def test_the_claims_are_numbered_and_by_somebody():
    assert [c.number for c in CLAIMS] == list(range(1, 29))
    assert all(c.says and set(c.by) <= set(TEXTS) and c.by for c in CLAIMS)


def test_verdicts_are_entered_counted_and_drawn():
    ledger = Ledger()
    assert "open" in ledger._repr_mimebundle_()["text/plain"]
    assert ledger.judge(1, True, "counted") == " 1 holds: counted"
    ledger.judge(3, False, "too much")
    ledger.add(20, "not derivable here", "unknown")
    counts = ledger.counts()
    assert counts["A"] == {"holds": 1, "wrong": 1, "not derivable here": 1}
    assert counts["C"] == {"holds": 1, "not derivable here": 1}
    picture = ledger.picture()
    shown = {trace.name: list(trace.x) for trace in picture.figure.data}
    assert shown["wrong"] == [1, 0, 0] and shown["holds"] == [1, 1, 1]
    assert picture.caption == "Of 28 claims 1 hold, 1 are wrong, 1 are not derivable here."
    assert set(shown) == set(VERDICTS)
    for bad in ((0, "holds", "x"), (29, "holds", "x"), (1, "true", "x"), (1, "holds", "")):
        with pytest.raises(InputError):
            ledger.add(*bad)
