"""Prompts by domain: of exact length, the same for a seed, different between seeds."""

import pytest

from labkit import paths
from labkit.errors import InputError
from labkit.text.corpus import load_corpus
from labkit.text.prompts import DOMAINS, prompts
from labkit.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(paths.data_dir() / "mini")


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_have_the_length_and_follow_the_seed(domain, tokenizer):
    found = prompts(domain, tokenizer, 7, 60)
    assert len(found) == 7 and all(len(ids) == 60 for ids in found)
    assert all(ids[0] == tokenizer.bos_id and tokenizer.bos_id not in ids[1:] for ids in found)
    assert found == prompts(domain, tokenizer, 7, 60)
    other = prompts(domain, tokenizer, 7, 60, seed=1)
    assert found != other and len({tuple(ids) for ids in found + other}) > 8


def test_prose_is_held_out_text(tokenizer):
    texts = load_corpus("heldout").values()
    for ids in prompts("prose", tokenizer, 6, 40):
        assert any(tokenizer.decode(ids[3:-2]) in text for text in texts)


def test_code_and_counting_are_what_they_say(tokenizer):
    code = tokenizer.decode(prompts("code", tokenizer, 1, 200)[0][1:])
    assert code.count("def set_") >= 2 and "return self." in code
    numbers = tokenizer.decode(prompts("counting", tokenizer, 1, 60)[0][1:]).split(", ")[:-1]
    assert [int(n) for n in numbers] == list(range(int(numbers[0]), int(numbers[0]) + len(numbers)))


def test_a_code_prompt_never_changes(tokenizer):
    # figures that were measured on this domain stay comparable
    assert tokenizer.decode(prompts("code", tokenizer, 1, 80)[0][1:]).startswith(
        "def set_number(self, number):\n    self.number = number + 9\n"
        "    return self.number\n\n"
        "def set_answer(self, answer):\n    self.answer = answer + 6\n"
        "    return self.answer\n\n")


@pytest.mark.parametrize("words, said", [
    (("poetry", 1, 10), "choose one of prose, code, counting"), (("prose", 0, 10), "at least 1"),
    (("prose", 1, 1), "2 tokens"), (("prose", 1, 10**7), "fewer than"),
])
def test_bad_input(tokenizer, words, said):
    domain, count, length = words
    with pytest.raises(InputError, match=said):
        prompts(domain, tokenizer, count, length)
