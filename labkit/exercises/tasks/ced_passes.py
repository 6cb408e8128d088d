"""Exercise 1.2: what a prefill costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from labkit.exercises.record import Case, Mistake

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "1.2", "What a prefill costs", "passes_of"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 4
TOLERANCE = 0.0
OBJECTIVE = """
Count the layer-token passes of a CED prefill: how often some layer computes some token. The
encoder's E layers read all T tokens. The decoder's L-E layers read the end of the prompt: its
last W tokens, or, with `exact`, so many that the last W come out as in a full prefill. Each
decoder layer reaches W-1 tokens further back than the one above it.
"""
HELP = (
    """The tail of the decoder is one number for all its layers. For `exact`, ask how far back the
    *last* layer's last W tokens depend on the tokens that enter the *first* decoder layer.""",
    """The last layer needs W tokens right. Each of the other L-E-1 layers below it must be right
    for W-1 tokens more. And no tail is longer than the prompt.""",
    """```python
    tail = W + (L - E - 1) * (W - 1) if exact else W
    return T * E + ... * (L - E)
    ```""",
)
AFTER = """The same numbers come from counters in the running model, which the explorer above shows.
The check cannot see what a pass costs: the decoder's layers of ratio 1 score more entries than the
encoder's, and their share of the multiply-adds is larger than their share of the passes."""


def solution(T, W, L, E, exact):
    """Layer-token passes of a CED prefill.

    T tokens, window W, L layers of which the first E are the encoder; exact: see above.
    """
    tail = W + (L - E - 1) * (W - 1) if exact else W
    return T * E + min(T, tail) * (L - E)


def alternative(T, W, L, E, exact):
    """Layer by layer, from the last one down."""
    needed = W
    for _ in range(L - E - 1):
        needed += (W - 1) if exact else 0
    return sum(T if layer < E else min(T, needed) for layer in range(L))


def short_prompts_too_dear(T, W, L, E, exact):
    return T * E + (W + (L - E - 1) * (W - 1) if exact else W) * (L - E)


def half_of_everything(T, W, L, E, exact):
    return T * L // 2


def whole_windows(T, W, L, E, exact):
    return T * E + min(T, W * (L - E) if exact else W) * (L - E)


def one_layer_short(T, W, L, E, exact):
    return T * E + min(T, W + (L - E - 2) * (W - 1) if exact else W) * (L - E)


MISTAKES = (
    Mistake(short_prompts_too_dear, "the tail is longer than the prompt here: a prompt of fewer "
            "tokens than that is read whole, and no more.", "W*(L-E) added without a minimum"),
    Mistake(half_of_everything, "half of T*L is the limit for long prompts; the decoder's tail is "
            "missing.", "press texts: prefill at half the cost"),
    Mistake(whole_windows, "each layer reaches W-1 tokens further back, not W: a token's window "
            "holds the token itself. (W a layer is the report's bound.)", "the report's 2,560"),
    Mistake(one_layer_short, "one layer is missing from the reach: count the layers below the last "
            "one.", "mutant `halo_one_layer_short`"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    W, L, E = c.sliding_window, c.num_hidden_layers, c.encoder_layers
    for what, args in (
            ("512 tokens, this model, the last window", (512, W, L, E, False)),
            ("512 tokens, this model, exact", (512, W, L, E, True)),
            ("a prompt shorter than the window", (W // 2, W, L, E, False)),
            ("a prompt shorter than the exact tail", (W + 30, W, L, E, True)),
            ("100,000 tokens at the released sizes", (100_000, 128, 40, 20, False)),
            ("the same, exact", (100_000, 128, 40, 20, True))):
        yield Case(what, args)
