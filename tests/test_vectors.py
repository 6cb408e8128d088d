"""Every golden vector, stage by stage, under the rules of `labkit.mutants.rules`.

The vectors are inputs and outputs of an independent implementation. Both kernel sets are held to
the same rules; what is loaded goes through `labkit.load`, as a user's checkpoint does.
"""

import functools
import json

import helpers
import pytest
import torch
from safetensors import safe_open

import labkit
from labkit.cache import GlobalStore
from labkit.errors import ConfigError
from labkit.mutants import checks, golden, rules
from labkit.mutants.oracle import Oracle
from labkit.mutants.schedules import one_pass
from labkit.mutants.vectors import bf16_rule

FP32_CASES = ("text", "long", "no_candidates", "ratio4", "padded", "released_layout")
NOT_COMPARED = ("input_ids", "lengths")  # inputs; dspark.* belongs to the draft


@pytest.fixture(scope="module", autouse=True)
def _folders():
    yield
    helpers.remove_folders()


def stored(case, rounding):
    """Names of the tensors to compare; none where there is no such file."""
    path = helpers.GOLDEN / case / ("expected" if rounding else "expected_unrounded")
    path = path.with_suffix(".safetensors")
    if not path.exists():
        return []
    with safe_open(path, "pt") as file:
        return sorted(n for n in file.keys() if n not in NOT_COMPARED and n[:7] != "dspark.")


STAGES = [
    pytest.param(case, rounding, kernels, name,
                 id=f"{case}-{'rounded' if rounding else 'exact'}-{kernels}-{name}")
    for case in FP32_CASES for rounding in (False, True) for kernels in helpers.KERNELS
    for name in stored(case, rounding)
]


def test_there_is_a_vector_for_every_stage():
    """The files were not emptied: what the course relies on is in them."""
    names = {stage.values[3] for stage in STAGES if stage.values[0] == "text"}
    assert {"engram_hash_ids", "logits", "layers.6.attn.candidates", "layers.8.attn.topk_indices",
            "layers.2.attn.compressed_kv", "layers.4.attn.index_keys", "layers.0.attn.out",
            "layers.9.streams_in"} <= names
    for case in FP32_CASES:
        assert len(stored(case, True)) >= 13, case
        assert len(stored(case, False)) >= 13 or case == "released_layout", case


@pytest.mark.parametrize("case, rounding, kernels, name", STAGES)
def test_stage(case, rounding, kernels, name):
    vector = golden.case(case)
    expected = (vector.rounded if rounding else vector.unrounded)[name]
    actual = helpers.trace(case, rounding, kernels)[name]
    expected, actual = vector.live(name, expected), vector.live(name, actual)
    if not rounding:
        wrong = rules.unrounded(name, expected, actual)
    else:
        # The rounded rule bounds one flip. Where this processor's fp32 noise makes more of them,
        # the same arithmetic in float64 keeps the rule, and most of fp32 still agrees.
        exact = vector.live(name, helpers.trace_float64(case, kernels)[name])
        wrong = rules.rounded(name, expected, exact) or (
            rules.rounded(name, expected, actual) and rules.mostly(name, expected, actual))
    assert wrong is None, wrong


@pytest.mark.parametrize("kernels", helpers.KERNELS)
@pytest.mark.parametrize("case", ("text", "long"))
def test_the_unrounded_logits_are_as_close_as_fp32_usually_is(case, kernels):
    """Typical agreement is 1e-6 of the span; ten times that would be another computation."""
    expected = golden.case(case).unrounded["logits"]
    error = rules.error_of_span(expected, helpers.trace(case, False, kernels)["logits"])
    assert float(error.max()) < 1e-5


@pytest.mark.parametrize("kernels", helpers.KERNELS)
@pytest.mark.parametrize("rounding", (False, True), ids=("exact", "rounded"))
def test_bf16(rounding, kernels):
    vector = golden.case("bf16")
    taps = helpers.trace("bf16", rounding, kernels)
    wrong = bf16_rule(vector, taps, vector.rounded if rounding else vector.unrounded)
    assert wrong is None, wrong


def test_a_bf16_model_keeps_in_fp32_what_must_be():
    model = helpers.lab("bf16", True).model
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert all(p.dtype == torch.bfloat16 for n, p in model.named_parameters() if n not in wide)
    kinds = {name.split(".")[-1] for name in wide if name.startswith("layers.2.")}
    assert kinds == {"attn_sink", "bias", "bias_vl", "weight", "hc_attn_fn", "hc_attn_base",
                     "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"}
    assert {n for n in wide if n.endswith(".weight")} == {"head.weight"} | {
        f"layers.{i}.attn.compressor.{w}.weight" for i in (2, 4) for w in ("wkv", "wgate")}


def test_the_addresses_of_the_padded_rows_are_those_of_the_rows_alone():
    vector = golden.case("padded")
    whole = helpers.trace("padded", False)["engram_hash_ids"]
    for b, n in enumerate(vector.lengths.tolist()):
        alone = helpers.lab("padded", False).trace(vector.ids[b : b + 1, :n])["engram_hash_ids"]
        assert torch.equal(alone[0], whole[b, :n])


def test_a_trace_has_every_key_that_tests_and_pictures_rely_on():
    taps = helpers.trace("text", True)
    assert set(stored("text", True)) <= set(taps)
    for layer in range(10):
        for stage in ("streams_in", "streams_after_engram", "attn.out"):
            assert f"layers.{layer}.{stage}" in taps


def test_weights_from_is_refused_by_load(tmp_path):
    raw = json.loads((helpers.GOLDEN / "long" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ConfigError, match="weights_from"):
        labkit.load(tmp_path)


@pytest.mark.parametrize("case, row, length", [("text", 1, 45), ("ratio4", 0, 37), ("long", 0, 60)])
def test_the_oracle_meets_the_vectors_too(case, row, length):
    """The second leg of the tests stands on the first: causality lets it take a prefix."""
    vector = golden.case(case)
    state = {n: p for n, p in golden.model(case).named_parameters()}
    taps = Oracle(vector.config, state, golden.classes()[0].tolist()).run(
        vector.ids[row, :length].tolist())
    for name, expected in vector.unrounded.items():
        if name in NOT_COMPARED or name.startswith("dspark."):
            continue
        part = expected[row]
        if name.endswith(("compressed_kv", "index_keys")):
            part = part[: taps[name].shape[0]]
        else:
            part = part[:length]
        if name.endswith("candidates"):
            part = part[:, : taps[name].shape[1]]
        wrong = rules.unrounded(name, part, taps[name].to(part.dtype))
        assert wrong is None, wrong


checks.load()


@pytest.mark.parametrize("name", checks.VECTORS)
def test_transformed_and_worked_vectors(name):
    """The checks that kill mutants pass on the right code."""
    said = checks.VECTORS[name].failure()
    assert said is None, said


# ---------------------------------------------------------------------------- packed caches
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@functools.cache
def rounding_model(case, dtype):
    helpers.lab(case, True)  # writes the folder
    folder = helpers._FOLDERS / case
    return labkit.load(folder, dtype=dtype, device="cpu", kernels="reference").model


def ways_to_read(vector):
    """Counts of every row in every pass: whole, in chunks, step by step, ragged."""
    rows, T = vector.ids.shape
    lengths = vector.lengths.tolist() if vector.lengths is not None else [T] * rows
    yield [lengths]
    for first in ([1], [2, 3], [7, 1, 1], [8, 9]):
        ends = [n - sum(first) for n in lengths]
        if min(ends) >= 1:
            yield [*([n] * rows for n in first), ends]
    short = min(lengths) // 3
    yield [[short + b % 2 for b in range(rows)],
           [n - short - b % 2 - 2 for b, n in enumerate(lengths)], [1] * rows, [1] * rows]


def read_in(model, vector, counts, form, tapped):
    """What every pass gave: all taps, or with tapped=False the live logits."""
    rows = vector.ids.shape[0]
    cache, at, out = model.new_cache(rows, form), [0] * rows, []
    for count in counts:
        part = torch.zeros(rows, max(count), dtype=torch.int64)
        for b, n in enumerate(count):
            part[b, :n] = vector.ids[b, at[b] : at[b] + n]
            at[b] += n
        if tapped:
            out.append(one_pass(model, part, torch.tensor(count), cache=cache))
        else:
            with torch.no_grad():
                out.append({"logits": model(part, torch.tensor(count), cache=cache).logits})
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ("text", "released_layout", "padded", "ratio4"))
def test_packed_caches_equal_fake_quantised_ones_bit_for_bit(case, dtype, monkeypatch):
    """The same schedule in three forms. Without taps, steps decode only what they selected."""
    model, vector = rounding_model(case, dtype), golden.case(case)
    read, gathered = GlobalStore.read, []

    def watched(store, selection, *sequence):
        entries, where = read(store, selection, *sequence)
        if where is not selection:
            gathered.append(store.kv_codec.form)
        return entries, where

    monkeypatch.setattr(GlobalStore, "read", watched)
    compared = 0
    for counts in ways_to_read(vector):
        assert min(map(min, counts)) >= 1, counts
        dense = None
        for tapped in (True, False):
            plain = read_in(model, vector, counts, "plain", tapped)
            logits = [part["logits"] for part in plain]
            # Taps show all entries, so reads under them are dense: gathered ones agree.
            assert dense is None or all(map(torch.equal, dense, logits))
            dense = logits
            for form in ("packed", "bf16"):
                for expected, found in zip(
                        plain, read_in(model, vector, counts, form, tapped), strict=True):
                    assert expected.keys() == found.keys()
                    for name, value in expected.items():
                        assert torch.equal(value, found[name]), (form, counts, name)
                        compared += value.numel()
    print(f"{case} {dtype}: {compared:,} values equal; {len(gathered)} reads gathered")
    assert {"plain", "packed", "bf16"} == set(gathered)
