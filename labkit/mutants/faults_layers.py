"""Wrong variants of rotation, norms, hyper-connections and the mixture of experts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from labkit.mutants.record import Patch, everywhere, method, mutant
from labkit.numerics.precision import wide


@mutant("rotation", "Window-only layers rotate with the compressed layers' frequencies.",
        "One rotary table for the whole model, with YaRN in every layer.",
        "layers.0.attn.out from token 1 on")
def yarn_in_every_layer() -> list[Patch]:
    from labkit.model.rope import inverse_frequencies

    def one_table(config, compressed):
        return inverse_frequencies(config, True)
    return everywhere(inverse_frequencies, one_table)


@mutant("rotation", "Compressed layers rotate without YaRN.",
        "A rope_scaling key in the other spelling that was silently ignored.",
        "layers.2.attn.compressed_kv: the slow channel pairs turn too fast")
def yarn_nowhere() -> list[Patch]:
    from labkit.model.rope import inverse_frequencies

    def plain(config, compressed):
        if not compressed:
            return inverse_frequencies(config, False)
        R, theta = config.qk_rope_head_dim, config.compress_rope_theta
        return tuple(theta ** (-2 * i / R) for i in range(R // 2))
    return everywhere(inverse_frequencies, plain)


@mutant("rotation", "YaRN also scales the amplitude of rotated channels (mscale).",
        "Rotary code from models in which YaRN has an attention temperature.",
        "layers.2.attn.compressed_kv: rotation should not change a vector's length")
def yarn_amplitude() -> list[Patch]:
    from labkit.model.rope import rotation

    def louder(config, compressed, positions, dtype):
        cos, sin = rotation(config, compressed, positions, dtype)
        scale = 0.1 * math.log(config.rope_scaling.factor) + 1 if compressed else 1.0
        return cos * scale, sin * scale
    return everywhere(rotation, louder)


@mutant("rotation", "Channels are paired across halves instead of with their neighbour.",
        "The two common rotary layouts, mixed up: the text model pairs neighbours.",
        "layers.0.attn.out from token 1 on")
def half_split_pairs() -> list[Patch]:
    from labkit.model.rope import rotate

    def halves(x, cos_sin, inverse=False):
        cos, sin = cos_sin
        R = 2 * cos.shape[-1]
        a, b = wide(x[..., -R:]).chunk(2, dim=-1)
        sin = -sin if inverse else sin
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return torch.cat([x[..., :-R], turned.to(x.dtype)], dim=-1)
    return everywhere(rotate, halves)


@mutant("hyper-connections", "A site reads the streams with its own pre, not the previous site's.",
        "Two-pass hyper-connections: fluent-looking loss, other numbers.",
        "layers.0.attn.out: the first site should read stream 0 alone")
def pre_does_not_lag() -> list[Patch]:
    from labkit.model import block
    from labkit.model.hyper import Mix

    last: dict[str, Mix] = {}

    def mix(h, fn, base, scale, config):
        last["mix"] = original_mix(h, fn, base, scale, config)
        return last["mix"]

    def collapse(h, pre):
        return original_collapse(h, last["mix"].pre)
    original_mix, original_collapse = block.hyper_mix, block.collapse
    return [Patch(block, "hyper_mix", mix), Patch(block, "collapse", collapse)]


@mutant("hyper-connections", "The mixing matrix is applied transposed.",
        "Doubly stochastic matrices keep sums either way, so norms look right.",
        "layers.1.streams_in, stream by stream")
def transposed_comb() -> list[Patch]:
    from labkit.model import block

    original = block.expand
    return [Patch(block, "expand", lambda y, h, mix: original(
        y, h, mix._replace(comb=mix.comb.transpose(-1, -2))))]


@mutant("hyper-connections", "The norm before the mixing projection uses hc_eps.",
        "Two epsilons in one function: only small streams show the difference.",
        "The same model with streams 4,096 times smaller, which should change nothing")
def hc_eps_in_norm() -> list[Patch]:
    from labkit.model import hyper

    original = hyper.mean_square_scale
    return [Patch(hyper, "mean_square_scale", lambda x, eps: original(x, 1e-6))]


@mutant("hyper-connections", "The Sinkhorn iteration stops after its first step.",
        "An iteration count read from the wrong field.",
        "Row sums of the mixing matrix, which should be 1")
def one_sinkhorn_step() -> list[Patch]:
    from labkit.model import hyper

    original = hyper.sinkhorn
    return [Patch(hyper, "sinkhorn", lambda a, iterations, eps: original(a, 1, eps))]


@mutant("routing", "The balancing bias enters the weights, not only the choice.",
        "Weights gathered from the biased scores.",
        "layers.0.ffn.weights: they should not change when all biases grow alike")
def bias_in_weights() -> list[Patch]:
    from labkit.model.moe import Gate

    def forward(self, x, run, image=None):
        scores = F.softplus(F.linear(wide(x), wide(self.weight))).sqrt()
        bias = self.bias if image is None else torch.where(image[:, None], self.bias_vl, self.bias)
        scores = scores + bias
        picked = run.kernels.select_top(scores.detach(), self.per_token)
        weights = scores.gather(-1, picked)
        if self.per_token > 1 and self.config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return picked, weights * self.config.routed_scaling_factor
    return [Patch(Gate, "forward", forward)]


@mutant("routing", "Image tokens are routed with the text bias.",
        "bias_vl loaded and never used.",
        "The experts that image tokens visit")
def image_bias_unused() -> list[Patch]:
    from labkit.model.moe import Gate

    return method(Gate, "forward", lambda original: (
        lambda self, x, run, image=None: original(self, x, run, None)))


def _expert(routed=None, shared=None) -> list[Patch]:
    """Replace silu(gate) * up of routed or shared experts; each gets (gate, up, limit)."""
    from labkit.model.moe import Expert

    def around(original):
        def forward(self, x, weight=None):
            wrong = shared if weight is None else routed
            if wrong is None:
                return original(self, x, weight)
            y = wrong(wide(self.w1(x)), wide(self.w3(x)), self.limit)
            return self.w2((y if weight is None else y * weight).to(x.dtype))
        return forward
    return method(Expert, "forward", around)


@mutant("experts", "The SwiGLU limit also clamps the gate from below.",
        "One symmetric clamp for both halves.",
        "An expert whose gate input is below -swiglu_limit")
def gate_clamped_below() -> list[Patch]:
    def wrong(gate, up, limit):
        return F.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)
    return _expert(wrong, wrong)


@mutant("experts", "The SwiGLU limit clamps the up half from above only.",
        "The gate's one-sided clamp used for both halves.",
        "An expert whose up input is below -swiglu_limit")
def up_unclamped_below() -> list[Patch]:
    def wrong(gate, up, limit):
        return F.silu(gate.clamp(max=limit)) * up.clamp(max=limit)
    return _expert(wrong, wrong)


@mutant("experts", "The shared expert has no limit.",
        "The clamp put into the routed experts' kernel only.",
        "The shared expert's output for a large input")
def shared_expert_unlimited() -> list[Patch]:
    return _expert(shared=lambda gate, up, limit: F.silu(gate) * up)


@mutant("experts", "The routing weight is multiplied in after the down projection.",
        "The same in exact arithmetic; in bf16 it rounds elsewhere and half of the tokens change.",
        "The bits of layers.2.streams_in in the bf16 vector")
def weight_after_down() -> list[Patch]:
    from labkit.model.moe import Expert

    def around(original):
        def forward(self, x, weight=None):
            y = original(self, x, None)
            return y if weight is None else (y * weight).to(x.dtype)
        return forward
    return method(Expert, "forward", around)

