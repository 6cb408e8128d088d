"""The model that ships: it has learnt, and what is written about it is what was measured."""

from __future__ import annotations

import json

import pytest
import torch

import labkit
from labkit.pages import between_markers
from labkit.paths import data_dir
from labkit.text.corpus import load_corpus
from labkit.text.stats import gzip_bits_per_byte, longest_copied_run, share_of_known_words
from labkit.train.attention_mass import NOVELS, attention_mass
from labkit.train.controls import muted_engram
from labkit.train.draft_record import read_draft_record
from labkit.train.evaluate import bits_per_byte
from labkit.train.figures import Figures, window
from labkit.train.readme import readme_part
from labkit.train.record import training_record
from labkit.train.runs import read_log, read_plain, read_runs
from labkit.train.targets import targets

MINI = data_dir() / "mini"


@pytest.fixture(scope="module")
def lab() -> labkit.lab.Lab:
    return labkit.load("mini")


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures.from_dict(json.loads((MINI / "figures.json").read_text(encoding="utf-8")))


def test_all_mechanisms_are_active_inside_the_context(lab):
    c = lab.config
    assert {role.kind for role in c.roles} == {"window", "full", "reindex", "reuse"}
    assert {role.ratio for role in c.roles} == {0, 1, 2} and len(c.engram_layer_ids) == 2
    context = c.max_position_embeddings
    assert context // 2 > c.index_topk and context > c.sliding_window  # both selections select
    assert c.candidate_topk_blocks * c.candidate_block_size < context  # and the pool leaves out
    assert any(role.uses_candidates for role in c.roles)
    assert c.encoder_layers == c.num_hidden_layers - c.encoder_layers and c.hc_mult == 4


def test_it_fits_the_repository():
    assert (MINI / "model.safetensors").stat().st_size <= 16_000_000
    assert sum(path.stat().st_size for path in MINI.iterdir()) <= 17_500_000


def test_it_writes_english_and_does_not_recite(lab):
    text = "".join(lab.generate(prompt, 100, temperature=0.8, seed=5).text + "\n"
                   for prompt in ("It was a", "Mr. Knightley had", "The weather"))
    assert share_of_known_words(text) >= 0.8
    assert longest_copied_run(text) < 12
    assert longest_copied_run(load_corpus("train")["emma"][1000:1200]) >= 12  # it would be seen


def test_held_out_text_costs_what_the_record_says(lab, figures):
    """A twelfth of the windows: near the recorded figure, far below gzip and equal odds."""
    length = window(lab.config)
    found = bits_per_byte(lab.model, lab.tokenizer, length=length, stride=length // 2, limit=8)
    assert found == pytest.approx(figures.bits_per_byte, rel=0.08)
    assert figures.bits_per_byte < figures.bits_per_byte_gzip - 1.0
    assert figures.bits_per_byte_gzip == pytest.approx(gzip_bits_per_byte(), rel=0.01)


def test_engram_and_the_indexer_have_learnt(lab, figures):
    assert figures.bits_per_byte_engram_muted > figures.bits_per_byte + 0.02
    found = {(m.layer, m.text): m for m in attention_mass(lab, rows=1, answers=1)}
    assert found.keys() == {(m.layer, m.text) for m in figures.attention_mass}
    for source in lab.config.index_source_layer_ids:
        m = found[source, NOVELS]
        assert m.kept_entries > 1.2 * m.kept_entries_random, m


def test_muting_engram_is_undone(lab):
    ids = torch.tensor([lab.encode("It is a truth")])
    before = lab.model(ids).logits
    with muted_engram(lab.model):
        assert not torch.equal(lab.model(ids).logits, before)
    assert torch.equal(lab.model(ids).logits, before)


def test_the_record_is_what_the_measurements_give(lab, figures):
    wanted = training_record(lab.config, read_runs(MINI), read_log(MINI / "log.jsonl"), figures,
                             read_draft_record(MINI))
    assert (MINI / "TRAINING.md").read_text(encoding="utf-8") == wanted


def test_the_figures_are_of_these_files(lab, figures):
    assert figures.file_bytes == (MINI / "model.safetensors").stat().st_size
    assert figures.parameters == sum(
        p.numel() for n, p in lab.model.named_parameters() if not n.startswith("mtp."))
    assert figures.context == lab.config.max_position_embeddings
    assert figures.plain == read_plain(MINI)
    draft = read_draft_record(MINI)
    assert figures.draft == (draft and draft.figures)
    told = json.loads((MINI / "figures.json").read_text(encoding="utf-8"))["targets"]
    assert told == [target.to_dict() for target in targets(figures)]


def test_the_readme_says_what_the_measurements_give(figures):
    readme = (MINI.parents[1] / "README.md").read_text(encoding="utf-8")
    wanted = readme_part(figures, read_runs(MINI), read_draft_record(MINI))
    assert between_markers(readme, wanted) == readme
