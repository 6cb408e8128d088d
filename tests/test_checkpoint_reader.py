"""Reading checkpoints: values against the vectors, and every kind of damage in one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.checkpoint import (
    fake_quantize_weight,
    parameters,
    read_state,
    storage_of,
    target_dtype,
    weights,
)
from labkit.checkpoint.weights import quantize_weight
from labkit.config import ModelConfig
from labkit.errors import CheckpointError, ConfigError
from labkit.numerics import formats

GOLDEN = Path(__file__).parent / "golden"
RELEASED = GOLDEN / "released_layout"
EXPERT = "layers.0.ffn.experts.0.w1"
DENSE = "layers.0.attn.wq_b"


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def stored_tensors(folder=RELEASED):
    tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def check_weights_equal_the_vectors():
    """The `text` weights, quantised by us, are the released_layout tensors bit for bit; read back,
    those are what fake quantisation gives."""
    plain, released = load_file(GOLDEN / "text/model.safetensors"), stored_tensors()
    read = read_state(RELEASED)
    for name, weight in plain.items():
        if name.startswith("mtp."):
            continue
        ours, scale = quantize_weight(name, weight)
        assert same_bits(ours, released[name]), name
        if scale is not None:
            assert same_bits(scale, released[name.removesuffix("weight") + "scale"]), name
        assert torch.equal(read[name], fake_quantize_weight(name, weight)), name
    # one element of each storage, written out
    tile = released[f"{DENSE}.weight"].float()[40, 7]
    exponent = int(released[f"{DENSE}.scale"].view(torch.uint8)[1, 0]) - 127
    assert read[f"{DENSE}.weight"][40, 7] == tile * 2.0**exponent
    byte = int(released[f"{EXPERT}.weight"].view(torch.uint8)[5, 3])
    exponent = int(released[f"{EXPERT}.scale"].view(torch.uint8)[5, 0]) - 127
    values = formats.e2m1_values()
    assert read[f"{EXPERT}.weight"][5, 6:8].tolist() == [
        values[byte & 15] * 2.0**exponent, values[byte >> 4] * 2.0**exponent,
    ]


def test_released_folder_bit_for_bit():
    check_weights_equal_the_vectors()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", ["text", "vision", "released_layout"])
def test_dtypes_follow_the_policy(case, dtype):
    config = ModelConfig.from_file(GOLDEN / case)
    state = read_state(GOLDEN / case, config, dtype)
    names = [n for n, _ in parameters(config) if case == "text" or not n.startswith("mtp.")]
    assert list(state) == names
    assert {n: v.dtype for n, v in state.items()} == {
        n: target_dtype(n, config, dtype) for n in names
    }
    assert all(tuple(state[n].shape) == s for n, s in parameters(config) if n in state)


def test_what_a_narrow_model_keeps_in_fp32():
    config = ModelConfig.preset("nano")
    kept = {n for n, _ in parameters(config)
            if target_dtype(n, config, torch.bfloat16) == torch.float32}
    compressors = {f"layers.{r.layer}.attn.compressor.{w}.weight" for r in config.roles
                   if r.kind == "full" and r.ratio > 1 for w in ("wkv", "wgate")}
    assert compressors and compressors | {"head.weight"} == {
        n for n in kept if storage_of(n) != "fp32"}
    assert {n for n, _ in parameters(config) if storage_of(n) == "fp32"} < kept
    assert target_dtype("layers.0.hc_attn_fn", config, torch.float64) == torch.float64
    with pytest.raises(CheckpointError, match="a model computes in"):
        target_dtype("embed.weight", config, torch.int8)


def test_tensors_outlive_their_files(tmp_path):
    folder = shutil.copytree(GOLDEN / "text", tmp_path / "case")
    state = read_state(folder)
    before = state["embed.weight"].clone()
    (folder / "model.safetensors").write_bytes(b"\0" * 3_000_000)  # in place, the same inode
    assert torch.equal(state["embed.weight"], before)
    state["embed.weight"].add_(1)  # own memory, writable


# ------------------------------------------------------------------ forms that must load
def one_file(folder, tensors):
    """`tensors` as the only weights of a folder with released_layout's config."""
    folder.mkdir(exist_ok=True)
    shutil.copy(RELEASED / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_shards_without_index_and_single_file_and_byte_scales(tmp_path):
    want = read_state(RELEASED)
    bare = shutil.copytree(RELEASED, tmp_path / "bare")
    (bare / "model.safetensors.index.json").unlink()
    tensors = stored_tensors()
    single = one_file(tmp_path / "single", tensors)
    as_bytes = one_file(tmp_path / "bytes", {
        n: t.view(torch.uint8) if n.endswith(".scale") or t.dtype == torch.int8 else t
        for n, t in tensors.items()
    })
    for folder in (bare, single, as_bytes):
        got = read_state(folder)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[n], want[n]) for n in want)


def test_scales_may_lie_in_another_shard(tmp_path):
    tensors = stored_tensors()
    folder = tmp_path / "split"
    one_file(folder, {n: t for n, t in tensors.items() if n.endswith(".scale")})
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith(".scale")},
              folder / "model-00002-of-00002.safetensors")
    want, got = read_state(RELEASED), read_state(folder)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_plain_tensors_of_any_float_dtype_are_converted(tmp_path):
    tensors = read_state(RELEASED)
    kinds = [torch.float64, torch.bfloat16, torch.float16, torch.float32]
    mixed = {n: t.to(kinds[i % 4]) for i, (n, t) in enumerate(tensors.items())}
    got = read_state(one_file(tmp_path / "mixed", mixed))
    assert all(torch.equal(got[n], mixed[n].float()) for n in tensors)


# ------------------------------------------------------------------ faults
def damaged(tmp_path, change):
    tensors = stored_tensors()
    change(tensors)
    return one_file(tmp_path / "damaged", tensors)


FAULTS = {
    "missing tensor": (
        lambda t: t.pop("norm.weight"), "1 missing: norm.weight"),
    "missing scale": (
        lambda t: t.pop(f"{DENSE}.scale"), f"1 without its scale: {DENSE}.weight"),
    "missing scale of packed": (
        lambda t: t.pop(f"{EXPERT}.scale"), f"1 without its scale: {EXPERT}.weight"),
    "scale of nothing": (
        lambda t: t.pop(f"{EXPERT}.weight"),
        f"1 a scale without its quantised weight: {EXPERT}.scale"),
    "scale of a plain weight": (
        lambda t: t.update({f"{DENSE}.weight": t[f"{DENSE}.weight"].float()}),
        f"1 a scale without its quantised weight: {DENSE}.scale"),
    "other suffix": (
        lambda t: t.update({f"{DENSE}.weight_scale_inv": t.pop(f"{DENSE}.scale")}),
        f"1 without its scale: {DENSE}.weight; 1 unexpected: {DENSE}.weight_scale_inv"),
    "renamed": (
        lambda t: t.update({"lm_head.weight": t.pop("head.weight")}),
        "1 missing: head.weight; 1 unexpected: lm_head.weight"),
    "wrong shape": (
        lambda t: t.update({"embed.weight": t["embed.weight"][:500].clone()}),
        "1 of wrong shape: embed.weight is [500, 32], needs [512, 32]"),
    "transposed": (
        lambda t: t.update({f"{DENSE}.weight": t[f"{DENSE}.weight"].T.contiguous()}),
        f"1 of wrong shape: {DENSE}.weight is [32, 128], needs [128, 32]"),
    "scale per row, not per tile": (
        lambda t: t.update({f"{DENSE}.scale": t[f"{DENSE}.scale"].repeat(32, 1)}),
        f"1 of wrong shape: {DENSE}.scale is [128, 1], needs [4, 1]"),
    "unpacked expert": (
        lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"].repeat(1, 2)}),
        f"1 of wrong shape: {EXPERT}.weight is [32, 32], needs [32, 16]"),
    "fp8 expert": (
        lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"].float().to(
            torch.float8_e4m3fn)}),
        f"1 of wrong dtype: {EXPERT}.weight is F8_E4M3, needs I8"),
    "e5m2": (
        lambda t: t.update({f"{DENSE}.weight": t[f"{DENSE}.weight"].float().to(
            torch.float8_e5m2)}),
        f"1 of wrong dtype: {DENSE}.weight is F8_E5M2, needs F8_E4M3"),
    "fp32 scale": (
        lambda t: t.update({f"{DENSE}.scale": t[f"{DENSE}.scale"].float()}),
        f"1 of wrong dtype: {DENSE}.scale is F32, needs F8_E8M0"),
    "quantised norm": (
        lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)}),
        "1 of wrong dtype: norm.weight is F8_E4M3"),
    "integers": (
        lambda t: t.update({"norm.weight": t["norm.weight"].long()}),
        "1 of wrong dtype: norm.weight is I64"),
    "partial draft": (
        lambda t: t.update({"mtp.0.main_norm.weight": torch.ones(32)}),
        "107 missing: mtp.0.main_proj.weight"),
    "vision that the config lacks": (
        lambda t: t.update({"image_start": torch.ones(32)}), "1 unexpected: image_start"),
    "NaN scale code": (
        lambda t: t[f"{DENSE}.scale"].view(torch.uint8).fill_(255),
        f"{DENSE}.weight in "),
    "NaN weight code": (
        lambda t: t[f"{DENSE}.weight"].view(torch.uint8)[0].fill_(0x7F),
        f"{DENSE}.weight in "),
    "a layer's experts": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.3.ffn.experts.")],
        "24 missing: layers.3.ffn.experts.0.w1.weight, layers.3.ffn.experts.0.w2.weight, "
        "layers.3.ffn.experts.0.w3.weight and 21 more"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_tensors_are_named_in_one_sentence(fault, tmp_path):
    change, said = FAULTS[fault]
    with pytest.raises(CheckpointError) as error:
        read_state(damaged(tmp_path, change))
    message = str(error.value)
    assert said in message
    assert "\n" not in message and len(message) < 600
    if fault == "partial draft":
        assert "must be whole or wholly absent" in message
    if fault.startswith("NaN"):
        assert "holds NaN" in message


def test_vision_must_be_whole_when_the_config_has_it(tmp_path):
    folder = tmp_path / "vision"
    folder.mkdir()
    shutil.copy(GOLDEN / "vision/config.json", folder)
    tensors = load_file(GOLDEN / "vision/model.safetensors")
    save_file({n: t for n, t in tensors.items() if n != "aligner.w2.bias"},
              folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 missing: aligner.w2.bias"):
        read_state(folder)


def test_missing_shard(tmp_path):
    folder = shutil.copytree(RELEASED, tmp_path / "case")
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks model-00003-of-00004.safetensors, of 4 shards"
                                              ".*download what is missing"):
        read_state(folder)


@pytest.mark.parametrize("keep", [0, 5, 5_000, 300_000])
def test_truncated_shard_names_file_and_sizes(tmp_path, keep):
    folder = shutil.copytree(RELEASED, tmp_path / "case")
    shard = folder / "model-00002-of-00004.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError) as error:
        read_state(folder)
    message = str(error.value)
    assert "model-00002-of-00004.safetensors" in message and f"{keep:,}" in message
    if keep == 300_000:
        assert f"expected {len(whole):,} bytes, found 300,000" in message
    shard.write_bytes(whole + b"\0")
    with pytest.raises(CheckpointError, match="longer than its header says"):
        read_state(folder)


def test_files_that_are_no_safetensors(tmp_path):
    folder = shutil.copytree(GOLDEN / "text", tmp_path / "case")
    for content in (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
                    (20).to_bytes(8, "little") + b"not json at all.....",
                    (13).to_bytes(8, "little") + b'{"a": {"b":1}}'[:13],
                    (9).to_bytes(8, "little") + b'{"a": {}}'):
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="model.safetensors.*download it again"):
            read_state(folder)


def test_headers_that_lie_are_refused(tmp_path):
    folder = shutil.copytree(GOLDEN / "text", tmp_path / "case")
    file = folder / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["embed.weight"]["data_offsets"], header["head.weight"]["data_offsets"] = (
        header["head.weight"]["data_offsets"], [0, 4])
    changed = json.dumps(header).encode()
    file.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    with pytest.raises(CheckpointError, match="model.safetensors is damaged"):
        read_state(folder)


def test_bad_indexes(tmp_path):
    folder = shutil.copytree(RELEASED, tmp_path / "case")
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    index.write_text("{")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_state(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_state(folder)
    outside = {"weight_map": good["weight_map"] | {"norm.weight": "../model.safetensors"}}
    index.write_text(json.dumps(outside))
    with pytest.raises(CheckpointError, match="must be a file beside it"):
        read_state(folder)
    other = next(s for s in good["weight_map"].values() if s != good["weight_map"]["norm.weight"])
    index.write_text(json.dumps({"weight_map": good["weight_map"] | {"norm.weight": other}}))
    with pytest.raises(CheckpointError, match="places norm.weight in .* which does not hold it"):
        read_state(folder)


def test_a_tensor_twice(tmp_path):
    folder = shutil.copytree(RELEASED, tmp_path / "case")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": torch.ones(32)}, folder / "model-extra.safetensors")
    with pytest.raises(CheckpointError, match="norm.weight lies in .* and in"):
        read_state(folder)


def test_folders_without_config_weights_or_with_another_model(tmp_path):
    with pytest.raises(ConfigError, match="no config.json at .*name a preset"):
        read_state(tmp_path)
    with pytest.raises(CheckpointError, match="flash holds no weights: it needs model.safetensors"):
        read_state(GOLDEN / "flash")
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_state(tmp_path / "nowhere", ModelConfig.preset("nano"))
    folder = one_file(tmp_path / "case", {"a": torch.ones(1)})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "deepseek_v4"}))
    with pytest.raises(ConfigError, match="model_type is 'deepseek_v4'"):
        read_state(folder)


# ------------------------------------------------------------------ broken variants
def _swapped_nibbles(packed):
    packed = packed.view(torch.uint8)
    return torch.stack((packed >> 4, packed & 0xF), dim=-1).flatten(-2)


_scale = weights._scale
MUTANTS = {
    "nibbles swapped when reading": (weights, "unpack_nibbles", _swapped_nibbles),
    "nibbles swapped when writing": (
        weights, "pack_nibbles", lambda codes: (codes[..., 0::2] << 4) | codes[..., 1::2]),
    "UE8M0 byte read as a number": (formats, "decode_ue8m0", lambda codes: codes.float()),
    "dense scales per row": (
        weights, "_scale",
        lambda t, s: weights.power_of_two_scale(t.abs().amax(-1, keepdim=True), 448.0)
        if s == "fp8_tile" else _scale(t, s)),
    "expert scale from 448": (
        weights, "_scale", lambda t, s: _scale(t, "fp8_row" if s == "fp4_row" else s)),
    "scale rounded down": (
        weights, "power_of_two_scale", lambda a, m: (a / m).log2().floor().exp2()),
    "one Engram scale for all rows": (
        weights, "_scale",
        lambda t, s: _scale(t, s).amax(0, keepdim=True).expand(len(t), -1, -1, -1)
        if s == "fp8_row" else _scale(t, s)),
    "bf16 weights left unrounded": (
        weights, "_fake_quantize", lambda w, s, f=weights._fake_quantize:
        w if s == "bf16" else f(w, s)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_broken_variant_is_caught(mutant, monkeypatch):
    module, name, broken = MUTANTS[mutant]
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(AssertionError):
        check_weights_equal_the_vectors()
