"""CED prefill: the encoder reads everything, the decoder the last window; what that changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import labkit
from labkit.errors import InputError
from labkit.kernels import get
from labkit.model.attention import Attention
from labkit.mutants.models import random_ids, random_model
from labkit.text.corpus import load_corpus

KERNELS = ("reference", "cpu")


def nano(kernels: str = "reference", rounding: bool = False):
    """The nano schedule (10 layers, W = 8, last KV source 6) with random float64 weights."""
    model = random_model(labkit.ModelConfig.preset("nano"), seed=3).double()
    model.kernels, model.cache_rounding = get(kernels), rounding
    return model


def tail_of_a_full_pass(model, ids, after, monkeypatch, side="inside"):
    """An independent way to the same logits: all layers see all tokens, but from the last KV
    source on (or behind it) the kernel is told that no window key before the cut exists."""
    c = model.config
    cut = ids.shape[1] - c.sliding_window
    plain, kernels = Attention.forward, model.kernels
    first = c.encoder_layers + (side == "after")

    def cut_off(q, window, entries, selected, sink, start):
        return kernels.sparse_attention(q, window, entries, selected, sink, start - cut)

    def forward(self, x, run, published=False):
        if self.role.layer >= first and x.shape[1] > 1:
            run.kernels = SimpleNamespace(**{**vars(kernels), "sparse_attention": cut_off})
        try:
            return plain(self, x, run, published)
        finally:
            run.kernels = kernels

    cache = model.new_cache()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Attention, "forward", forward)
        logits = [model(ids, cache=cache).logits[:, cut:]]
        logits += [model(ids_, cache=cache).logits for ids_ in after.split(1, dim=1)]
    return torch.cat(logits, dim=1), cache


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("cut", ["inside", "after"])
@pytest.mark.parametrize("length", [9, 16, 17, 41])
def test_the_tail_and_what_follows_equal_a_pass_with_cut_windows(kernels, length, cut,
                                                                 monkeypatch):
    model = nano(kernels)
    ids = random_ids(model.config, length + 11, 1, seed=length)
    prompt, after = ids[:, :length], ids[:, length:]
    expected, _ = tail_of_a_full_pass(model, prompt, after, monkeypatch, cut)
    cache = model.new_cache()
    with torch.no_grad():
        found = [model(prompt, cache=cache, tail=model.config.sliding_window, cut=cut).logits]
        found += [model(i, cache=cache).logits for i in after.split(1, dim=1)]
    found = torch.cat(found, dim=1)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


@pytest.mark.parametrize("length", [1, 7, 8])
def test_a_prompt_within_the_window_is_bit_identical(length):
    model = nano(rounding=True)
    ids = random_ids(model.config, length, 1, seed=length)
    caches = [model.new_cache() for _ in range(2)]
    with torch.no_grad():
        full, ced = (model(ids, cache=cache, tail=tail).logits
                     for cache, tail in zip(caches, (None, model.config.sliding_window),
                                            strict=True))
    assert torch.equal(full, ced)
    for a, b in zip(caches[0].windows, caches[1].windows, strict=True):
        assert torch.equal(a.rows, b.rows)


def test_global_entries_and_encoder_windows_are_those_of_a_full_prefill():
    model = nano(rounding=True)
    ids = random_ids(model.config, 37, 1, seed=5)
    caches = [model.new_cache() for _ in range(2)]
    with torch.no_grad():
        for cache, ced in zip(caches, (False, True), strict=True):
            model(ids, cache=cache, tail=model.config.sliding_window if ced else None)
    full, ced = caches
    assert full.stores.keys() == ced.stores.keys() == {2, 4, 6}
    for layer, store in full.stores.items():
        assert torch.equal(store.values(), ced.stores[layer].values()), layer
        assert torch.equal(store.keys(), ced.stores[layer].keys()), layer
    for layer in range(model.config.encoder_layers):
        assert torch.equal(full.windows[layer].rows, ced.windows[layer].rows)
    assert not torch.equal(full.windows[9].rows, ced.windows[9].rows)  # the approximation
    assert torch.equal(full.lengths, ced.lengths) and torch.equal(
        full.look_back.rows, ced.look_back.rows)


def test_layers_behind_the_cut_compute_the_last_window_only():
    """Layer-token passes, counted where the queries and the stored entries are computed."""
    model = nano()
    c, T = model.config, 41
    seen: dict[str, int] = {}

    def count(name):
        def hook(module, args):
            seen[name] = seen.get(name, 0) + args[0].shape[-2]
        return hook

    for layer, block in enumerate(model.layers):
        block.attn.wq_a.register_forward_pre_hook(count(f"queries {layer}"))
        block.ffn.shared_experts.w1.register_forward_pre_hook(count(f"experts {layer}"))
    model.layers[6].attn.compressor.wkv.register_forward_pre_hook(count("entries 6"))
    with torch.no_grad():
        model(random_ids(c, T, 1, seed=1), tail=model.config.sliding_window)
    assert seen.pop("entries 6") == T
    for name, tokens in seen.items():
        layer = int(name.split()[1])
        assert tokens == (T if layer < c.encoder_layers else c.sliding_window), name
    passes = sum(tokens for name, tokens in seen.items() if name.startswith("queries"))
    assert passes == T * c.encoder_layers + c.sliding_window * (10 - c.encoder_layers)


def test_rows_of_different_length_equal_single_rows():
    model = nano()
    ids, lengths = random_ids(model.config, 30, 3, seed=8), torch.tensor([30, 5, 17])
    W = model.config.sliding_window
    with torch.no_grad():
        together = model(ids, lengths, tail=model.config.sliding_window).logits
        for row, length in enumerate(lengths.tolist()):
            alone = model(ids[row : row + 1, :length], tail=model.config.sliding_window).logits[0]
            kept = min(length, W)
            difference = (together[row, :kept] - alone[:kept]).abs().max()
            assert difference <= 1e-9 * alone.abs().max(), row


def test_last_only_is_the_last_row_of_the_tail():
    model = nano()
    ids = random_ids(model.config, 23, 1, seed=2)
    with torch.no_grad():
        tail, last = (model(ids, tail=model.config.sliding_window, last_only=only).logits
                      for only in (False, True))
    assert tail.shape[1] == model.config.sliding_window
    assert (tail[:, -1:] - last).abs().max() <= 1e-12 * last.abs().max()


def test_on_the_trained_mini_it_is_near_a_full_prefill():
    """Held-out text, six prompts of 400: the next token's distributions hardly move."""
    lab = labkit.load("mini")
    divergences = []
    for text in load_corpus("heldout").values():
        ids = lab.encode(text)[:400]
        full, ced = (torch.log_softmax(lab.session().prefill(ids, True, mode)[0, -1].double(), -1)
                     for mode in ("full", "ced"))
        divergences.append(float((full.exp() * (full - ced)).sum()))
    assert 0 < max(divergences) and sum(divergences) / len(divergences) < 0.1, divergences
    print(f"KL(full || ced) per prompt: {[round(d, 4) for d in divergences]}")


def test_it_can_be_chosen_and_nothing_else():
    lab = labkit.load("mini")
    prompt = load_corpus("heldout")["emma"][:1500]
    a, b = (lab.generate(prompt, 8, seed=1, prefill="ced") for _ in range(2))
    assert a.ids == b.ids and a.stats.new_tokens == 8
    with pytest.raises(InputError, match="'full' or 'ced'"):
        lab.generate(prompt, 8, prefill="half")
