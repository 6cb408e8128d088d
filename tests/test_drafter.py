"""Training the draft: its losses, its batches, the run, and what is written and measured."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import signal
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

import labkit
from labkit import kernels
from labkit.checkpoint.draft import write_draft
from labkit.checkpoint.writer import write_checkpoint
from labkit.engine.calibration import FILE, load_calibration, target_digest
from labkit.engine.sampling import Sampling
from labkit.errors import CheckpointError, InputError
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.paths import data_dir
from labkit.text.tokenizer import SPECIAL_TOKENS, Tokenizer
from labkit.train import drafter, losses, own_text
from labkit.train.batches import Batches, Novels
from labkit.train.command import DRAFT_FILES, export_run
from labkit.train.controls import changed
from labkit.train.draft_command import train_draft
from labkit.train.draft_figures import measure_draft, try_drafts
from labkit.train.draft_record import draft_minutes, draft_section, read_draft_record
from labkit.train.drafter import (
    DraftOptions,
    DraftTrainer,
    acceptance,
    behind,
    draft_blocks,
    heldout_rows,
    read,
    with_new_draft,
)
from labkit.train.state import read_weights

OPTIONS = DraftOptions(steps=4, batch=2, length=48, anchors=16, warmup=2, kernels="cpu",
                       half=False, rounding_from=0.5, shares={"novels": 1.0})


def nano() -> labkit.lab.Lab:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return labkit.load("nano")


@functools.cache
def batches(*sizes: int) -> Batches:
    return Batches(Tokenizer.from_file(data_dir() / "nano"), *sizes)


@pytest.fixture(autouse=True, scope="module")
def _novels_are_read_once():
    """Cutting the novels into tokens takes seconds, and batches are a function of the step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "Batches", lambda _, *sizes: batches(*sizes[:3]))
        yield


@pytest.fixture(scope="module")
def lab() -> labkit.lab.Lab:
    return nano()


@pytest.fixture
def folder(lab, tmp_path):
    """A checkpoint without draft whose config has one, in the released form."""
    out = tmp_path / "target"
    state = {n: p for n, p in lab.model.state_dict().items() if not n.startswith("mtp.")}
    write_checkpoint(out, lab.config, state, "released", engram_digest=lab.tokenizer.digest())
    shutil.copyfile(data_dir() / "nano" / "tokenizer.json", out / "tokenizer.json")
    return out


# ---- blocks behind anchors ------------------------------------------------------------------


@pytest.mark.parametrize("rounding", [True, False])
def test_drafts_of_training_are_those_of_service(lab, rounding):
    """Against `lab.draft` with the text's own tokens before each slot, short windows included."""
    model, n = lab.model, lab.config.dspark_block_size
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 512, (2, 61), generator=g)
    anchors = torch.tensor([[1, 2, 17, 55], [3, 16, 40, 54]])
    before, model.cache_rounding = model.cache_rounding, rounding
    try:
        with torch.no_grad():
            reading = read(model, ids)
            found = draft_blocks(model, reading, anchors, n)
        served = lab.draft(ids[:, :-1], anchors, behind(ids, anchors, n, 0).reshape(2, -1))
    finally:
        model.cache_rounding = before
    wanted = served["dspark.base_logits"] + served["dspark.markov_logits"]
    assert torch.allclose(found.logits, wanted.reshape(8, n, -1), rtol=0, atol=1e-5)
    assert torch.allclose(found.confidence_logits,
                          served["dspark.confidence_logits"].reshape(8, n), rtol=0, atol=1e-5)


def test_later_text_is_not_seen(lab):
    """A draft depends on the tokens up to its anchor, and through them alone."""
    g = torch.Generator().manual_seed(2)
    a = torch.randint(5, 512, (1, 50), generator=g)
    b = a.clone()
    b[:, 31:] = torch.randint(5, 512, (1, 19), generator=g)
    with torch.no_grad():
        one, two = (draft_blocks(lab.model, read(lab.model, ids), torch.tensor([[30]]), 5)
                    for ids in (a, b))
    # Slot 1 has the anchor before it; later slots have tokens of the changed text in the bias.
    assert torch.equal(one.logits[:, 0], two.logits[:, 0])
    assert not torch.equal(one.logits[:, 2], two.logits[:, 2])


def test_a_new_draft_knows_nothing_and_leaves_the_backbone_as_it_was(lab):
    model = with_new_draft(lab, "cpu", seed=7)
    for name, p in lab.model.named_parameters():
        if not name.startswith("mtp."):
            assert torch.equal(model.get_parameter(name), p), name
    classes = lab.model.engram_classes
    plain = init_weights(Transformer(lab.config, classes), 7)
    both = dict(init_weights(Transformer(lab.config, classes, draft=True), 7).named_parameters())
    assert all(torch.equal(both[name], p) for name, p in plain.named_parameters())
    with torch.no_grad():
        reading = read(model, torch.randint(5, 512, (1, 41)))
        found = draft_blocks(model, reading, torch.tensor([[5, 20, 30]]), 5)
    loss = F.cross_entropy(found.logits.flatten(0, 1), torch.randint(5, 512, (15,)))
    assert float(loss) == pytest.approx(math.log(512), abs=0.1)
    assert float(found.confidence_logits.abs().max()) < 1.5


# ---- the run --------------------------------------------------------------------------------


def test_a_run_starts_from_the_draft_of_another_target(lab, folder, tmp_path):
    """The draft is the other's, the backbone the target's own; one without is refused."""
    other = Transformer(lab.config, lab.model.engram_classes, draft=True)
    init_weights(other, 9)
    trainer = DraftTrainer(lab, tmp_path / "run", OPTIONS, other)
    assert trainer.options.start == target_digest(other)
    for name, p in trainer.model.named_parameters():
        source = other if name.startswith("mtp.") else lab.model
        assert torch.equal(p, source.get_parameter(name)), name
    bare = Transformer(lab.config, lab.model.engram_classes)
    with pytest.raises(InputError, match="no draft"):
        DraftTrainer(lab, tmp_path / "none", OPTIONS, bare)
    sizes = {"steps": 1, "batch": 1, "length": 48, "anchors": 4}
    changed = tmp_path / "changed"
    write_checkpoint(changed, lab.config.replace(rms_norm_eps=1e-7), bare.state_dict(),
                     engram_digest=lab.tokenizer.digest())
    shutil.copyfile(data_dir() / "nano" / "tokenizer.json", changed / "tokenizer.json")
    with pytest.raises(InputError, match="another configuration"):
        train_draft(tmp_path / "r", str(folder), True, changed, **sizes)


def test_a_target_writes_rows_by_their_numbers(lab, monkeypatch):
    """Any grouping of the rows gives the same; each begins as the novels do; the draws are fair."""
    model, tokenizer = lab.model, lab.tokenizer
    with changed(model, kernels=kernels.get("cpu")):
        rows = own_text.write_rows(model, tokenizer, 5, 40, 3)
        monkeypatch.setattr(own_text, "ROWS", 2)
        assert torch.equal(own_text.write_rows(model, tokenizer, 5, 40, 3), rows)
        assert not torch.equal(own_text.write_rows(model, tokenizer, 5, 40, 4), rows)
    assert rows.shape == (5, 41) and (rows[:, 0] == tokenizer.bos_id).all()
    begun = Novels(tokenizer, own_text.PROMPT, 3)
    assert all(rows[n, :33].tolist() == begun(n).tolist() for n in range(5))
    special = {tokenizer.special_id(role) for role in SPECIAL_TOKENS} - {None}
    assert not special & set(rows[:, 1:].flatten().tolist())


def test_the_targets_rows_follow_its_odds(lab, monkeypatch):
    """Next tokens behind one prompt, 400 times: chi-square against the model's own odds."""
    n, prompt = 400, np.array([lab.tokenizer.bos_id, *range(40, 40 + own_text.PROMPT)])
    monkeypatch.setattr(own_text, "Novels", lambda *_: lambda number: prompt)
    rows = own_text.write_rows(lab.model, lab.tokenizer, n, own_text.PROMPT + 1, 0)
    logits = lab.model(torch.tensor(prompt)[None]).logits[0, -1].detach().double()
    logits[[lab.tokenizer.special_id(role) for role in SPECIAL_TOKENS
            if lab.tokenizer.special_id(role) is not None]] = -math.inf
    odds, order = logits.softmax(-1).sort(descending=True)
    cells = torch.bucketize(odds.cumsum(-1), torch.linspace(0, 1, 9)[1:-1].double())
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    found = torch.bincount(cells[place[rows[:, -1].long()]], minlength=8).double()
    expected = n * torch.zeros(8).double().index_add_(0, cells, odds)
    used = expected > 5
    assert used.sum() > 3
    value = float(((found - expected)[used] ** 2 / expected[used]).sum())
    assert value < 30, (found, expected)                 # 7 degrees: one in ten thousand


def test_half_of_the_novels_are_the_targets_own(lab, tmp_path):
    options = dataclasses.replace(OPTIONS, own_rows=3)
    trainer = DraftTrainer(lab, tmp_path / "run", options)
    assert trainer.own is not None and trainer.own.shape == (3, 49)
    kept = (tmp_path / "run" / own_text.FILE).read_bytes()
    plain = DraftTrainer(lab, tmp_path / "plain", OPTIONS)
    for step in (0, 2, 4):
        trainer.step = plain.step = step
        mine, texts = trainer.reading().ids, plain.reading().ids
        assert torch.equal(mine[0], texts[0])                        # batches of 2: rows 0, 2, ...
        assert torch.equal(mine[1], trainer.own[step // 2 % 3].long())
    again = DraftTrainer(lab, tmp_path / "run", options)
    assert torch.equal(again.own, trainer.own)
    assert (tmp_path / "run" / own_text.FILE).read_bytes() == kept


def test_only_the_draft_moves(lab, tmp_path):
    trainer = DraftTrainer(lab, tmp_path, OPTIONS)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    for _ in range(3):
        trainer.one_step()
        trainer.step += 1
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert {n for n in before if n.startswith("mtp.")} - moved <= {
        n for n in before if n.endswith("bias_vl")}  # no images here
    assert all(n.startswith("mtp.") for n in moved)
    assert target_digest(trainer.model) == target_digest(lab.model) == trainer.options.target


def test_a_resumed_run_equals_an_uninterrupted_one(lab, tmp_path):
    """With two updates for a pass of the target, stopped between the two."""
    options = dataclasses.replace(OPTIONS, updates=2)
    whole = DraftTrainer(lab, tmp_path / "whole", options)
    whole.run(look_every=100, quiet=True)
    first = DraftTrainer(lab, tmp_path / "parts", options)
    first.one_step()
    first.step += 1
    first.save()
    second = DraftTrainer(lab, tmp_path / "parts", options)
    assert second.step == 1
    second.run(look_every=100, quiet=True)
    for (name, a), b in zip(whole.trained.named_parameters(), second.trained.parameters(),
                            strict=True):
        assert torch.equal(a, b), name
    entry = json.loads((tmp_path / "whole" / "log.jsonl").read_text().splitlines()[-1])
    assert entry["step"] == 4 and entry["rounding"]
    assert len(entry["acceptance"]) == len(entry["heldout_acceptance"]) == 5
    assert entry["loss"] == pytest.approx(
        0.1 * entry["cross_entropy"] + 0.9 * entry["total_variation"] + entry["confidence_loss"],
        abs=3e-4)


def test_two_updates_share_a_pass_of_the_target(lab, tmp_path, monkeypatch):
    passes, anchors = [], []
    whole_read, whole_blocks = drafter.read, drafter.draft_blocks
    monkeypatch.setattr(drafter, "read", lambda *a: (passes.append(1), whole_read(*a))[1])
    monkeypatch.setattr(drafter, "draft_blocks", lambda m, r, a, *rest: (
        anchors.append(a), whole_blocks(m, r, a, *rest))[1])
    trainer = DraftTrainer(lab, tmp_path, dataclasses.replace(OPTIONS, updates=2))
    for _ in range(4):
        trainer.one_step()
        trainer.step += 1
    assert len(passes) == 2 and not torch.equal(anchors[0], anchors[1])


def test_training_raises_acceptance(tmp_path):
    lab = nano()
    with torch.no_grad():
        lab.model.head.weight.mul_(12)        # a target with opinions: noise agrees with noise
    trainer = DraftTrainer(lab, tmp_path, dataclasses.replace(
        OPTIONS, steps=60, warmup=4, anchors=32, rounding_from=0.75))
    before = trainer.look(limit=2)
    seen = []
    for _ in range(60):
        seen.append(trainer.one_step())
        trainer.step += 1
    after = trainer.look(limit=2)
    print("acceptance of noise by a target of noise:", [round(a, 3) for a in before], "->",
          [round(a, 3) for a in after])
    assert sum(e["loss"] for e in seen[-5:]) < 0.9 * sum(e["loss"] for e in seen[:5])
    assert sum(after) > sum(before) + 0.1
    # The confidence follows the acceptance that it is to predict: cost near that label's entropy.
    a = torch.tensor(seen[-1]["acceptance"]).double()
    floor = (-(a * a.log() + (1 - a) * (1 - a).log()) * losses.slot_weights(5)).sum()
    assert seen[-1]["confidence_loss"] < float(floor) + 0.05


def test_a_run_belongs_to_its_target_and_options(lab, tmp_path):
    DraftTrainer(lab, tmp_path, OPTIONS).save()
    assert DraftTrainer(lab, tmp_path, dataclasses.replace(OPTIONS, steps=9)).step == 0
    with pytest.raises(InputError, match="anchors"):
        DraftTrainer(lab, tmp_path, dataclasses.replace(OPTIONS, anchors=8))
    other = nano()
    with torch.no_grad():
        other.model.head.weight[0, 0] += 1
    with pytest.raises(InputError, match="target"):
        DraftTrainer(other, tmp_path, OPTIONS)


# ---- measuring ------------------------------------------------------------------------------


def test_a_draft_that_is_the_target_is_always_accepted(lab, monkeypatch):
    """Acceptance of the target's own distribution is 1, of a point far from it near 0."""
    def perfect(model, reading, anchors, n, taps=None):
        return drafter.Drafted(behind(reading.logits, anchors, n, 0), torch.zeros(1, n))

    monkeypatch.setattr(drafter, "draft_blocks", perfect)
    assert acceptance(lab.model, lab.tokenizer, 60, 2) == pytest.approx([1.0] * 5, abs=1e-5)


def test_held_out_rows_are_the_held_out_text(lab):
    from labkit.text.corpus import load_corpus

    rows = heldout_rows(lab.tokenizer, 100)
    text = next(iter(load_corpus("heldout").values()))
    assert rows.shape[1] == 101 and (rows[:, 0] == lab.tokenizer.bos_id).all()
    assert text.startswith(lab.tokenizer.decode(rows[0, 1:].tolist())[:-4])
    assert len(heldout_rows(lab.tokenizer, 100, 3)) == 3


def test_trials_are_proposals_of_service_behind_the_text(lab):
    """Against a session that reads the text so far: the same greedy drafts, the same verdict."""
    text = heldout_rows(lab.tokenizer, 40, 2)
    n = lab.config.dspark_block_size
    found = try_drafts(lab.model, text, Sampling(temperature=0.0), every=9)
    anchors = list(range(9, 41 - n, 9))
    assert found.survived.shape == (2 * len(anchors), n) == found.confidence_logits.shape
    assert not bool((found.survived[:, 1:] & ~found.survived[:, :-1]).any())
    for i, anchor in enumerate(anchors):
        for row in range(2):
            known = text[row : row + 1, :anchor]
            served = lab.draft(text[row : row + 1, : anchor + 1], [anchor])
            previous = served["dspark.previous_token_ids"][0].tolist()
            drafted = (served["dspark.base_logits"] + served["dspark.markov_logits"])[0].argmax(-1)
            assert previous[0] == int(text[row, anchor])
            logits = served["dspark.confidence_logits"][0].double()
            place = i * 2 + row
            assert int(found.rows[place]) == row
            assert torch.allclose(found.confidence_logits[place], logits, atol=1e-4)
            ids = torch.cat([known, text[row : row + 1, anchor : anchor + 1], drafted[None]], 1)
            with torch.no_grad():
                wanted = lab.model(ids).logits[0, anchor : anchor + n].argmax(-1)
            alive = (wanted == drafted).long().cumprod(0).bool()
            assert torch.equal(found.survived[place], alive)


def test_trials_repeat_with_a_seed(lab):
    text = heldout_rows(lab.tokenizer, 30, 2)
    a, b, c = (try_drafts(lab.model, text, Sampling(), every=3, seed=s) for s in (1, 1, 2))
    assert torch.equal(a.survived, b.survived)
    assert torch.equal(a.confidence_logits, b.confidence_logits)
    assert not torch.equal(a.confidence_logits, c.confidence_logits)
    assert a.of_rows(odd=True).rows.unique().tolist() == [1]
    assert a.accepted == pytest.approx(float(a.survived.sum(1).double().mean()))


# ---- files and commands ---------------------------------------------------------------------


def _bytes_of(path, drop="mtp."):
    with safe_open(path, framework="pt") as file:
        return {name: (t.dtype, tuple(t.shape), hashlib.sha256(
                    t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
                for name in file.keys()  # noqa: SIM118 - not a dict
                if not name.startswith(drop) for t in [file.get_tensor(name)]}


def test_a_draft_joins_a_checkpoint_whose_other_bytes_stay(lab, folder):
    before = _bytes_of(folder / "model.safetensors")
    assert not labkit.load(folder).has_draft
    state = {n: p for n, p in lab.model.state_dict().items() if n.startswith("mtp.")}
    for change in (1.0, 0.5):                             # the second replaces the first
        changed = {n: p * change for n, p in state.items()}
        write_draft(folder, changed)
        assert _bytes_of(folder / "model.safetensors") == before
        loaded = labkit.load(folder)
        assert loaded.has_draft
        name = "mtp.0.main_norm.weight"                   # bf16: halves are exact
        assert torch.equal(loaded.model.get_parameter(name), changed[name])
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json"]
    for bad, word in (({}, "missing"), ({**state, "head.weight": torch.ones(1)}, "unexpected"),
                      ({**state, name: torch.ones(3)}, "shape"),
                      ({**state, name: state[name] * math.nan}, "NaN")):
        with pytest.raises(CheckpointError, match=word):
            write_draft(folder, bad)
    assert labkit.load(folder).has_draft


def test_train_export_load(folder, tmp_path, capsys, monkeypatch):
    from labkit.train import draft_command

    monkeypatch.setattr(draft_command, "measure_draft", lambda lab: measure_draft(
        lab, length=60, limit=4, quiet=True))
    monkeypatch.setattr(DraftTrainer, "look", lambda self, limit=None: [0.5] * 5)
    run = tmp_path / "run"
    options = {"steps": 2, "batch": 2, "length": 48, "anchors": 8, "kernels": "cpu", "half": False}
    train_draft(run, str(folder), fresh=False, **options)
    assert "acceptance by slot" in capsys.readouterr().out
    before = _bytes_of(folder / "model.safetensors")
    written = export_run(run, folder, "nano", "released")
    assert {p.name for p in written} == {"model.safetensors", *DRAFT_FILES}
    assert _bytes_of(folder / "model.safetensors") == before
    lab = labkit.load(folder)
    head = lab.model.mtp.last.confidence_head.proj.weight
    found = load_calibration(folder, 5, head)
    assert found is not None and found.fitted_on["proposals_fitted"] > 0
    figures = json.loads((folder / "draft_figures.json").read_text())
    assert figures["temperatures"] == list(found.temperatures)
    record = read_draft_record(folder)
    assert record is not None and record.figures.to_dict() == {
        k: tuple(v) if isinstance(v, list) else v for k, v in figures.items()}
    section = "\n".join(draft_section(lab.config, record))
    for said in (f"{figures['parameters']:,} parameters", "3 stages", "--steps 2", "--length 48",
                 f"{figures['proposals']:,} proposals", f"{figures['greedy_length']:.2f} greedily",
                 "2 updates, 32 blocks"):
        assert said in section, said
    (folder / "draft_log.jsonl").rename(folder / "elsewhere")
    assert read_draft_record(folder) is None
    (folder / "elsewhere").rename(folder / "draft_log.jsonl")
    assert lab.generate("It is", 6, temperature=0, speculative=True).ids == lab.generate(
        "It is", 6, temperature=0).ids
    # A run that goes on from it tells of both, and so does one that goes on from that.
    for number in (1, 2):
        again = tmp_path / f"again{number}"
        train_draft(again, str(folder), False, folder, **options | {"seed": number})
        train_draft(again, str(folder), False, folder, **options | {"seed": number})   # goes on
        export_run(again, folder, "nano", "released")
    record = read_draft_record(folder)
    assert record is not None
    assert [one["options"]["seed"] for one in [*record.facts["before"], record.facts]] == [0, 1, 2]
    section = "\n".join(draft_section(lab.config, record))
    assert "Run 2: 2 updates of 2 rows of 48 tokens with 8 blocks" in section
    assert draft_minutes(record.facts) == pytest.approx(sum(
        one["seconds"] for one in [*record.facts["before"], record.facts]) / 60)
    run, lab = again, labkit.load(folder)
    # A draft of another model is refused, and nothing of it is written.
    log = (folder / "draft_log.jsonl").read_bytes()
    _, facts = read_weights(run)
    assert facts["options"]["target"] == target_digest(lab.model)
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    state = {n: p for n, p in nano().model.state_dict().items() if not n.startswith("mtp.")}
    state["head.weight"] = state["head.weight"] * 2
    write_checkpoint(other, lab.config, state, "released",
                     engram_digest=lab.tokenizer.digest())
    with pytest.raises(CheckpointError, match="another model"):
        export_run(run, other, "nano", "released")
    write_draft(other, read_weights(run)[0])        # put there by hand, it is not loaded either
    with pytest.raises(CheckpointError, match="trained for another model.*train-draft"):
        labkit.load(other)
    assert (other / "draft_log.jsonl").read_bytes() == log


def test_ctrl_c_ends_the_run_after_a_whole_step(folder, tmp_path, monkeypatch):
    whole = DraftTrainer.one_step

    def one_step(self):
        facts = whole(self)
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return facts

    monkeypatch.setattr(DraftTrainer, "one_step", one_step)
    options = {"steps": 4, "batch": 2, "length": 48, "anchors": 8, "kernels": "cpu", "half": False}
    with pytest.raises(KeyboardInterrupt):
        train_draft(tmp_path / "run", str(folder), fresh=False, **options)
    state, facts = read_weights(tmp_path / "run")
    assert facts["step"] == 2 and all(name.startswith("mtp.") for name in state)


def test_bad_input_is_one_sentence(folder, tmp_path):
    good = {"steps": 1, "batch": 1, "length": 32, "anchors": 4}
    for bad, word in (({"anchors": 0}, "anchors is 0"), ({"steps": 0}, "steps is 0"),
                      ({"length": 5000}, "exceeds the context"), ({"batch": 10**6}, "pieces"),
                      ({"length": 5}, "length is 5")):
        with pytest.raises(InputError, match=word):
            train_draft(tmp_path / "run", str(folder), fresh=False, **{**good, **bad})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    config["text_config"]["compress_ratios"] = config["text_config"]["compress_ratios"][:10]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="num_nextn_predict_layers is 0"):
        train_draft(tmp_path / "run", str(folder), fresh=False, **good)
    with pytest.raises(CheckpointError, match="no draft"):
        write_draft(folder, {})
    assert not (folder / FILE).exists()


def test_weights_in_several_files_are_refused(lab, folder):
    state = {n: p for n, p in lab.model.state_dict().items() if not n.startswith("mtp.")}
    write_checkpoint(folder, lab.config, state, "released", max_shard_bytes=200_000)
    draft = {n: p for n, p in lab.model.state_dict().items() if n.startswith("mtp.")}
    with pytest.raises(CheckpointError, match="one model.safetensors only"):
        write_draft(folder, draft)
