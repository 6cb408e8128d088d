"""labkit generate and labkit inspect from the command line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from golden_model import GOLDEN, make_folder
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import labkit
from labkit.cli import app
from labkit.engine.inspection import describe, tensor_report

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("text"))


def generate(folder, *words):
    return runner.invoke(app, ["generate", *words, "--model", str(folder)])


def test_text_on_standard_output_and_a_note_on_standard_error(folder):
    result = generate(folder, "It is a truth", "--max-new-tokens", "12", "--seed", "1")
    assert result.exit_code == 0
    wanted = labkit.load(folder).generate("It is a truth", 12, seed=1)
    assert result.stdout == wanted.text + "\n"
    assert result.stderr.startswith("labkit: 12 tokens, ")
    assert "tokens/s; max-new-tokens reached; seed 1" in result.stderr


@pytest.mark.parametrize("option", (["--draft-slots", "3"], ["--min-survival", ".5"]))
def test_options_of_speculation_without_it_are_refused_by_their_own_names(option):
    result = generate("no-such-folder", "It is", *option)   # before a model is looked for
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr == ("labkit: --draft-slots and --min-survival go with --speculative: add "
                             "that, or leave them out\n")


def test_json_holds_all_of_the_result(folder):
    options = ["--max-new-tokens", "9", "--temperature", "0", "--stop", "zzz", "--stop", "qqq"]
    result = generate(folder, "It is", *options, "--json")
    found = json.loads(result.stdout)
    wanted = labkit.load(folder).generate("It is", 9, temperature=0)
    assert found["ids"] == list(wanted.ids) and found["text"] == wanted.text
    assert found["stats"]["new_tokens"] == 9


def test_sampling_options_arrive(folder):
    nine = ["It is", "--max-new-tokens", "9"]
    a = generate(folder, *nine, "--top-k", "1", "--seed", "1", "--json")
    b = generate(folder, *nine, "--top-p", "1e-9", "--seed", "2", "--json")
    assert json.loads(a.stdout)["ids"] == json.loads(b.stdout)["ids"]
    text = json.loads(a.stdout)["text"]
    stop = next(c for c in text[3:] if c.isascii() and c.isprintable())
    c = generate(folder, *nine, "--top-k", "1", "--stop", stop)
    assert c.stdout == text[: text.index(stop)] + "\n" and "stop string met" in c.stderr


def test_nano_needs_no_files_and_says_that_it_is_random():
    result = generate("nano", "It is", "--max-new-tokens", "3")
    assert result.exit_code == 0 and "random weights" in result.stderr


def broken(folder, tmp_path, change):
    copy = shutil.copytree(folder, tmp_path / "copy")
    change(copy)
    return copy


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def reshape(folder):
    state = load_file(folder / "model.safetensors")
    state["norm.weight"] = torch.zeros(7)
    save_file(state, folder / "model.safetensors")


def another_type(folder):
    text = (folder / "config.json").read_text().replace('"deepseek_v41"', '"llama"')
    (folder / "config.json").write_text(text)


@pytest.mark.parametrize(("change", "said"), [
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: (f / "config.json").write_text("{"), "not valid JSON"),
    (another_type, "model_type is 'llama'"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
    (lambda f: (f / "tokenizer.json").write_text("{}"), "is not a tokenizer.json"),
    (lambda f: (f / "model.safetensors").unlink(), "holds no weights"),
    (cut, "is truncated"),
    (reshape, "norm.weight is [7], needs [32]"),
])  # fmt: skip
def test_a_folder_that_is_not_whole_is_one_sentence(folder, tmp_path, change, said):
    copy = broken(folder, tmp_path, change)
    before = sorted(p.name for p in copy.iterdir())
    result = generate(copy, "It is")
    assert_refused(result, said)
    assert sorted(p.name for p in copy.iterdir()) == before


def test_a_shard_or_a_scale_that_is_missing(tmp_path):
    released = make_folder(tmp_path / "released", "released_layout")
    shard = released / "model-00002-of-00004.safetensors"
    state = load_file(shard)
    name = next(n for n in state if n.endswith(".scale"))
    index = json.loads((released / "model.safetensors.index.json").read_text())
    del index["weight_map"][name]
    (released / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({n: t for n, t in state.items() if n != name}, shard)
    assert_refused(generate(released, "It"), "without its scale")
    shard.unlink()
    assert_refused(generate(released, "It"), "lacks model-00002-of-00004.safetensors")


def assert_refused(result, said):
    assert result.exit_code == 1
    assert said in result.stderr and result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("labkit: ") and said in last and "Traceback" not in result.output


@pytest.mark.parametrize(("words", "said"), [
    ([""], "the prompt is empty"),
    (["It", "--max-new-tokens", "0"], "max_new_tokens is 0"),
    (["It", "--max-new-tokens", "5000"], "more than the context of 4096"),
    (["It", "--temperature", "-1"], "temperature is -1"),
    (["It", "--top-p", "1.5"], "top_p is 1.5"),
    (["It", "--top-k", "-1"], "top_k is -1"),
    (["It", "--seed", "-1"], "seed is -1"),
    (["It", "--stop", ""], "at least one character"),
    (["a " * 5000], "more than the context"),
])  # fmt: skip
def test_bad_options_are_one_sentence(folder, words, said):
    assert_refused(generate(folder, *words), said)


@pytest.mark.parametrize("source", ["flash", "no/such/folder"])
def test_bad_sources_are_one_sentence(source):
    assert_refused(generate(source, "It"), "flash")


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_ctrl_c_prints_what_there_is_and_leaves_with_130(folder):
    child = subprocess.Popen(
        [sys.executable, "-m", "labkit", "generate", "It is", "--model", str(folder),
         "--max-new-tokens", "4000", "--seed", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    first = child.stdout.read(12)  # it is writing; unbuffered, or communicate would miss some
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    rest, note = child.communicate(timeout=60)
    text, note = (first + rest).decode(), note.decode()
    assert child.returncode == 130
    assert text.endswith("\n") and "Traceback" not in note
    assert note.splitlines()[-1].endswith("; interrupted; seed 1")
    count = int(note.splitlines()[-1].split()[1])
    whole = labkit.load(folder).generate("It is", count, seed=1).text
    assert 1 <= count < 4000 and text == whole + "\n"


# ---- inspect ---------------------------------------------------------------------------------


def inspect(*words):
    return runner.invoke(app, ["inspect", *map(str, words)])


def test_inspect_flash_adds_up_to_the_release():
    result = inspect("flash")
    assert result.exit_code == 0
    last = result.stdout.splitlines()[-1].split()
    assert last == ["96,085", "in", "all", "510,286,023,000"]
    assert "layers.{0..39}.ffn.experts.{0..383}.w1.weight" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["20", "full", "1", "20", "20", "publishes"] in rows
    assert ["39", "reuse", "1", "20", "36"] in rows


def test_inspect_a_folder_lists_what_is_stored(tmp_path):
    released = make_folder(tmp_path / "released", "released_layout")
    result = inspect(released)
    assert "tensors stored" in result.stdout
    size = sum(f.stat().st_size for f in released.glob("*.safetensors"))
    count, total = (int(result.stdout.splitlines()[-1].split()[i].replace(",", "")) for i in (0, 3))
    weights = json.loads((released / "model.safetensors.index.json").read_text())["weight_map"]
    assert count == len(weights) and 0.8 * size < total < size
    assert "layers.{2,4,6,8}.attn.indexer.wq_b.weight" in result.stdout
    only_config = inspect(GOLDEN / "flash")
    assert only_config.stdout == inspect("flash").stdout


def test_inspect_one_tensor_multiplies_its_scale_in(tmp_path):
    released = make_folder(tmp_path / "released", "released_layout")
    state = labkit.checkpoint.read_state(released)
    for name in ("layers.0.ffn.experts.0.w1.weight", "layers.0.attn.wq_a.weight", "norm.weight",
                 "layers.1.engram.embed.weight", "layers.0.hc_attn_fn"):
        shown = inspect(released, "--tensor", name).stdout
        assert tensor_report(name, state[name]).splitlines()[1:] == shown.splitlines()[1:], name
        assert shown.startswith(f"{name}  [{', '.join(map(str, state[name].shape))}]")
    assert "stored as F8_E8M0" in inspect(released, "--tensor", "layers.0.attn.wq_a.scale").stdout


def test_a_large_tensor_is_read_in_part(tmp_path, monkeypatch):
    from labkit.engine import inspection

    released = make_folder(tmp_path / "released", "released_layout")
    state = labkit.checkpoint.read_state(released)
    monkeypatch.setattr(inspection, "MOST_VALUES", 32 * 64)
    for name in ("layers.1.engram.embed.weight", "layers.2.attn.indexer.wq_b.weight"):
        shown = inspect(released, "--tensor", name).stdout
        assert f"the first 64 of {state[name].shape[0]} rows" in shown
        assert shown.splitlines()[1] == tensor_report(name, state[name][:64]).splitlines()[1]


def test_a_report_counts_every_value():
    x = torch.tensor([0.0, 0.0, 1.0, -3.0, float("nan")])
    lines = tensor_report("x", x).splitlines()
    assert lines[0] == "x  [5]" and lines[1] == "1 values are NaN or infinite"
    assert lines[2].split() == "min -3 max 1 mean -0.5 std 1.5 zeros 50.00%".split()
    counts = [int(line.split("..")[1].split()[1].replace(",", "")) for line in lines[3:]]
    assert sum(counts) == 4 and len(counts) == 20 and counts[0] == 1
    assert len(tensor_report("x", torch.ones(3)).splitlines()) == 2
    assert "no finite values" in tensor_report("x", torch.tensor([float("inf")]))


def test_a_scalar_of_the_roles_follows_the_config():
    c = labkit.ModelConfig.preset("nano").replace(candidate_source_layer_id=-1)
    text = describe(c)
    assert "candidate pool       none" in text and "publishes" not in text


@pytest.mark.parametrize(("words", "said"), [
    (["no/such"], "neither a preset"),
    (["flash", "--tensor", "norm.weight"], "no weights here"),
    (["nano", "--tensor", "norm.weight"], "has no files"),
])  # fmt: skip
def test_inspect_refuses_in_one_sentence(words, said):
    assert_refused(inspect(*words), said)


def test_inspect_names_a_tensor_like_the_one_asked_for(folder):
    result = inspect(folder, "--tensor", "layers.0.attn_sink")
    assert_refused(result, "layers.0.attn.attn_sink")


# ---- the cache's options ---------------------------------------------------------------------


@pytest.mark.parametrize(("words", "options"), [
    (["--prefill", "ced"], {"prefill": "ced"}),
    (["--prefill", "ced", "--halo", "exact", "--cut", "after"],
     {"prefill": "ced", "halo": "exact", "cut": "after"}),
    (["--cache-form", "fp8"], {"cache_form": "fp8"}),
    (["--chunk", "7"], {"chunk": 7}),
])  # fmt: skip
def test_cache_options_arrive(folder, words, options):
    text = "It is a truth universally acknowledged, that a single man"
    result = generate(folder, text, "--max-new-tokens", "9", "--seed", "1", "--json", *words)
    wanted = labkit.load(folder).generate(text, 9, seed=1, **options)
    assert json.loads(result.stdout)["ids"] == list(wanted.ids)
    assert "reading" not in result.stderr  # standard error is no terminal here


def test_each_cache_option_does_something(folder):
    lab = labkit.load(folder)
    ids = lab.encode("It is a truth universally acknowledged, that a single man in possession " * 3)

    def first(**options):
        generation = lab.stream(ids, 1, temperature=0, **options)
        read = []
        generation.progress = read.append
        return next(generation).probability, read, generation.session.cache.form

    full, read, form = first()
    assert read == [len(ids)] and form == "packed"
    ced = {first(prefill="ced", cut=cut)[0] for cut in ("inside", "after")}
    assert len(ced | {full}) == 3
    exact = first(prefill="ced", halo="exact")[0]
    assert abs(exact - full) < 1e-3 * full and exact not in ced
    assert first(cache_form="fp8")[2] == "fp8" and first(cache_form="fp8")[0] != full
    chunked, read, _ = first(chunk=10)
    assert read == [10] * (len(ids) // 10) + [len(ids) % 10] * (len(ids) % 10 > 0)
    assert abs(chunked - full) < 1e-2 * full
    assert not lab.model._forward_hooks


@pytest.mark.parametrize(("words", "said"), [
    (["--halo", "wide"], "halo is 'wide'"),
    (["--cut", "before"], "cut is 'before'"),
    (["--cache-form", "int4"], "cache form is 'int4'"),
    (["--chunk", "0"], "chunk is 0"),
    (["--prefill", "some"], "prefill is 'some'"),
])  # fmt: skip
def test_bad_cache_options_are_one_sentence(folder, words, said):
    assert_refused(generate(folder, "It", *words), said)


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("chunk", "shown"), [("8", True), ("4096", False)])
def test_a_long_prompt_read_in_chunks_shows_its_progress_on_a_terminal(folder, chunk, shown):
    import termios

    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))  # a fresh one has no width, and a bar none either
    child = subprocess.Popen(
        [sys.executable, "-m", "labkit", "generate", "It is a truth " * 20, "--model", str(folder),
         "--max-new-tokens", "3", "--seed", "1", "--chunk", chunk],
        stdout=subprocess.PIPE, stderr=terminal,
    )  # fmt: skip
    os.close(terminal)
    text, note = child.stdout.read(), b""
    try:
        while piece := os.read(main, 4096):
            note += piece
    except OSError:  # Linux: the other end has been closed
        pass
    os.close(main)
    assert child.wait(60) == 0
    assert (b"reading" in note) == shown and b"labkit: 3 tokens" in note
    assert text.decode() == labkit.load(folder).generate(
        "It is a truth " * 20, 3, seed=1, chunk=int(chunk)).text + "\n"
