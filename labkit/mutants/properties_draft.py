"""Properties of the draft: behind any token of a text its block is the oracle's."""

from __future__ import annotations

import functools

import torch

from labkit.engine.drafting import draft_at
from labkit.model.transformer import Transformer
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.models import DRAFT, random_ids, random_model, small_config
from labkit.mutants.oracle import Oracle
from labkit.mutants.oracle_draft import DraftOracle, Guess
from labkit.mutants.rules import FP32, FP64, close

prop = collect(PROPERTIES)
LENGTH = 24
ANCHORS = (0, 1, 3, 4, 5, 13, LENGTH - 1)       # W = 4: no window, a short, a full one


def model(rounding: bool = False, experts: int = 2) -> Transformer:
    return _pair(rounding, experts)[0]


def oracles(rounding: bool = False, experts: int = 2) -> tuple[Oracle, DraftOracle]:
    return _pair(rounding, experts)[1]


@functools.cache
def _pair(rounding: bool, experts: int) -> tuple[Transformer, tuple[Oracle, DraftOracle]]:
    """A target with its draft, and the two oracles of them."""
    config = small_config(**{**DRAFT, "dspark_num_experts_per_tok": experts})
    target = random_model(config, seed=2, cache_rounding=rounding)
    oracle = Oracle(config, dict(target.named_parameters()), target.engram_classes.tolist(),
                    rounding)
    return target, (oracle, DraftOracle(oracle))


# ------------------------------------------------------------------ what the checks start from
@functools.cache
def text() -> torch.Tensor:
    return random_ids(model().config, LENGTH, seed=31)                      # [1,T]


def features(rounding: bool = False) -> torch.Tensor:
    """[T,targets*D] of the text; the draft's experts are no matter of the target's."""
    return _features(rounding)


@functools.cache
def _features(rounding: bool) -> torch.Tensor:
    oracle, guesser = oracles(rounding)
    return guesser.features(oracle.run(text()[0].tolist()))


@functools.cache
def guesses(rounding: bool, experts: int) -> list[Guess]:
    """What the oracle says behind each of the anchors."""
    rows, (_, guesser) = features(rounding), oracles(rounding, experts)
    return [guesser.block(rows, int(text()[0, a]), a, slots()) for a in ANCHORS]


def warm() -> None:
    """Compute what is kept between checks, before any fault is switched on."""
    for rounding, experts in ((False, 2), (False, 1), (True, 2)):
        guesses(rounding, experts)


def slots() -> int:
    return model().config.dspark_block_size


# ------------------------------------------------------------------ a text that is there
def _against_oracle(rounding: bool, experts: int, of_span: float) -> str | None:
    (_, guesser), n = oracles(rounding, experts), slots()
    previous = random_ids(model().config, len(ANCHORS) * n, seed=32)        # [1,A*n]
    taps = draft_at(model(rounding, experts), text(), torch.tensor([ANCHORS]), previous)
    right = guesses(rounding, experts)
    raw = torch.cat([guess.raw_hidden for guess in right])
    expected = {
        "target_features": features(rounding), "raw_hidden": raw,
        "normalized_hidden": torch.cat([guess.normalized_hidden for guess in right]),
        "base_logits": torch.cat([guess.base_logits for guess in right]),
        "markov_logits": guesser.markov(previous[0].tolist()),
        "confidence_logits": guesser.confidence(raw, previous[0].tolist()),
    }
    for name, value in expected.items():
        wrong = close(name, value[None], taps[f"dspark.{name}"], of_span)
        if wrong:
            return wrong
    return None


@prop("draft", "blocks behind seven anchors equal a slot-by-slot computation that shares no code")
def draft() -> str | None:
    for experts in (2, 1):
        wrong = _against_oracle(False, experts, FP64)
        if wrong:
            return f"{experts} experts for each slot: {wrong}"
    return None


@prop("draft_rounded", "the same with the draft's keys in their small number format")
def draft_rounded() -> str | None:
    return _against_oracle(True, 2, FP32)
