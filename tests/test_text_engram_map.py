"""The class map: exact counts, the rules that matter, and the library as a second opinion."""

import string
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from labkit.errors import ConfigError, InputError
from labkit.paths import data_dir
from labkit.text import Tokenizer, engram_classes
from labkit.text.engram_map import ClassRules, checked_classes, class_digest, normalise

REAL = Tokenizer.deepseek()
REAL_CLASSES, REAL_COUNT = engram_classes(REAL)
NANO = Tokenizer.from_file(data_dir() / "nano")
REAL_DIGEST = "26b9be2936d236a124ba318a998c417bc7032e3e92a3107fe98deee49f1dc496"
NANO_DIGEST = "ab673cb5386922856a790cf1792282bc7b9e6c8e0f928dc68c1d3cb7b55782f7"


def library_normaliser():
    """The same rules as steps of the tokenizers library."""
    from tokenizers import Regex
    from tokenizers import normalizers as n

    lone = "\ue000"
    steps = [n.NFKC(), n.NFD(), n.StripAccents(), n.Lowercase()]
    steps += [n.Replace(Regex(r"[ \t\r\n]+"), " "), n.Replace(Regex(r"^ $"), lone)]
    return n.Sequence([*steps, n.Strip(), n.Replace(lone, " ")])


LIBRARY = library_normaliser()


def test_counts_and_digests():
    assert REAL_COUNT == 99_092
    assert REAL_CLASSES.dtype == torch.int64 and REAL_CLASSES.shape == (129_280,)
    assert REAL.digest() == class_digest(REAL_CLASSES) == REAL_DIGEST
    classes, count = engram_classes(NANO)
    assert count == 402 and classes.shape == (512,) and NANO.digest() == NANO_DIGEST


def test_the_library_object_gives_the_same_map():
    assert torch.equal(engram_classes(NANO.backend)[0], engram_classes(NANO)[0])


@pytest.mark.parametrize(
    "rules, count",
    [
        (ClassRules(lone_space=False), 99_250),
        (ClassRules(marks=("Mn",)), 99_510),
        (ClassRules(raw_undecodable=False), 97_940),
    ],
    ids=["no lone space", "Mn only", "fragments by text"],
)
def test_each_rule_left_out_gives_another_count(rules, count):
    assert engram_classes(REAL, rules=rules)[1] == count != REAL_COUNT


def test_classes_are_numbered_by_first_appearance():
    for tokenizer in (NANO, REAL):
        classes, count = engram_classes(tokenizer)
        newest = torch.cummax(classes, 0).values
        assert classes[0] == 0 and newest[-1] == count - 1
        assert set((newest[1:] - newest[:-1]).tolist()) <= {0, 1}


def test_spellings_of_a_word_share_a_class():
    ids = [REAL.encode(text) for text in (" The", "the", "THE", "The", " the")]
    assert all(len(i) == 1 for i in ids)
    assert len({int(REAL_CLASSES[i[0]]) for i in ids}) == 1


def test_white_space_runs_share_the_class_of_the_lone_space():
    space = REAL.encode(" ")
    assert len(space) == 1
    for text in ("  ", "\n", "\n\n", "\t"):
        ids = REAL.encode(text)
        assert len(ids) == 1 and REAL_CLASSES[ids[0]] == REAL_CLASSES[space[0]], repr(text)


def test_fragments_of_characters_keep_classes_of_their_own():
    fragments = [i for i, t in enumerate(REAL.decode_each(range(129_280))) if "\ufffd" in t]
    assert len(fragments) > 1000
    assert len(set(REAL_CLASSES[fragments].tolist())) == len(fragments)


def test_every_real_entry_normalises_as_in_the_library():
    for text in REAL.decode_each(range(REAL.vocab_size)):
        assert normalise(text) == LIBRARY.normalize_str(text) or text in "\x1c\x1d\x1e\x1f"


# Scripts whose characters have not changed between versions of Unicode.
SETTLED = st.text(
    st.one_of(
        st.sampled_from(string.printable.replace("\x1c", "") + "\x85\xa0\u2003\u2028\u3000ς"),
        *(
            st.characters(min_codepoint=low, max_codepoint=high, exclude_categories=["Cn"])
            for low, high in [
                (0xA0, 0x17F),
                (0x300, 0x36F),
                (0x391, 0x3C9),
                (0x410, 0x44F),
                (0x904, 0x939),
                (0x3041, 0x3096),
                (0xAC00, 0xAC50),
                (0xFF21, 0xFF5A),
            ]
        ),
    ),
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(SETTLED)
@example("ΑΣ")
@example("İ ẞ ﬁ ½")
@example(" \n ")
def test_any_text_normalises_as_in_the_library(text):
    assert normalise(text) == LIBRARY.normalize_str(text)


@settings(max_examples=300, deadline=None)
@given(SETTLED)
def test_normalising_twice_changes_nothing_more(text):
    assert normalise(normalise(text)) == normalise(text)


def test_spacing_and_enclosing_marks_go_too():
    assert normalise("का") == "क"  # U+093E is Mc
    assert normalise("a\u20dd") == "a"  # U+20DD is Me
    assert normalise("का", ClassRules(marks=("Mn",))) == "का"


def test_padding_entries_share_one_class():
    padded, count = engram_classes(NANO, 520)
    plain, plain_count = engram_classes(NANO)
    assert torch.equal(padded[:512], plain) and count == plain_count + 1
    assert set(padded[512:].tolist()) == {plain_count}


def test_a_vocabulary_larger_than_the_model_is_refused():
    with pytest.raises(InputError, match="vocab_size is 500, but the tokenizer has 512"):
        engram_classes(NANO, 500)


def test_a_map_that_is_not_the_model_s_is_refused():
    config = SimpleNamespace(vocab_size=512, engram_compressed_vocab_size=402)
    assert torch.equal(checked_classes(config, NANO, NANO_DIGEST), engram_classes(NANO)[0])
    with pytest.raises(ConfigError, match="other digest"):
        checked_classes(config, NANO, REAL_DIGEST)
    config.engram_compressed_vocab_size = 401
    with pytest.raises(ConfigError, match="is 401, .* 402 classes"):
        checked_classes(config, NANO)
