"""Properties of the whole model: equal to the oracle, and the same however a text is fed."""

from __future__ import annotations

import functools

import torch

from labkit.config import ModelConfig
from labkit.model.transformer import Transformer
from labkit.mutants.checks import PROPERTIES, collect
from labkit.mutants.models import random_ids, random_model, small_classes, small_config
from labkit.mutants.oracle import Oracle
from labkit.mutants.rules import FP32, FP64, close, same_run
from labkit.mutants.schedules import in_chunks, in_ragged_chunks, one_pass, row
from labkit.trace import Taps

prop = collect(PROPERTIES)
LENGTH = 29


def _small(rounding: bool = False, **changes) -> tuple[ModelConfig, Transformer]:
    config = small_config(**changes)
    return config, random_model(config, seed=1, cache_rounding=rounding)


@functools.cache
def oracle_answers(rounding: bool) -> dict[str, torch.Tensor]:
    """The oracle's taps of the text that the checks use, once per session."""
    config, model = _small()
    return Oracle(config, dict(model.named_parameters()), small_classes(config, 1).tolist(),
                  rounding).run(random_ids(config, LENGTH, seed=3)[0].tolist())


def against_oracle(rounding: bool, taps: dict[str, torch.Tensor], of_span: float) -> str | None:
    expected = {name: value[None] for name, value in oracle_answers(rounding).items()}
    return same_run(expected, taps, of_span)


@prop("oracle", "every tensor equals a token-by-token computation that shares no code")
def oracle() -> str | None:
    config, model = _small()
    return against_oracle(False, one_pass(model, random_ids(config, LENGTH, seed=3)), FP64)


@prop("oracle_rounded", "the same with the cache in its small number formats")
def oracle_rounded() -> str | None:
    config, model = _small(rounding=True)
    return against_oracle(True, one_pass(model, random_ids(config, LENGTH, seed=3)), FP32)


@prop("causal", "a later token changes nothing before it")
def causal() -> str | None:
    config, model = _small()
    ids = random_ids(config, 24, seed=8)
    other = ids.clone()
    other[0, 17] = (other[0, 17] + 1) % config.vocab_size
    with torch.no_grad():
        a, b = model(ids).logits[:, :17], model(other).logits[:, :17]
    return close("logits before the change", a, b, FP64)


@prop("chunks", "a text in pieces, some of them single tokens, equals one pass")
def chunks() -> str | None:
    config, model = _small()
    ids = random_ids(config, 41, seed=9)
    whole = one_pass(model, ids)
    for sizes in ([7, 13, 21], [2, 39], [20] + [1] * 21):
        wrong = same_run(whole, in_chunks(model, ids, sizes), FP64)
        if wrong:
            return f"pieces of {sizes[0]}, {sizes[1]}, ...: {wrong}"
    return None


@prop("token_by_token", "a text read token by token from the first on equals one pass")
def token_by_token() -> str | None:
    config, model = _small()
    ids = random_ids(config, 41, seed=9)
    return same_run(one_pass(model, ids), in_chunks(model, ids, [1] * 41), FP64)


@prop("ragged", "a padded row equals the row alone, also continued unevenly over one cache")
def ragged() -> str | None:
    config, model = _small()
    ids = random_ids(config, 23, rows=3, seed=10)
    lengths = [23, 14, 5]
    padded = one_pass(model, ids, torch.tensor(lengths))
    pieces = in_ragged_chunks(model, ids, [[9, 3, 1], [1, 1, 3], [13, 10, 1]])
    for b, n in enumerate(lengths):
        alone = one_pass(model, ids[b : b + 1, :n])
        for what, taps in (("padded", row(padded, b, n, config)), ("uneven pieces", pieces[b])):
            wrong = same_run(alone, taps, FP64)
            if wrong:
                return f"row of {n} tokens, {what}: {wrong}"
    return None


@prop("snapshot", "two continuations of one snapshot, taken in turns, do not feel each other")
def snapshot() -> str | None:
    config, model = _small()
    ids, other = random_ids(config, 26, seed=11), random_ids(config, 26, seed=12)
    other[:, :13] = ids[:, :13]
    found: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        first = model.new_cache()
        model(ids[:, :13], cache=first)
        caches = [first, first.fork()]
        for piece in (slice(13, 17), slice(17, 18), slice(18, 26)):
            for branch, text in enumerate((ids, other)):
                found[branch].append(model(text[:, piece], cache=caches[branch]).logits)
        for branch, text in enumerate((ids, other)):
            wrong = close(f"logits of continuation {branch}", model(text).logits[:, 13:],
                          torch.cat(found[branch], dim=1), FP64)
            if wrong:
                return wrong
    return None


@prop("offset", "the same text further on in a window-only model differs by rounding alone")
def offset() -> str | None:
    # Two layers of W = 4 and N = 3 look back 8 tokens; the text's first 12 see the past.
    config, model = _small(num_hidden_layers=2, compress_ratios=(0, 0), kv_source_layer_ids=(),
                           index_source_layer_ids=(), candidate_source_layer_id=-1,
                           engram_layer_ids=(1,))
    text, past = random_ids(config, 20, seed=13), random_ids(config, 1000, seed=14)
    with torch.no_grad():
        near = model(text).logits[:, 12:]
        far = model(torch.cat([past, text], dim=1)).logits[:, 1012:]
    return close("logits at offset 1000", near, far, FP64)


@prop("taps", "recording changes no bit")
def taps() -> str | None:
    config, model = _small(rounding=True)
    ids = random_ids(config, 12, seed=15)
    with torch.no_grad():
        plain, tapped = model(ids).logits, model(ids, taps=Taps()).logits
    return None if torch.equal(plain, tapped) else "logits: other bits when taps are on"
