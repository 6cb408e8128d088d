"""Writing checkpoints: both forms, shards, fixed points, and nothing half-written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from labkit.checkpoint import (
    fake_quantize_weight,
    layout,
    parameters,
    read_state,
    storage_of,
    write_checkpoint,
    writer,
)
from labkit.checkpoint.files import find_tensors, stored_engram_digest
from labkit.config import ModelConfig
from labkit.errors import CheckpointError

NANO = ModelConfig.preset("nano")
ODD = NANO.replace(hidden_size=40, moe_intermediate_size=36, q_lora_rank=50, o_lora_rank=18)


def random_state(config, draft=True, seed=0):
    """Rows and columns of very different sizes, as trained weights have outliers."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in parameters(config):
        if draft or not name.startswith("mtp."):
            size = torch.exp2(torch.randn(shape, generator=generator) * 3 - 4)
            state[name] = torch.randn(shape, generator=generator) * size
    return state


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("config", [NANO, ODD], ids=["blocks of 32", "ragged blocks"])
def test_released_form_reads_back_as_fake_quantised(config, tmp_path):
    state = random_state(config)
    write_checkpoint(tmp_path, config, state)
    got = read_state(tmp_path)
    assert list(got) == list(state)
    for name, weight in state.items():
        assert torch.equal(got[name], fake_quantize_weight(name, weight)), name
    quantised = ModelConfig.from_file(tmp_path)
    assert quantised.quantized and quantised.dtype == "bfloat16"
    stored = {n: (t.shape, t.dtype) for n, t in find_tensors(tmp_path).items()}
    assert stored == {s.name: (s.shape, s.dtype) for s in layout(quantised)}


@pytest.mark.parametrize("most", [10**9, 100_000])
def test_a_state_that_was_read_is_a_fixed_point(tmp_path, most):
    folders = [tmp_path / str(i) for i in range(3)]
    states = [random_state(NANO)]
    for folder in folders:
        write_checkpoint(folder, NANO, states[-1], max_shard_bytes=most)
        states.append(read_state(folder))
    for name in states[1]:  # the values from the first reading on
        assert torch.equal(states[1][name], states[2][name]), name
    assert files(folders[1]) == files(folders[2])  # and every byte


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_plain_form(tmp_path, dtype):
    state = random_state(NANO)
    write_checkpoint(tmp_path, NANO, state, form="plain", dtype=dtype)
    config = ModelConfig.from_file(tmp_path)
    assert not config.quantized and f"torch.{config.dtype}" == str(dtype)
    stored = {n: (t.shape, t.dtype) for n, t in find_tensors(tmp_path).items()}
    assert stored == {s.name: (s.shape, s.dtype) for s in layout(config)}
    got = read_state(tmp_path)
    for name, weight in state.items():
        kept = dtype == torch.bfloat16 and storage_of(name) != "fp32"
        assert torch.equal(got[name], weight.bfloat16().float() if kept else weight), name


def test_shards_keep_their_limit_and_the_index_is_complete(tmp_path):
    paths = write_checkpoint(tmp_path, NANO, random_state(NANO), max_shard_bytes=120_000)
    shards = [p for p in paths if p.suffix == ".safetensors"]
    assert [p.name for p in shards] == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    assert len(shards) > 4 and {p.name for p in paths} == set(files(tmp_path))
    stored = find_tensors(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {n: t.file.name for n, t in stored.items()}
    assert index["metadata"]["total_size"] == sum(t.end - t.begin for t in stored.values())
    for shard in shards:
        assert sum(t.end - t.begin for t in stored.values() if t.file == shard) <= 120_000


def test_an_older_checkpoint_is_replaced_and_other_files_stay(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "expected.safetensors").write_bytes(b"x")
    write_checkpoint(tmp_path, NANO, random_state(NANO), max_shard_bytes=120_000)
    new = random_state(NANO, draft=False, seed=1)
    write_checkpoint(tmp_path, NANO, new)
    assert set(files(tmp_path)) == {
        "tokenizer.json", "expected.safetensors", "model.safetensors", "config.json",
    }
    got = read_state(tmp_path)
    assert list(got) == list(new) and not any(n.startswith("mtp.") for n in got)
    write_checkpoint(tmp_path, NANO, new, max_shard_bytes=120_000)
    assert "model.safetensors" not in files(tmp_path)
    assert list(read_state(tmp_path)) == list(new)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch, error):
    folder = tmp_path / "model"
    write_checkpoint(folder, NANO, random_state(NANO), max_shard_bytes=120_000)
    before = files(folder)
    save_file, calls = writer.save_file, []

    def breaks_at_the_third(tensors, path, **options):
        calls.append(path)
        save_file(tensors, path, **options)
        if len(calls) == 3:
            raise error("stopped")

    monkeypatch.setattr(writer, "save_file", breaks_at_the_third)
    for target in (folder, tmp_path / "new"):
        calls.clear()
        with pytest.raises(error):
            write_checkpoint(target, NANO, random_state(NANO, seed=1), max_shard_bytes=120_000)
    assert files(folder) == before
    assert not (tmp_path / "new").exists()


def test_ctrl_c_between_renames_finishes_them(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, NANO, random_state(NANO), max_shard_bytes=120_000)
    new = random_state(NANO, seed=1)
    replace, calls = writer.os.replace, []

    def interrupted_once(source, target):
        calls.append(target)
        replace(source, target)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(writer.os, "replace", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, NANO, new, max_shard_bytes=120_000)
    got = read_state(tmp_path)
    assert all(torch.equal(got[n], fake_quantize_weight(n, w)) for n, w in new.items())
    assert not list(tmp_path.glob(".saving-*"))


BAD_STATES = {
    "missing": (lambda s: s.pop("norm.weight"), "1 missing: norm.weight"),
    "unexpected": (lambda s: s.update(extra=torch.ones(1)), "1 unexpected: extra"),
    "partial draft": (lambda s: s.pop("mtp.0.main_proj.weight"), "1 missing: mtp.0.main_proj"),
    "shape": (lambda s: s.update({"norm.weight": torch.ones(31)}), "norm.weight has shape [31]"),
    "integers": (
        lambda s: s.update({"norm.weight": torch.ones(32, dtype=torch.int64)}), "torch.int64"),
    "NaN": (lambda s: s["head.weight"].view(-1)[9].fill_(float("nan")), "head.weight holds NaN"),
    "infinity": (lambda s: s["embed.weight"].view(-1)[9].fill_(float("inf")), "or infinity"),
    "beyond bf16": (
        lambda s: s["embed.weight"].view(-1)[9].fill_(3.4028e38), "exceeds the range of"),
}


@pytest.mark.parametrize("fault", BAD_STATES)
def test_a_bad_state_is_refused_and_nothing_is_written(fault, tmp_path):
    change, said = BAD_STATES[fault]
    state = random_state(NANO)
    change(state)
    with pytest.raises(CheckpointError) as error:
        write_checkpoint(tmp_path / "new", NANO, state)
    assert said in str(error.value)
    assert not (tmp_path / "new").exists()


def test_unknown_form_and_dtype(tmp_path):
    with pytest.raises(CheckpointError, match="unknown form 'onnx'"):
        write_checkpoint(tmp_path, NANO, random_state(NANO), form="onnx")
    with pytest.raises(CheckpointError, match="cannot write torch.int8"):
        write_checkpoint(tmp_path, NANO, random_state(NANO), form="plain", dtype=torch.int8)
    assert not files(tmp_path)


# ------------------------------------------------------------------ rounding while training
@pytest.mark.parametrize("name", [
    "layers.0.attn.wq_a.weight", "layers.0.ffn.experts.0.w1.weight",
    "layers.1.engram.embed.weight", "embed.weight", "layers.0.hc_attn_fn",
])
@pytest.mark.parametrize("shape", [(64, 96), (50, 40), (3, 64, 96)])
def test_fake_quantised_weights_pass_gradients(name, shape):
    weight = torch.randn(shape, requires_grad=True)
    before = weight.detach().clone()
    rounded = fake_quantize_weight(name, weight)
    factor = torch.randn(shape)
    (rounded * factor).sum().backward()
    assert torch.equal(weight.grad, factor)
    assert torch.equal(weight.detach(), before)
    assert torch.equal(rounded.detach(), fake_quantize_weight(name, before))
    twice = fake_quantize_weight(name, rounded.detach())
    assert torch.equal(twice, rounded.detach())
    if len(shape) == 3:  # stacked experts are rounded one by one
        assert torch.equal(rounded.detach()[1], fake_quantize_weight(name, before[1]))


def test_rounding_a_weight_by_hand():
    """One outlier sets the scale of its 32 x 32 tile, or of its row's 32 columns only."""
    weight = torch.full((32, 64), 2.0**-20)
    weight[5, 7] = 448.0
    dense = fake_quantize_weight("layers.0.attn.wq_a.weight", weight)
    assert dense[5, 7] == 448 and dense[:, 32:].eq(2.0**-20).all()
    assert dense[:, :32].count_nonzero() == 1  # below half of E4M3's least 2^-9
    expert = fake_quantize_weight("layers.0.ffn.experts.0.w1.weight", weight)
    assert expert[5, 7] == 512  # scale 128: 3.5 lies between 3 and 4, the even code is 4's
    assert expert[5, :32].count_nonzero() == 1
    assert expert[:5].eq(2.0**-20).all() and expert[5, 32:].eq(2.0**-20).all()
    table = fake_quantize_weight("layers.1.engram.embed.weight", weight)
    assert table[5, :32].count_nonzero() == 1 and table[6].eq(2.0**-20).all()


def test_paths_are_returned(tmp_path):
    paths = write_checkpoint(str(tmp_path / "a" / "b"), NANO, random_state(NANO))
    assert paths == [tmp_path / "a" / "b" / n for n in ("model.safetensors", "config.json")]
    assert all(isinstance(p, Path) and p.exists() for p in paths)


# ---- the digest of the Engram class map ------------------------------------------------------


@pytest.mark.parametrize("most", [10**9, 100_000], ids=["one file", "shards"])
def test_every_shard_holds_the_digest_and_the_bytes_are_the_same_each_time(most, tmp_path):
    state = random_state(NANO)
    for number in range(6):  # safetensors orders its metadata at random: 6 runs would show it
        write_checkpoint(tmp_path / str(number), NANO, state, max_shard_bytes=most,
                         engram_digest="ab" * 32)
        assert files(tmp_path / str(number)) == files(tmp_path / "0")
    shards = sorted((tmp_path / "0").glob("*.safetensors"))
    assert (len(shards) > 1) == (most == 100_000)
    for shard in shards:
        with safe_open(shard, framework="pt") as stored:
            assert stored.metadata() == {"format": "pt", "engram_class_digest": "ab" * 32}
    assert stored_engram_digest(tmp_path / "0") == "ab" * 32
    read = read_state(tmp_path / "0")
    assert all(torch.equal(read[n], fake_quantize_weight(n, v)) for n, v in state.items())


def test_without_a_digest_the_files_are_as_before(tmp_path):
    write_checkpoint(tmp_path, NANO, random_state(NANO))
    assert stored_engram_digest(tmp_path) is None
    with safe_open(tmp_path / "model.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"format": "pt"}
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "again.safetensors", metadata={"format": "pt"})
    assert files(tmp_path)["model.safetensors"] == files(tmp_path)["again.safetensors"]


def test_shards_of_two_checkpoints_are_told_by_their_digests(tmp_path):
    for name in ("one", "two"):
        write_checkpoint(tmp_path / name, NANO, random_state(NANO), max_shard_bytes=100_000,
                         engram_digest=name)
    shard = sorted((tmp_path / "two").glob("*.safetensors"))[0]
    (tmp_path / "one" / shard.name).write_bytes(shard.read_bytes())
    with pytest.raises(CheckpointError, match="different values of engram_class_digest"):
        stored_engram_digest(tmp_path / "one")
