#!/usr/bin/env python3
"""Full against CED prefill, in one run: python benchmarks/prefill.py [--tokens 4096]

A mini-shaped model with random weights and a longer context; logits of the last token in both
modes. The ideal is the ratio of layer-token passes; the rest is what the cut does not save.
"""

from __future__ import annotations

import argparse
import time

import torch

from labkit.config import ModelConfig
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    c = ModelConfig.preset("mini").replace(max_position_embeddings=2 * options.tokens)
    classes = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
    model = init_weights(Transformer(c, classes))
    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(c.vocab_size, (1, options.tokens), generator=seeded)
    times: dict[bool, list[float]] = {False: [], True: []}
    with torch.no_grad():
        for repeat in range(options.repeats + 1):
            for ced, found in times.items():  # in turn, so that both meet the same neighbours
                started = time.perf_counter()
                model(ids, last_only=True, ced=ced)
                if repeat:
                    found.append(time.perf_counter() - started)
    full, ced_time = min(times[False]), min(times[True])
    T, W, L, E = options.tokens, c.sliding_window, c.num_hidden_layers, c.encoder_layers
    passes = T * E + W * (L - E)
    print(f"torch {torch.__version__}, {options.threads} threads, {T} tokens, {E} encoder and "
          f"{L - E} decoder layers, window {W}")
    print(f"full  {full:7.3f} s  {T * L:8,} layer-token passes")
    print(f"ced   {ced_time:7.3f} s  {passes:8,} layer-token passes")
    print(f"ratio {ced_time / full:7.3f}    {passes / (T * L):.3f} of the passes")


if __name__ == "__main__":
    main()
