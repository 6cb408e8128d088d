"""Exercise 7.2: one site of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from labkit.exercises.record import Case, Mistake
from labkit.model.hyper import hyper_mix
from labkit.trace import Taps

if TYPE_CHECKING:
    from labkit.lab import Lab

NUMBER, TITLE, FUNCTION = "7.2", "One site: read, work, write back", "site"
MINUTES, DIFFICULTY, IMPORTANCE = 10, 2, 5
TOLERANCE = 1e-5
OBJECTIVE = """
Write what a site (attention or experts) does with C streams. It *reads* one vector, the sum of the
streams weighted by `pre`; gives it to `work`; and *writes*: every target stream becomes the mix of
all source streams by `comb` (first index source, second target), plus `post` times the result.
`pre` comes from the site before, `post` and `comb` are this site's own.
"""
HELP = (
    """Three lines, one for each verb. Shapes: streams [T,C,D], pre and post [T,C], comb [T,C,C],
    the vector that is read and the result [T,D].""",
    """`torch.einsum` says which index is summed: reading sums over c; mixing sums over the source s
    and keeps the target c.""",
    """```python
    x = torch.einsum("tc,tcd->td", pre, streams)
    y = work(x)
    return ... * y[:, None] + torch.einsum("tsc,tsd->tcd", ...)
    ```""",
)
AFTER = """The streams that come out are those that entered the next site in the run. The check
cannot see where `pre` came from: a model in which each site computed its own would pass, and write
fluent, other text."""


def solution(streams, pre, post, comb, work):
    """The streams [T,C,D] after a site.

    streams [T,C,D]; pre, post [T,C]; comb [T,C,C], source to target;
    work: a function [T,D] -> [T,D].
    """
    x = torch.einsum("tc,tcd->td", pre, streams)
    y = work(x)
    return post[:, :, None] * y[:, None] + torch.einsum("tsc,tsd->tcd", comb, streams)


def alternative(streams, pre, post, comb, work):
    """With matrix products."""
    y = work((pre[:, None] @ streams)[:, 0])
    return comb.transpose(-1, -2) @ streams + post[..., None] * y[:, None]


def transposed(streams, pre, post, comb, work):
    return solution(streams, pre, post, comb.transpose(-1, -2), work)


def without_mixing(streams, pre, post, comb, work):
    y = work(torch.einsum("tc,tcd->td", pre, streams))
    return post[:, :, None] * y[:, None] + streams


def written_to_all_alike(streams, pre, post, comb, work):
    y = work(torch.einsum("tc,tcd->td", pre, streams))
    return y[:, None] + torch.einsum("tsc,tsd->tcd", comb, streams)


def reads_the_mean(streams, pre, post, comb, work):
    y = work(streams.mean(1))
    return post[:, :, None] * y[:, None] + torch.einsum("tsc,tsd->tcd", comb, streams)


MISTAKES = (
    Mistake(transposed, "the mixing matrix is transposed: its first index is the source. Norms "
            "look right either way, since rows and columns both sum to about one.",
            "mutant `transposed_comb`"),
    Mistake(without_mixing, "the streams are kept as they are, as in a plain residual connection, "
            "but they are mixed by `comb`.", "residual connections"),
    Mistake(written_to_all_alike, "the result is added to every stream alike; `post` says how much "
            "of it each one gets.", "one residual stream copied C times"),
    Mistake(reads_the_mean, "the site reads the mean of the streams; `pre` says how much of each.",
            "streams averaged where they should be weighted"),
)


def cases(lab: Lab) -> Iterator[Case]:
    c = lab.config
    model: Any = lab.model
    ids = torch.tensor([lab.encode("She was not at all afraid of the rain")])
    taps = Taps(["layers.*.streams_after_engram", "layers.*.attn.out"])
    lab.model(ids, taps=taps)
    for layer in (0, c.num_hidden_layers - 1):
        h = taps[f"layers.{layer}.streams_after_engram"].float().cpu()       # [1,T,C,D]
        block = model.layers[layer]
        fn, base, scale = (getattr(block, f"hc_attn_{p}").detach().float().cpu()
                           for p in ("fn", "base", "scale"))
        mix = hyper_mix(h, fn, base, scale, c)
        out = taps[f"layers.{layer}.attn.out"][0].float().cpu()              # [T,D]
        pre = torch.full_like(mix.pre[0], 1 / c.hc_mult) + 0.1 * mix.post[0]
        yield Case(f"the attention site of layer {layer}, with what attention gave in the run",
                   (h[0], pre, mix.post[0], mix.comb[0], _Given(out)))
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(3, c.hc_mult, 6, generator=generator)
    weights = [torch.rand(*shape, generator=generator) for shape in (
        (3, c.hc_mult), (3, c.hc_mult), (3, c.hc_mult, c.hc_mult))]
    yield Case("work that depends on what is read", (h, *weights, torch.tanh))


class _Given:
    """Work whose result is known: it depends on what is read by a little, so reading counts."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.out + 0.1 * x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Given) and torch.equal(self.out, other.out)

    __hash__ = None  # type: ignore[assignment]
