"""Ablations: variants that differ in one thing, their runs, the table of what is saved."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from labkit.checkpoint.accounting import active_decode
from labkit.errors import InputError
from labkit.kernels.cpu import sparse_attention
from labkit.kernels.reference import attention_probabilities
from labkit.model.hyper import sinkhorn
from labkit.model.transformer import Transformer
from labkit.paths import data_dir
from labkit.text.corpus import load_corpus
from labkit.text.engram_map import engram_classes
from labkit.text.tokenizer import Tokenizer
from labkit.train import ablations, batches
from labkit.train.ablation_table import difference, figure, noise, read_results, rows, table
from labkit.train.ablations import (
    NO_SINK,
    STAGES,
    VARIANTS,
    PlainAblation,
    ablate,
    base_config,
    cache_bytes_a_token,
    differences,
    new_run,
    options_for,
    variant_config,
)
from labkit.train.loop import Stage
from labkit.train.run import TrainingRun

SHORT = (Stage(0.5, 160, 160, "all", {"novels": 0.5, "pairs": 0.5}),
         Stage(1.0, 160, 160, "index", {"novels": 1.0}))
QUICK = {"kernels": "cpu", "half": False, "warmup": 1}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(data_dir() / "mini")


@pytest.fixture(scope="module")
def base(tokenizer):
    """The base, smaller: the same layers, and all that a variant changes."""
    return base_config(tokenizer).replace(
        hidden_size=32, moe_intermediate_size=32, num_attention_heads=2, q_lora_rank=32,
        o_lora_rank=32, index_n_heads=2, sliding_window=16, index_topk=8,
        candidate_topk_blocks=4, candidate_block_size=4, hc_sinkhorn_iters=4)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    text = {name: novel[:40_000] for name, novel in list(load_corpus("train").items())[:2]}
    monkeypatch.setattr(batches, "load_corpus", lambda split: text)


# ---- variants --------------------------------------------------------------------------------

CLAIMS = {
    "base": set(),
    "no-engram": {"engram_layer_ids", "engram_num_embeddings"},
    "no-pool": {"candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size"},
    "all-full": {"kv_source_layer_ids", "index_source_layer_ids"},
    "one-stream": {"hc_mult", "hc_sinkhorn_iters"},
    "ratio-4": {"compress_ratios"},
    "no-sink": set(),
    "plain": set(),
}


def test_a_variant_differs_in_what_it_claims(tokenizer):
    base = base_config(tokenizer)
    assert set(VARIANTS) == set(CLAIMS)
    for name, fields in CLAIMS.items():
        found = differences(variant_config(VARIANTS[name], base), base)
        assert set(found) == fields, name
        options = [options_for(VARIANTS[n], 1, 5000) for n in ("base", name)]
        one, other = map(dataclasses.asdict, options)
        assert {k for k in one if one[k] != other[k]} == ({"sinks"} if name == "no-sink" else set())
    kinds = {name: [(r.kind, r.ratio) for r in variant_config(VARIANTS[name], base).roles]
             for name in CLAIMS}
    assert kinds["base"] == [("window", 0), ("full", 2), ("reuse", 2), ("full", 1), ("reuse", 1),
                             ("reindex", 1)]
    assert {kind for kind, _ in kinds["all-full"][1:]} == {"full"}
    assert kinds["ratio-4"] == [("window", 0), ("full", 4), ("reuse", 4), *kinds["base"][3:]]
    roles = variant_config(VARIANTS["base"], base).roles
    assert [r.layer for r in roles if r.uses_candidates] == [5]
    assert not any(r.uses_candidates for r in variant_config(VARIANTS["no-pool"], base).roles)


def test_one_stream_needs_no_iterations():
    """What lets its variant differ in their number as well: it changes nothing."""
    one = torch.randn(50, 1, 1, generator=torch.Generator().manual_seed(0)) * 5
    few, many = (sinkhorn(one, n, 1e-6) for n in (1, 20))
    assert torch.allclose(few, torch.ones_like(few), atol=1e-5)
    assert torch.allclose(few, many, atol=1e-5)


def test_the_base_selects_and_its_pool_excludes(tokenizer):
    """On the longest rows: fewer entries are selected than the pool holds, fewer than there are."""
    c = base_config(tokenizer)
    longest = max(stage.length for stage in STAGES)
    pool = c.candidate_topk_blocks * c.candidate_block_size
    assert c.index_topk < pool < longest // c.compress_ratios[c.candidate_source_layer_id]
    assert longest <= c.max_position_embeddings and c.index_topk < longest // 4


def test_every_variant_makes_a_step(base, tokenizer, tmp_path):
    for name, variant in VARIANTS.items():
        options = options_for(variant, 0, 640, SHORT, **QUICK)
        run = new_run(variant, base, tokenizer, tmp_path / name, options)
        before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        for run.step in (0, 3):                           # all entries; then selected and rounded
            loss = run.one_step()["loss"]
            assert 0 < loss < 12, (name, loss)
        moved = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
        sinks = {n for n in before if n.endswith("attn_sink")}
        if variant.plain:
            assert isinstance(run, PlainAblation) and moved == set(before)
            wanted = active_decode(base).counted
            assert abs(run.options.model.active_parameters / wanted - 1) <= 0.03
            continue
        assert len(sinks) == 6
        assert moved & sinks == (set() if name == "no-sink" else sinks), name
        if name == "no-sink":
            assert all(bool((before[n] == NO_SINK).all()) for n in sinks)
        assert ("layers.1.engram.wkv.weight" in moved) == (name != "no-engram")


def test_no_sink_takes_no_share():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 2, 32, generator=generator) * 4
    window = torch.randn(1, 4 + 6, 32, generator=generator)
    sink, start = torch.full((2,), NO_SINK), torch.tensor([0])
    weights, _ = attention_probabilities(q, window, None, None, sink, start)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 6, 2), atol=1e-6)
    with_sink, _ = attention_probabilities(q, window, None, None, torch.zeros(2), start)
    assert float(with_sink.sum(-1).max()) < 0.9999
    assert torch.isfinite(sparse_attention(q, window, None, None, sink, start)).all()


@pytest.mark.parametrize("name", ["base", "all-full", "ratio-4"])
def test_bytes_a_token_are_those_of_a_real_cache(name, base, tokenizer):
    config = variant_config(VARIANTS[name], base)
    model = Transformer(config, engram_classes(tokenizer)[0], "cpu")
    for p in model.parameters():
        p.data.normal_(0, 0.02)
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.randint(4096, (1, 64)), cache=cache)
    held = cache.nbytes()
    found = cache_bytes_a_token(config)
    print(name, found)
    assert (held["global_kv"] + held["index_keys"]) / 64 == found


def test_tokens_are_as_many_as_asked_or_a_few_more():
    for tokens in (1, 5_000, 20_001, 2_000_000):
        options = options_for(VARIANTS["base"], 0, tokens)
        read = sum(n * stage.tokens for n, stage in zip(
            ablations._steps_of(options), STAGES, strict=True))
        assert tokens <= read < tokens + 2 * max(stage.tokens for stage in STAGES)


# ---- runs ------------------------------------------------------------------------------------

def go(tmp_path, tokenizer, base, folder="a", **options):
    ablate(tmp_path / folder, tmp_path / f"{folder}-results", tokenizer, base=base, stages=SHORT,
           limit=1, count=2, **{"tokens": 640, "seeds": 1, "say": print, **QUICK, **options})
    return tmp_path / f"{folder}-results"


def test_results_are_saved_skipped_and_printed(base, tokenizer, tmp_path, monkeypatch, capsys):
    results = go(tmp_path, tokenizer, base, only=["base", "plain"], seeds=2)
    assert sorted(f.name for f in results.iterdir()) == [
        "base-seed0.json", "base-seed1.json", "plain-seed0.json", "plain-seed1.json"]
    saved = json.loads((results / "base-seed1.json").read_text())
    assert saved["seed"] == saved["options"]["seed"] == 1 and saved["changes"] == {}
    assert saved["tokens"] == 640 and saved["steps"] == 4 and saved["recall"].keys() == {"32"}
    assert 0 < saved["heldout_bits_per_byte"] < 9
    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "run", None)           # whoever trains now fails
        go(tmp_path, tokenizer, base, only=["base", "plain"], seeds=2)
        assert capsys.readouterr().out.count("done") == 4
        text = table(read_results(results))
    assert text.splitlines()[2].startswith("| base |") and "plain dense transformer" in text
    with pytest.raises(InputError, match="other options"):
        go(tmp_path, tokenizer, base, only=["base"], tokens=6400)
    with pytest.raises(InputError, match="other base"):
        go(tmp_path, tokenizer, base.replace(index_topk=4), only=["base"])
    for change, word in ((dict(only=["none"]), "'none'"), (dict(seeds=0), "seeds is 0"),
                         (dict(tokens=0), "tokens is 0")):
        with pytest.raises(InputError, match=word):
            go(tmp_path, tokenizer, base, **change)


def test_a_run_that_was_stopped_goes_on(base, tokenizer, tmp_path, monkeypatch):
    whole = json.loads((go(tmp_path, tokenizer, base, only=["no-sink"]) /
                        "no-sink-seed0.json").read_text())
    step = ablations.AblationRun.one_step

    def one_step(self):
        facts = step(self)
        if self.step == 1:
            self.stop()
        return facts

    with monkeypatch.context() as patch:
        patch.setattr(ablations.AblationRun, "one_step", one_step)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path, tokenizer, base, "b", only=["no-sink"])
    assert not (tmp_path / "b-results").exists()
    parts = json.loads((go(tmp_path, tokenizer, base, "b", only=["no-sink"]) /
                        "no-sink-seed0.json").read_text())
    log = [json.loads(line) for line in
           (tmp_path / "b" / "no-sink-0" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 4
    for name in ("heldout_bits_per_byte", "recall", "steps", "tokens"):
        assert parts[name] == whole[name], name


# ---- the table -------------------------------------------------------------------------------

def saved(name: str, seed: int, bits: float, recall: float, **changes) -> dict:
    return {"name": name, "title": VARIANTS[name].title, "seed": seed, "plain": False,
            "base": {"hidden_size": 8}, "tokens": 100, "recall_count": 50, "cpu_seconds": 3600.0,
            "options": {"seed": seed, "sinks": name != "no-sink", "lr": 0.1},
            "parameters": 1234, "active_parameters": 567, "active_not_counted": {},
            "cache_bytes_a_token": 40.5, "heldout_bits_per_byte": bits, "recall": {"64": recall},
            **changes}


RESULTS = [saved("base", 0, 1.80, 0.90), saved("base", 1, 1.82, 0.96),
           saved("no-pool", 0, 1.82, 0.80), saved("no-pool", 1, 1.826, 0.90),
           saved("no-engram", 0, 1.90, 0.10), saved("no-engram", 1, 1.91, 0.12)]


def test_what_chance_can_do_is_called_none():
    found = rows(RESULTS)
    assert [row.name for row in found] == ["base", "no-engram", "no-pool"]
    chance = noise([row.bits for row in found])
    assert chance == pytest.approx(0.02)                   # the base's, the largest
    by_name = {row.name: row for row in found}
    assert difference(by_name["no-pool"].bits, by_name["base"].bits, chance) is None
    assert difference(by_name["no-engram"].bits, by_name["base"].bits, chance) == pytest.approx(
        0.095)
    assert difference(figure([2.0]), figure([1.0]), None) is None
    lines = table(RESULTS).splitlines()
    print("\n".join(lines))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert cells[0] == ["base", "1,234", "567", "40.5", "1.8100 ± 0.0100", "", "93% ± 3%", ""]
    assert cells[1][5:] == ["+0.0950", "11% ± 1%", "-82 points"]
    assert cells[2][5:] == ["none", "85% ± 5%", "none"]
    assert "0.0200 bits per byte" in "\n".join(lines)


def test_one_seed_tells_no_difference():
    lines = table([r for r in RESULTS if r["seed"] == 0]).splitlines()
    assert [cell.strip() for cell in lines[3].split("|")][6] == "one seed" and "±" not in lines[3]


def test_results_that_compare_nothing_are_refused(tmp_path):
    with pytest.raises(InputError, match="labkit ablate"):
        read_results(tmp_path / "nothing")

    def write(*results: dict) -> None:
        for number, result in enumerate(results):
            (tmp_path / f"x{number}-seed0.json").write_text(json.dumps(result))

    write(RESULTS[0], RESULTS[4])
    assert len(read_results(tmp_path)) == 2
    for change in ({"tokens": 200}, {"base": {"hidden_size": 16}}, {"recall": {"32": 0.5}},
                   {"options": {"seed": 0, "sinks": True, "lr": 0.2}}):
        write(RESULTS[0], {**RESULTS[4], **change})
        with pytest.raises(InputError, match="not of one set"):
            read_results(tmp_path)
    write(RESULTS[0], {"name": "base"})
    with pytest.raises(InputError, match="no result of an ablation"):
        read_results(tmp_path)


def test_the_saved_results_are_those_of_the_code(tokenizer):
    """What the repository holds, if anything: of this base and these variants."""
    folder = data_dir() / "ablations"
    if not list(folder.glob("*-seed*.json")):
        pytest.skip("no results are saved yet")
    base = base_config(tokenizer)
    results = read_results(folder)
    for result in results:
        options = options_for(VARIANTS[result["name"]], result["seed"], result["tokens"])
        ablations.check_result(ablations.result_file(folder, result["name"], result["seed"]),
                               ablations.run_facts(VARIANTS[result["name"]], base, options))
        assert result["tokens"] >= 2_000_000
    print(table(results))
