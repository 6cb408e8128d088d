"""Synthetic text: made again from its seed, with the structure it claims, and split cleanly."""

import random
import re
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import paths
from labkit.config import ModelConfig
from labkit.errors import InputError
from labkit.text.corpus import load_corpus
from labkit.text.synthetic import (
    COPIED,
    FACTS,
    KINDS,
    NAMES,
    OPERATIONS,
    RECITED,
    document,
    documents,
    fact_table,
    function,
    recall,
)
from labkit.text.tokenizer import Tokenizer

STATEMENT = re.compile(r" The number of (\w+) is (\d{4})\.")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(paths.data_dir() / "mini")


# -- every kind ------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_document_is_made_again_from_its_number(kind, split, tokenizer):
    random.seed(1)
    state = random.getstate()
    found = list(islice(documents(kind, tokenizer, split=split, seed=3, length=400), 8))
    assert random.getstate() == state
    again = islice(documents(kind, tokenizer, split=split, seed=3, start=5, length=400), 3)
    assert list(again) == found[5:]
    assert document(kind, tokenizer, split=split, seed=3, index=6, length=400) == found[6]
    assert len({d.text for d in found}) == 8
    assert document(kind, tokenizer, split=split, seed=4, index=6, length=400).text != found[6].text
    for number, d in enumerate(found):
        assert (d.kind, d.split, d.seed, d.index) == (kind, split, 3, number)
        assert 0 < len(d.ids) <= 400 and tokenizer.encode(d.text) == list(d.ids)


@pytest.mark.parametrize("kind", KINDS)
def test_the_splits_share_no_document(kind, tokenizer):
    texts = [{d.text for d in islice(documents(kind, tokenizer, split=split, length=200), 30)}
             for split in ("train", "heldout")]
    assert not texts[0] & texts[1]


# -- recall -----------------------------------------------------------------------------------

def check_answer(d, answer, tokenizer):
    assert tokenizer.decode(d.ids[answer.at : answer.at + answer.size]) == answer.text
    stated = answer.at - answer.distance
    assert d.ids[stated : stated + answer.size] == d.ids[answer.at : answer.at + answer.size]
    # the ids before are the text before, so the prompt can be given as it is
    before = tokenizer.decode(d.ids[: answer.at])
    key = re.search(r" The number of (\w+) is $", before)[1]
    assert d.text.startswith(before)
    said = [value for name, value in STATEMENT.findall(before) if name == key]
    assert said == [answer.text]


@given(distance=st.integers(24, 2000), index=st.integers(0, 10**6))
def test_distance_and_length_are_exact(tokenizer, distance, index):
    d = recall(tokenizer, distance, 2047, index=index)
    (answer,) = d.answers
    assert answer.distance == distance and len(d.ids) == 2047
    assert answer.at + answer.size == 2046  # then the full stop
    assert tokenizer.encode(d.text) == list(d.ids)
    check_answer(d, answer, tokenizer)
    pairs = STATEMENT.findall(d.text)
    assert len(pairs) == 5 and len({name for name, _ in pairs}) == 4
    assert len({value for _, value in pairs}) == 4


def test_distances_reach_from_one_statement_to_the_whole_length(tokenizer):
    with pytest.raises(InputError) as told:
        recall(tokenizer, 1, 2047, others=0)
    short, long = map(int, re.search(r"asked (\d+) to (\d+) tokens", str(told.value)).groups())
    print(f"distances from {short} to {long} in 2047 tokens")
    assert short < 24 and long > 2047 - 2 * 24
    # keys differ in tokens by index, and the key that fits exactly is found among a few
    closest = 0
    for index in range(40):
        try:
            closest = max(closest, recall(tokenizer, long, 2047, index=index).answers[0].distance)
        except InputError:
            continue
    assert closest == long


def test_the_latest_number_is_often_not_the_answer(tokenizer):
    wrong = 0
    for index in range(20):
        d = recall(tokenizer, 500, 1000, index=index)
        wrong += STATEMENT.findall(d.text)[-2][1] != d.answers[0].text
    print(f"the number before the question is another key's in {wrong} of 20")
    assert wrong >= 10


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_filler_comes_from_the_split(split, tokenizer):
    novels = load_corpus(split).values()
    for index in range(5):
        d = recall(tokenizer, 600, 1200, split=split, index=index)
        runs = [run for run in STATEMENT.split(d.text)[::3] if run]
        assert len(runs) >= 2
        assert all(any(run in novel for novel in novels) for run in runs)


def test_every_answer_of_a_needle_document_is_right_and_distances_spread(tokenizer):
    distances = []
    for d in islice(documents("needle", tokenizer), 60):
        assert d.answers
        for answer in d.answers:
            check_answer(d, answer, tokenizer)
        distances.append(d.answers[0].distance)
    print("distances", sorted(distances))
    assert min(distances) < 64 and max(distances) > 1024


# -- what is written by code ------------------------------------------------------------------

def test_code_compiles_and_repeats_its_runs_of_tokens(tokenizer):
    def repeated(kind):  # of all runs of 8 tokens, how many occurred before
        seen, again, total = set(), 0, 0
        for d in islice(documents(kind, tokenizer, split="heldout", length=600), 10):
            for at in range(len(d.ids) - 7):
                again += (run := d.ids[at : at + 8]) in seen
                total += 1
                seen.add(run)
        return again / total

    for d in islice(documents("code", tokenizer, length=600), 10):
        compile(d.text, "document", "exec")
    code, novels = repeated("code"), repeated("novels")
    print(f"repeated runs of 8 tokens: code {code:.3f}, novels {novels:.3f}")
    assert code > 0.3 > 10 * novels


def test_function_uses_the_names_given():
    assert function(random.Random(0), ("moon",)).startswith("def set_moon(self, moon):")
    found = {re.match(r"def set_(\w+)", function(random.Random(n)))[1] for n in range(200)}
    assert found == set(NAMES)


def test_arithmetic_is_right_and_no_question_is_in_both_splits(tokenizer):
    questions = {}
    for split in ("train", "heldout"):
        asked = questions[split] = set()
        for d in islice(documents("arithmetic", tokenizer, split=split), 40):
            for line in d.text.splitlines():
                question, answer = line.split(" = ")
                a, sign, b = question.split()
                assert OPERATIONS[sign](int(a), int(b)) == int(answer)
                asked.add(question)
        assert {question.split()[1] for question in asked} == {"+", "-", "*"}
    assert (OPERATIONS["+"](7, 5), OPERATIONS["-"](7, 5), OPERATIONS["*"](7, 5)) == (12, 2, 35)
    assert not questions["train"] & questions["heldout"]
    assert len(questions["train"]) > 1000 and len(questions["heldout"]) > 100


def test_the_halves_of_the_table_share_no_name_and_no_place():
    words = [{word for fact in fact_table(5, split) for word in (*fact.name.split(), fact.place)}
             for split in ("train", "heldout")]
    assert len(words[0]) == len(words[1]) == 96 and not words[0] & words[1]
    assert fact_table(5, "train") != fact_table(6, "train")


def test_facts_are_repeated_word_for_word_and_only_those_of_the_split(tokenizer):
    for split in ("train", "heldout"):
        told = Counter(line for d in islice(documents("facts", tokenizer, split=split), 20)
                       for line in d.text.splitlines(keepends=True))
        assert set(told) == {fact.sentence for fact in fact_table(0, split)}
        assert min(told.values()) >= 2
    fact = fact_table(0, "train")[0]
    assert fact.sentence == fact.cue + fact.answer + ".\n" and fact.answer == f" {fact.place}"


def test_novel_passages_are_the_whole_novels_once_before_any_again(tokenizer):
    size = sum(len(text) for text in load_corpus("heldout").values())
    texts, total = [], 0
    for d in documents("novels", tokenizer, split="heldout", length=700):
        texts.append(d.text)
        total += len(d.text)
        if total >= size:
            break
    assert total == size and len(set(texts)) == len(texts)
    assert all(any(text in novel for novel in load_corpus("heldout").values()) for text in texts)


# -- bad input ----------------------------------------------------------------------------------

@pytest.mark.parametrize("call, said", [
    (lambda t: document("poetry", t), "choose one of needle, copy"),
    (lambda t: document("code", t, split="test"), "split is 'test'"),
    (lambda t: document("code", t, length=100), "128 tokens or more"),
    (lambda t: document("code", t, index=-1), "numbered from 0"),
    (lambda t: documents("poetry", t), "choose one of"),
    (lambda t: fact_table(0, "test"), "split is 'test'"),
    (lambda t: recall(t, 5000, 2047), "distance is 5000: in 2047 tokens"),
    (lambda t: recall(t, 64, 100), "128 tokens or more"),
    (lambda t: recall(t, 64, 512, others=-1), "others is -1"),
    (lambda t: recall(t, 90_000, 100_000), "no heldout novel has a run"),
])
def test_bad_input(tokenizer, call, said):
    with pytest.raises(InputError, match=said):
        call(tokenizer)


def test_a_vocabulary_that_joins_words_is_refused(tokenizer):
    class Joining(Tokenizer):
        """One id less wherever a text holds two statements: as if a token ran across."""

        def encode(self, text, bos=False):
            ids = super().encode(text, bos)
            return ids[:-1] if text.count("The number of") > 1 else ids

    with pytest.raises(InputError, match="joins a word to the one before"):
        recall(Joining(tokenizer.backend), 100, 300)


# -- copying and pairs ---------------------------------------------------------------------------

@pytest.mark.parametrize("kind, shortest, longest", [("copy", 1, 24), ("recite", *RECITED)])
def test_a_row_of_words_is_said_over_and_over(tokenizer, kind, shortest, longest):
    for d in islice(documents(kind, tokenizer, length=512), 20):
        words = d.text.split()
        period = next(n for n in range(1, len(words) + 1) if words[n:] == words[:-n])
        assert shortest <= period <= longest and len(words) == len(d.ids)  # a word is a token
        assert len(set(words)) <= COPIED


def test_what_is_recited_is_out_of_the_windows_sight():
    assert RECITED[0] > ModelConfig.preset("mini").sliding_window


def test_pairs_come_again_in_another_order(tokenizer):
    for d in islice(documents("pairs", tokenizer, length=512), 20):
        lines = d.text.splitlines()
        pairs = dict(line.split() for line in lines)
        assert all(line == f"{name} {pairs[name]}" for line in lines for name in [line.split()[0]])
        n = len(pairs)
        passes = [lines[i : i + n] for i in range(0, len(lines) - n + 1, n)]
        assert 1 < n <= 12 and all(set(p) == set(passes[0]) for p in passes)
        assert len(passes) < 4 or n < 4 or len({tuple(p) for p in passes}) > 1


def test_the_facts_of_any_seed_are_of_one_table(tokenizer):
    known = {fact.sentence for fact in fact_table(FACTS, "train")}
    for seed in (0, 7):
        d = document("facts", tokenizer, seed=seed, length=1000)
        assert set(d.text.splitlines(keepends=True)) <= known
