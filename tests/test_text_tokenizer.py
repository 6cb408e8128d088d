"""Vocabularies: exact round trips, special tokens, streaming, the trained one's provenance."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.errors import InputError, LabError
from labkit.paths import data_dir
from labkit.text import Tokenizer, load_corpus
from labkit.text.tokenizer import SPECIAL_TOKENS, _byte_alphabet
from labkit.text.train_tokenizer import train_mini_tokenizer

MINI = Tokenizer.from_file(data_dir() / "mini")
NANO = Tokenizer.from_file(data_dir() / "nano" / "tokenizer.json")
REAL = Tokenizer.deepseek()
ALL = pytest.mark.parametrize("tokenizer", [MINI, NANO, REAL], ids=["mini", "nano", "real"])

TEXT = st.text(max_size=60)  # every code point but surrogates
SPELT = st.sampled_from([name for names in SPECIAL_TOKENS.values() for name in names])
MIXED = st.lists(st.one_of(TEXT, SPELT, st.sampled_from(["  ", "\r\n", "\t", "1234567", "é"])))


@ALL
@settings(max_examples=150, deadline=None)
@given(parts=MIXED)
@example(parts=["\x00\ud7ff\ue000\U0010ffff", "a\u0301\u200d🧑🏽‍🚀", " \n\n  \u00a0x"])
def test_any_text_comes_back(tokenizer, parts):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@ALL
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_stream_says_what_decode_says(tokenizer, data):
    # Arbitrary ids: most such sequences are not valid UTF-8 somewhere.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode(ids)


@ALL
def test_a_stream_holds_back_half_a_character(tokenizer):
    text = "naïve 🧑🏽‍🚀 東京"
    ids = [tokenizer._ids[c] for byte in text.encode() for c in [_char(byte)]]  # a byte each
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == text and stream.finish() == ""
    assert "\ufffd" not in "".join(pieces) and "" in pieces
    half = tokenizer.stream()
    assert half.push(ids[text.encode().index("東".encode())]) == "" and half.finish() == "\ufffd"


def _char(byte: int) -> str:
    return next(c for c, b in _byte_alphabet().items() if b == byte)


def test_the_byte_alphabet_is_the_library_s():
    from tokenizers.pre_tokenizers import ByteLevel

    assert sorted(_byte_alphabet()) == sorted(ByteLevel.alphabet())
    assert sorted(_byte_alphabet().values()) == list(range(256))


def test_the_released_vocabulary():
    assert REAL.vocab_size == 129_280
    assert (REAL.bos_id, REAL.eos_id, REAL.pad_id) == (0, 1, 2)
    assert (REAL.image_id, REAL.noise_id) == (129_264, 128_799)
    assert REAL.token_string(REAL.noise_id) == "<｜place▁holder▁no▁799｜>"
    assert REAL.encode("The quick", bos=True)[0] == 0
    assert "" not in {REAL.token_string(i) for i in range(REAL.vocab_size)}


def test_the_vectors_vocabulary():
    ids = (NANO.bos_id, NANO.eos_id, NANO.pad_id, NANO.image_id, NANO.noise_id)
    assert ids == (0, 1, 2, 3, 4) and NANO.vocab_size == 512
    assert NANO.special_id("user") is None


def test_the_trained_vocabulary_is_named_as_the_released_one():
    assert MINI.vocab_size == 4096
    assert (MINI.bos_id, MINI.eos_id, MINI.pad_id) == (0, 1, 2)
    for role in SPECIAL_TOKENS:
        assert MINI.token_string(MINI.special_id(role)) == REAL.token_string(REAL.special_id(role))
        assert MINI.encode(SPECIAL_TOKENS[role][0]) == [MINI.special_id(role)]
    assert "" not in {MINI.token_string(i) for i in range(MINI.vocab_size)}


def test_the_trained_vocabulary_splits_text_as_the_released_one():
    def splitting(path):
        return json.loads(Path(path).read_text(encoding="utf-8"))["pre_tokenizer"]

    assert splitting(MINI.source) == splitting(REAL.source)


def test_training_again_writes_the_committed_file(tmp_path):
    train_mini_tokenizer(tmp_path / "new" / "tokenizer.json")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["tokenizer.json"]
    again = json.loads((tmp_path / "new/tokenizer.json").read_text(encoding="utf-8"))
    committed = json.loads((data_dir() / "mini/tokenizer.json").read_text(encoding="utf-8"))
    assert again["model"]["vocab"] == committed["model"]["vocab"]
    assert again["model"]["merges"] == committed["model"]["merges"]
    assert again["added_tokens"] == committed["added_tokens"]


def test_the_trained_vocabulary_packs_text_it_never_saw():
    text = "".join(load_corpus("heldout").values())
    ids = MINI.encode(text)
    assert MINI.decode(ids) == text
    # 512 entries give about half of this; a merge table of the wrong text less than 3.
    assert len(text.encode()) / len(ids) > 4


@ALL
def test_what_cannot_be_encoded_or_decoded_is_named(tokenizer):
    with pytest.raises(InputError, match="surrogate at character 1"):
        tokenizer.encode("a\ud800")
    with pytest.raises(InputError, match="takes a str, not bytes"):
        tokenizer.encode(b"a")
    for id_ in (-1, tokenizer.vocab_size):
        for call in (tokenizer.decode_token, tokenizer.token_string, tokenizer.stream().push):
            with pytest.raises(InputError, match=f"Token id {id_} is outside"):
                call(id_)


def test_files_that_are_no_tokenizer_are_named(tmp_path):
    with pytest.raises(LabError, match="tokenizer.json does not exist"):
        Tokenizer.from_file(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(LabError, match="is not a tokenizer.json"):
        Tokenizer.from_file(tmp_path)


def test_a_vocabulary_without_begin_token_says_so():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    plain = Tokenizer(Backend(models.BPE({"a": 0}, [])), "plain")
    assert plain.bos_id is None and plain.encode("a") == [0]
    with pytest.raises(InputError, match="no begin-of-sentence"):
        plain.encode("a", bos=True)
