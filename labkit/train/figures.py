"""What is measured of a trained model, with a control beside every figure."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tqdm import tqdm

from labkit.lab import Lab
from labkit.model.indexer import visible
from labkit.text.corpus import load_corpus
from labkit.text.stats import corpus_index, gzip_bits_per_byte, share_of_known_words
from labkit.train.evaluate import bits_per_byte

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


@dataclass(frozen=True)
class Figures:
    """Bits per byte are of the whole held-out text, in windows of 1,024 tokens that overlap by
    half: behind the start of a text, a token is seen with at least 511 before it."""

    parameters: int      # without a draft, which has figures of its own
    bits_per_byte: float
    bits_per_byte_unrounded_cache: float
    bits_per_byte_engram_muted: float
    bits_per_byte_equal_odds: float      # log2(vocabulary) a token: what knowing nothing costs
    bits_per_byte_gzip: float            # gzip -9 that has just read the training text
    attention_recall: dict[str, float]   # by index source: mass that the selection holds
    attention_recall_random: dict[str, float]  # by a random selection of the same size
    samples: tuple[Sample, ...]

    @property
    def known_words(self) -> float:
        """Share of known words over all samples at temperature 0.8, weighted by words."""
        return share_of_known_words(" ".join(s.text for s in self.samples if s.temperature == 0.8))

    @property
    def copied_run(self) -> int:
        return max(s.copied_run for s in self.samples)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "known_words": self.known_words, "copied_run": self.copied_run}


def measure(lab: Lab, *, limit: int | None = None, quiet: bool = False) -> Figures:
    """Every figure of a lab. limit: held-out windows at most (a quick look says so little)."""
    length = min(1024, lab.config.max_position_embeddings)

    def bits(title: str) -> float:
        def bar(groups: list[Any]) -> Iterable[Any]:
            return tqdm(groups, desc=title, unit="batch", disable=quiet, leave=False)

        return bits_per_byte(lab.model, lab.tokenizer, length=length, stride=length // 2,
                             limit=limit, progress=bar)

    with cache_rounding(lab, True):
        rounded = bits("held-out text")
        with muted_engram(lab):
            muted = bits("the same, Engram muted")
        recall, by_chance = attention_recall(lab)
    with cache_rounding(lab, False):
        exact = bits("the same, cache not rounded")
    held_out = load_corpus("heldout").values()
    tokens = sum(len(lab.tokenizer.encode(text)) for text in held_out)
    size = sum(len(text.encode("utf-8")) for text in held_out)
    return Figures(
        parameters=sum(p.numel() for n, p in lab.model.named_parameters()
                       if not n.startswith("mtp.")),
        bits_per_byte=rounded, bits_per_byte_unrounded_cache=exact,
        bits_per_byte_engram_muted=muted,
        bits_per_byte_equal_odds=math.log2(lab.config.vocab_size) * tokens / size,
        bits_per_byte_gzip=gzip_bits_per_byte(),
        attention_recall=recall, attention_recall_random=by_chance,
        samples=tuple(samples(lab, quiet)),
    )


@contextlib.contextmanager
def cache_rounding(lab: Lab, on: bool) -> Iterator[None]:
    """Inside, the cache quantisers are on or off."""
    before, lab.model.cache_rounding = lab.model.cache_rounding, on
    try:
        yield
    finally:
        lab.model.cache_rounding = before


@contextlib.contextmanager
def muted_engram(lab: Lab) -> Iterator[None]:
    """Inside, Engram adds nothing to the streams: its value projection is zero."""
    weights = [lab.model.get_parameter(f"layers.{layer}.engram.wkv.weight")
               for layer in lab.config.engram_layer_ids]
    saved = [w.data for w in weights]
    for w in weights:
        w.data = torch.zeros_like(w)
    try:
        yield
    finally:
        for w, data in zip(weights, saved, strict=True):
            w.data = data


@torch.no_grad()
def attention_recall(lab: Lab, length: int = 1024, rows: int = 2,
                     ) -> tuple[dict[str, float], dict[str, float]]:
    """How much of the attention over *all* visible entries falls on the selected ones.

    Per index source, mean over heads and over those queries of held-out text that see more
    entries than they may select; and the same for random selections of that size.
    """
    c = lab.config
    length = min(length, c.max_position_embeddings)
    texts = list(load_corpus("heldout").values())[:rows]
    ids = torch.tensor([[c.bos_token_id, *lab.tokenizer.encode(t)[: length - 1]] for t in texts])
    taps = lab.trace(ids)
    generator = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}
    chance: dict[str, float] = {}
    positions = torch.arange(ids.shape[1]).expand(len(texts), -1)
    for source in c.index_source_layer_ids:
        role, name = c.roles[source], f"layers.{source}.attn"
        entries = taps[f"layers.{role.kv_source}.attn.compressed_kv"].float()      # [B,S,d]
        seen = visible(positions, role.ratio, entries.shape[1])                     # [B,T,S]
        dots = torch.einsum("bthd,bsd->bths", taps[f"{name}.q"].float(), entries)
        dots = (dots * c.head_dim**-0.5).masked_fill(~seen[:, :, None], float("-inf"))
        mass = torch.softmax(dots, -1).nan_to_num(0.0).mean(2)                      # [B,T,S]
        choosing = seen.sum(-1) > c.index_topk                                      # [B,T]
        if not bool(choosing.any()):
            continue
        chosen = taps[f"{name}.topk_indices"]                                       # [B,T,K]
        at_random = torch.rand(seen.shape, generator=generator).masked_fill(~seen, -1.0)
        at_random = at_random.topk(c.index_topk, dim=-1).indices
        for kept, where in ((chosen, found), (at_random, chance)):
            held = mass.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, 0.0).sum(-1)
            where[f"layer {source}"] = float(held[choosing].mean())
    return found, chance


def samples(lab: Lab, quiet: bool = False) -> Iterator[Sample]:
    """Text from seven prompts at three temperatures, seeds fixed."""
    prompts = [FIRST_WORDS]
    for text in load_corpus("heldout").values():
        paragraph = max(text.split("\n")[:8], key=len)
        prompts.append(" ".join(paragraph.split()[:PROMPT_WORDS]))
    jobs = [(p, t, seed) for t in TEMPERATURES for seed, p in enumerate(prompts)]
    for prompt, temperature, seed in tqdm(jobs, desc="samples", disable=quiet, leave=False):
        result = lab.generate(prompt, SAMPLE_TOKENS, temperature=temperature, seed=seed)
        run = corpus_index().longest_run(result.text)
        yield Sample(prompt, temperature, seed, result.text, share_of_known_words(result.text),
                     len(run))


def figures_text(f: Figures) -> str:
    """The figures as lines for a terminal."""
    lines = [
        f"parameters                                   {f.parameters:,}",
        "bits per byte on held-out text",
        f"  as shipped (weights and cache rounded)     {f.bits_per_byte:.4f}",
        f"  cache not rounded                          {f.bits_per_byte_unrounded_cache:.4f}",
        f"  Engram muted                               {f.bits_per_byte_engram_muted:.4f}",
        f"  gzip -9 after reading the training text    {f.bits_per_byte_gzip:.4f}",
        f"  equal odds for every token                 {f.bits_per_byte_equal_odds:.4f}",
        "attention mass on the selected entries (random selection)",
    ]
    for name, value in f.attention_recall.items():
        chance = f.attention_recall_random[name]
        lines.append(f"  {name:<42} {value:.3f}  ({chance:.3f})")
    written = [s for s in f.samples if s.temperature == 0.8]
    lines += [
        f"samples at temperature 0.8, {len(written)} of {SAMPLE_TOKENS} tokens",
        f"  words that occur in the training text      {f.known_words:.1%}",
        f"  longest run copied from it, all samples    {f.copied_run} words",
    ]
    return "\n".join(lines)
