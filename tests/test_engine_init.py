"""Seeded initial weights: repeatable, balanced, and trainable everywhere."""

import math

import pytest
import torch
import torch.nn.functional as F

from labkit.config import ModelConfig
from labkit.model.init import CONSTANT, EMBED_STD, HEAD_STD, LOOK_BACK, init_weights
from labkit.model.transformer import Transformer
from labkit.trace import Taps


def build(seed, dtype=torch.float32):
    c = ModelConfig.preset("nano")
    classes = torch.arange(c.vocab_size) % c.engram_compressed_vocab_size
    return init_weights(Transformer(c, classes).to(dtype), seed)


@pytest.fixture(scope="module")
def model():
    return build(0)


def batch(model):
    return torch.randint(5, 512, (4, 48), generator=torch.Generator().manual_seed(1))


def test_a_seed_gives_the_same_bits(model):
    torch.manual_seed(9)
    for (name, a), (_, b) in zip(model.named_parameters(), build(0).named_parameters(),
                                 strict=True):
        assert torch.equal(a, b), name
    other = dict(build(1).named_parameters())
    assert not torch.equal(other["embed.weight"], model.embed.weight)
    for (name, a), (_, b) in zip(model.named_parameters(),
                                 build(0, torch.float64).named_parameters(), strict=True):
        assert torch.equal(a, b.float()), name


def test_the_first_loss_is_that_of_knowing_nothing(model):
    ids = batch(model)
    with torch.no_grad():
        logits = model(ids).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(512), abs=0.1)


def test_streams_neither_grow_nor_forget(model):
    taps = Taps(["*.streams_in"])
    with torch.no_grad():
        model(batch(model), taps=taps)
    size = [float(taps[f"layers.{i}.streams_in"].square().mean().sqrt()) for i in range(10)]
    assert max(size) < 2.5 * size[0]
    first, last = (taps[f"layers.{i}.streams_in"].flatten() for i in (0, 9))
    assert float(F.cosine_similarity(first, last, dim=0)) > 0.4  # the token is still there


def test_sites_take_turns_in_reading_the_streams(model):
    c = model.config
    for layer, block in enumerate(model.layers):
        for n, site in enumerate(("attn", "ffn")):
            pre, _, comb = getattr(block, f"hc_{site}_base").detach().split(
                [c.hc_mult, c.hc_mult, c.hc_mult**2])
            assert int(pre.argmax()) == (2 * layer + n + 1) % c.hc_mult
            rows = torch.softmax(comb.view(c.hc_mult, -1), -1)
            assert float(rows.diagonal().min()) > 0.9


def test_every_trained_parameter_has_a_gradient():
    model = build(0)
    ids = batch(model)
    logits = model(ids).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    without = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # A selection passes no gradient, and the routing bias only picks.
    allowed = {n for n, _ in model.named_parameters() if ".indexer." in n or ".gate.bias" in n}
    assert without == allowed


def test_heads_of_the_first_layer_look_back_by_a_fixed_number_of_tokens():
    """Head 0 one token, head 1 two: most of the attention, at any place and for any tokens."""
    config = ModelConfig.preset("mini")
    model = init_weights(Transformer(config, torch.zeros(config.vocab_size).long()), 0)
    ids = torch.randint(5, 4000, (1, 90), generator=torch.Generator().manual_seed(1))
    taps = Taps(["layers.0.attn.q", "layers.0.attn.window"])
    with torch.no_grad():
        model(ids, taps=taps)
    W, T = config.sliding_window, ids.shape[1]
    q, keys = taps["layers.0.attn.q"][0], taps["layers.0.attn.window"][0, W:]
    scores = torch.einsum("thd,sd->hts", q, keys) * config.head_dim**-0.5
    past = torch.arange(T)[:, None] - torch.arange(T)                        # [T,T] how far back
    attention = torch.softmax(scores.masked_fill((past < 0) | (past >= W), -math.inf), -1)
    share = [[float(attention[head][past == back][8:].mean()) for back in range(7)]
             for head in range(config.num_attention_heads)]
    for head, found in enumerate(share):
        print(f"head {head}:", " ".join(f"{x:.2f}" for x in found))
        if head < LOOK_BACK:
            assert found[head + 1] > 0.5 and sum(found[head : head + 3]) > 0.9
        else:
            assert max(found) < 0.3


def test_the_head_begins_as_the_embedding(model):
    assert torch.equal(model.head.weight[:, 1:],
                       model.embed.weight[:, 1:] * (HEAD_STD / EMBED_STD))
    assert not model.head.weight[:, 0].any() and (model.embed.weight[:, 0] == CONSTANT).all()
