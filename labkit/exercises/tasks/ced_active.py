"""Exercise 1.3: how many parameters a token meets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "1.3", "How many parameters a token meets", "active_of"
MINUTES, DIFFICULTY, IMPORTANCE = 15, 2, 4
TOLERANCE = 0.0
OBJECTIVE = """
Of 552 billion backbone parameters, how many take part when one token of a prompt is read? Each
row of the list is `(layer, component, parameters)`; `layer` is None outside of the layers. Sum
the layers below `split` (the decoder's first), with `picked` of the `experts` equally large
routed experts, and add what the decoder's first layer needs to store its entries: its
`"compressor"` and `"index key"`. Left out, as is usual: `"hyper-connections"`, and
`"engram tables"`, which are looked up and not multiplied. What has no layer is not met at all: a
prompt token needs no head, and its embedding is looked up.
"""
HELP = (
    """Write one loop over the rows with three questions: is it left out? is it in a layer below
    the split, or one of the two parts of the split layer? is it the routed experts?""",
    """The component `"routed experts"` holds all experts of a layer. They are equally large, so a
    token's share is `parameters * picked // experts`.""",
    """```python
    total = 0
    for layer, component, parameters in rows:
        if layer is None or component in ("hyper-connections", "engram tables"):
            continue
        stored = layer == split and component in ("compressor", "index key")
        if layer < split or stored:
            total += ... if component == "routed experts" else ...
    return total
    ```""",
)
AFTER = """7.9 billion for a token of the prompt against 15.8 billion for one that is generated:
reading runs half of the layers, writing all of them. The check cannot see what the convention
hides: hyper-connections multiply too, and at decode the Engram projections are left out."""


def solution(rows, split, picked, experts):
    """Active parameters of one prompt token.

    rows: (layer or None, component, parameters); split: the decoder's first layer;
    picked of experts: routed experts that a token visits, and all of a layer.
    """
    total = 0
    for layer, component, parameters in rows:
        if layer is None or component in ("hyper-connections", "engram tables"):
            continue
        stored = layer == split and component in ("compressor", "index key")
        if layer < split or stored:
            share = picked / experts if component == "routed experts" else 1
            total += round(parameters * share)
    return total


def alternative(rows, split, picked, experts):
    """By component first."""
    by: dict[str, int] = {}
    for layer, component, parameters in rows:
        if layer is not None and layer < split:
            by[component] = by.get(component, 0) + parameters
    by["routed experts"] = by["routed experts"] * picked // experts
    store = sum(n for i, name, n in rows if i == split and name in ("compressor", "index key"))
    return store + sum(n for name, n in by.items()
                       if name not in ("hyper-connections", "engram tables"))


def _with(rows, split, picked, experts, *, all_experts=False, store=True, outer=False,
          tables=False):
    total = 0
    for layer, component, parameters in rows:
        if component == "hyper-connections" or (component == "engram tables" and not tables):
            continue
        inside = (outer if layer is None else layer < split or (
            store and layer == split and component in ("compressor", "index key")))
        if inside:
            routed = component == "routed experts" and not all_experts
            total += parameters * picked // experts if routed else parameters
    return total


def counts_all_experts(*args):
    return _with(*args, all_experts=True)


def forgets_the_decoders_entries(*args):
    return _with(*args, store=False)


def counts_embedding_and_head(*args):
    return _with(*args, outer=True)


def counts_the_tables(*args):
    return _with(*args, tables=True)


MISTAKES = (
    Mistake(counts_all_experts, "all routed experts are counted, but a token visits "
            "num_experts_per_tok of them.", "total taken for active"),
    Mistake(forgets_the_decoders_entries, "the decoder's entries are missing: its first layer "
            "compresses every token of the prompt, though it answers for the tail alone.",
            "a cut that drops the decoder whole"),
    Mistake(counts_embedding_and_head, "what stands outside of the layers is counted: the "
            "embedding is looked up, and a prompt token asks for no logits.", "decode's rule"),
    Mistake(counts_the_tables, "Engram's tables are counted, but a token reads a few rows of them; "
            "only their projections multiply.", "tables taken for weights"),
)


def rows_of(config: Any) -> list[tuple[int | None, str, int]]:
    """(layer, component, parameters) of the backbone, as the exercise is asked."""
    from labkit.checkpoint.accounting import component_of, part_of
    from labkit.checkpoint.layout import parameters

    sums: dict[tuple[int | None, str], int] = {}
    for name, shape in parameters(config):
        if part_of(name) in ("vision", "draft"):
            continue
        layer = int(name.split(".", 2)[1]) if name.startswith("layers.") else None
        component = component_of(name)
        if ".indexer.wk." in name or ".indexer.k_norm." in name:
            component = "index key"
        sums[layer, component] = sums.get((layer, component), 0) + math.prod(shape)
    return [(layer, component, count) for (layer, component), count in sums.items()]


def cases(lab: Lab) -> Iterator[Case]:
    from labkit.config import ModelConfig

    for what, c in (("this model", lab.config),
                    ("the released model", ModelConfig.preset("flash"))):
        yield Case(what, (rows_of(c), c.encoder_layers, c.num_experts_per_tok,
                          c.n_routed_experts))
