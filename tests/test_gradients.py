"""Training uses the code of inference: gradients reach every parameter that has one."""

import pytest
import torch
import torch.nn.functional as F
from helpers import KERNELS

from labkit.config import ModelConfig
from labkit.model.transformer import Transformer
from labkit.mutants import golden, rules
from labkit.mutants.models import fill, random_ids, random_model, small_config

# A selection is discrete: nothing flows into what made it. The trainer has its own loss for it.
WITHOUT = ("gate.bias", "gate.bias_vl")


def has_none(name):
    return ".indexer." in name or name.endswith(WITHOUT)


def one_step(model, ids, lengths=None):
    model.train()
    for p in model.parameters():
        p.grad = None
    logits = model(ids, lengths).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss


def nano(rounding, kernels):
    config = ModelConfig.preset("nano")
    model = Transformer(config, golden.classes()[0], kernels, rounding)
    fill(model, 2)
    for name, p in model.named_parameters():
        if name.endswith(WITHOUT):
            p.data.mul_(0.1)  # a large bias would keep an expert from ever being picked
    return model


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rounding", (False, True), ids=("exact", "rounded"))
def test_every_parameter_gets_a_gradient(rounding, kernels):
    model = nano(rounding, kernels)
    # Enough tokens for every expert of every layer to be picked by some.
    ids = random_ids(model.config, 64, rows=4, seed=5)
    assert torch.isfinite(one_step(model, ids))
    for name, p in model.named_parameters():
        if has_none(name):
            assert p.grad is None or not p.grad.any(), f"{name} is not trained by this loss"
        else:
            assert p.grad is not None and p.grad.any(), f"{name} has no gradient"
            assert torch.isfinite(p.grad).all(), f"{name} has a gradient that is not finite"


def test_engram_rows_that_were_hit_have_gradients_and_no_others():
    model = nano(True, "reference")
    ids = random_ids(model.config, 20, seed=6)
    one_step(model, ids)
    rows = golden_rows(model, ids)
    for place, layer in enumerate(model.config.engram_layer_ids):
        grad = model.layers[layer].engram.embed.weight.grad
        hit = torch.zeros(grad.shape[0], dtype=torch.bool)
        hit[rows[:, :-1, place].flatten()] = True  # the last token's logits are not in the loss
        touched = grad.abs().sum(-1) > 0
        assert touched.any() and not (touched & ~hit).any()
        assert float(touched[hit].double().mean()) > 0.99


def golden_rows(model, ids):
    from labkit.model.engram import addresses

    return addresses(model.config, model.engram_classes, ids)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_gradient_is_the_slope(kernels):
    """Against finite differences along a random direction, in float64 without rounding."""
    config = small_config()
    model = random_model(config, 3, kernel_set=kernels).requires_grad_(True)
    for name, p in model.named_parameters():
        p.requires_grad_(not has_none(name))
    ids = random_ids(config, 15, rows=2, seed=7)
    one_step(model, ids)
    made = torch.Generator().manual_seed(8)
    trained = [p for p in model.parameters() if p.grad is not None]
    directions = [torch.randn(p.shape, generator=made, dtype=torch.float64) for p in trained]
    slope = sum(float((p.grad * d).sum()) for p, d in zip(trained, directions, strict=True))

    def loss_at(step):
        with torch.no_grad():
            for p, d in zip(trained, directions, strict=True):
                p.add_(d, alpha=step)
            logits = model(ids).logits
            value = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            for p, d in zip(trained, directions, strict=True):
                p.add_(d, alpha=-step)
        return float(value)

    step = 1e-7  # small enough that no selection changes
    measured = (loss_at(step) - loss_at(-step)) / (2 * step)
    assert abs(measured - slope) < 1e-5 * max(1.0, abs(slope)), (measured, slope)


def test_padding_gets_no_gradient():
    config = small_config()
    model = random_model(config, 3).requires_grad_(True)
    ids, lengths = random_ids(config, 12, rows=2, seed=9), torch.tensor([12, 5])
    logits = model(ids, lengths).logits
    grads = torch.autograd.grad(logits[1, :5].sum(), model.embed.weight)[0]
    used = set(ids[1, :5].tolist())
    for token in range(config.vocab_size):
        assert token in used or not grads[token].any(), f"id {token} stands only in padding"


def test_straight_through_gradients_are_close_to_the_exact_ones():
    """Rounding passes gradients as if it were not there: same direction, not the same numbers."""
    config = small_config(  # without selections, which a rounding can change
        num_hidden_layers=2, compress_ratios=(0, 0), kv_source_layer_ids=(),
        index_source_layer_ids=(), candidate_source_layer_id=-1, engram_layer_ids=(1,))
    grads = {}
    for rounding in (False, True):
        model = random_model(config, 2, torch.float32, rounding)
        one_step(model, random_ids(config, 40, rows=2, seed=10))
        grads[rounding] = model.layers[0].attn.wkv.weight.grad.flatten()
    cosine = float(F.cosine_similarity(grads[False], grads[True], dim=0))
    assert cosine > 0.99, cosine
    assert rules.close("", grads[False], grads[True], 1e-6) is not None, "rounding did nothing"
