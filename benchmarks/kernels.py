#!/usr/bin/env python3
"""Times of the kernel sets side by side, in one run: python benchmarks/kernels.py [--threads N]

Shapes are those of mini at 1,024 tokens. Figures move from machine to machine and with whatever
else it does; the ratios of one run are what counts. Processor time is printed beside wall time,
since threads that wait for each other show only in the difference.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from types import ModuleType

import torch

from labkit.config import ModelConfig
from labkit.kernels import cpu, reference
from labkit.kernels import train as training
from labkit.model.hyper import collapse, expand, hyper_mix
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer

B, T = 2, 1024


def timed(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(wall, processor) milliseconds a call, the best of `repeats` after two to warm up."""
    call()
    call()
    best = (math.inf, math.inf)
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        best = min(best, (time.perf_counter() - wall, time.process_time() - processor))
    return best[0] * 1e3, best[1] * 1e3


def operations(c: ModelConfig) -> dict[str, Callable[[ModuleType], Callable[[], object]]]:
    """Per operation a function from a kernel set to the call that is timed."""
    g = torch.Generator().manual_seed(0)
    H, d, W, K = c.num_attention_heads, c.head_dim, c.sliding_window, c.index_topk

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).requires_grad_()

    q, window, entries, sink = random(B, T, H, d), random(B, W + T, d), random(B, T, d), random(H)
    start = torch.zeros(B, dtype=torch.int64)
    scores = torch.randn(B, T, T, generator=g)
    scores = scores.masked_fill(torch.arange(T) > torch.arange(T)[:, None], -math.inf)
    selected = reference.select_top(scores, K)
    index_q = torch.randn(B, T, c.index_n_heads, c.index_head_dim, generator=g)
    index_k = torch.randn(B, T, c.index_head_dim, generator=g)
    index_w = torch.randn(B, T, c.index_n_heads, generator=g)
    C, D = c.hc_mult, c.hidden_size
    h, y, pre = random(B, T, C, D), random(B, T, D), torch.rand(B, T, C)
    fn, base, scale = random(C * (C + 2), C * D), random(C * (C + 2)), random(3)

    def attention(k: ModuleType, backward: bool) -> Callable[[], object]:
        def call() -> object:
            out = k.sparse_attention(q, window, entries, selected, sink, start)
            return out.sum().backward() if backward else out
        return call if backward else torch.no_grad()(call)

    def streams(k: ModuleType) -> Callable[[], object]:
        def call() -> object:
            mix = k.fuse(hyper_mix)(h, fn, base, scale, c)
            x = k.fuse(collapse)(h, pre)
            return k.fuse(expand)(y + x, h, mix).sum().backward()
        return call

    return {
        "attention, forward": lambda k: attention(k, False),
        "attention, forward and backward": lambda k: attention(k, True),
        "index scores": lambda k: lambda: k.index_scores(index_q, index_k, index_w),
        "selection of the best": lambda k: lambda: k.select_top(scores, K),
        "one site's streams, with backward": streams,
    }


def whole_model(c: ModelConfig, kernels: str, backward: bool) -> Callable[[], object]:
    classes = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
    model = init_weights(Transformer(c, classes, kernels, cache_rounding=False))
    ids = torch.arange(B * T).reshape(B, T) * 7 % c.vocab_size

    def call() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kernels == "train"):
            logits = model(ids).logits
        if backward:
            logits.float().square().mean().backward()
            model.zero_grad()
    return call if backward else torch.no_grad()(call)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    c = ModelConfig.preset("mini")
    sets = {"reference": reference, "cpu": cpu, "train": training}
    print(f"torch {torch.__version__}, {options.threads} threads, {B} x {T} tokens, shapes of mini")
    print(f"{'':36}" + "".join(f"{name:>24}" for name in sets))
    print(f"{'milliseconds: wall (processor)':36}" + f"{'':24}" + f"{'ratio':>24}{'ratio':>24}")

    def row(title: str, times: list[tuple[float, float]]) -> None:
        text = f"{title:36}{f'{times[0][0]:.1f} ({times[0][1]:.1f})':>24}"
        for wall, processor in times[1:]:
            text += f"{f'{wall:.1f} ({processor:.1f})  x{times[0][0] / wall:.2f}':>24}"
        print(text, flush=True)

    for title, call in operations(c).items():
        row(title, [timed(call(k), options.repeats) for k in sets.values()])
    for title, backward in (("whole model, forward", False), ("whole model, with backward", True)):
        row(title, [timed(whole_model(c, name, backward), 1) for name in sets])


if __name__ == "__main__":
    main()
