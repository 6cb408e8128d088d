"""A second computation of the draft: one block behind one token, slot by slot and head by head.

It shares no code with `labkit.model`: what a stage has in common with a layer (norms, streams,
experts, rotation, rounding) is the `Oracle`'s, the rest is written out here in plain loops.

Symbols as in `oracle`, and n slots of a block behind the anchor at position a.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from labkit.mutants.oracle import Oracle, Vector


@dataclass(frozen=True)
class Guess:
    """One block: raw and normalised hidden states [n,D], logits [n,V] without the Markov bias."""

    raw_hidden: torch.Tensor
    normalized_hidden: torch.Tensor
    base_logits: torch.Tensor


class DraftOracle:
    def __init__(self, target: Oracle) -> None:
        c = self.config = target.config
        self.weights = target.weights
        self.last = f"mtp.{c.num_nextn_predict_layers - 1}"
        # A stage is a layer with experts of its own number; it is never asked about their names.
        self.parts = Oracle(
            dataclasses.replace(c, num_experts_per_tok=c.dspark_num_experts_per_tok),
            target.weights, target.classes, target.rounding)

    def features(self, taps: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Taps of `Oracle.run` -> [T,targets*D]: streams that enter target layers, their mean."""
        found = []
        for t in range(len(taps["logits"])):
            parts = []
            for layer in self.config.dspark_target_layer_ids:
                streams = taps[f"layers.{layer}.streams_after_engram"][t]           # [C,D]
                parts.append(sum(streams[1:], start=streams[0]) / len(streams))
            found.append(torch.cat(parts))
        return torch.stack(found)

    # ------------------------------------------------------------------ a block
    @torch.no_grad()
    def block(self, features: torch.Tensor, anchor: int, position: int, slots: int,
              first: int = 0) -> Guess:
        """The block behind id `anchor` at `position`; features [T,..] exist from `first` on."""
        c, w, parts = self.config, self.weights, self.parts
        read = range(max(first, position - c.sliding_window), position)
        ids = [anchor] + [c.dspark_noise_token_id] * (slots - 1)
        streams = [torch.stack([w["embed.weight"][i]] * c.hc_mult) for i in ids]    # [n] of [C,D]
        pre = [torch.tensor([1.0] + [0.0] * (c.hc_mult - 1)).double() for _ in ids]
        for stage in range(c.num_nextn_predict_layers):
            name = f"mtp.{stage}"
            for site in ("attn", "ffn"):
                mixes = [parts._mix(f"{name}.hc_{site}", h) for h in streams]
                x = [parts._norm(f"{name}.{site}_norm.weight", self._read(p, h))
                     for p, h in zip(pre, streams, strict=True)]
                if site == "attn":
                    past = [self._key(f"{name}.attn", self._taken_in(features[p]), p) for p in read]
                    y = self._attention(f"{name}.attn", x, position, past)
                else:
                    y = [parts._moe(f"{name}.ffn", v) for v in x]
                streams = [parts._expand(*each) for each in zip(y, streams, mixes, strict=True)]
                pre = [mix[0] for mix in mixes]
        raw = [self._read(p, h) for p, h in zip(pre, streams, strict=True)]
        normalized = [parts._norm(f"{self.last}.norm.weight", v) for v in raw]
        logits = [w["head.weight"] @ v for v in normalized]
        return Guess(torch.stack(raw), torch.stack(normalized), torch.stack(logits))

    def _read(self, pre: Vector, h: Vector) -> Vector:
        return sum((pre[s] * h[s] for s in range(1, len(h))), start=pre[0] * h[0])

    def _taken_in(self, feature: Vector) -> Vector:
        """A feature as all stages read it."""
        return self.parts._norm("mtp.0.main_norm.weight",
                                self.weights["mtp.0.main_proj.weight"] @ feature)

    def _key(self, name: str, x: Vector, position: int) -> Vector:
        """Key and value of a feature or of a slot."""
        kv = self.parts._norm(f"{name}.kv_norm.weight", self.weights[f"{name}.wkv.weight"] @ x)
        return self.parts._round(self.parts._turn(kv, position, False), "fp8")

    def _attention(self, name: str, x: list[Vector], position: int,
                   past: list[Vector]) -> list[Vector]:
        """Each slot reads the past and all slots, earlier and later ones and itself."""
        c, w, parts = self.config, self.weights, self.parts
        keys = past + [self._key(name, v, position + k) for k, v in enumerate(x)]
        out = []
        for k, v in enumerate(x):
            latent = parts._norm(f"{name}.q_norm.weight", w[f"{name}.wq_a.weight"] @ v)
            q = (w[f"{name}.wq_b.weight"] @ latent).view(c.num_attention_heads, c.head_dim)
            heads = []
            for head in range(c.num_attention_heads):
                turned = parts._turn(q[head], position + k, False)
                powers = [math.exp(float(turned @ key) / math.sqrt(c.head_dim)) for key in keys]
                total = sum(powers) + math.exp(float(w[f"{name}.attn_sink"][head]))
                value = sum((p / total * key for p, key in zip(powers, keys, strict=True)),
                            start=torch.zeros(c.head_dim).double())
                heads.append(parts._turn(value, position + k, False, back=True))
            out.append(parts._project(name, heads))
        return out

    # ------------------------------------------------------------------ what a token adds
    def markov(self, previous: Sequence[int]) -> torch.Tensor:
        """[n,V]: the bias of each slot's logits from the id before the slot's own."""
        name, w = f"{self.last}.markov_head", self.weights
        return torch.stack([w[f"{name}.head.weight"] @ w[f"{name}.embed.weight"][i]
                            for i in previous])

    def confidence(self, raw: torch.Tensor, previous: Sequence[int]) -> torch.Tensor:
        """[n], before the sigmoid, from the hidden states [n,D] as they are."""
        proj = self.weights[f"{self.last}.confidence_head.proj.weight"][0]
        embed = self.weights[f"{self.last}.markov_head.embed.weight"]
        return torch.stack([proj @ torch.cat([v, embed[i]])
                            for v, i in zip(raw, previous, strict=True)])
