"""Losses of the draft, and where its blocks are cut out of a text."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.train import losses
from labkit.train.drafter import (
    behind,
    sample_anchors,
)

# ---- losses ---------------------------------------------------------------------------------


def test_slots_weigh_less_the_further_they_are():
    w = losses.slot_weights(5)
    assert float(w.sum()) == pytest.approx(1.0)
    assert torch.allclose(w[1:] / w[:-1], torch.full((4,), math.exp(-1 / 5)))
    assert losses.slot_weights(1).tolist() == [1.0]


def test_losses_by_hand():
    """Two slots, three tokens: every part computed with nothing but exp and log."""
    p = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]], dtype=torch.float64)
    q = torch.tensor([[[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]]], dtype=torch.float64)
    confidence = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    tokens = torch.tensor([[0, 2]])
    found = losses.draft_loss(p.log() + 3.0, q.log() - 1.0, tokens, confidence)
    w1, w2 = 1.0, math.exp(-1 / 2)
    w1, w2 = w1 / (w1 + w2), w2 / (w1 + w2)
    ce = -w1 * math.log(0.5) - w2 * math.log(0.8)
    tv = w1 * 0.3
    c2 = 1 / (1 + math.exp(-2.0))
    judged = w1 * math.log(2) - w2 * math.log(c2)   # at c = .5 every label costs ln 2; label 1
    assert float(found.cross_entropy) == pytest.approx(ce, rel=1e-5)
    assert float(found.total_variation) == pytest.approx(tv, rel=1e-5)
    assert float(found.confidence) == pytest.approx(judged, rel=1e-5)
    assert float(found.total) == pytest.approx(0.1 * ce + 0.9 * tv + judged, rel=1e-5)
    assert found.by_slot.tolist() == pytest.approx([0.3, 0.0], abs=1e-6)


def test_the_confidence_wants_the_acceptance_and_nothing_else_wants_the_confidence():
    g = torch.Generator().manual_seed(0)
    logits, target = (torch.randn(6, 3, 20, generator=g) for _ in range(2))
    tokens = torch.randint(0, 20, (6, 3), generator=g)
    kept = 1 - losses.total_variation(logits.softmax(-1), target.softmax(-1))
    confidence = torch.logit(kept).requires_grad_()
    logits.requires_grad_()
    target.requires_grad_()
    losses.draft_loss(logits, target, tokens, confidence).total.backward()
    assert confidence.grad.abs().max() < 1e-6          # at its optimum
    assert target.grad is None                         # the target is frozen
    with_confidence = logits.grad.clone()
    logits.grad = None
    losses.draft_loss(logits, target, tokens, confidence.detach() * 0 - 5).total.backward()
    assert torch.equal(logits.grad, with_confidence)   # no draft is made worse to be judged well


def test_total_variation_is_what_verification_rejects():
    g = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, 7, generator=g).double().softmax(-1)
    kept = (p * torch.minimum(torch.ones(()), q / p)).sum()     # drawn from p, accepted min(1, q/p)
    assert float(1 - losses.total_variation(p, q)) == pytest.approx(float(kept), abs=1e-12)


# ---- blocks behind anchors ------------------------------------------------------------------


def test_anchors_lie_where_a_whole_block_has_targets():
    g = torch.Generator().manual_seed(0)
    found = sample_anchors(3, 200, 64, 5, 32, g)
    assert found.shape == (3, 64) and int(found.min()) >= 1 and int(found.max()) <= 195
    assert (found <= 32).sum() >= 3 * 4
    ends = sample_anchors(40, 12, 64, 5, 32, g)         # a text shorter than the window
    assert set(ends.flatten().tolist()) == set(range(1, 8))
    again = sample_anchors(3, 200, 64, 5, 32, torch.Generator().manual_seed(0))
    assert torch.equal(found, again)


def test_tokens_and_targets_of_a_slot():
    """Slot k (from 0) of anchor a guesses token a+1+k behind token a+k, judged by logits a+k."""
    ids = torch.arange(20)[None] * 10
    anchors = torch.tensor([[3, 15]])
    assert behind(ids, anchors, 4, 0).tolist() == [[30, 40, 50, 60], [150, 160, 170, 180]]
    assert behind(ids, anchors, 4, 1).tolist() == [[40, 50, 60, 70], [160, 170, 180, 190]]
