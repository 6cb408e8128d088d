"""Generation: one code path, where it stops, what it says about itself."""

import json
from types import SimpleNamespace

import pytest
import torch
from golden_model import GOLDEN, make_folder

import labkit
from labkit.engine.generate import Generation
from labkit.engine.sampling import Sampling
from labkit.errors import InputError
from labkit.text import Tokenizer


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    return labkit.load(make_folder(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(GOLDEN / "tokenizer.json")


class Script:
    """A session whose likeliest next ids are written down: greedy generation reads them out."""

    length = 0

    def __init__(self, ids, vocab_size=512, context=100, padding=0):
        self.model = SimpleNamespace(config=SimpleNamespace(
            vocab_size=vocab_size, max_position_embeddings=context, eos_token_id=1,
            sliding_window=8))
        self.ids, self.taken, self.padding = list(ids), [], padding

    def _logits(self):
        logits = torch.zeros(1, 1, self.model.config.vocab_size)
        logits[0, 0, self.ids[len(self.taken)]] = 20.0
        if self.padding:
            logits[..., -self.padding:] = 50.0
        return logits

    def prefill(self, ids, last_only=False, mode="full", **_):
        return self._logits()

    def decode(self, id_):
        self.taken.append(id_)
        return self._logits()


def scripted(tokenizer, ids, limit=50, stop=None, **options):
    session = Script(ids, **options)
    return Generation(session, tokenizer, [0], limit, Sampling(temperature=0), stop, seed=0)


# ---- the draw --------------------------------------------------------------------------------


def test_greedy_is_the_argmax_of_the_model_step_by_step(lab):
    prompt = lab.encode("It is a truth")
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(lab.session().prefill(ids)[0, -1].argmax()))
    result = lab.generate("It is a truth", 12, temperature=0)
    assert list(result.ids) == ids[len(prompt):]
    assert result.text == lab.tokenizer.decode(result.ids)
    assert lab.generate(prompt, 12, temperature=0).ids == result.ids
    assert lab.generate(torch.tensor(prompt), 12, temperature=0).ids == result.ids


def test_a_prompt_starts_with_bos_once(lab):
    assert lab.encode("It")[0] == lab.config.bos_token_id == 0
    assert lab.encode("It")[1:] == lab.tokenizer.encode("It")
    assert lab.encode([7, 8]) == [7, 8]


def test_a_seed_repeats_a_run_and_another_seed_does_not(lab):
    options = {"temperature": 1.0, "top_p": 1.0}
    one = lab.generate("She", 25, seed=3, **options)
    torch.rand(5)  # the global generator plays no part
    assert lab.generate("She", 25, seed=3, **options).ids == one.ids
    assert lab.generate("She", 25, seed=4, **options).ids != one.ids
    drawn = lab.generate("She", 25, **options)
    assert lab.generate("She", 25, seed=drawn.stats.seed, **options).ids == drawn.ids


def test_one_code_path_stream_and_generate_agree(lab):
    stream = lab.stream("It is", 30, seed=1)
    events = list(stream)
    result = lab.generate("It is", 30, seed=1)
    assert tuple(e.id for e in events) == result.ids == tuple(stream.ids)
    assert "".join(e.text for e in events) == result.text == stream.text
    assert [e.index for e in events] == list(range(len(events)))
    assert all(e.stop_reason is None for e in events[:-1])
    assert events[-1].stop_reason == result.stats.stop_reason == "length"


def test_options_reach_the_draw(lab):
    for event in lab.stream("It is", 20, seed=0, top_k=1, temperature=5.0):
        assert event.sampled == 1.0 and event.probability < 1.0
    for event in lab.stream("It is", 10, seed=0, top_k=3, top_p=1.0, candidates=6):
        assert sum(c.sampled > 0 for c in event.candidates) == 3
        assert sum(c.sampled for c in event.candidates) == pytest.approx(1)


def test_candidates_are_the_likeliest_by_the_models_own_odds(lab):
    stream = lab.stream("It is", 3, seed=0, candidates=4)
    logits = lab.session().prefill(stream.prompt)[0, -1]
    p = torch.softmax(logits.double(), 0)
    event = next(stream)
    assert [c.id for c in event.candidates] == p.topk(4).indices.tolist()
    for c in event.candidates:
        assert c.probability == pytest.approx(float(p[c.id]), rel=1e-4)
        assert c.text == lab.tokenizer.decode_token(c.id)
    assert event.probability == pytest.approx(float(p[event.id]), rel=1e-4)
    assert lab.generate("It is", 3, seed=0).ids[0] == event.id  # looking changes nothing


def test_ids_that_only_pad_the_vocabulary_are_never_drawn(tokenizer):
    ids = tokenizer.encode("It is a truth")
    generation = scripted(tokenizer, ids, limit=len(ids), vocab_size=530, padding=18)
    assert "".join(e.text for e in generation) == "It is a truth"


# ---- where it ends ---------------------------------------------------------------------------


def test_eos_ends_it_and_has_no_text(tokenizer):
    ids = tokenizer.encode("It is so")
    events = list(scripted(tokenizer, [*ids, 1, 5, 5]))
    assert [e.id for e in events] == [*ids, 1]
    assert "".join(e.text for e in events) == "It is so"
    assert events[-1].text == "" and events[-1].stop_reason == "eos"


def test_eos_of_a_real_run(lab):
    free = lab.generate("It is", 30, temperature=0)
    at = next(n for n in range(3, 30) if free.ids[n] not in free.ids[:n])
    kept, lab.model.config = lab.model.config, lab.config.replace(eos_token_id=free.ids[at])
    try:
        result = lab.generate("It is", 30, temperature=0)
    finally:
        lab.model.config = kept
    assert result.ids == free.ids[: at + 1] and result.stats.stop_reason == "eos"
    assert result.text == lab.tokenizer.decode(free.ids[:at])


@pytest.mark.parametrize("stop", ["uth uni", "truth", "t", "ledged"])
def test_stop_strings_across_tokens_are_left_out(tokenizer, stop):
    text = "It is a truth universally acknowledged"
    ids = [*tokenizer.encode(text), 1]
    events = list(scripted(tokenizer, ids, stop=["nowhere", stop]))
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    assert events[-1].stop_reason == "stop"
    drawn = tokenizer.decode([e.id for e in events])
    assert stop in drawn and len(drawn) < len(text) or stop == "ledged"


def test_a_stop_string_that_does_not_come_is_given_back(tokenizer):
    text = "It is a truth"
    ids = tokenizer.encode(text)
    held = scripted(tokenizer, [*ids, 1], stop="truth is")
    assert "".join(e.text for e in held) == text and held.stop_reason == "eos"
    held = scripted(tokenizer, ids, limit=len(ids), stop="truth is")
    events = list(held)
    assert "".join(e.text for e in events) == text and held.stop_reason == "length"


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    text = "a \U0001f600 \u20ac b"
    ids = tokenizer.encode(text)
    assert any("\ufffd" in tokenizer.decode_token(i) for i in ids)
    events = list(scripted(tokenizer, ids, limit=len(ids)))
    assert "".join(e.text for e in events) == text
    assert not any("\ufffd" in e.text for e in events)
    cut = ids[: next(n for n, i in enumerate(ids) if "\ufffd" in tokenizer.decode_token(i)) + 1]
    assert "".join(e.text for e in scripted(tokenizer, cut, limit=len(cut))) == "a \ufffd"


def test_prompt_and_new_tokens_must_fit_the_context(lab):
    context = lab.config.max_position_embeddings
    lab.stream([5] * (context - 3), 3)  # fits exactly
    with pytest.raises(InputError, match="make 4097, more than the context of 4096"):
        lab.stream([5] * (context - 3), 4)
    small = lab.config.replace(max_position_embeddings=16)
    kept, lab.model.config = lab.model.config, small
    try:
        assert lab.generate([5] * 6, 10, seed=0).stats.new_tokens == 10
    finally:
        lab.model.config = kept


def test_ctrl_c_returns_what_there_is(lab, monkeypatch):
    free = lab.generate("It is", 30, seed=2)
    forward, calls = type(lab.model).forward, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(lab.model), "forward", interrupted)
    result = lab.generate("It is", 30, seed=2)
    assert result.ids == free.ids[:7] and result.stats.stop_reason == "interrupted"
    assert result.text == lab.tokenizer.decode(free.ids[:7])
    calls[:] = [1] * 7  # at once: during the prefill
    result = lab.generate("It is", 30, seed=2)
    assert result.ids == () and result.text == "" and result.stats.stop_reason == "interrupted"


def test_a_stream_can_be_left_and_ended(tokenizer):
    text = "It is a truth"
    stream = scripted(tokenizer, tokenizer.encode(text), stop="is a trutx")
    while not stream.text:
        next(stream)
    while len(stream.text) + 4 > len(tokenizer.decode(stream.ids)):
        next(stream)
    rest = stream.interrupt()
    assert rest and stream.text == tokenizer.decode(stream.ids)
    assert stream.interrupt() == "" and list(stream) == []


# ---- what it says ----------------------------------------------------------------------------


def test_stats_count_and_time(lab):
    result = lab.generate("It is a truth", 9, seed=0)
    stats = result.stats
    assert stats.prompt_tokens == len(lab.encode("It is a truth")) and stats.new_tokens == 9
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
    assert stats.tokens_per_second == pytest.approx(8 / stats.decode_seconds)
    assert lab.generate("It", 1, seed=0).stats.tokens_per_second is None
    again = json.loads(json.dumps(result.to_dict()))
    assert again["ids"] == list(result.ids) and again["stats"]["stop_reason"] == "length"


@pytest.mark.parametrize(("options", "said"), [
    ({"prompt": ""}, "the prompt is empty"), ({"prompt": []}, "the prompt is empty"),
    ({"prompt": [512]}, "512 is outside the vocabulary 0..511"),
    ({"prompt": [-1]}, "-1 is outside"),
    ({"prompt": [1.5]}, "whole numbers"), ({"prompt": ["a"]}, "whole numbers"),
    ({"prompt": "\ud800"}, "surrogate"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"), ({"max_new_tokens": 1.0}, "max_new_tokens"),
    ({"max_new_tokens": 5000}, "more than the context"),
    ({"temperature": -0.1}, "temperature is -0.1"), ({"top_p": 0}, "top_p is 0"),
    ({"top_k": -2}, "top_k is -2"), ({"seed": -1}, "seed is -1"), ({"seed": 2**63}, "seed"),
    ({"seed": True}, "seed is True"), ({"stop": ""}, "at least one character"),
    ({"candidates": -1}, "candidates is -1"),
    ({"prefill": "fast"}, "choose 'full' or 'ced'"), ({"draft_slots": 3}, "belong to speculative"),
    ({"speculative": True, "draft_slots": 17}, "from 0 (no draft) to 16"),
    ({"speculative": True, "draft_slots": -1}, "draft length is -1"),
    ({"speculative": True, "policy": "fixed"}, "policy is 'fixed'"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_computed(lab, options, said, monkeypatch):
    def computed(*args, **kwargs):
        raise AssertionError("the model ran")

    monkeypatch.setattr(type(lab.model), "forward", computed)
    with pytest.raises(InputError) as error:
        lab.generate(**{"prompt": "It", **options})
    assert said in str(error.value) and "\n" not in str(error.value)
