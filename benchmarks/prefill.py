#!/usr/bin/env python3
"""Full against CED prefill, side by side in one run.

The shape of the preset mini, whose encoder and decoder are equally deep, with random weights and
a context of 8,192. In both modes the pass ends with the logits of the last token.

The ideal counts layer-token passes: T tokens in E encoder layers and W tokens (a window) in
L - E decoder layers, instead of T tokens in L layers. Time may fall below it where decoder
layers cost more than encoder layers, and stays above it where work remains that is no layer's.
Multiply-adds are those that the reference kernels need, whichever set runs.
"""

from __future__ import annotations

import argparse
import time

import torch

from labkit.config import ModelConfig
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.model.work import Work, counting

CONTEXT = 8192
TARGET_TOKENS, TARGET = 4096, 0.62

EXAMPLES = """examples:
  python benchmarks/prefill.py                        4,096 tokens, all threads
  python benchmarks/prefill.py --threads 1 --repeats 5
  python benchmarks/prefill.py --tokens 8192          the whole context
  python benchmarks/prefill.py --tokens 512 --parts   what each part multiplies, in both modes
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=TARGET_TOKENS, metavar="T",
                        help=f"length of the prompt, 1..{CONTEXT} (default {TARGET_TOKENS})")
    parser.add_argument("--repeats", type=int, default=3, metavar="N",
                        help="timed passes in each mode, of which the fastest counts (default 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="N",
                        help="threads of torch (default %(default)s)")
    parser.add_argument("--kernels", default="auto", choices=("auto", "cpu", "reference"),
                        help="kernel set (default auto)")
    parser.add_argument("--parts", action="store_true",
                        help="also print the multiply-adds of every part")
    options = parser.parse_args()
    if not 1 <= options.tokens <= CONTEXT:
        parser.error(f"--tokens is {options.tokens}: give a length in 1..{CONTEXT}")
    for name in ("repeats", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: give at least 1")
    torch.set_num_threads(options.threads)

    c = ModelConfig.preset("mini").replace(max_position_embeddings=CONTEXT)
    T, W, L, E = options.tokens, c.sliding_window, c.num_hidden_layers, c.encoder_layers
    if 2 * E != L:
        raise SystemExit(f"the preset mini has {E} encoder and {L - E} decoder layers: this "
                         "comparison is for equal depth")
    classes = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
    model = init_weights(Transformer(c, classes, options.kernels))
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(c.vocab_size, (1, T), generator=seeded)

    times, work = measure(model, ids, options.repeats)
    passes = {"full": T * L, "ced": T * E + min(T, W) * (L - E)}
    for mode, expected in passes.items():
        if work[mode].passes.total() != expected:
            raise SystemExit(f"{mode}: {work[mode].passes.total():,} layer-token passes were "
                             f"counted and {expected:,} derived: the cut is wrong")
    print(f"torch {torch.__version__}, {options.threads} threads, kernels "
          f"{model.kernels.__name__.rpartition('.')[-1]}; {T} tokens, {E} encoder and {L - E} "
          f"decoder layers, window {W}")
    print("        seconds  layer-token passes     multiply-adds  (all repeats, seconds)")
    for mode in ("full", "ced"):
        every = " ".join(f"{t:.3f}" for t in times[mode])
        print(f"{mode:<5} {min(times[mode]):9.3f}  {work[mode].passes.total():18,}  "
              f"{work[mode].total():16,}  ({every})")
    ratio = min(times["ced"]) / min(times["full"])
    print(f"ratio {ratio:9.3f}  {passes['ced'] / passes['full']:18.3f}  "
          f"{work['ced'].total() / work['full'].total():16.3f}")
    print(f"ideal {passes['ced'] / passes['full']:9.3f}  = (T E + min(T, W) (L - E)) / (T L)")
    if T == TARGET_TOKENS:
        print(f"goal  {TARGET:9.2f}  {'met' if ratio <= TARGET else 'NOT met'}")
    if options.parts:
        for mode, counted in work.items():
            print(f"\n{mode}\n{counted.table()}")


def measure(model: Transformer, ids: torch.Tensor,
            repeats: int) -> tuple[dict[str, list[float]], dict[str, Work]]:
    """Seconds of every pass in both modes, and the work of one, counted outside of the timing."""
    times: dict[str, list[float]] = {"full": [], "ced": []}
    work: dict[str, Work] = {}
    with torch.no_grad():
        for mode in times:  # this also warms up
            with counting(model) as work[mode]:
                prefill(model, ids, mode)
        for _ in range(repeats):
            for mode, found in times.items():  # in turn, so that both meet the same neighbours
                started = time.perf_counter()
                prefill(model, ids, mode)
                found.append(time.perf_counter() - started)
    return times, work


def prefill(model: Transformer, ids: torch.Tensor, mode: str) -> None:
    tail = model.config.sliding_window if mode == "ced" else None
    model(ids, last_only=True, tail=tail)


if __name__ == "__main__":
    main()
