"""Golden vectors read again, taken back, cut and packed: the answers stay those of one pass."""

from __future__ import annotations

import torch

from labkit.engine.session import Session
from labkit.mutants import golden
from labkit.mutants.checks import VECTORS, collect
from labkit.mutants.properties_reuse import (
    PAGE,
    later,
    prefix_hit,
    rewound,
    rewound_expected,
    small_chunks,
)
from labkit.mutants.rules import rounded, unrounded
from labkit.mutants.schedules import in_chunks, one_pass

vector = collect(VECTORS)


def _unrounded(name: str) -> tuple[golden.Case, dict[str, torch.Tensor]]:
    case = golden.case(name)
    assert case.unrounded is not None
    return case, case.unrounded


def _first_row(expected: dict[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
    """Of the first text what a pass from `start` on records."""
    return later({name: value[:1] for name, value in expected.items()
                  if name not in ("input_ids", "lengths") and not name.startswith("dspark.")},
                 start)


def _same(expected: dict[str, torch.Tensor], taps: dict[str, torch.Tensor]) -> str | None:
    for name, value in expected.items():
        wrong = unrounded(name, value, taps[name])
        if wrong:
            return wrong
    return None


@vector("text_query_chunks", "the vector `text`, scored a few queries and keys at a time")
def text_query_chunks() -> str | None:
    case = golden.case("text")
    with small_chunks(elements=512):
        return case.difference(one_pass(golden.model("text"), case.ids))


@vector("text_ced", "the end of the vector `text` after a cut prefill with the exact halo")
def text_ced() -> str | None:
    case, expected = _unrounded("text")
    for cut in ("inside", "after"):
        for chunk in (None, 7):
            session = Session(golden.model("text"), page_tokens=PAGE)
            logits = session.prefill(case.ids[0, :40], mode="ced", halo="exact", cut=cut,
                                     chunk=chunk)
            taps = one_pass(session.model, case.ids[:1, 40:], cache=session.cache)
            wrong = (unrounded("last logits", expected["logits"][:1, 39:40], logits[:, -1:])
                     or _same(_first_row(expected, 40), taps))
            if wrong:
                return f"cut {cut}, chunk {chunk}: {wrong}"
    return None


@vector("text_rewound", "the vector `text` after 0 to 5 accepted tokens of five, twice")
def text_rewound() -> str | None:
    case, expected = _unrounded("text")
    for start in (15, 24):
        wrong = unrounded(f"from {start} tokens: logits",
                          rewound_expected(expected["logits"][0], start),
                          rewound(golden.model("text"), case.ids[:1], start, case.ids[1:]))
        if wrong:
            return wrong
    return None


def _other_end(ids: torch.Tensor, length: int, more: int) -> torch.Tensor:
    """ids [T] up to `length`, then `more` other tokens of the same text."""
    return torch.cat([ids[:length], ids[:more].flip(0)])


@vector("long_cropped", "the vector `long`, cropped with exact replay from another ending")
def long_cropped() -> str | None:
    case, expected = _unrounded("long")
    for length in (131, 130):
        session = Session(golden.model("long"), page_tokens=PAGE)
        session.prefill(_other_end(case.ids[0], length, 9))
        session.crop(length, "exact")
        taps = one_pass(session.model, case.ids[:1, length:], cache=session.cache)
        wrong = _same(_first_row(expected, length), taps)
        if wrong:
            return f"cropped to {length} tokens: {wrong}"
    return None


@vector("long_hit", "the vector `long`, of which a prefix is found without its windows")
def long_hit() -> str | None:
    case, expected = _unrounded("long")
    _, logits, known, kind = prefix_hit(golden.model("long"), _other_end(case.ids[0], 131, 9),
                                        case.ids[0], "exact")
    if (known, kind) != (131, "global-only"):
        return f"{known} tokens known, {kind} hit"
    return unrounded("logits", expected["logits"][:1, 131:], logits[:, -29:])


@vector("text_packed", "the vector `text` with cache rounding, in a packed cache")
def text_packed() -> str | None:
    case = golden.case("text")
    model = golden.in_float64(golden.model("text", rounding=True))
    cache = model.new_cache(case.ids.shape[0], "packed", page_tokens=PAGE)
    return case.difference(in_chunks(model, case.ids, [20, 1, 1, 23], cache), rounded,
                           rounding=True)
