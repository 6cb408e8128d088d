"""Training: batches, optimiser, losses, resuming; on the nano preset, a few steps long."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import signal

import pytest
import torch

from labkit.config import ModelConfig
from labkit.engine.calibration import target_digest
from labkit.errors import CheckpointError, InputError
from labkit.kernels import cpu, reference
from labkit.kernels import train as train_kernels
from labkit.model.indexer import visible
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.paths import data_dir
from labkit.text.corpus import load_corpus
from labkit.text.engram_map import checked_classes
from labkit.text.tokenizer import Tokenizer
from labkit.trace import Taps
from labkit.train import attention_mass, losses
from labkit.train.balance import balance_experts
from labkit.train.batches import Batches, Novels
from labkit.train.command import export_run, train_preset
from labkit.train.evaluate import bits_per_byte
from labkit.train.loop import FROM_NOTHING, Options, Stage, Trainer, blind, rounded_weights
from labkit.train.muon import Muon
from labkit.train.optimizers import schedule
from labkit.train.state import read_weights

STAGES = (Stage(1.0, 96, 48, "index", {"novels": 1.0}),)
OPTIONS = Options(steps=4, index_queries=32, warmup=2, kernels="cpu", half=False,
                  rounding_from=0.5, stages=STAGES)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(data_dir() / "nano")


@pytest.fixture
def trainer(tokenizer, tmp_path) -> Trainer:
    return Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path / "run", OPTIONS)


def test_batches_are_a_function_of_the_step():
    tokenizer = Tokenizer.from_file(data_dir() / "mini")
    shares = {"novels": 0.5, "needle": 0.2, "code": 0.2, "facts": 0.1}
    a, b = (Batches(tokenizer, 2, 256, 3, shares) for _ in range(2))
    far = a.novels.pieces + 5  # in the second epoch: half of the rows are of novels
    later = a(far)
    assert all(torch.equal(x, y) for x, y in zip(a(7), b(7), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(later, b(far), strict=True))
    ids, targets, weights = a(7)
    assert torch.equal(weights, torch.ones(ids.shape))
    assert (ids[:, 0] == tokenizer.bos_id).all() and torch.equal(ids[:, 1:], targets[:, :-1])
    assert not torch.equal(a(7)[0], a(8)[0])


def test_answers_weigh_as_asked_and_nothing_else_does():
    tokenizer = Tokenizer.from_file(data_dir() / "mini")
    batches = Batches(tokenizer, 2, 500, 1, {"needle": 0.5, "novels": 0.5}, answers=16.0)
    for (kind, _), targets, weights in zip(batches.kinds(0), *batches(0)[1:], strict=True):
        if kind == "novels":
            assert torch.equal(weights, torch.ones(500))
            continue
        heavy = weights == 16.0
        assert heavy.any() and torch.equal(weights[~heavy], torch.ones(int((~heavy).sum())))
        text = tokenizer.decode(targets.tolist())
        said = re.findall(r"The number of (\w+) is (\d{4})", text)
        asked = [value for number, (name, value) in enumerate(said)
                 if name in [other for other, _ in said[:number]]]
        found = tokenizer.decode(targets[heavy].tolist())
        assert found == "".join(asked) and len(asked) > 3


def test_weighted_mean_is_of_rows_not_of_tokens():
    values = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
    weights = torch.tensor([[3.0, 1.0], [16.0, 16.0]])
    assert float(losses.weighted_mean(values, weights)) == pytest.approx((1.5 + 5.0) / 2)


def test_rows_are_of_the_kinds_by_their_shares():
    tokenizer = Tokenizer.from_file(data_dir() / "mini")
    shares = {"novels": 0.5, "needle": 0.3, "code": 0.15, "arithmetic": 0.05}
    batches = Batches(tokenizer, 4, 200, 1, shares)
    kinds = [kind for step in range(50) for kind, _ in batches.kinds(step)]
    for kind, share in shares.items():
        assert all(abs(kinds[:n].count(kind) - share * n) <= 1 for n in (1, 7, 40, 200))
    numbers = [number for step in range(50) for kind, number in batches.kinds(step)
               if kind == "code"]
    assert numbers == list(range(30))
    sign = {"needle": "The number of", "code": "self.", "arithmetic": " = "}
    for row, (kind, _) in zip(batches(3)[0], batches.kinds(3), strict=True):
        assert kind == "novels" or sign[kind] in tokenizer.decode(row.tolist())
    with pytest.raises(InputError, match="documents take 128"):
        Batches(tokenizer, 1, 100, 0, shares)


def test_stages_follow_one_another(tokenizer, tmp_path):
    """Each begins with its own first row; the tokens read are the sum of what they read."""
    novels = {"novels": 1.0}
    stages = (Stage(0.25, 64, 32, "all", novels), Stage(0.75, 96, 48, "index", novels),
              Stage(1.0, 128, 128, "random", novels))
    trainer = Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path,
                      dataclasses.replace(OPTIONS, steps=8, stages=stages, rounding_from=0.5))
    assert [trainer.stage(step) for step in range(8)] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1)]
    found = []
    for _ in range(8):
        facts = trainer.one_step()
        found.append((facts["length"], facts["tokens"], trainer.model.selecting))
        trainer.step += 1
    assert found == [(32, 64, "all"), (32, 128, "all"), (48, 224, "index"), (48, 320, "index"),
                     (48, 416, "index"), (48, 512, "index"), (128, 640, "random"),
                     (128, 768, "random")]


@pytest.mark.parametrize("preset", ["nano", "mini"])
def test_what_the_command_trains_by_default_fits_the_preset(preset, tmp_path, monkeypatch):
    """Rows are no longer than the context; copying, selection and the whole context are there."""
    given = []
    monkeypatch.setattr(Trainer, "__init__", lambda self, *args: given.append(args[3]) or 1 / 0)
    with pytest.raises(ZeroDivisionError):  # nothing is trained here
        train_preset(tmp_path, preset, False, steps=3500)
    context = ModelConfig.preset(preset).max_position_embeddings
    lengths = [stage.length for stage in given[0].stages]
    assert max(lengths) <= context
    if preset == "mini":
        assert lengths == [min(stage.length, context) for stage in FROM_NOTHING]
        assert [round(stage.until * 3500) for stage in given[0].stages] == [400, 1700, 2150, 3500]


def test_a_run_starts_from_the_weights_of_another(trainer, tokenizer, tmp_path):
    trainer.one_step()
    other = Trainer(trainer.config, tokenizer, tmp_path / "next", OPTIONS, trainer.model)
    assert other.options.start == target_digest(trainer.model) != ""
    for name, p in trainer.model.named_parameters():
        assert torch.equal(other.model.get_parameter(name), p), name
    other.save()
    trainer.one_step()  # other weights: another start
    with pytest.raises(InputError, match="start"):
        Trainer(trainer.config, tokenizer, tmp_path / "next", OPTIONS, trainer.model)


def test_an_epoch_reads_every_piece_once_and_never_the_held_out_text(tokenizer):
    batches = Novels(tokenizer, 512, seed=0)
    pieces = batches._pieces(2)
    assert len(set(pieces)) == len(pieces) == batches.pieces
    for number, novel in enumerate(batches.novels):
        firsts = sorted(first for n, first in pieces if n == number)
        assert all(b - a >= 512 for a, b in zip(firsts, firsts[1:], strict=False))
        assert firsts[-1] + 512 <= len(novel)
    train, held_out = load_corpus("train"), load_corpus("heldout")
    assert sum(map(len, batches.novels)) == sum(
        len(tokenizer.encode(text)) + 1 for text in train.values())
    assert all(held_out[name][:200] not in text for name, text in train.items())


def test_muon_is_that_of_torch():
    torch.manual_seed(0)
    shapes = [(12, 32), (12, 32), (32, 12), (16, 16)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = copy.deepcopy(ours)
    mine = Muon(ours, lr=0.02, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.95)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        mine.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        # A batched bf16 product may round differently from a single one.
        assert torch.allclose(p, q, atol=2e-3), (p - q).abs().max()


def test_schedule_rises_stays_and_falls():
    factors = [schedule(s, 100, 10) for s in range(100)]
    assert factors[0] == 0.1 and factors[10:50] == [1.0] * 40
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))
    assert factors[-1] == pytest.approx(0.02)


def test_index_loss_reaches_the_indexer_only_and_falls(trainer):
    ids, _, _ = trainer.batches[0](0)
    queries = torch.arange(4, 48, 3)

    def loss() -> torch.Tensor:
        taps = Taps(losses.wanted_taps(trainer.config), keep_graph=True)
        trainer.model(ids, taps=taps)
        return losses.selection_loss(trainer.config, taps, queries).index

    first = loss()
    first.backward()
    touched = {n for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert touched and all(".indexer." in name for name in touched)
    indexer = [p for n, p in trainer.model.named_parameters() if ".indexer." in n]
    assert len(touched) == len(indexer)
    optimizer = torch.optim.Adam(indexer, lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert float(loss().detach()) < 0.8 * float(first.detach())


def test_index_loss_is_zero_when_the_scores_are_the_attention():
    """The smallest case by hand: one query, two entries, scores set to the log of the target."""
    config = ModelConfig.preset("nano").replace(
        compress_ratios=(1,) * 10, kv_source_layer_ids=(0,), index_source_layer_ids=(0,),
        candidate_source_layer_id=-1, num_nextn_predict_layers=0)
    entries = torch.zeros(1, 2, 32)
    entries[0, 0, 0], entries[0, 1, 0] = 1.0, 2.0
    q = torch.zeros(1, 2, 4, 32)
    q[..., 0] = 32**0.5  # logits 1 and 2 in every head
    keys = torch.zeros(1, 2, 32)
    keys[0, 0, 0], keys[0, 1, 0] = 1.0, 2.0
    index_q = torch.zeros(1, 2, 1, 32)
    index_q[..., 0] = 1.0
    taps = {"layers.0.attn.compressed_kv": entries, "layers.0.attn.index_keys": keys,
            "layers.0.attn.q": q, "layers.0.attn.index_queries": index_q,
            "layers.0.attn.index_weights": torch.ones(1, 2, 1),
            "layers.0.attn.topk_indices": torch.tensor([[[0, -1], [0, 1]]])}
    for layer in range(10):  # all but the first only read its selection; they look as it does
        taps[f"layers.{layer}.attn.q"] = q
    queries = torch.tensor([1])
    assert float(losses.selection_loss(config, taps, queries).index) == pytest.approx(0, abs=1e-6)
    taps["layers.0.attn.index_keys"] = keys.flip(1)
    p = torch.softmax(torch.tensor([1.0, 2.0]), 0)
    expected = float((p * (p.log() - p.flip(0).log())).sum())
    found = losses.selection_loss(config, taps, queries)
    assert float(found.index) == pytest.approx(expected, rel=1e-5)
    assert float(found.left_out) == 0.0                  # all entries are selected

    # Another layer that looks the other way: the target is the mean of all that read.
    taps["layers.0.attn.index_keys"] = keys
    taps["layers.7.attn.q"] = -q
    other = torch.softmax(torch.tensor([-1.0, -2.0]), 0)
    mixed = 0.9 * p + 0.1 * other
    expected = float((mixed * (mixed.log() - p.log())).sum())
    found = losses.selection_loss(config, taps, queries)
    assert float(found.index) == pytest.approx(expected, rel=1e-4)


def test_left_out_is_minus_log_of_the_mass_kept():
    """By hand: scores ln 6 selected and ln 2 not."""
    far = torch.tensor([6.0, 2.0]).log().view(1, 1, 1, 2)
    loss = losses._left_out(far, torch.tensor([[[0, -1]]]))
    assert float(loss) == pytest.approx(-math.log(6 / 8))


def test_left_out_agrees_with_the_mass_that_is_reported(trainer):
    """The same figure from `attention_mass.kept_mass`, which takes another way there."""
    config, queries = trainer.config, torch.arange(30, 120, 9)
    ids = torch.randint(5, config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))
    taps = Taps([*losses.wanted_taps(config), "layers.*.attn.window"], keep_graph=True)
    trainer.model(ids, taps=taps)
    found = losses.selection_loss(config, taps, queries).left_out
    W, expected = config.sliding_window, []
    for role in (r for r in config.roles if r.ratio):
        name, owner = f"layers.{role.layer}.attn", f"layers.{role.kv_source}.attn"
        for row in range(2):
            entries = taps[f"{owner}.compressed_kv"][row].detach()
            selected = taps[f"layers.{role.index_source}.attn.topk_indices"][row][queries]
            columns = queries[:, None] + 1 + torch.arange(W)
            near, far = attention_mass.attention(
                taps[f"{name}.q"][row][queries].detach(),
                taps[f"{name}.window"][row][columns].detach(), columns >= W, entries,
                visible(queries[None], role.ratio, len(entries))[0])
            kept = [attention_mass.kept_mass(
                near[:, [head]], far[:, [head]], attention_mass.held(selected, len(entries)))[:, 1]
                for head in range(config.num_attention_heads)]
            expected.append(-torch.stack(kept).log().mean())
    value = float(found.detach())
    assert value == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)
    assert value > 0.01                                  # else nothing was compared
    found.backward()
    touched = {n for n, p in trainer.model.named_parameters() if p.grad is not None}
    assert any("compressor" in name for name in touched)
    assert not any(".indexer." in name for name in touched)


def test_blind_steps_are_evenly_spread_and_leave_the_decoder_its_entries(trainer):
    steps = [step for step in range(20) if blind(step, 0.25)]
    assert steps == [3, 7, 11, 15, 19]
    assert all(blind(step, 1.0) for step in range(5)) and not any(
        blind(step, 0.0) for step in range(5))
    config = trainer.config
    ids = torch.randint(5, config.vocab_size, (1, 96), generator=torch.Generator().manual_seed(2))
    found = {}
    for half in ("", "encoder", "decoder"):
        taps = Taps(["layers.*.attn.topk_indices"])
        trainer.model.blind = half
        with torch.no_grad():
            trainer.model(ids, taps=taps)
        found[half] = {layer: taps[f"layers.{layer}.attn.topk_indices"].shape[-1]
                       for layer in config.index_source_layer_ids}
    inside = {layer for layer in config.index_source_layer_ids if layer < config.encoder_layers}
    outside = set(config.index_source_layer_ids) - inside
    assert inside and outside and all(found[""].values())
    assert {layer for layer, size in found["encoder"].items() if not size} == inside
    assert {layer for layer, size in found["decoder"].items() if not size} == outside


def test_later_full_layers_begin_as_copies_of_the_first(tokenizer, tmp_path):
    config = ModelConfig.preset("nano")
    start = Transformer(config, checked_classes(config, tokenizer), "cpu", False)
    init_weights(start, 5)
    alike = Trainer(config, tokenizer, tmp_path / "a", dataclasses.replace(OPTIONS, alike=True),
                    start).model
    first, *later = config.kv_source_layer_ids
    copied = set()
    for name, p in alike.named_parameters():
        layer, part = re.match(r"(?:layers\.(\d+)\.)?(.*)", name).groups()
        source = f"layers.{first}.{part}" if layer and int(layer) in later else name
        before = dict(start.named_parameters()).get(source)
        if part.startswith("attn") and before is not None and before.shape == p.shape:
            copied |= {part} if source != name else set()
        else:
            before = dict(start.named_parameters())[name]
        assert torch.equal(p, before), name
    assert {"attn.wq_b.weight", "attn.compressor.wkv.weight", "attn.indexer.wk.weight",
            "attn.wo_b.weight", "attn_norm.weight"} <= copied


def test_balance_lifts_the_bias_of_idle_experts(trainer):
    picked = torch.zeros(1, 6, 2, dtype=torch.int64)
    picked[..., 1] = 1
    taps = {f"layers.{i}.ffn.picked": picked for i in range(10)}
    before = trainer.model.layers[0].ffn.gate.bias.clone()
    assert balance_experts(trainer.model, taps, step=0.5) == pytest.approx(4.0)  # 6 of 12/8
    change = trainer.model.layers[0].ffn.gate.bias - before
    assert change.tolist() == [-0.5, -0.5] + [0.5] * 6


def test_rounded_weights_are_left_again(trainer):
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    with rounded_weights(trainer.model):
        inside = dict(trainer.model.named_parameters())
        name = "layers.0.attn.wq_a.weight"
        assert not torch.equal(inside[name], before[name])
        assert torch.equal(inside["layers.0.hc_attn_fn"], before["layers.0.hc_attn_fn"])
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())


@pytest.mark.parametrize("tables_by", ["adamw", "momentum"])
def test_a_resumed_run_equals_an_uninterrupted_one(tokenizer, tmp_path, tables_by):
    config, options = ModelConfig.preset("nano"), dataclasses.replace(OPTIONS, tables_by=tables_by)
    whole = Trainer(config, tokenizer, tmp_path / "whole", options)
    whole.run(look_every=100, quiet=True)
    first = Trainer(config, tokenizer, tmp_path / "parts", options)
    for _ in range(2):
        first.one_step()
        first.step += 1
    first.save()
    second = Trainer(config, tokenizer, tmp_path / "parts", options)
    assert second.step == 2
    second.run(look_every=100, quiet=True)
    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    log = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 4 and log[-1]["rounding"] and "heldout_bits_per_byte" in log[-1]


def test_ctrl_c_ends_the_run_after_a_whole_step(tmp_path, monkeypatch):
    """A real signal in the middle of a step: that step is done, saved and not done again."""
    whole = Trainer.one_step

    def one_step(self):
        facts = whole(self)
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return facts

    monkeypatch.setattr(Trainer, "one_step", one_step)
    options = {"steps": 4, "kernels": "cpu", "half": False, "stages": STAGES}
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_preset(tmp_path, "nano", fresh=False, **options)
    assert signal.getsignal(signal.SIGINT) is handler
    _, facts = read_weights(tmp_path)
    assert facts["step"] == 2


def test_a_run_goes_on_only_with_the_options_it_began_with(trainer, tokenizer):
    trainer.save()
    longer = dataclasses.replace(OPTIONS, steps=9)
    assert Trainer(trainer.config, tokenizer, trainer.folder, longer).step == 0
    for change in ({"seed": 1}, {"stages": FROM_NOTHING}, {"lr": 1e-3}):
        other = dataclasses.replace(OPTIONS, **change)
        with pytest.raises(InputError, match=next(iter(change))):
            Trainer(trainer.config, tokenizer, trainer.folder, other)


def test_fresh_forgets_the_run_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "look", lambda self, limit=None: 1.0)
    options = {"steps": 1, "kernels": "cpu", "half": False, "stages": STAGES}
    train_preset(tmp_path, "nano", fresh=False, **options)
    (tmp_path / "notes.txt").write_text("mine")
    train_preset(tmp_path, "nano", fresh=True, **{**options, "seed": 5})
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert read_weights(tmp_path)[1]["options"]["seed"] == 5


def test_a_damaged_state_is_named(trainer):
    trainer.folder.mkdir(parents=True)
    (trainer.folder / "state.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(CheckpointError, match="--fresh"):
        Trainer(trainer.config, trainer.tokenizer, trainer.folder, OPTIONS)


def test_training_lowers_the_loss(tokenizer, tmp_path):
    options = dataclasses.replace(OPTIONS, steps=40, warmup=4, rounding_from=0.7)
    trainer = Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path, options)
    losses_seen = []
    for _ in range(40):
        losses_seen.append(trainer.one_step()["loss"])
        trainer.step += 1
    assert losses_seen[0] == pytest.approx(math.log(512), abs=0.3)
    assert sum(losses_seen[-5:]) / 5 < losses_seen[0] - 1.0


def test_bits_per_byte_of_a_model_that_knows_nothing(tokenizer):
    """Equal probabilities cost log2(V) bits a token, whatever the windows."""

    class Nothing(torch.nn.Module):
        def forward(self, ids, lengths):
            return type("Output", (), {"logits": torch.zeros(*ids.shape, 512)})

    texts = {"a": load_corpus("heldout")["emma"][:3000], "b": "Short."}
    tokens = sum(len(tokenizer.encode(t)) for t in texts.values())
    size = sum(len(t.encode()) for t in texts.values())
    found = bits_per_byte(Nothing(), tokenizer, texts, length=64, stride=16, batch=3)
    assert found == pytest.approx(9 * tokens / size, rel=1e-6)


def test_export_opens_again(trainer, tmp_path):
    import labkit

    trainer.log(trainer.one_step())
    trainer.save()
    export_run(trainer.folder, tmp_path / "out", "nano", "plain")
    lab = labkit.load(tmp_path / "out")
    name = "layers.3.attn.wq_b.weight"
    weight = trainer.model.get_parameter(name).detach()
    assert torch.equal(lab.model.get_parameter(name), weight.bfloat16().float())
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    text = "".join(described[f"{role}_token"] for role in ("bos", "eos", "pad"))
    assert lab.tokenizer.encode(text) == [lab.config.bos_token_id, lab.config.eos_token_id,
                                          lab.config.pad_token_id]
    assert described["model_max_length"] == lab.config.max_position_embeddings
    assert lab.generate("It is", max_new_tokens=3, temperature=0).stats.new_tokens <= 3


def test_bad_input_is_one_sentence(tmp_path):
    def stage(**change) -> dict:
        values = {"tokens": 64, "length": 32, "shares": {"novels": 1.0}, **change}
        return {"stages": (Stage(1.0, **values),)}

    refused = [({"steps": 0}, "steps is 0"), (stage(length=5000), "exceeds the context"),
               (stage(tokens=10**8), "pieces"), (stage(shares={"novels": 0.5}), "together 1"),
               (stage(shares={"poems": 1.0}), "give parts of needle"),
               (stage(tokens=16), "no row of 32 tokens")]
    with pytest.raises(InputError, match="nano or mini"):
        train_preset(tmp_path, "flash", False, steps=1)
    for bad, word in refused:
        with pytest.raises(InputError, match=word):
            train_preset(tmp_path, "nano", False, **{"steps": 1, **bad})
    with pytest.raises(CheckpointError, match="labkit train"):
        export_run(tmp_path / "none", tmp_path / "out", "nano", "released")
    with pytest.raises(InputError, match="released or plain"):
        export_run(tmp_path / "none", tmp_path / "out", "nano", "gguf")


@pytest.mark.parametrize("K", [None, 0, 4, 8, 25])
def test_training_kernels_are_near_the_reference(K):
    """bf16 products: values and gradients within 2 % of their span, selections within reason.

    4 of 25 entries are gathered, 8 and all of them are masked; of a blind half none are selected.
    """
    compressed, K = K is not None, 8 if K is None else K
    g = torch.Generator().manual_seed(1)
    B, T, H, d, W, S = 2, 50, 4, 32, 16, 25
    assert (K * train_kernels.WHOLE >= S) == (K > 4)
    tensors = [torch.randn(B, T, H, d, generator=g), torch.randn(B, W + T, d, generator=g),
               torch.randn(B, S, d, generator=g), torch.randn(H, generator=g)]
    scores = torch.randn(B, T, S, generator=g)
    scores = scores.masked_fill(torch.arange(S) >= (torch.arange(T)[:, None] + 1) // 2, -math.inf)
    selected = reference.select_top(scores, K)
    assert torch.equal(selected, cpu.select_top(scores, K))
    grad = torch.randn(B, T, H, d, generator=g)
    found = []
    for kernels in (reference, cpu, train_kernels):
        q, window, entries, sink = (t.clone().requires_grad_() for t in tensors)
        y = kernels.sparse_attention(q, window, entries if compressed else None,
                                     selected if compressed else None, sink,
                                     torch.tensor([0, 3]))
        y.backward(grad)
        found.append([y.detach(), q.grad, window.grad, sink.grad]
                     + ([entries.grad] if compressed and K else []))
    for exact, fast, coarse in zip(*found, strict=True):
        span = exact.abs().max()
        assert (exact - fast).abs().max() <= 1e-5 * span
        assert (exact - coarse).abs().max() <= 2e-2 * span


@pytest.mark.slow
def test_a_training_step_with_its_own_kernels_is_near_an_exact_one(tokenizer, tmp_path):
    """bf16 products and compiled chains: loss, index loss and gradient within a few percent."""
    found = []
    for kernels, half in (("reference", False), ("train", True)):
        options = Options(steps=4, index_queries=64, warmup=2, kernels=kernels, half=half,
                          stages=(Stage(1.0, 256, 128, "index", {"novels": 1.0}),))
        trainer = Trainer(ModelConfig.preset("nano"), tokenizer, tmp_path / kernels, options)
        found.append([trainer.one_step() for _ in range(2)][-1])
    exact, coarse = found
    for what, tolerance in (("loss", 0.01), ("index_loss", 0.1), ("gradient_norm", 0.05)):
        assert coarse[what] == pytest.approx(exact[what], rel=tolerance), what
