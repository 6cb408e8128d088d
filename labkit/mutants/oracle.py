"""A second computation of the whole model, token by token and head by head.

It shares no code with `labkit.model`, `labkit.cache`, `labkit.kernels`, `labkit.numerics` or
`labkit.text`: one text at a time, no batch, no cache, no tensor over tokens; plain loops over
float64 vectors, with Python's own sort and integers where the model uses tensors. It is slow on
purpose: what it says can be checked by eye, and a fault in the model is not repeated here.

Symbols: T tokens, D hidden size, C streams, H heads, d head dim, R rotated channels, r ratio of
a layer, K index_topk, W sliding_window.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from labkit.config import ModelConfig
from labkit.mutants.oracle_numbers import engram_constants, nearest_in_blocks, yarn_frequencies

Vector = torch.Tensor
NOTHING = float("-inf")


class Oracle:
    """weights: checkpoint names to tensors of any float dtype; classes: Engram class of an id."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor],
                 classes: Sequence[int], rounding: bool = False) -> None:
        self.config, self.rounding = config, rounding
        self.weights = {name: w.detach().double() for name, w in weights.items()}
        self.classes = [int(c) for c in classes]
        self.plain = yarn_frequencies(config, compressed=False)
        self.yarn = yarn_frequencies(config, compressed=True)
        self.enter: Mapping[int, int] = {}
        self.kept: tuple[int, Mapping[str, torch.Tensor]] = (0, {})

    # ------------------------------------------------------------------ the whole forward
    @torch.no_grad()
    def run(self, ids: Sequence[int], enter: Mapping[int, int] | None = None,
            kept: tuple[int, Mapping[str, torch.Tensor]] = (0, {})) -> dict[str, torch.Tensor]:
        """Taps of one text of T ids, without a batch axis, e.g. `layers.2.attn.out` [T,D].

        enter: of some layers the lowest position that has a window key (a replay, a decoder that
        sees the end of a prompt only); what these layers give for tokens before it is void.
        kept: the compressed entries of so many tokens are those of an earlier run.
        """
        c, w = self.config, self.weights
        self.enter, self.kept = enter or {}, kept
        T, C = len(ids), c.hc_mult
        taps: dict[str, torch.Tensor] = {}
        rows = self._engram_rows(list(ids))                    # [T][L][(N-1)*heads]
        if c.engram_layer_ids:
            taps["engram_hash_ids"] = torch.tensor(rows)
        streams = [torch.stack([w["embed.weight"][i]] * C) for i in ids]  # [T] of [C,D]
        pre = [_tensor([1.0] + [0.0] * (C - 1)) for _ in ids]
        shared: dict[str, list] = {}                           # what sources publish
        for layer in range(c.num_hidden_layers):
            name = f"layers.{layer}"
            taps[f"{name}.streams_in"] = torch.stack(streams)
            if layer in c.engram_layer_ids:
                place = c.engram_layer_ids.index(layer)
                streams = [self._engram(name, streams[t], rows[t][place]) for t in range(T)]
            taps[f"{name}.streams_after_engram"] = torch.stack(streams)
            for site in ("attn", "ffn"):
                mixes = [self._mix(f"{name}.hc_{site}", h) for h in streams]
                read = [_sum(pre[t][s] * streams[t][s] for s in range(C)) for t in range(T)]
                x = [self._norm(f"{name}.{site}_norm.weight", v) for v in read]
                if site == "attn":
                    y = self._attention(layer, x, shared, taps)
                else:
                    y = [self._moe(f"{name}.ffn", v) for v in x]
                streams = [self._expand(y[t], streams[t], mixes[t]) for t in range(T)]
                pre = [mix[0] for mix in mixes]                # read by the *next* site
        final = [_sum(pre[t][s] * streams[t][s] for s in range(C)) for t in range(T)]
        logits = [w["head.weight"] @ self._norm("norm.weight", v) for v in final]
        taps["logits"] = torch.stack(logits)
        return taps

    def _norm(self, name: str, x: Vector) -> Vector:
        return x / math.sqrt(float(x @ x) / len(x) + self.config.rms_norm_eps) * self.weights[name]

    # ------------------------------------------------------------------ hyper-connections
    def _mix(self, name: str, h: Vector) -> tuple[Vector, Vector, Vector]:
        """(pre [C], post [C], comb [C,C]: source stream, target stream) from h [C,D]."""
        c, C = self.config, self.config.hc_mult
        flat = torch.cat([h[s] for s in range(C)])
        m = self.weights[f"{name}_fn"] @ flat
        m = m / math.sqrt(float(flat @ flat) / len(flat) + c.rms_norm_eps)
        base, scale = self.weights[f"{name}_base"], self.weights[f"{name}_scale"]
        pre = [1 / (1 + math.exp(-float(base[i] + m[i] * scale[0]))) + c.hc_eps for i in range(C)]
        post = [2 / (1 + math.exp(-float(base[C + i] + m[C + i] * scale[1]))) for i in range(C)]
        comb = []
        for i in range(C):
            places = range(2 * C + i * C, 3 * C + i * C)
            row = [float(base[p] + m[p] * scale[2]) for p in places]
            powers = [math.exp(v - max(row)) for v in row]
            comb.append([p / sum(powers) + c.hc_eps for p in powers])
        for turn in range(c.hc_sinkhorn_iters):
            if turn:
                comb = [[v / (sum(row) + c.hc_eps) for v in row] for row in comb]
            sums = [sum(row[j] for row in comb) + c.hc_eps for j in range(C)]
            comb = [[v / sums[j] for j, v in enumerate(row)] for row in comb]
        return _tensor(pre), _tensor(post), _tensor(comb)

    def _expand(self, y: Vector, h: Vector, mix: tuple[Vector, Vector, Vector]) -> Vector:
        _, post, comb = mix
        C = self.config.hc_mult
        return torch.stack([post[target] * y + _sum(comb[source, target] * h[source]
                            for source in range(C)) for target in range(C)])

    # ------------------------------------------------------------------ rotation
    def _turn(self, x: Vector, position: int, compressed: bool, back: bool = False) -> Vector:
        """The last R channels of x [..., n], pair by pair as complex numbers."""
        out = x.clone()
        frequencies = self.yarn if compressed else self.plain
        first = x.shape[-1] - 2 * len(frequencies)
        for i, f in enumerate(frequencies):
            angle = -position * f if back else position * f
            a, b = x[..., first + 2 * i], x[..., first + 2 * i + 1]
            out[..., first + 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[..., first + 2 * i + 1] = a * math.sin(angle) + b * math.cos(angle)
        return out

    def _round(self, x: Vector, form: str) -> Vector:
        return nearest_in_blocks(x, form) if self.rounding else x

    # ------------------------------------------------------------------ attention
    def _attention(self, layer: int, x: list[Vector], shared: dict[str, list],
                   taps: dict[str, torch.Tensor]) -> list[Vector]:
        c, w, name = self.config, self.weights, f"layers.{layer}.attn"
        ratio, T = c.compress_ratios[layer], len(x)
        squeezed = ratio > 0
        latents = [self._norm(f"{name}.q_norm.weight", w[f"{name}.wq_a.weight"] @ v) for v in x]
        window = [self._round(self._turn(self._norm(f"{name}.kv_norm.weight",
                  w[f"{name}.wkv.weight"] @ v), t, squeezed), "fp8") for t, v in enumerate(x)]
        if layer in c.kv_source_layer_ids:
            self._publish(name, ratio, x, shared)
            taps[f"{name}.compressed_kv"] = _stacked(shared["kv"], c.head_dim)
            taps[f"{name}.index_keys"] = _stacked(shared["keys"], c.index_head_dim)
        if layer in c.index_source_layer_ids:
            self._select(layer, ratio, x, latents, shared, taps)
        outputs = []
        for t in range(T):
            lowest = min(t, self.enter.get(layer, 0))
            keys = window[max(lowest, t - c.sliding_window + 1) : t + 1]
            if squeezed:
                keys = keys + [shared["kv"][g] for g in shared["selection"][t] if g >= 0]
            q = (w[f"{name}.wq_b.weight"] @ latents[t]).view(c.num_attention_heads, c.head_dim)
            heads = []
            for head in range(c.num_attention_heads):
                turned = self._turn(q[head], t, squeezed)
                logits = [float(turned @ k) / math.sqrt(c.head_dim) for k in keys]
                sink = float(w[f"{name}.attn_sink"][head])
                top = max([*logits, sink])
                powers = [math.exp(v - top) for v in logits]
                total = sum(powers) + math.exp(sink - top)
                value = _sum(p / total * k for p, k in zip(powers, keys, strict=True))
                heads.append(self._turn(value, t, squeezed, back=True))
            outputs.append(self._project(name, heads))
        taps[f"{name}.out"] = torch.stack(outputs)
        return outputs

    def _project(self, name: str, heads: list[Vector]) -> Vector:
        """Grouped low-rank output: group g meets only its own rows of wo_a."""
        c, parts = self.config, []
        size = c.num_attention_heads // c.o_groups
        for g in range(c.o_groups):
            rows = self.weights[f"{name}.wo_a.weight"][g * c.o_lora_rank : (g + 1) * c.o_lora_rank]
            parts.append(rows @ torch.cat(heads[g * size : (g + 1) * size]))
        return self.weights[f"{name}.wo_b.weight"] @ torch.cat(parts)

    def _publish(self, name: str, ratio: int, x: list[Vector], shared: dict[str, list]) -> None:
        """Compressed entries and index keys of a Full layer; an unfinished group gives none."""
        w, kv, keys = self.weights, [], []
        for g in range(len(x) // ratio):
            tokens = x[g * ratio : (g + 1) * ratio]
            values = [w[f"{name}.compressor.wkv.weight"] @ v for v in tokens]
            if ratio == 1:
                mixed = values[0]
            else:
                gates = torch.stack([w[f"{name}.compressor.wgate.weight"] @ v for v in tokens])
                share = torch.exp(gates - gates.max(dim=0).values)
                share = share / share.sum(dim=0)               # per channel over the group
                mixed = _sum(share[j] * values[j] for j in range(ratio))
            latent = self._norm(f"{name}.compressor.norm.weight", mixed)
            first = g * ratio                                  # position of the group's first token
            kv.append(self._round(self._turn(latent, first, True), "nvfp4"))
            key = w[f"{name}.indexer.wk.weight"] @ latent
            key = self._norm(f"{name}.indexer.k_norm.weight", key)
            keys.append(self._round(self._turn(key, first, True), "mxfp4"))
        tokens_kept, earlier = self.kept
        for g in range(tokens_kept // ratio):                  # stored before: not made again
            kv[g] = earlier[f"{name}.compressed_kv"][g]
            keys[g] = earlier[f"{name}.index_keys"][g]
        shared["kv"], shared["keys"] = kv, keys

    # ------------------------------------------------------------------ indexer
    def _select(self, layer: int, ratio: int, x: list[Vector], latents: list[Vector],
                shared: dict[str, list], taps: dict[str, torch.Tensor]) -> None:
        c, name = self.config, f"layers.{layer}.attn"
        owner = layer == c.candidate_source_layer_id
        restricted = 0 <= c.candidate_source_layer_id < layer
        selection, pools = [], []
        for t in range(len(x)):
            scores = self._scores(name, t, x[t], latents[t], shared["keys"][: (t + 1) // ratio])
            if owner:
                pools.append(self._pool(scores))
            if restricted:
                scores = [s if g in shared["pool"][t] else NOTHING for g, s in enumerate(scores)]
            best = sorted(_best(scores, c.index_topk))
            selection.append(best + [-1] * (c.index_topk - len(best)))
        shared["selection"] = selection
        taps[f"{name}.topk_indices"] = torch.tensor(selection)
        if owner:
            shared["pool"] = pools
            entries = range(len(shared["keys"]))
            mask = torch.tensor([[g in pool for g in entries] for pool in pools])
            taps[f"{name}.candidates"] = mask.bool().view(len(x), -1)

    def _scores(self, name: str, t: int, x: Vector, latent: Vector,
                keys: list[Vector]) -> list[float]:
        """One score per visible entry: sum over heads of weight * relu(query . key)."""
        c, w = self.config, self.weights
        q = (w[f"{name}.indexer.wq_b.weight"] @ latent).view(c.index_n_heads, c.index_head_dim)
        queries = [self._round(self._turn(q[h], t, True), "mxfp4") for h in range(c.index_n_heads)]
        weights = w[f"{name}.indexer.weights_proj.weight"] @ x
        weights = weights / math.sqrt(c.index_head_dim) / math.sqrt(c.index_n_heads)
        out = []
        for key in keys:
            score = 0.0
            for h in range(c.index_n_heads):
                score += float(weights[h]) * max(float(queries[h] @ key), 0.0)
            out.append(score)
        return out

    def _pool(self, scores: list[float]) -> set[int]:
        """Entries in the kept blocks; the block of the newest visible entry always stays."""
        size = self.config.candidate_block_size
        blocks = [max(scores[b : b + size]) for b in range(0, len(scores), size)]
        if blocks:
            blocks[-1] = float("inf")
        kept = _best(blocks, self.config.candidate_topk_blocks)
        return {g for g in range(len(scores)) if g // size in kept}

    # ------------------------------------------------------------------ mixture of experts
    def _moe(self, name: str, x: Vector) -> Vector:
        c, w = self.config, self.weights
        score = [math.sqrt(math.log1p(math.exp(float(v)))) for v in w[f"{name}.gate.weight"] @ x]
        biased = [s + float(b) for s, b in zip(score, w[f"{name}.gate.bias"], strict=True)]
        picked = _best(biased, c.num_experts_per_tok)
        total = 1.0
        if c.num_experts_per_tok > 1 and c.norm_topk_prob:
            total = sum(score[e] for e in picked) + 1e-20
        out = self._expert(f"{name}.shared_experts", x, 1.0)
        for e in picked:
            share = score[e] / total * c.routed_scaling_factor
            out = out + self._expert(f"{name}.experts.{e}", x, share)
        return out

    def _expert(self, name: str, x: Vector, share: float) -> Vector:
        limit, w = self.config.swiglu_limit, self.weights
        inner = []
        for a, b in zip(w[f"{name}.w1.weight"] @ x, w[f"{name}.w3.weight"] @ x, strict=True):
            gate, up = min(float(a), limit), min(max(float(b), -limit), limit)
            inner.append(gate / (1 + math.exp(-gate)) * up * share)
        return w[f"{name}.w2.weight"] @ _tensor(inner)

    # ------------------------------------------------------------------ Engram
    def _engram_rows(self, ids: list[int]) -> list[list[list[int]]]:
        """Row numbers [T][L][(N-1)*heads], with Python's unbounded integers."""
        c = self.config
        constants = engram_constants(c)
        pad = self.classes[c.engram_pad_id]
        out = []
        N = c.engram_max_ngram_size
        for t in range(len(ids)):
            back = [self.classes[ids[t - k]] if t >= k else pad for k in range(N)]
            layers = []
            for multipliers, primes in constants:
                rows, offset = [], 0
                for order in range(2, N + 1):
                    mixed = 0
                    for k in range(order):
                        mixed ^= back[k] * multipliers[k]
                    for head in range(c.engram_n_heads):
                        prime = primes[(order - 2) * c.engram_n_heads + head]
                        rows.append(mixed % prime + offset)
                        offset += prime
                layers.append(rows)
            out.append(layers)
        return out

    def _engram(self, name: str, h: Vector, rows: list[int]) -> Vector:
        """h [C,D] after the memory was gated into every stream."""
        c, w, D = self.config, self.weights, self.config.hidden_size
        memory = torch.cat([w[f"{name}.engram.embed.weight"][row] for row in rows])
        memory = w[f"{name}.engram.wkv.weight"] @ memory
        value, out = memory[c.hc_mult * D :], []
        for s in range(c.hc_mult):
            key = memory[s * D : (s + 1) * D]
            weight = w[f"{name}.engram.q_weight"][s] * w[f"{name}.engram.k_weight"][s]
            dot = float((h[s] * weight) @ key)
            for v in (h[s], key):
                dot /= math.sqrt(float(v @ v) / D + c.rms_norm_eps)
            dot /= math.sqrt(D)
            root = math.sqrt(max(abs(dot), 1e-6)) * float(np.sign(dot))
            out.append(h[s] + value / (1 + math.exp(-root)))
        return torch.stack(out)


def _best(scores: list[float], k: int) -> list[int]:
    """Places of the k largest finite scores; of equal ones the earlier. (+inf counts.)"""
    order = sorted(range(len(scores)), key=lambda g: (-scores[g], g))
    return [g for g in order if scores[g] != NOTHING][:k]


def _sum(vectors: Iterable[Vector]) -> Vector:
    return sum(vectors, start=torch.zeros(1, dtype=torch.float64))


def _tensor(numbers: list) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _stacked(vectors: list[Vector], width: int) -> torch.Tensor:
    return torch.stack(vectors) if vectors else torch.zeros(0, width, dtype=torch.float64)
