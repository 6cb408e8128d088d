"""Text measures against slow definitions."""

import gzip

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import InputError
from labkit.text import load_corpus
from labkit.text.stats import (
    WordIndex,
    corpus_words,
    gzip_bits_per_byte,
    longest_copied_run,
    share_of_known_words,
    words,
)

FEW_WORDS = st.lists(st.sampled_from("abcd"), max_size=25).map(" ".join)


def test_words_are_counted_without_case_and_signs():
    assert words("“Don’t,” said _she_--1814; Mrs. Élton's") == [
        "don't", "said", "she", "mrs", "élton's",
    ]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.lists(FEW_WORDS, min_size=1, max_size=3), FEW_WORDS)
def test_the_longest_run_is_the_longest(texts, given_text):
    index = WordIndex.build(dict(enumerate(texts)))
    given_words = given_text.split()
    present = {
        tuple(text.split()[i:j])
        for text in texts
        for i in range(len(text.split()))
        for j in range(i + 1, len(text.split()) + 1)
    }
    expected = max(
        (
            j - i
            for i in range(len(given_words))
            for j in range(i + 1, len(given_words) + 1)
            if tuple(given_words[i:j]) in present
        ),
        default=0,
    )
    run = index.longest_run(given_text)
    assert len(run) == expected
    assert not run or tuple(run) in present


def test_a_run_does_not_cross_from_one_novel_into_the_next():
    index = WordIndex.build({"one": "a b c", "two": "d e f"})
    assert index.longest_run("b c d e") == ["b", "c"]
    assert index.longest_run("x y") == [] and index.longest_run("") == []
    assert index.longest_run("d e f a b c") == ["d", "e", "f"]


def test_copies_from_the_corpus_are_found():
    train = load_corpus("train")["emma"]
    assert longest_copied_run("Zzz " + train[1000:3000].upper() + " zzz") >= 300
    # Held-out prose shares phrases with the rest, not sentences.
    assert 4 <= longest_copied_run(load_corpus("heldout")["emma"][:5000]) < 12


def test_known_words():
    assert share_of_known_words("It is a TRUTH universally acknowledged") == 1
    assert share_of_known_words("It is qwrtz xxyzz") == 0.5
    assert share_of_known_words("... 12") == 0
    assert "darcy" in corpus_words() and "qwrtz" not in corpus_words()


def test_gzip_baseline():
    assert gzip_bits_per_byte() == pytest.approx(2.85, abs=0.02)
    assert gzip_bits_per_byte(per_novel=True) == pytest.approx(2.80, abs=0.02)


def test_gzip_is_the_difference_of_two_sizes():
    held, known = {"n": "held out words"}, {"n": "words known before, held out words"}
    size = {t: len(gzip.compress(t.encode(), 9, mtime=0)) for t in (known["n"],)}
    both = len(gzip.compress((known["n"] + held["n"]).encode(), 9, mtime=0))
    expected = 8 * (both - size[known["n"]]) / len(held["n"])
    assert gzip_bits_per_byte(held, known) == expected
    assert gzip_bits_per_byte(held, known) < gzip_bits_per_byte(held, {"n": ""})
    with pytest.raises(InputError, match="no held-out text"):
        gzip_bits_per_byte({"n": ""}, known)
