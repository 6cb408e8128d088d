"""Figures made by hand, in which every target is reached, and a random model to measure."""

from __future__ import annotations

import functools
from dataclasses import replace

from labkit.config import ModelConfig
from labkit.lab import Lab
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.paths import data_dir
from labkit.text.engram_map import checked_classes
from labkit.text.tokenizer import Tokenizer
from labkit.train.attention_mass import ANSWERS, Mass
from labkit.train.attention_mass import NOVELS as PROSE
from labkit.train.draft_figures import DraftFigures
from labkit.train.figures import Figures, Replay
from labkit.train.kinds import MEMORISED, NOVELS, KindCost
from labkit.train.recall import AS_SHIPPED, RecallPoint
from labkit.train.runs import Plain
from labkit.train.samples import Sample

DRAFT = DraftFigures(
    parameters=1000, proposals=50, acceptance=(0.9, 0.8), sampled=(0.9, 0.7), sampled_length=1.3,
    greedy=(0.9, 0.7), greedy_length=1.6, temperatures=(1.0, 1.0), ece_before=(0.2, 0.2),
    ece_after=(0.01, 0.02), ece_greedy_before=(0.2, 0.2), ece_greedy_after=(0.1, 0.1),
    code_proposals=40, code_sampled_length=2.1, code_greedy_length=2.5)

GOOD = Figures(
    parameters=5000, active_parameters=2000, file_bytes=7000, context=2048, window=1024, tokens=900,
    bits_per_byte=1.5, bits_per_byte_unrounded_cache=1.499, bits_per_byte_engram_muted=1.6,
    bits_per_byte_equal_odds=2.9, bits_per_byte_gzip=2.8,
    plain=Plain(2100, 12345, 10, 1.51, 60.0, "labkit train-plain"),
    recall=(RecallPoint(AS_SHIPPED, 64, 192, 63, 64), RecallPoint(AS_SHIPPED, 256, 384, 62, 64),
            RecallPoint(AS_SHIPPED, 1024, 1152, 16, 16),
            RecallPoint("window only", 64, 192, 1, 16)),
    attention_mass=(Mass(1, "full", 1, PROSE, 100, 0.95, 0.4, 0.9, 0.3, 0.97),
                    Mass(2, "reuse", 1, PROSE, 100, 0.91, 0.4, 0.8, 0.3, 0.96),
                    Mass(1, "full", 1, ANSWERS, 9, 0.93, 0.4, 0.9, 0.3, 0.94)),
    kinds=(KindCost(NOVELS, 900, 1.5, 1.6, 4.0, 4.2), KindCost(MEMORISED, 100, 0.1, 1.1, 0.2, 2.0),
           KindCost("code", 100, 0.5, 0.7, 0.4, 0.6)),
    replay=Replay(24, 512, 1536, 0.01, 0.5), draft=DRAFT,
    samples=(Sample("It is", 0.8, 0, " a truth", 1.0, 2),))


def changed(**fields):
    return replace(GOOD, **fields)


@functools.cache
def nano():
    """The preset with a context that is soon read, and a draft; random weights."""
    config = replace(ModelConfig.preset("nano"), max_position_embeddings=256)
    tokenizer = Tokenizer.from_file(data_dir() / "nano")
    model = Transformer(config, checked_classes(config, tokenizer), draft=True)
    return Lab(init_weights(model, seed=0).requires_grad_(False).eval(), tokenizer, "nano")
