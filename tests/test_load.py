"""labkit.load, Lab.trace, and what they refuse."""

import json
import shutil
import warnings

import pytest
import torch
from golden_model import GOLDEN, make_folder
from safetensors.torch import load_file, save_file

import labkit
from labkit.checkpoint import target_dtype, write_checkpoint
from labkit.errors import CheckpointError, ConfigError, InputError, LabError
from labkit.lab import choose_device
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.text.engram_map import class_digest, engram_classes
from labkit.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def lab(folder):
    return labkit.load(folder)


def copy_of(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


# ---- what it gives ---------------------------------------------------------------------------


def test_the_model_is_ready_to_run_and_not_to_train(lab, folder):
    assert not lab.model.training
    assert not any(p.requires_grad for p in lab.model.parameters())
    assert not any(p.is_meta for p in lab.model.parameters())
    assert lab.config == labkit.ModelConfig.from_file(folder)
    assert lab.model.dtype == torch.float32
    assert "10 layers" in repr(lab) and "float32 on cpu" in repr(lab)
    stored = load_file(folder / "model.safetensors")
    for name, p in lab.model.named_parameters():
        assert torch.equal(p, stored[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_every_parameter_has_its_own_dtype(folder, dtype):
    lab = labkit.load(folder, dtype=dtype)
    for name, p in lab.model.named_parameters():
        assert p.dtype == target_dtype(name, lab.config, dtype), name
    kept = {n for n, p in lab.model.named_parameters() if p.dtype == torch.float32}
    if dtype == torch.bfloat16:
        assert "head.weight" in kept and "layers.2.attn.compressor.wgate.weight" in kept
        assert "layers.6.attn.compressor.wkv.weight" not in kept  # ratio 1 weighs nothing
    else:
        assert not kept
    logits = lab.model(torch.tensor([[0, 5, 7]])).logits
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(torch.isfinite(logits).all())


def live(name, tensor, expected, ratio_of):
    """Only what stands before the rows' lengths is compared."""
    lengths = expected.get("lengths")
    if lengths is None:
        return tensor
    layer = name.split(".")[1] if name.startswith("layers.") else None
    if name.endswith(("compressed_kv", "index_keys")):
        lengths = lengths // ratio_of(int(layer))
    steps = torch.arange(tensor.shape[1])
    return tensor[steps < lengths[:, None]]


@pytest.mark.parametrize("case", ["text", "long", "padded"])
def test_trace_equals_the_unrounded_vectors(case, tmp_path):
    lab = labkit.load(make_folder(tmp_path / case, case), cache_rounding=False)
    expected = load_file(GOLDEN / case / "expected_unrounded.safetensors")
    found = lab.trace(expected["input_ids"], expected.get("lengths"))
    compared = 0
    for name, wanted in expected.items():
        if name.startswith("dspark.") or name in ("input_ids", "lengths"):
            continue
        assert found[name].shape == wanted.shape, name
        a, b = (live(name, x, expected, lambda i: lab.config.roles[i].ratio)
                for x in (found[name], wanted))
        if wanted.dtype in (torch.int64, torch.bool):
            assert torch.equal(a, b), name
        else:
            assert (a - b).abs().max() <= 1e-5 * wanted.abs().max() + 1e-5, name
        compared += 1
    assert compared >= 15


def test_a_released_folder_loads_through_its_index(tmp_path):
    lab = labkit.load(make_folder(tmp_path / "released", "released_layout"))
    expected = load_file(GOLDEN / "released_layout" / "expected.safetensors")
    found = lab.trace(expected["input_ids"])
    span = expected["logits"].abs().max()
    assert (found["logits"] - expected["logits"]).abs().max() <= 0.01 * span
    for layer in (2, 4, 6, 8):
        name = f"layers.{layer}.attn.topk_indices"
        assert (found[name] == expected[name]).double().mean() >= 0.995


def test_trace_keeps_what_was_asked_for_and_changes_nothing(lab):
    ids = torch.arange(40)[None] % 500
    everything = lab.trace(ids)
    some = lab.trace(ids, patterns=["*.topk_indices", "logits"])
    assert sorted(some) == sorted(n for n in everything if "topk" in n or n == "logits")
    assert torch.equal(some["logits"], lab.model(ids).logits)
    assert not any(t.requires_grad for t in everything.values())
    assert torch.equal(lab.trace("It was")["logits"], lab.model(
        torch.tensor([lab.encode("It was")])).logits)


def test_trace_has_the_names_that_pictures_rely_on(lab):
    names = set(lab.trace([0, 5, 6, 7]))
    c = lab.config
    wanted = {"engram_hash_ids", "logits"}
    for role in c.roles:
        at = f"layers.{role.layer}"
        wanted |= {f"{at}.streams_in", f"{at}.streams_after_engram", f"{at}.attn.out"}
        if role.kind == "full":
            wanted |= {f"{at}.attn.compressed_kv", f"{at}.attn.index_keys"}
        if role.kind in ("full", "reindex"):
            wanted.add(f"{at}.attn.topk_indices")
        if role.publishes_candidates:
            wanted.add(f"{at}.attn.candidates")
    assert wanted <= names


def test_a_model_without_engram_and_with_a_padded_vocabulary(tmp_path):
    c = labkit.ModelConfig.preset("nano").replace(
        vocab_size=530, engram_layer_ids=(), engram_num_embeddings=(), num_nextn_predict_layers=0)
    model = init_weights(Transformer(c), seed=3)
    with torch.no_grad():
        model.head.weight[512:] = model.norm.weight.sign()  # ids without text are often likeliest
    write_checkpoint(tmp_path, c, model.state_dict(), form="plain", dtype=torch.float32)
    shutil.copy(GOLDEN / "tokenizer.json", tmp_path)
    lab = labkit.load(tmp_path)
    ids = torch.arange(30)[None]
    assert torch.equal(lab.model(ids).logits, model(ids).logits)
    assert max(lab.generate("It is", 40, seed=0, temperature=3.0, top_p=1.0).ids) < 512
    assert lab.session().nbytes()["engram"] >= 0 and "engram_hash_ids" not in lab.trace(ids)


# ---- presets ---------------------------------------------------------------------------------


def test_nano_says_that_it_is_random_and_is_the_same_each_time():
    with pytest.warns(UserWarning, match="random weights"):
        one = labkit.load("nano")
    with pytest.warns(UserWarning), torch.random.fork_rng():
        torch.manual_seed(5)
        two = labkit.load("nano", dtype=torch.float64)
    for (name, a), (_, b) in zip(one.model.named_parameters(), two.model.named_parameters(),
                                 strict=True):
        assert torch.equal(a.double(), b), name
    assert one.has_draft and one.draft([0, 1], [1])["dspark.base_logits"].shape[:2] == (1, 5)


def test_mini_is_read_from_the_data_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_DATA", str(tmp_path))
    with pytest.raises(CheckpointError, match="holds no trained model.*labkit train"):
        labkit.load("mini")
    shutil.copytree(folder, tmp_path / "mini")
    assert labkit.load("mini").config.num_hidden_layers == 10


# ---- refusals --------------------------------------------------------------------------------


def sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400, text
    return text


@pytest.mark.parametrize(("source", "said"), [
    ("flash", "deepseek-ai/DeepSeek-V4.1-Flash"),
    (GOLDEN / "flash", "holds no weights"),
    (GOLDEN / "long", "weights_from 'text'"),
    (GOLDEN, "no config.json"),
    ("no/such/folder", "neither a preset (nano, mini, flash) nor a folder"),
    (GOLDEN / "text", "tokenizer.json does not exist"),
])  # fmt: skip
def test_sources_that_cannot_be_loaded(source, said):
    with pytest.raises(LabError) as error:
        labkit.load(source)
    assert said in sentence(error)


def test_another_model_type(folder, tmp_path):
    broken = copy_of(folder, tmp_path)
    raw = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**raw, "model_type": "deepseek_v4"}))
    with pytest.raises(ConfigError) as error:
        labkit.load(broken)
    assert "'deepseek_v4'" in sentence(error)


def test_a_vocabulary_of_another_model(folder, tmp_path):
    broken = copy_of(folder, tmp_path)
    config = json.loads((broken / "config.json").read_text())
    config["text_config"]["engram_compressed_vocab_size"] = 17
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        labkit.load(broken)
    assert "engram_compressed_vocab_size is 17" in sentence(error)
    config["text_config"]["vocab_size"] = 500
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        labkit.load(broken)
    assert "vocab_size is 500" in sentence(error)


def test_a_vocabulary_of_equal_size_with_another_class_map(folder, tmp_path):
    """Two entries trade ids: as many classes as before, but other Engram rows."""
    whole = copy_of(folder, tmp_path)
    config = labkit.ModelConfig.from_file(whole)
    classes, _ = engram_classes(Tokenizer.from_file(whole), config.vocab_size)
    state = load_file(whole / "model.safetensors")
    write_checkpoint(whole, config, state, form="plain", dtype=torch.float32,
                     engram_digest=class_digest(classes))
    assert torch.equal(labkit.load(whole).model.engram_classes, classes)

    raw = json.loads((whole / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    # The last id with a class of its own trades places with the last that shares one.
    listed, special = classes.tolist(), {t["id"] for t in raw["added_tokens"]}
    own = {c for c in listed if listed.count(c) == 1}
    ids = [i for i in sorted(vocabulary.values()) if i not in special]
    new = max(i for i in ids if listed[i] in own)
    repeated = max(i for i in ids if listed[i] not in own)
    raw["model"]["vocab"] = {t: {new: repeated, repeated: new}.get(i, i)
                             for t, i in vocabulary.items()}
    (whole / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as error:
        labkit.load(whole)
    assert "another Engram class map" in sentence(error)

    write_checkpoint(whole, config, state, form="plain", dtype=torch.float32)  # no digest
    assert not torch.equal(labkit.load(whole).model.engram_classes, classes)


@pytest.mark.parametrize(("change", "said"), [
    (lambda s: s.pop("norm.weight"), "missing: norm.weight"),
    (lambda s: s.update({"extra": torch.zeros(2)}), "unexpected: extra"),
    (lambda s: s.update({"norm.weight": torch.zeros(3)}), "norm.weight is [3], needs [32]"),
    (lambda s: s.pop("mtp.0.main_norm.weight"), "must be whole or wholly absent"),
])  # fmt: skip
def test_tensors_that_do_not_fit(folder, tmp_path, change, said):
    broken = copy_of(folder, tmp_path)
    state = load_file(broken / "model.safetensors")
    change(state)
    save_file(state, broken / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        labkit.load(broken)
    assert said in sentence(error)


def test_cut_and_missing_files(tmp_path):
    released = make_folder(tmp_path / "released", "released_layout")
    shard = released / "model-00003-of-00004.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match="is truncated"):
        labkit.load(released)
    shard.unlink()
    with pytest.raises(CheckpointError, match="lacks model-00003-of-00004.safetensors"):
        labkit.load(released)


def test_draft_and_images_say_that_they_are_not_here(lab, folder, tmp_path):
    assert lab.has_draft
    bare = copy_of(folder, tmp_path)
    state = load_file(bare / "model.safetensors")
    save_file({n: t for n, t in state.items() if not n.startswith("mtp.")},
              bare / "model.safetensors")
    with pytest.raises(InputError, match="has no draft"):
        labkit.load(bare).draft([0, 1], [1])
    for name in ("pixel_values", "image_grid_hws", "vision_token_types"):
        with pytest.raises(InputError) as error:
            lab.model(torch.tensor([[1, 2]]), **{name: torch.zeros(1)})
        assert "does not see images" in sentence(error)


@pytest.mark.parametrize(("ids", "said"), [
    ([[1, 600]], "600 is outside the vocabulary 0..511"),
    ([[-1]], "-1 is outside"),
    ([[]], "empty"),
    ([[1.5]], "whole numbers"),
    (["a"], "whole numbers"),
    ([[1, 2], [3]], "rows of one length"),
    ("", "empty"),
    ([[1] * 4097], "do not fit the context of 4096"),
])  # fmt: skip
def test_ids_that_the_model_cannot_take(lab, ids, said):
    with pytest.raises(InputError) as error:
        lab.trace(ids)
    assert said in sentence(error)


def test_options_of_another_type_are_refused_in_a_sentence(lab):
    for call, said in (
        (lambda: labkit.load(None), "the model to load is None"),
        (lambda: labkit.load(5), "the model to load is 5"),
        (lambda: lab.generate("the", 1, stop=5), "stop is 5"),
        (lambda: lab.generate("the", 1, stop=["a", 5]), "stop holds 5"),
        (lambda: lab.trace([1, 2], patterns=5), "patterns is 5"),
        (lambda: lab.trace([1, 2], patterns=[5]), "patterns is [5]"),
        (lambda: lab.trace([1, 2], patterns="*.q"), "patterns is '*.q'"),
        (lambda: lab.model([[1, 2]], lengths=[1.9]), "lengths must be whole numbers, got [1.89"),
        (lambda: lab.model([[1, 2]], lengths=[True]), "lengths must be whole numbers, got [True"),
        (lambda: lab.model([[1, 2]], lengths=[3]), "lengths must be 1 numbers in 1..2"),
    ):
        with pytest.raises(InputError) as error:
            call()
        assert said in sentence(error)


def test_padding_is_a_length_and_never_an_id(lab):
    """Whatever lies behind a row's length is not looked at, also not by the range check."""
    plain = lab.model([[5, 6]]).logits
    for void in (-1, 10**6, lab.config.pad_token_id, 7):
        padded = lab.model([[5, 6, void]], lengths=[2]).logits[:, :2]
        assert torch.equal(padded, lab.model([[5, 6, 0]], lengths=[2]).logits[:, :2])
        assert torch.allclose(padded, plain, atol=1e-5)
    for ids, lengths in (([[5, -1, 6]], [2]), ([[5, 6, -1]], None), ([[5, 6], [7, -1]], [1, 2])):
        with pytest.raises(InputError, match="-1 is outside the vocabulary"):
            lab.model(ids, lengths=lengths)


# ---- devices ---------------------------------------------------------------------------------


def machine(monkeypatch, cuda, mps):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))


@pytest.mark.parametrize(("cuda", "mps", "dtype", "chosen", "notice"), [
    (True, True, torch.float32, "cuda", False),
    (True, True, torch.float64, "cuda", False),
    (False, True, torch.bfloat16, "mps", False),
    (False, True, torch.float64, "cpu", True),
    (False, False, torch.float64, "cpu", False),
])  # fmt: skip
def test_auto_takes_the_first_device_that_has_the_dtype(monkeypatch, cuda, mps, dtype, chosen,
                                                        notice):
    machine(monkeypatch, cuda, mps)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert choose_device("auto", dtype).type == chosen
    assert bool(told) == notice


@pytest.mark.parametrize(("device", "said"), [
    ("cuda", "not available"), ("mps", "not available"), ("gpu", "unknown device"),
    ("meta", "not supported"),
])  # fmt: skip
def test_devices_that_are_not_here(monkeypatch, device, said):
    machine(monkeypatch, False, False)
    with pytest.raises(InputError, match=said):
        choose_device(device, torch.float32)


def test_named_devices_that_cannot(monkeypatch):
    machine(monkeypatch, True, True)
    with pytest.raises(InputError, match="MPS has no float64"):
        choose_device("mps", torch.float64)
    with pytest.raises(InputError, match="1 CUDA devices"):
        choose_device("cuda:3", torch.float32)


def test_options_that_do_not_exist(folder):
    with pytest.raises(InputError, match="dtype"):
        labkit.load(folder, dtype=torch.int8)
    with pytest.raises(InputError, match="unknown kernels"):
        labkit.load(folder, kernels="fast")


def test_a_calibrated_draft_is_loaded_in_every_dtype(folder, tmp_path):
    """Its digests are of fp32 values: a plain fp32 checkpoint has others in bf16."""
    from labkit.engine import calibration

    here = copy_of(folder, tmp_path)
    model = labkit.load(here).model
    weight = model.mtp.last.confidence_head.proj.weight
    calibration.save_calibration(here, calibration.Calibration(
        (1.5,) * 5, (0.2,) * 5, (0.1,) * 5, {}, calibration.draft_digest(weight),
        calibration.target_digest(model)))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        assert labkit.load(here, dtype=dtype).calibration.temperatures == (1.5,) * 5


def test_plain_generation_does_not_pay_for_the_draft(lab):
    assert lab.has_draft
    plain = lab.stream([1, 2, 3], 2).session
    assert plain.nbytes()["draft"] == 0 and not plain.cache.draft_windows
    assert lab.stream([1, 2, 3], 2, speculative=True).session.nbytes()["draft"] > 0
