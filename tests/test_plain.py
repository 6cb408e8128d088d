"""The plain transformer that a V4.1 is compared with: its size, its rows, its run."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from labkit.checkpoint.accounting import active_decode
from labkit.config import ModelConfig
from labkit.errors import CheckpointError, InputError
from labkit.paths import data_dir
from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import Tokenizer
from labkit.train import batches, plain_run
from labkit.train.loop import FROM_NOTHING, Options, Stage, Trainer
from labkit.train.plain import LOOK_BACK, PlainConfig, PlainTransformer, plain_config, turned
from labkit.train.plain_run import PlainRun, from_options, joined, read_facts, train_plain
from labkit.train.runs import read_plain

NOVELS = {"novels": 1.0}
SMALL = PlainConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                    intermediate_size=96)
STAGES = (Stage(0.5, 96, 48, "all", NOVELS), Stage(1.0, 128, 64, "index", NOVELS))
OPTIONS = dataclasses.replace(Options(), steps=6, warmup=2, half=False, stages=STAGES, seed=3)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(data_dir() / "nano")


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """Two novels' beginnings: encoding all of the text takes seconds, once for every stage."""
    text = {name: novel[:60_000] for name, novel in list(load_corpus("train").items())[:2]}
    monkeypatch.setattr(batches, "load_corpus", lambda split: text)


def facts(options: Options, step: int | None = None, **changes) -> dict:
    raw = json.loads(json.dumps(dataclasses.asdict(options)))
    return {"step": options.steps if step is None else step, "options": raw | changes}


# ---- the model -------------------------------------------------------------------------------

@pytest.mark.parametrize("head_dim", [32, 64])
@pytest.mark.parametrize("preset", ["nano", "mini"])
def test_it_has_as_many_active_parameters(preset, head_dim):
    config = ModelConfig.preset(preset)
    wanted = active_decode(config).counted
    found = plain_config(wanted, config.vocab_size, config.num_hidden_layers, head_dim)
    print(preset, wanted, found, found.active_parameters)
    assert abs(found.active_parameters / wanted - 1) <= 0.03
    assert found.head_dim == head_dim and found.num_hidden_layers == config.num_hidden_layers
    assert 0.3 < found.intermediate_size / found.hidden_size < 16


def test_its_sizes_are_those_of_the_module():
    model = PlainTransformer(SMALL)
    count = sum(p.numel() for p in model.parameters())
    assert SMALL.parameters == count
    assert SMALL.active_parameters == count - model.embed.weight.numel()
    layer = model.layers[0]
    # a key and a value in every layer, two bytes a number
    rows = sum(w.weight.shape[0] for w in (layer.wk, layer.wv))
    assert SMALL.cache_bytes_a_token == SMALL.num_hidden_layers * rows * 2


def test_no_size_fits_what_the_head_alone_exceeds():
    for active, layers, head in ((1000, 2, 32), (5_000_000, 0, 32), (5_000_000, 8, 48)):
        with pytest.raises(InputError, match="plain transformer"):
            plain_config(active, 4096, layers, head)


def test_a_token_sees_none_behind_it():
    model = PlainTransformer(SMALL)
    ids = torch.randint(512, (2, 40), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[:, 25:] = (other[:, 25:] + 7) % 512
    one, two = model(ids).logits, model(other).logits
    assert torch.allclose(one[:, :25], two[:, :25], atol=1e-5)
    assert not torch.allclose(one[:, 25:], two[:, 25:], atol=1e-2)


def test_its_first_heads_look_back():
    """As those of a V4.1 do at the start: most of head h on the token h + 1 back."""
    config = PlainConfig(512, 256, 2, 8, 64)
    model = PlainTransformer(config)
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(1))
    layer = model.layers[0]
    x = layer.attn_norm(model.embed(ids))
    angle = torch.arange(64)[:, None] * model.rates(x.device)
    q, k = (turned(w(x).unflatten(-1, (8, -1)).transpose(1, 2), angle.cos(), angle.sin())
            for w in (layer.wq, layer.wk))
    scores = (q @ k.mT) * config.head_dim**-0.5                         # [1,8,64,64]
    seen = torch.ones(64, 64, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)[0]
    for head in range(8):
        mass = weights[head].diagonal(-(head + 1))[16:].mean().item()
        print(head, round(mass, 3))
        assert mass > 0.4 if head < LOOK_BACK else mass < 0.2
    assert torch.equal(model.head.weight[:, 1:], model.embed.weight[:, 1:] * 0.04)
    assert not model.head.weight[:, 0].any()


# ---- what it reads ---------------------------------------------------------------------------

def test_it_reads_the_rows_of_the_model(tokenizer, tmp_path):
    trainer = Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path / "a",
                      dataclasses.replace(OPTIONS, kernels="cpu"))
    run = PlainRun(tokenizer, tmp_path / "b", from_options(OPTIONS, SMALL))
    assert run.ends == trainer.ends == [3, 6]
    assert run.tokens_after(6) == trainer.tokens_after(6) == 3 * 96 + 3 * 128
    for step in range(6):
        number, within = run.stage(step)
        assert (number, within) == trainer.stage(step)
        for one, other in zip(run.batches[number](within), trainer.batches[number](within),
                              strict=True):
            assert torch.equal(one, other)
    for name in ("seed", "lr", "muon_lr", "weight_decay", "warmup", "clip", "cooldown", "half"):
        assert getattr(run.options, name) == getattr(OPTIONS, name), name


def test_runs_one_after_another_are_one(tokenizer, tmp_path):
    """The first left after 4 of 6 steps; the second from its weights, with rows of its own."""
    second = dataclasses.replace(OPTIONS, steps=4, seed=9, cooldown=0.5, start="abc",
                                 stages=(Stage(1.0, 64, 64, "index", NOVELS),))
    options = joined([facts(OPTIONS, step=4), facts(second)], SMALL)
    run = PlainRun(tokenizer, tmp_path, options)
    assert options.steps == 8 and run.ends == [3, 4, 8]
    assert options.row_seeds == (3, 4, 9) and options.cooldown == 0.25
    assert run.tokens_after(8) == 3 * 96 + 1 * 128 + 4 * 64
    own = Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path / "second",
                  dataclasses.replace(second, start="", kernels="cpu"))
    number, within = run.stage(5)
    assert torch.equal(run.batches[number](within)[0], own.batches[0](1)[0])
    assert run.length == 64


def test_runs_that_do_not_follow_one_another_are_refused():
    started = dataclasses.replace(OPTIONS, start="abc")
    for runs in ([started], [OPTIONS, OPTIONS], [started, started]):
        with pytest.raises(InputError, match="the first one first"):
            joined([facts(options) for options in runs], SMALL)
    with pytest.raises(InputError, match="no step behind it"):
        joined([facts(OPTIONS, step=0)], SMALL)


def test_another_length_keeps_the_shares():
    options = joined([facts(OPTIONS)], SMALL, steps=60, seed=8)
    assert options.steps == 60 and options.seed == 8 and options.row_seeds == (3, 4)
    assert [stage.until for stage in options.stages] == [0.5, 1.0]


def test_facts_of_a_run_are_found_where_they_lie(tokenizer, tmp_path):
    run = PlainRun(tokenizer, tmp_path / "run", from_options(OPTIONS, SMALL))
    run.save()
    (found,) = read_facts(tmp_path / "run")               # of the saved state
    assert found["options"]["stages"] == facts(OPTIONS)["options"]["stages"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps([facts(OPTIONS), facts(OPTIONS)]))
    assert len(read_facts(file)) == len(read_facts(tmp_path)) == 2
    file.write_text(json.dumps({"step": 1, "options": {"steps": 1, "batch": 2}}))
    with pytest.raises(InputError, match="older form"):
        read_facts(file)
    file.write_text("{")
    with pytest.raises(InputError, match="no JSON"):
        read_facts(file)
    with pytest.raises(InputError, match="holds no run"):
        read_facts(tmp_path / "nothing")


# ---- the run ---------------------------------------------------------------------------------

def test_training_lowers_the_loss_and_a_resumed_run_equals_an_uninterrupted_one(
        tokenizer, tmp_path):
    options = from_options(dataclasses.replace(OPTIONS, steps=30), SMALL)
    whole = PlainRun(tokenizer, tmp_path / "whole", options)
    whole.glance = dict
    whole.run(quiet=True)
    first = PlainRun(tokenizer, tmp_path / "parts", options)
    seen = []
    for _ in range(17):
        seen.append(first.one_step()["loss"])
        first.step += 1
    assert seen[-1] < seen[0] - 0.5
    first.save()
    second = PlainRun(tokenizer, tmp_path / "parts", options)
    assert second.step == 17
    second.glance = dict
    second.run(quiet=True)
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(CheckpointError, match="--fresh"):
        PlainRun(tokenizer, tmp_path / "parts", dataclasses.replace(
            options, model=dataclasses.replace(SMALL, intermediate_size=64)))


def test_the_command_writes_what_a_model_is_compared_with(tmp_path, monkeypatch, capsys):
    """From run.json to plain.json; a second call trains nothing and measures the same."""
    stages = (Stage(1.0, 160, 160, "all", {"novels": 0.5, "needle": 0.5}),)
    (tmp_path / "run.json").write_text(json.dumps(facts(dataclasses.replace(
        OPTIONS, steps=2, stages=stages))))
    monkeypatch.setattr(plain_run, "RECALL_COUNT", 2)
    monkeypatch.setattr(plain_run.heldout_bits, "__defaults__", (1, True))  # one window
    folder = tmp_path / "run"
    path = train_plain(folder, "mini", [tmp_path / "run.json"], False)
    raw = json.loads(path.read_text())
    assert raw["steps"] == 2 and raw["tokens"] == 320 and raw["seed"] == 3
    assert abs(raw["active_parameters"] / raw["compared_with_active_parameters"] - 1) <= 0.03
    assert set(raw["recall"]) == {"20", "32", "64", "100"} and all(
        0 <= share <= 1 for share in raw["recall"].values())
    assert raw["options"]["model"]["vocab_size"] == 4096
    found = read_plain(folder)
    assert found is not None and found.heldout_bits_per_byte == raw["heldout_bits_per_byte"] < 9
    assert found.command.startswith("labkit train-plain --like ")
    again = json.loads(train_plain(folder, "mini", [tmp_path / "run.json"], False).read_text())
    assert again == raw
    assert "from step 2 to 2" in capsys.readouterr().out
    with pytest.raises(InputError, match="steps is 0"):
        train_plain(folder, "mini", [tmp_path / "run.json"], False, steps=0)
    with pytest.raises(InputError, match="heads of 48"):
        train_plain(folder, "mini", [], False, head_dim=48)


def test_without_a_run_in_stages_it_reads_what_a_new_one_would(tmp_path, monkeypatch):
    (tmp_path / "mini").mkdir()
    monkeypatch.setattr(plain_run, "data_dir", lambda: tmp_path)
    for text in (None, {"step": 1, "options": {"steps": 1, "batch": 2, "length": 1024}}):
        if text is not None:
            (tmp_path / "mini" / "run.json").write_text(json.dumps(text))
        options = plain_run._options("mini", [], SMALL, 50, None)
        assert options.steps == 50
        assert [s.length for s in options.stages] == [s.length for s in FROM_NOTHING]
    shipped = [facts(OPTIONS), facts(dataclasses.replace(OPTIONS, start="abc"))]
    (tmp_path / "mini" / "run.json").write_text(json.dumps(shipped))
    assert plain_run._options("mini", [], SMALL, None, None).steps == 12
