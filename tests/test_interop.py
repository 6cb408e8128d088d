"""benchmarks/interop.py without any engine: the rule, the boundaries, the tables, the recipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys

import numpy as np
import pytest
import torch

import labkit
from labkit import paths
from labkit.config import ModelConfig
from labkit.lab import model_folder
from labkit.numerics import fake_quantize
from labkit.pages import BEGIN, END, between_markers


def _script():
    spec = importlib.util.spec_from_file_location("bench_interop", paths.benchmarks()["interop"])
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


interop = _script()
compare, env, lab_side = interop.compare, interop.env, interop.lab_side
CACHE = env.RECIPES["nemo-automodel"].modes[1]
PLAIN = env.RECIPES["nemo-automodel"].modes[0]


# ---- the rule -------------------------------------------------------------------------------

def test_distance_is_a_share_of_the_span_row_by_row():
    ours = np.array([[1.0, -10.0, 2.0], [3.0, 4.0, 5.0], [0.0, 1.0, 0.0]])
    theirs = ours + np.array([[0.0, 0.02, 0.0], [1.5, 0.0, 0.0], [0.0, 0.0, 0.0]])
    d = compare.distance(theirs, ours, compare.ROUNDED)
    assert d.rows == 3 and d.worst == pytest.approx(0.15) and d.median == pytest.approx(0.002)
    assert (d.beyond, d.first, d.same) == (1, 1, 1.0)
    assert compare.distance(theirs, ours, compare.UNROUNDED).first == 0


def test_what_is_no_number_never_agrees():
    ours = np.ones((2, 4))
    theirs = ours.copy()
    theirs[1, 2] = np.nan
    d = compare.distance(theirs, ours, compare.ROUNDED)
    assert d.beyond == 1 and d.first == 1 and d.worst == np.inf
    assert compare.verdict([d], floor=[compare.distance(ours, ours, 1e-3)]) == compare.DISAGREES
    with pytest.raises(ValueError, match="shape"):
        compare.distance(theirs[:1], ours, compare.ROUNDED)


def _distance(worst, beyond, median=1e-6):
    return compare.Distance(10, worst, median, beyond, 0 if beyond else None, 1.0)


def test_the_farthest_of_several_takes_the_largest_of_both():
    found = compare.farthest([_distance(1e-3, 0, 5e-4), _distance(2e-2, 4, 1e-4)])
    assert (found.worst, found.median, found.beyond) == (2e-2, 5e-4, 4)


def test_a_nudge_moves_embeddings_by_one_unit(tmp_path):
    folder = model_folder("mini")
    plain = lab_side.load(folder, CACHE.job(1)).model.embed.weight
    nudged = lab_side.load(folder, CACHE.job(1), nudge=1).model.embed.weight
    apart = ((nudged - plain).abs() / plain.abs().clamp_min(1e-30))
    assert apart.max() <= torch.finfo(torch.float32).eps
    assert 0.5 < (nudged != plain).double().mean() < 0.8
    other = lab_side.load(folder, CACHE.job(1), nudge=2).model.embed.weight
    assert not torch.equal(other, nudged)


def test_verdicts():
    near, late = _distance(1e-4, 0), _distance(2e-2, 3, 1e-3)
    assert compare.verdict([near, near]) == compare.AGREES
    assert compare.verdict([near, late]) == compare.DISAGREES
    assert compare.verdict([near, late], forced=[_distance(5e-6, 0)]) == compare.BOUNDARIES
    # Every text that is beyond the tolerance has to be explained, and well enough.
    assert compare.verdict([late, late], forced=[_distance(5e-6, 0)]) == compare.DISAGREES
    assert compare.verdict([late], forced=[_distance(2e-3, 1)]) == compare.DISAGREES
    assert compare.verdict([late], floor=[_distance(1.5e-2, 2, 6e-4)]) == compare.FLOOR
    assert compare.verdict([late], floor=[_distance(1.5e-2, 2, 4e-4)]) == compare.DISAGREES
    assert compare.verdict([late], floor=[_distance(5e-3, 0, 1e-3)]) == compare.DISAGREES


def test_modes_say_what_is_rounded():
    assert not PLAIN.rounded and CACHE.rounded
    assert all(m.rounded for m in env.RECIPES["ftllm"].modes)  # bf16 rounds everywhere


# ---- boundaries -----------------------------------------------------------------------------

def test_selections_are_compared_as_sets_whatever_their_dtype_and_filling():
    rows = np.array([[-1, -1, 2], [7, -1, 0]], dtype=np.int32)
    assert compare.padded(rows, 4).tolist() == [[2, -1, -1, -1], [0, 7, -1, -1]]


def _traces(tokens=6):
    # A window-only layer, a layer of ratio 2 that owns everything, a reader.
    ours = {f"layers.{i}.attn.window": np.zeros((tokens, 4), np.float32) for i in range(3)}
    ours |= {"layers.1.attn.compressed_kv": np.zeros((tokens // 2, 4), np.float32),
             "layers.1.attn.candidates": np.zeros((tokens, tokens // 2), bool),
             "layers.1.attn.topk_indices": np.tile([0, -1], (tokens, 1)),
             "layers.2.ffn.picked": np.tile([1, 3], (tokens, 1))}
    return ours, {name: array.copy() for name, array in ours.items()}


RATIOS = (0, 2, 2)


def test_equal_traces_have_no_boundary():
    ours, theirs = _traces()
    theirs["layers.1.attn.topk_indices"] = np.tile([-1, 0, -1], (6, 1)).astype(np.int32)
    theirs["layers.2.ffn.picked"] = theirs["layers.2.ffn.picked"][:, ::-1]
    theirs["layers.1.attn.candidates"][0, 0] = True     # entry 0 does not exist yet at token 0
    assert compare.first_boundary(theirs, ours, RATIOS, 5) is None


def test_the_first_boundary_is_that_of_the_lowest_layer_before_the_row():
    ours, theirs = _traces()
    theirs["layers.2.ffn.picked"][1] = 0, 3
    theirs["layers.1.attn.compressed_kv"][1, 2] = np.float32(1e-30)   # entry 1: token 3
    theirs["layers.0.attn.window"][5, 0] = 1.0
    found = compare.first_boundary(theirs, ours, RATIOS, 4)
    assert (found.layer, found.site, found.position) == (1, "attn.compressed_kv", 3)
    assert found.places == 1 + 1 and "NVFP4" in str(found)
    found = compare.first_boundary(theirs, ours, RATIOS, 2)
    assert (found.layer, found.site, found.position) == (2, "ffn.picked", 1)
    found = compare.first_boundary(theirs, ours, RATIOS, 5)
    assert (found.layer, found.position) == (0, 5)
    assert compare.first_boundary(theirs, ours, RATIOS, 0) is None


def test_partings_and_margins():
    assert compare.parting([1, 2, 3], [1, 2, 3]) is None
    assert compare.parting([1, 5, 3], [1, 2, 3]) == 1
    assert compare.margin(np.array([0.5, 3.0, -1.0, 2.75], np.float32)) == 0.25


# ---- labkit in an engine's mode -------------------------------------------------------------

@pytest.fixture(scope="module")
def folder():
    return model_folder("mini")


@pytest.fixture(scope="module")
def ids(folder):
    config = ModelConfig.from_file(folder)
    count = 2 * config.index_topk + 20   # selections leave something out at ratios 1 and 2
    return torch.randint(5, config.vocab_size, (count,),
                         generator=torch.Generator().manual_seed(1)).tolist()


def test_forced_to_its_own_choices_labkit_is_itself_and_forced_to_others_it_is_not(folder, ids):
    lab = lab_side.load(folder, CACHE.job(1))
    trace = lab_side.trace(lab, ids)
    assert np.array_equal(trace["logits"], lab_side.logits(lab, ids))
    assert np.array_equal(lab_side.forced(folder, CACHE.job(1), ids, trace), trace["logits"])
    config = lab.config
    full, last = config.kv_source_layer_ids[-1], config.num_hidden_layers - 1
    half = (trace[f"layers.{full}.attn.topk_indices"] + 1) // 2 - 1
    for name, value in {
        f"layers.{last}.attn.window": trace[f"layers.{last}.attn.window"] * 2,
        f"layers.{full}.attn.compressed_kv": trace[f"layers.{full}.attn.compressed_kv"] * 2,
        f"layers.{full}.attn.topk_indices": half,
        f"layers.{last}.ffn.picked": (trace[f"layers.{last}.ffn.picked"] + 1)
        % config.n_routed_experts,
    }.items():
        moved = lab_side.forced(folder, CACHE.job(1), ids, trace | {name: value})
        apart = compare.distance(moved, trace["logits"], compare.UNROUNDED)
        print(f"{name}: largest {apart.worst:.1e}")
        assert apart.beyond, name


def test_linear_inputs_are_rounded_where_the_mode_says(folder):
    x = torch.randn(3, ModelConfig.from_file(folder).hidden_size,
                    generator=torch.Generator().manual_seed(0))
    plain = lab_side.load(folder, PLAIN.job(1)).model.layers[0].attn
    for linear, wo_a in (("inputs", False), ("all", True)):
        mode = dataclasses.replace(CACHE, linear=linear).job(1)
        attention = lab_side.load(folder, mode).model.layers[0].attn
        assert torch.equal(attention.wq_a(x), plain.wq_a(fake_quantize(x, "fp8")))
        assert not torch.equal(attention.wq_a(x), plain.wq_a(x))
        groups = torch.randn(2, plain.wo_a.groups, plain.wo_a.weight.shape[1])
        expected = plain.wo_a(fake_quantize(groups, "fp8") if wo_a else groups)
        assert torch.equal(attention.wo_a(groups), expected)


def test_greedy_is_generation_at_temperature_zero(folder, ids):
    tokens, logits = lab_side.greedy(lab_side.load(folder, CACHE.job(1)), ids[:40], 6)
    written = labkit.load(folder, kernels="reference").generate(ids[:40], 6, temperature=0).ids
    assert list(written)[-len(tokens):] == tokens or list(written) == tokens
    assert logits.argmax(-1).tolist() == tokens


# ---- questions ------------------------------------------------------------------------------

def test_lengths_follow_the_config():
    for name in ("nano", "mini"):
        c = ModelConfig.preset(name)
        lengths = interop.default_lengths(c)
        print(name, lengths)
        assert lengths[0] < c.sliding_window
        assert lengths[-1] <= c.max_position_embeddings and len(lengths) == 4
        assert any(n > max(c.compress_ratios) * c.index_topk for n in lengths[:2])
        assert any(n > c.candidate_topk_blocks * c.candidate_block_size for n in lengths[:3])


def test_chosen_rows_end_with_the_last():
    assert interop.chosen_rows(5, None) == [0, 1, 2, 3, 4] == interop.chosen_rows(5, 8)
    assert interop.chosen_rows(60, 8) == [6, 14, 21, 29, 36, 44, 51, 59]


# ---- environments and processes -------------------------------------------------------------

def test_commands_install_in_order_with_the_environments_own_python(tmp_path):
    made = env.commands(env.RECIPES["nemo-automodel"], tmp_path, "python3")
    assert made[0] == ["python3", "-m", "venv", str(tmp_path)]
    assert [words[-1] for words in made[1:]] == ["torch==2.13.0", "nemo-automodel==0.7.0"]
    assert all(words[0] == str(env.python_of(tmp_path)) for words in made[1:])
    assert env.python_of(tmp_path, windows=True).name == "python.exe"
    for recipe in env.RECIPES.values():  # the versions that the tables name are those installed
        assert any(word.endswith(f"=={recipe.version}") for call in recipe.installs
                   for word in call)


def test_only_a_finished_environment_of_the_same_recipe_is_used_again(tmp_path, monkeypatch):
    recipe = env.RECIPES["ftllm"]
    python = env.python_of(tmp_path / "e")
    make = f"import pathlib; p=pathlib.Path({str(python)!r}); p.parent.mkdir(parents=True); " \
           "p.touch()"
    calls = []

    def commands(*args):
        calls.append(args)
        return [[sys.executable, "-m", "timeit", "-n1", "-r1", "pass"],
                [sys.executable, "-c", make, "-m"]]
    monkeypatch.setattr(env, "commands", commands)
    assert not env.is_ready(tmp_path / "e", recipe)
    assert env.prepare(recipe, tmp_path / "e", print) == python
    assert env.prepare(recipe, tmp_path / "e", print) == python and len(calls) == 1
    other = dataclasses.replace(recipe, installs=(("ftllm==0",),))
    assert not env.is_ready(tmp_path / "e", other)
    (tmp_path / "e" / env.READY).unlink()  # as when it was stopped half-way
    env.prepare(recipe, tmp_path / "e", print)
    assert len(calls) == 2


def test_an_engine_that_cannot_be_installed_is_one_sentence(tmp_path, monkeypatch):
    failing = "import sys; sys.exit('WARNING: slow\\nERROR: No matching distribution\\nnote: x')"
    monkeypatch.setattr(env, "commands", lambda *a: [[sys.executable, "-c", failing, "-m"]])
    with pytest.raises(env.EngineError, match="No matching distribution; check the network"):
        env.prepare(env.RECIPES["ftllm"], tmp_path / "e", print)
    assert not env.is_ready(tmp_path / "e", env.RECIPES["ftllm"])


WORKER = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from worker import serve

class Engine:
    version = "9.9"
    def __init__(self, folder, mode):
        print("much talk")
        if mode["threads"] == 13:
            sys.exit("Press any key: the weights are odd")
        self.names = sorted(f.name for f in folder.iterdir())
    def logits(self, ids, rows):
        return np.outer(np.array(ids, np.float32)[rows], [1, 2])
    def greedy(self, prompt, steps, given):
        return prompt[:steps], np.zeros((steps, 2))
    def trace(self, ids):
        return {{"files": np.array(self.names)}}

serve(Engine)
"""


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake_worker.py"
    script.write_text(WORKER.format(here=str(env.HERE)))
    return dataclasses.replace(env.RECIPES["ftllm"], worker=str(script))


def _job(tmp_path, checkpoint, threads):
    job = {"checkpoint": str(checkpoint), "mode": CACHE.job(threads), "texts": [[4, 5, 6]],
           "rows": [[0, 2]], "prompts": [[7, 8, 9]], "given": [], "steps": 2, "traces": [[1]]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    return tmp_path / "job.json"


def test_a_job_goes_through_a_process_and_leaves_the_checkpoint_alone(tmp_path, fake):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
                 "run.json"):
        (source / name).write_text("{}")
    said, result = [], tmp_path / "result.npz"
    with env.checkpoint_copy(source, tmp_path / "work") as copy:
        env.run(fake, sys.executable, _job(tmp_path, copy, 1), result, tmp_path / "log", 1,
                said.append)
    assert not copy.exists() and len(list(source.iterdir())) == 5
    with np.load(result) as stored:
        assert str(stored["version"]) == "9.9"
        assert stored["logits.0"].tolist() == [[4, 8], [6, 12]]
        assert stored["tokens.0"].tolist() == [7, 8] and stored["steps.0"].shape == (2, 2)
        assert stored["trace.0.files"].tolist() == ["config.json", "model.safetensors",
                                                    "tokenizer.json", "tokenizer_config.json"]
    assert said[0] == "loading the checkpoint" and "much talk" not in said
    assert "much talk" in (tmp_path / "log").read_text()


def test_a_worker_that_fails_is_told_and_never_an_agreement(tmp_path, fake):
    result = tmp_path / "result.npz"
    with pytest.raises(env.EngineError, match="exit status 1.*the weights are odd"):
        env.run(fake, sys.executable, _job(tmp_path, tmp_path, 13), result, tmp_path / "log", 1,
                print)
    assert not result.exists()
    failed = interop.Outcome(fake, CACHE, 0.0, failure="failed: the weights are odd")
    assert failed.verdict == "not compared"
    page = interop.report("mini", model_folder("mini"), ModelConfig.preset("mini"), [failed])
    row = next(line for line in page.splitlines() if line.startswith("| ftllm"))
    assert "the weights are odd" in row and "agrees" not in page


def test_digests_follow_contents_and_questions(tmp_path):
    (tmp_path / "a").write_text("1")
    before = env.digest([tmp_path / "a"], {"x": [1]})
    assert before == env.digest([tmp_path / "a"], {"x": [1]})
    assert before != env.digest([tmp_path / "a"], {"x": [2]})
    (tmp_path / "a").write_text("2")
    assert before != env.digest([tmp_path / "a"], {"x": [1]})


# ---- tables ---------------------------------------------------------------------------------

def test_the_report_names_boundaries_and_partings():
    boundary = compare.Boundary(4, "attn.index_keys", 17, 23)
    outcome = interop.Outcome(env.RECIPES["mlx-vlm"], CACHE, 5e-3, version="0.0.1")
    outcome.texts = [interop.Text(60, [0], _distance(2e-2, 3), _distance(1e-2, 1), boundary,
                                  _distance(5e-6, 0))]
    outcome.writings = [interop.Writing(0, 128, None),
                        interop.Writing(1, 128, 7, (5, 6), (0.01, 0.02), 1e-3, boundary)]
    page = interop.report("mini", model_folder("mini"), ModelConfig.preset("mini"), [outcome])
    assert outcome.verdict == compare.BOUNDARIES
    assert "1 of 2, 1 part behind a named boundary" in page and "mlx-vlm 0.0.1" in page
    assert page.count("layer 4, index key (MXFP4), position 17 (23 places in all)") == 2


def test_only_what_stands_between_the_markers_is_replaced():
    page = f"before {BEGIN} old {END} after"
    new = between_markers(page, "\nnew\n")
    assert new == f"before {BEGIN}\n\nnew\n\n{END} after"
    assert between_markers(new, "new") == new
    with pytest.raises(ValueError, match="lacks"):
        between_markers("no markers", "x")
    assert compare.table(("a", "b"), [("x|y", "1")]).splitlines()[2] == "| x\\|y | 1   |"
