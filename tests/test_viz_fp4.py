"""Figures of formats, blocks, rounding and store forms: their numbers, computed another way."""

import itertools
import math
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from viz_helpers import nano_lab

import labkit
from labkit.errors import InputError
from labkit.numerics import FORMATS, dequantize, fake_quantize, quantize, relative_rms
from labkit.train.controls import cache_rounding
from labkit.viz import blocks, formats, palette, rounding, stores
from labkit.viz.attention_data import record

TEXT = ("It is a truth universally acknowledged, that a single man in possession of a good "
        "fortune, must be in want of a wife. However little known the feelings or views of such "
        "a man may be on his first entering a neighbourhood, this truth is so well fixed in the "
        "minds of the surrounding families, that he is considered the rightful property of some "
        "one or other of their daughters.")


@pytest.fixture(scope="module")
def lab():
    return labkit.load("mini", device="cpu")


@pytest.fixture(scope="module")
def nano():
    return nano_lab()


@pytest.fixture(scope="module")
def tensors(lab):
    return blocks.unrounded(lab, TEXT)


@pytest.fixture(scope="module")
def chains(nano):
    return rounding.measure(nano, TEXT)


@pytest.fixture(scope="module")
def weights(nano):
    return stores.weigh(nano.config, nano, nano.encode(TEXT))


def trace(picture, start):
    (found,) = [t for t in picture.figure.data if t.name.startswith(start)]
    return found


def told_in_words(picture):
    meta = picture.figure.layout.meta
    assert meta["alt"] == picture.alt and len(picture.alt) > 40
    assert meta["caption"] == picture.caption and any(c.isdigit() for c in picture.caption)
    assert picture.rows and all(len(row) == len(picture.columns) for row in picture.rows)
    static = picture.static()
    root = ElementTree.fromstring(static.svg)
    assert root.attrib["aria-label"] == picture.alt and picture.caption in static.markdown()
    assert len(static.svg) < 100_000
    return root


def test_the_recipes_colours_stay_apart():
    marks = palette.ROUNDING
    assert set(marks) == set(FORMATS)
    assert palette.smallest_distance([mark.colour for mark in marks.values()])[0] >= 11
    assert len({mark.pattern for mark in marks.values()}) == 3


# ---------------------------------------------------------------------------------- formats
def test_the_line_has_sixteen_codes_and_fourteen_ties():
    picture = formats.e2m1_line()
    told_in_words(picture)
    even, odd = trace(picture, "even code"), trace(picture, "odd code")
    drawn = dict(zip([*even.customdata, *odd.customdata], [*even.x, *odd.x], strict=True))
    by_hand = [0, .5, 1, 1.5, 2, 3, 4, 6]
    assert drawn == {code: (-1 if code > 7 else 1) * by_hand[code % 8] for code in range(16)}
    left, right = trace(picture, "a tie falls to the left"), trace(picture, "a tie falls to the r")
    ties = {**dict(zip(left.x, left.customdata, strict=True)),
            **dict(zip(right.x, right.customdata, strict=True))}
    assert {at: to for at, to in ties.items() if at > 0} == {
        .25: 0, .75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4}
    assert len(ties) == 14 and all(ties[-at] == -to for at, to in ties.items())
    assert all(to < at for at, to in zip(left.x, left.customdata, strict=True))
    assert "6 grow and 8 shrink" in picture.caption
    assert sorted(trace(picture, "codes").text) == sorted(f"{code:04b}" for code in range(16))


def test_three_formats_are_torchs_own():
    picture = formats.three_formats()
    told_in_words(picture)
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3 = codes.view(torch.float8_e4m3fn).float()
    wanted = sorted(v for v in e4m3.tolist() if v > 0 and math.isfinite(v))
    assert list(trace(picture, "E4M3").customdata) == wanted and len(wanted) == 126
    ue8m0 = [v for v in codes.view(torch.float8_e8m0fnu).double().tolist() if 2**-18 <= v <= 2**18]
    assert list(trace(picture, "UE8M0").customdata) == ue8m0 and len(ue8m0) == 37
    for one in picture.figure.data:
        assert list(one.x) == pytest.approx([math.log2(v) for v in one.customdata])
    assert [row[2] for row in picture.rows] == [16, 256, 256]


# ---------------------------------------------------------------------------------- blocks
def test_vectors_are_those_of_a_run_without_rounding(lab, tensors):
    with cache_rounding(lab.model, False):
        run = lab.trace(TEXT)
    assert lab.model.cache_rounding is True
    for layer in (1, 4):
        for name, recipe, tap in (("entry", "nvfp4", "compressed_kv"),
                                  ("index key", "mxfp4", "index_keys"), ("window key", "fp8", "")):
            own = tensors[f"{name} of layer {layer}"]
            assert own.recipe == recipe
            wanted = (run[f"layers.{layer}.attn.{tap}"][0] if tap
                      else run[f"layers.{layer}.attn.window"][0, 64:])
            assert torch.equal(own.rows, wanted)
            assert not torch.equal(own.rows, fake_quantize(own.rows, recipe))


@pytest.mark.parametrize("factor", (1, 16, 1024))
def test_the_block_is_what_the_package_stores(tensors, factor):
    picture = blocks.block_picture(tensors, "entry of layer 1", 9, 32, factor)
    root = told_in_words(picture)
    exact = tensors["entry of layer 1"].rows[9, 32:64]
    at = max(range(32), key=lambda i: abs(float(exact[i])))
    grown = exact.clone()
    grown[at] *= factor
    limit = float(exact.abs().max())
    for number, recipe in enumerate(("fp8", "mxfp4", "nvfp4")):
        bars, q = picture.figure.data[number], quantize(grown, recipe)
        values = dequantize(q)
        assert [pair[1] for pair in bars.customdata] == values.tolist()
        assert [pair[0] for pair in bars.customdata] == grown.tolist()
        assert list(bars.y) == pytest.approx(
            [max(-1.1, min(1.1, v / limit)) for v in values.tolist()])
        others = [i for i in range(32) if i != at]
        noise = sum((float(values[i]) - float(grown[i])) ** 2 for i in others)
        error = (noise / sum(float(grown[i]) ** 2 for i in others)) ** 0.5
        assert picture.rows[number][3] == f"{error:.1%}"
        assert picture.rows[number][4] == f"{sum(float(values[i]) == 0 for i in others)} of 31"
        codes = trace(picture, "codes")
        assert list(codes.customdata)[32 * number : 32 * number + 32] == q.codes.tolist()
        digits = 2 if recipe == "fp8" else 1
        assert list(codes.text)[32 * number] == f"{int(q.codes[0]):0{digits}X}"
    shown = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"FP8", "MXFP4", "NVFP4"} <= shown
    assert len(trace(picture, "outside").x) == (0 if factor == 1 else 3)
    assert len(trace(picture, "as computed").x) == (96 if factor == 1 else 93)


def test_an_outlier_leaves_the_other_block_of_sixteen_alone(tensors):
    exact = tensors["entry of layer 4"].rows[3, :32]
    grown, at = blocks.with_outlier(exact, 512)
    far = slice(16, 32) if at < 16 else slice(0, 16)
    before, after = (blocks.stored(x, at, "nvfp4") for x in (exact, grown))
    assert torch.equal(before.values[far], after.values[far])
    assert after.zeros >= 15 and blocks.stored(grown, at, "mxfp4").zeros == 31
    assert blocks.stored(grown, at, "fp8").error < 0.05


def test_other_weights_give_other_blocks(nano, tensors):
    other = blocks.unrounded(nano, TEXT)
    name = next(name for name in other if name.startswith("entry"))
    picture = blocks.block_picture(other, name, 2)
    assert list(picture.figure.data[0].y) != list(
        blocks.block_picture(tensors, "entry of layer 1", 2).figure.data[0].y)
    assert picture.figure.layout.yaxis.range == blocks.block_picture(
        tensors, "entry of layer 1", 5, 32, 64).figure.layout.yaxis.range


# ---------------------------------------------------------------------------------- rounding
def test_attention_spread_over_places_is_what_a_look_says(lab):
    recording = record(lab, TEXT)
    W = lab.config.sliding_window
    for layer in (0, 1, 6):
        spread = recording.spread(layer)
        assert torch.allclose(spread.sum(-1), torch.ones(spread.shape[:2]), atol=1e-5)
        for query, head in ((0, 0), (40, 3), (len(recording) - 1, 7)):
            look, row = recording.look(layer, query, head), spread[query, head]
            assert [float(row[W - 1 - query + p]) for p, _ in look.window] == pytest.approx(
                [w for _, w in look.window], abs=1e-6)
            assert {e for e in range(len(row) - W - 1) if row[W + e] > 0} <= {
                e for e, *_ in look.entries}
            assert [float(row[W + e]) for e, *_ in look.entries] == pytest.approx(
                [w for *_, w in look.entries], abs=1e-6)
            assert float(row[-1]) == pytest.approx(look.sink, abs=1e-5)


def test_the_chain_compares_run_with_run(nano, chains):
    assert set(chains) == {frozenset(s) for n in range(4)
                           for s in itertools.combinations(FORMATS, n)}
    ids = nano.encode(TEXT)
    runs = {}
    for on in ((), ("mxfp4",), tuple(FORMATS)):
        with cache_rounding(nano.model, frozenset(on)):
            runs[on] = nano.trace(ids)
    exact = runs[()]
    for on, run in runs.items():
        chain = chains[frozenset(on)]
        for field, tap in (("window", "window"), ("entries", "compressed_kv"),
                           ("keys", "index_keys")):
            pairs = [(exact[n].flatten(), run[n].flatten()) for n in exact if n.endswith("." + tap)]
            a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
            assert getattr(chain, field) == pytest.approx(relative_rms(a, b), abs=1e-7)
        p, q = (t["logits"][0].double().log_softmax(-1) for t in (exact, run))
        assert chain.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), abs=1e-9)
        assert chain.same == float((p.argmax(-1) == q.argmax(-1)).double().mean())
        targets = torch.tensor(ids[1:])
        change = sum(float(p[i, t] - q[i, t]) for i, t in enumerate(targets)) / math.log(2)
        assert chain.bits == pytest.approx(change / len(TEXT.encode()), abs=1e-9)
        kept = total = 0
        for layer in nano.config.index_source_layer_ids:
            r, K = nano.config.compress_ratios[layer], nano.config.index_topk
            for i in range(len(ids)):
                if (i + 1) // r >= K and i >= K * r:
                    a, b = (set(t[f"layers.{layer}.attn.topk_indices"][0, i].tolist())
                            for t in (exact, run))
                    kept, total = kept + len(a & b), total + K
        assert total and chain.exchanged == pytest.approx(1 - kept / total, abs=1e-12)


def test_each_recipe_touches_its_own_tensor_most(chains):
    window, entries, keys = (chains[frozenset([r])] for r in ("fp8", "nvfp4", "mxfp4"))
    assert window.window > 0.01 and entries.entries > 0.05 and keys.keys > 0.05
    assert keys.entries < entries.entries and window.keys < keys.keys
    nothing = chains[frozenset()]
    assert (nothing.window, nothing.kl, nothing.attention, nothing.bits, nothing.same) == (
        0, 0, 0, 0, 1)


def test_the_picture_holds_the_chain(chains):
    seen = set()
    for on, chain in chains.items():
        picture = rounding.rounding_picture(chains, on)
        told_in_words(picture) if on else None
        values = [abs(getattr(chain, field)) for field, *_ in rounding.LINKS]
        dots = trace(picture, "the chosen ones")
        assert list(dots.customdata) == values
        assert list(dots.x) == [math.log10(min(1, max(1e-9, v))) for v in values]
        assert list(trace(picture, "all three").customdata) == [
            abs(getattr(chains[rounding.ALL], field)) for field, *_ in rounding.LINKS]
        seen.add((picture.caption, picture.alt))
        assert tuple(picture.figure.layout.xaxis.range) == (-9, 0)
    assert len(seen) == 8
    with pytest.raises(InputError, match="'fp4': choose one"):
        rounding.rounding_picture(chains, ["fp4"])


# ---------------------------------------------------------------------------------- stores
def test_bytes_are_those_of_the_storages_and_of_the_recipes(nano, weights):
    flash = labkit.ModelConfig.preset("flash")
    assert stores.bytes_a_token(flash, "packed") == {"global_kv": 720.0, "index_keys": 170.0}
    assert stores.bytes_a_token(flash, "fp8") == {"global_kv": 1320.0, "index_keys": 330.0}
    picture = stores.stores_picture(weights, "nano", "a sentence")
    told_in_words(picture)
    assert [one.form for one in weights] == ["packed", "fp8", "bf16", "plain"]
    kv, keys = trace(picture, "compressed entries"), trace(picture, "index keys")
    assert list(kv.x) == [one.global_kv for one in weights]
    assert list(keys.base) == list(kv.x) and list(keys.x) == [one.index_keys for one in weights]
    c = nano.config
    per_token = sum(1 / c.compress_ratios[layer] for layer in c.kv_source_layer_ids)
    assert weights[2].total == 2 * (c.head_dim + c.index_head_dim) * per_token
    assert weights[0].kl == 0 and weights[2].kl < 1e-6 < weights[1].kl


def test_changes_are_those_of_the_session(nano, weights):
    ids = nano.encode(TEXT)
    p, q = (nano.session(form).prefill(ids)[0].double().log_softmax(-1)
            for form in ("packed", "fp8"))
    kl = (p.exp() * (p - q)).sum(-1).clamp(min=0)
    assert weights[1].kl == pytest.approx(float(kl.mean()))
    assert weights[1].kl_max == pytest.approx(float(kl.max()))
