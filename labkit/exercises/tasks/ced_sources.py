"""Exercise 1.1: whose entries and whose selection a layer reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "1.1", "Whose memory a layer reads", "sources_of"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 1, 5
TOLERANCE = 0.0
OBJECTIVE = """
Given the kinds of all layers in order (`"window"`, `"full"`, `"reindex"`, `"reuse"`), say for each
layer whose *entries* it reads and whose *selection*: a pair `(kv, index)` of layer numbers, or
`(None, None)` for a layer that sees its window alone. A Full layer publishes both and uses its
own; a Reindex layer selects anew among the entries that are there; a Reuse layer takes both.
"""
HELP = (
    """Go through the layers once, from the first to the last, and remember two numbers: who last
    published entries, and who last selected.""",
    """A Full layer changes both numbers, a Reindex layer the second alone, a Reuse layer none. A
    window layer changes nothing either, and reads neither.""",
    """```python
    kv = index = None
    out = []
    for layer, kind in enumerate(kinds):
        if kind == "full":
            kv = ...
        if kind in ("full", "reindex"):
            index = ...
        out.append(... if kind == "window" else (kv, index))
    return out
    ```""",
)
AFTER = """The last Full layer's number is all there is to "encoder" and "decoder": every layer
behind it reads one memory. The check cannot see ratios or the candidate pool; the configuration's
rules forbid, for instance, a Reuse layer of another ratio than its source."""


def solution(kinds):
    """[(kv, index), ...] for every layer, None where it reads neither.

    kinds: "window", "full", "reindex" or "reuse" of every layer, in order.
    """
    kv = index = None
    out = []
    for layer, kind in enumerate(kinds):
        if kind == "full":
            kv = layer
        if kind in ("full", "reindex"):
            index = layer
        out.append((None, None) if kind == "window" else (kv, index))
    return out


def alternative(kinds):
    """Looking back from every layer."""
    def latest(layer, wanted):
        return max(i for i in range(layer + 1) if kinds[i] in wanted)

    return [(None, None) if kind == "window" else
            (latest(i, {"full"}), latest(i, {"full", "reindex"})) for i, kind in enumerate(kinds)]


def from_the_layer_before(kinds):
    return [(None, None) if kind == "window" else (i, i) if kind == "full" else (i - 1, i - 1)
            for i, kind in enumerate(kinds)]


def reindex_has_its_own_entries(kinds):
    kv = None
    out = []
    for layer, kind in enumerate(kinds):
        kv = layer if kind in ("full", "reindex") else kv
        out.append((None, None) if kind == "window" else (kv, kv))
    return out


def reuse_skips_reindex(kinds):
    kv = None
    out = []
    for layer, kind in enumerate(kinds):
        kv = layer if kind == "full" else kv
        out.append((None, None) if kind == "window" else
                   (kv, layer if kind == "reindex" else kv))
    return out


MISTAKES = (
    Mistake(from_the_layer_before, "every layer reads what the layer just before it has, but that "
            "one may have published nothing: go back to the last that did.",
            "handing state from layer to layer"),
    Mistake(reindex_has_its_own_entries, "a Reindex layer publishes entries of its own here, but "
            "it selects anew among the last Full layer's.", "Reindex read as a cheaper Full"),
    Mistake(reuse_skips_reindex, "Reuse layers behind a Reindex layer take the Full layer's "
            "selection here, but they take the latest one.", "selection kept beside the cache"),
)


def cases(lab: Lab) -> Iterator[Case]:
    from labkit.config import ModelConfig

    yield Case("the layers of this model", ([role.kind for role in lab.config.roles],))
    yield Case("the 40 layers of the released model",
               ([role.kind for role in ModelConfig.preset("flash").roles],))
    yield Case("a Reuse layer right behind a Reindex layer",
               (["window", "full", "reindex", "reuse", "full", "reuse"],))
    yield Case("a model of windows alone", (["window", "window"],))
