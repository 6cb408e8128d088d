"""Text that the model writes, and how much of it stands in the training text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tqdm import tqdm

from labkit.lab import Lab
from labkit.text.corpus import load_corpus
from labkit.text.stats import corpus_index, share_of_known_words

FIRST_WORDS = "It is a truth universally acknowledged"
PROMPT_WORDS = 10  # the other prompts are the first words of held-out paragraphs
SAMPLE_TOKENS = 100
TEMPERATURES = (0.5, 0.8, 1.0)


@dataclass(frozen=True)
class Sample:
    prompt: str
    temperature: float
    seed: int
    text: str
    known_words: float   # share of its words that occur in the training text, 0..1
    copied_run: int      # words in the longest run that stands there word for word


def samples(lab: Lab, limit: int | None = None, quiet: bool = False) -> Iterator[Sample]:
    """Text from seven prompts (or `limit`) at three temperatures, seeds fixed."""
    prompts = [FIRST_WORDS]
    for text in load_corpus("heldout").values():
        paragraph = max(text.split("\n")[:8], key=len)
        prompts.append(" ".join(paragraph.split()[:PROMPT_WORDS]))
    jobs = [(p, t, seed) for t in TEMPERATURES for seed, p in enumerate(prompts[:limit])]
    for prompt, temperature, seed in tqdm(jobs, desc="samples", disable=quiet, leave=False):
        result = lab.generate(prompt, SAMPLE_TOKENS, temperature=temperature, seed=seed)
        run = corpus_index().longest_run(result.text)
        yield Sample(prompt, temperature, seed, result.text, share_of_known_words(result.text),
                     len(run))
