"""Engram's figures show the run's rows and gates, and n-grams counted another way."""

import math
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import reduce
from operator import xor

import numpy as np
import pytest
import torch
from viz_helpers import nano_lab

import labkit
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.model.norm import mean_square_scale
from labkit.primes import engram_primes, engram_rows, is_prime
from labkit.text import Tokenizer
from labkit.text.engram_hash import addresses, engram_multipliers
from labkit.text.engram_map import engram_classes
from labkit.train.controls import muted_engram
from labkit.viz import engram as drawing
from labkit.viz import ngrams as counting
from labkit.viz import palette
from labkit.viz.engram import FULL, engram_over_text, line_of, lines
from labkit.viz.engram_data import (
    class_members,
    engram_addresses,
    muted_costs,
    record_engram,
)
from labkit.viz.muted import muted_over_text
from labkit.viz.ngram_data import Ngrams, census, expected_sharing, table_sizes

TEXT = "It is a truth universally acknowledged, that a single man & <wife> must THE the"
LONG = "She was not at all afraid of the rain, and the rain was not afraid. " * 5


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def recording(lab):
    return record_engram(lab, TEXT)


@pytest.fixture(scope="module")
def counted(lab):
    texts = [lab.encode(LONG), lab.encode(TEXT), lab.encode("of the")]
    return census(lab.config, lab.model.engram_classes, texts, 4)


def trace(picture, name):
    (found,) = [t for t in picture.figure.data if t.name == name]
    return found


def values(figure):
    return [(t.name, list(t.x or ()), list(t.y or ())) for t in figure.data]


# ---------------------------------------------------------------------------------- palette
@pytest.mark.parametrize("name", ("ORDERS", "MUTED"))
def test_classes_stay_apart_for_every_reader(name):
    marks = list(getattr(palette, name).values())
    assert palette.smallest_distance([mark.colour for mark in marks])[0] >= 11
    assert len({mark.letter for mark in marks}) == len(marks)
    assert set(drawing.SYMBOLS) == set(counting.SYMBOLS) == set(palette.ORDERS)


# ---------------------------------------------------------------------------------- look-ups
def test_lookups_lead_to_the_rows_that_the_model_read(lab, recording):
    c, ids = lab.config, lab.encode(TEXT)
    for layer in c.engram_layer_ids:
        m = engram_multipliers(layer, c.engram_compressed_vocab_size, c.engram_max_ngram_size)
        read = addresses(c, lab.model.engram_classes, torch.tensor([ids]))[
            0, :, c.engram_layer_ids.index(layer)]
        for token in (0, 1, 2, 3, len(ids) - 1):
            looked = recording.lookups(layer, token)
            assert [look.order for look in looked] == [2, 3, 4]
            assert [row for look in looked for row in look.rows] == read[token].tolist()
            for look in looked:
                numbers = [slot.number for slot in look.slots]
                assert look.multipliers == tuple(m[: look.order][::-1])
                assert look.mix == reduce(xor, (
                    n * k for n, k in zip(numbers, look.multipliers, strict=True)))
                assert look.mix < 2**63
                assert look.rows == tuple(
                    look.mix % p + o for p, o in zip(look.primes, look.offsets, strict=True))
                blocked = [slot.blocked for slot in look.slots]
                assert blocked == [token - back < 0 for back in range(look.order)][::-1]


def test_gates_are_the_definition_on_the_runs_streams(lab, recording):
    c = lab.config
    for number, layer in enumerate(c.engram_layer_ids):
        taps, own = lab.trace(TEXT), lab.model.layers[layer].engram
        h = taps[f"layers.{layer}.streams_in"][0]                                   # [T,C,D]
        memory = own.wkv(own.embed(taps["engram_hash_ids"][0, :, number]).flatten(-2))
        key = memory.unflatten(-1, (c.hc_mult + 1, -1))[:, :-1]
        dot = (h * own.q_weight * own.k_weight * key).sum(-1) * c.hidden_size**-0.5
        dot = dot * (mean_square_scale(h, c.rms_norm_eps)
                     * mean_square_scale(key, c.rms_norm_eps))[..., 0]
        gates = torch.sigmoid(dot.sign() * dot.abs().sqrt())
        assert torch.allclose(recording.gates[layer], gates, atol=2e-3)


def test_what_is_not_there_is_refused(lab, recording):
    with pytest.raises(InputError, match="layer is 0: Engram stands in layers 1, 4"):
        recording.lookups(0, 0)
    for token in (-1, len(recording)):
        with pytest.raises(InputError, match="token is .*this text has 0 to"):
            recording.lookups(1, token)
    with pytest.raises(InputError, match="tokens here: give a text of one"):
        class_members(lab.tokenizer, lab.model.engram_classes, "It is a truth")
    with pytest.raises(InputError, match="no token to predict"):
        muted_costs(lab, [0])


def test_members_of_a_class_are_all_entries_of_its_number(lab):
    classes = lab.model.engram_classes
    found = class_members(lab.tokenizer, classes, "A")
    assert {"a", "A"} <= set(found)
    same = int((classes[: lab.tokenizer.vocab_size] == classes[lab.tokenizer.encode("a")[0]]).sum())
    assert len(found) == same


def test_released_addresses_without_a_model():
    flash, released = ModelConfig.preset("flash"), Tokenizer.deepseek()
    classes, count = engram_classes(released)
    assert count == flash.engram_compressed_vocab_size
    found = engram_addresses(flash, released, classes, "the truth")
    assert found.gates == {} and found.rows.shape == (3, 2, 3, 8)
    picture = engram_over_text(found, 14, 2)
    assert list(trace(picture, "gate of a stream (full bar: open)").x) == []
    assert sum(len(trace(picture, f"row of the {n}-gram").x) for n in (2, 3, 4)) == 24
    assert "24 of 384,016,682 rows are read" in picture.caption
    assert engram_over_text(found, 1, 2).caption != picture.caption


# ---------------------------------------------------------------------------------- the figure
def test_the_figure_holds_rows_gates_and_classes(lab, recording):
    layer, token = 4, 9
    picture = engram_over_text(recording, layer, token)
    cells = line_of(recording, token)
    bars = trace(picture, "gate of a stream (full bar: open)")
    gates = recording.gates[layer]
    assert len(bars.y) == sum(cell.index >= 0 for cell in cells) * lab.config.hc_mult
    for (index, stream, gate), y in zip(bars.customdata, bars.y, strict=True):
        assert gate == pytest.approx(float(gates[index, stream]))
        assert y == pytest.approx(-FULL * gate)
    numbers = lab.model.engram_classes[torch.tensor(lab.encode(TEXT))].tolist()
    shown = trace(picture, "classes")
    assert [int(t) for t in shown.text] == [
        numbers[i] if i >= 0 else recording.pad.number for i in shown.customdata]
    total = engram_rows(lab.config)[1]
    for look in recording.lookups(layer, token):
        marks = trace(picture, f"row of the {look.order}-gram")
        assert [row for row, _ in marks.customdata] == list(look.rows)
        for x, row in zip(marks.x, look.rows, strict=True):
            share = (x - drawing.LEFT) / (drawing.COLUMNS - 0.5 - drawing.LEFT)
            assert share == pytest.approx(row / total)
        bracket = trace(picture, f"{look.order}-gram ({look.order})")
        assert list(bracket.customdata) == [token - look.order + 1, token]
    others = trace(picture, "rows read by the other tokens")
    tables = 3 * lab.config.engram_n_heads
    assert len(others.x) == 3 * tables * sum(0 <= cell.index != token for cell in cells)
    assert [f"{row:,}" in picture.alt for row in look.rows] == [True] * len(look.rows)


def test_the_figure_follows_layer_token_text_and_weights(lab, recording):
    base = engram_over_text(recording, 4, 9)
    others = [engram_over_text(recording, 1, 9), engram_over_text(recording, 4, 8),
              engram_over_text(record_engram(lab, TEXT.replace("truth", "lie")), 4, 9)]
    for other in others:
        assert values(other.figure) != values(base.figure) and other.caption != base.caption
        assert other.figure.layout.yaxis.range == base.figure.layout.yaxis.range
        assert other.figure.layout.xaxis.range == base.figure.layout.xaxis.range
    weight = lab.model.layers[4].engram.q_weight
    original = weight.clone()
    try:
        weight.mul_(-1)
        changed = engram_over_text(record_engram(lab, TEXT), 4, 9)
    finally:
        weight.copy_(original)
    assert list(trace(changed, base.figure.data[0].name).y) != list(base.figure.data[0].y)
    again = engram_over_text(record_engram(lab, TEXT), 4, 9)
    assert values(again.figure) == values(base.figure)


def test_every_token_stands_on_a_line_with_all_that_it_looks_back_to(lab):
    recording = record_engram(lab, LONG)
    assert len(lines(recording)) > 2
    for token in range(len(recording)):
        cells = line_of(recording, token)
        assert {token - 3, token} <= {cell.index for cell in cells}
        ends = [cell.column + cell.width for cell in cells]
        assert ends[:-1] == [cell.column for cell in cells[1:]] and ends[-1] <= drawing.COLUMNS
    assert f"of {len(recording)}" in engram_over_text(recording, 4, 40).caption


# ---------------------------------------------------------------------------------- muted
def test_muted_costs_are_two_cross_entropies(lab):
    costs, ids = muted_costs(lab, TEXT), lab.encode(TEXT)

    def nats():
        logits = lab.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return torch.tensor([-float(logits[t, ids[t + 1]]) for t in range(len(ids) - 1)])
    assert torch.allclose(costs.nats, nats(), atol=1e-4)
    with muted_engram(lab.model):
        assert torch.allclose(costs.muted, nats(), atol=1e-4)
    assert costs.bytes == len(TEXT.encode())
    assert costs.bits_per_byte == pytest.approx(
        float(costs.nats.sum()) / math.log(2) / len(TEXT.encode()))
    picture = muted_over_text(costs)
    up, down = picture.figure.data[:2]
    more = costs.more.tolist()
    assert {i: nats for t in (up, down) for i, nats in t.customdata} == {
        i + 1: nats for i, nats in enumerate(more)}
    assert all(nats > 0 for _, nats in up.customdata) and all(y <= 0 for y in up.y)
    assert all(nats <= 0 for _, nats in down.customdata) and all(y >= 0 for y in down.y)
    assert picture.rows[0][-1] == f"{max(more):+.2f}"
    assert f"{costs.bits_per_byte_muted:.2f}" in picture.caption


# ---------------------------------------------------------------------------------- n-grams
def test_a_census_is_the_count_of_tuples(lab, counted):
    c, classes = lab.config, lab.model.engram_classes
    m = engram_multipliers(4, c.engram_compressed_vocab_size, c.engram_max_ngram_size)
    texts = [classes[torch.tensor(lab.encode(t))].tolist() for t in (LONG, TEXT, "of the")]
    assert counted.tokens == sum(map(len, texts))
    for order, found in counted.ngrams.items():
        tuples = [tuple(t[i : i + order]) for t in texts for i in range(len(t) - order + 1)]
        expected = Counter(tuples)                       # in order of first appearance
        assert found.counts.tolist() == list(expected.values())
        mixes = [reduce(xor, (n * k for n, k in zip(t[::-1], m, strict=False))) for t in expected]
        assert found.mixes.tolist() == mixes
        assert found.total == len(tuples)
        top = sorted(expected.values(), reverse=True)[:3]
        assert found.hit_share(3) == pytest.approx(sum(top) / len(tuples))


@pytest.mark.parametrize("rows", (7, 101, 10_007))
def test_sharing_is_counted_as_by_hand(counted, rows):
    for found in counted.ngrams.values():
        for k in (1, 2, 10, len(found)):
            held = Counter(found.mixes[:k] % rows)
            share = sum(n for n in held.values() if n > 1) / k
            assert found.shared(rows, k) == pytest.approx(share)


def test_the_curve_is_what_chance_gives():
    rng = np.random.default_rng(3)
    mixes = rng.integers(0, 2**62, 40_000)
    found = Ngrams(2, mixes, np.ones(40_000, dtype=int))
    for rows in (5_003, 40_009, 1_000_003):
        assert found.shared(rows) == pytest.approx(expected_sharing(40_000, rows), abs=0.01)
    assert expected_sharing(1, 5_003) == expected_sharing(1, 1) == 0.0
    assert expected_sharing(2, 1) == 1.0
    assert expected_sharing(23, 365) == pytest.approx(1 - (364 / 365) ** 22)


def test_the_corpus_spreads_over_the_tables_as_chance_does():
    """On mini's vocabulary; its own primes, fractions and multiples of them."""
    from labkit.text.corpus import load_corpus

    config, released = ModelConfig.preset("mini"), ModelConfig.preset("flash")
    tokenizer = Tokenizer.from_file(labkit.paths.data_dir() / "mini")
    classes, _ = engram_classes(tokenizer, config.vocab_size)
    counted = census(config, classes, [tokenizer.encode(load_corpus("heldout")["emma"])], 1)
    for rows in (engram_primes(config)[0][0], 20_021, engram_primes(released)[0][0]):
        for found in counted.ngrams.values():
            assert found.shared(rows) == pytest.approx(expected_sharing(len(found), rows),
                                                       abs=0.03)


def test_table_sizes_are_primes_around_the_configs_own():
    config = ModelConfig.preset("mini")
    sizes = table_sizes(config, 16_000_057)
    assert all(map(is_prime, sizes)) and sizes == sorted(sizes)
    assert sizes[2] == engram_primes(config)[0][0] and sizes[-1] == 16_000_057


def test_collision_figures_hold_what_was_measured(counted):
    picture = counting.collisions(counted, 101)
    curve = trace(picture, "expected (birthday curve)")
    for x, y in zip(curve.x, curve.y, strict=True):
        assert y == pytest.approx(expected_sharing(round(10**x), 101))
    for order, found in counted.ngrams.items():
        points = trace(picture, f"measured, {order}-grams")
        assert points.customdata[-1][0] == len(found)
        for (k, share), x, y in zip(points.customdata, points.x, points.y, strict=True):
            assert share == y == pytest.approx(found.shared(101, k))
            assert x == pytest.approx(math.log10(k))
    other = counting.collisions(counted, 1009)
    assert values(other.figure) != values(picture.figure) and other.caption != picture.caption
    assert other.figure.layout.xaxis.range == picture.figure.layout.xaxis.range
    assert tuple(picture.figure.layout.yaxis.range) == (0, 1)


def test_frequency_figures_hold_the_counts(counted):
    ranks, hits = counting.rank_frequency(counted), counting.hit_shares(counted, (0.1, 0.5, 1.0))
    for (order, found), line, served in zip(counted.ngrams.items(), ranks.figure.data,
                                            hits.figure.data, strict=True):
        ordered = sorted(found.counts.tolist(), reverse=True)
        assert line.name == f"{order}-grams ({counting.SYMBOLS[order]})"
        for (rank, count), y in zip(line.customdata, line.y, strict=True):
            assert count == ordered[rank - 1] and y == pytest.approx(math.log10(count))
        for rank, share in served.customdata:
            assert share == pytest.approx(found.hit_share(rank))
    assert [row[-1] for row in hits.rows] == ["100%"] * 3
    assert [row[2] for row in ranks.rows] == [f"{len(f):,}" for f in counted.ngrams.values()]


# ---------------------------------------------------------------------------------- pictures
def test_pictures_tell_their_content_and_become_whole_svg_files(lab, recording, counted):
    pictures = [engram_over_text(recording, 4, 9), muted_over_text(muted_costs(lab, TEXT)),
                counting.collisions(counted, 101), counting.rank_frequency(counted),
                counting.hit_shares(counted)]
    for picture in pictures:
        meta = picture.figure.layout.meta
        assert meta["alt"] == picture.alt and len(picture.alt) > 40
        assert meta["caption"] == picture.caption and any(c.isdigit() for c in picture.caption)
        assert picture.rows and all(len(row) == len(picture.columns) for row in picture.rows)
        static = picture.static()
        root = ElementTree.fromstring(static.svg)
        assert root.attrib["aria-label"] == picture.alt and len(static.svg) < 100_000
        assert picture.caption in static.markdown()
        assert "<figcaption>" in picture.html() and "<script" not in picture.html()
    assert len({p.alt for p in pictures}) == len(pictures)
