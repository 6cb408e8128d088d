"""Controls of the selection: all entries, none, or a random choice, instead of the index's."""

from __future__ import annotations

import pytest
import torch

from labkit.config import ModelConfig
from labkit.model.indexer import SELECTING, chance
from labkit.mutants.models import random_ids, random_model
from labkit.trace import Taps

LENGTH = 60  # nano: W = 8, top-k 8, so the index has to choose


def nano(**changes):
    return random_model(ModelConfig.preset("nano").replace(**changes), seed=2)


def logits(model, ids, selecting):
    model.selecting = selecting
    with torch.no_grad():
        return model(ids).logits


def selections(model, ids, selecting):
    model.selecting = selecting
    taps = Taps(["*.topk_indices"])
    with torch.no_grad():
        model(ids, taps=taps)
    return {name: taps[name] for name in taps}


def test_all_is_what_a_top_k_of_everything_without_a_pool_would_select():
    model = nano()
    ids = random_ids(model.config, LENGTH)
    wide = nano(index_topk=LENGTH, candidate_source_layer_id=-1)
    every = logits(model, ids, "all")
    assert (every - logits(wide, ids, "index")).abs().max() < 1e-12 * every.abs().max()
    assert (every - logits(model, ids, "index")).abs().max() > 1e-2 * every.abs().max()


def test_none_leaves_the_windows():
    """Nothing before the windows of all layers together is seen."""
    model = nano()
    c = model.config
    n_grams = (c.engram_max_ngram_size - 1) * len(c.engram_layer_ids)
    reach = (c.sliding_window - 1) * c.num_hidden_layers + n_grams + 1
    ids = random_ids(c, reach + 20)
    changed = ids.clone()
    changed[:, 0] = (ids[:, 0] + 1) % c.vocab_size
    for selecting in SELECTING:
        a, b = (logits(model, x, selecting)[:, reach:] for x in (ids, changed))
        moved = float((a - b).abs().max() / a.abs().max())  # experts meet other tokens: 1e-16
        print(selecting, f"{moved:.1e}")
        assert (moved < 1e-12) if selecting == "none" else (moved > 1e-6)


def test_random_selects_as_many_of_those_that_are_visible():
    model = nano()
    ids = random_ids(model.config, LENGTH, rows=2)
    by_index, at_random = (selections(model, ids, s) for s in ("index", "random"))
    for name, chosen in at_random.items():
        role = model.config.roles[int(name.split(".")[1])]
        number = (torch.arange(LENGTH) + 1) // role.ratio                   # visible entries
        assert ((chosen < 0) | (chosen < number[:, None])).all()
        if not role.uses_candidates:                  # a pool may hold less than it did
            assert torch.equal((chosen >= 0).sum(-1), (by_index[name] >= 0).sum(-1))
        assert not torch.equal(chosen, by_index[name])
        rows = [row[row >= 0].tolist() for row in chosen.flatten(0, 1)]
        assert all(row == sorted(set(row)) for row in rows)


@pytest.mark.parametrize("selecting", SELECTING)
def test_a_control_does_not_depend_on_the_chunks(selecting):
    model = nano()
    ids = random_ids(model.config, LENGTH)
    whole = logits(model, ids, selecting)
    cache = model.new_cache(1, "plain")
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([17, 1, 23, 19], dim=1)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-9 * whole.abs().max()


def test_chance_is_even():
    """4,096 scores of a query: all different bar chance, spread evenly, unlike those of another."""
    scores = chance(torch.tensor([[5000, 5001]]), 4096, layer=4)[0]
    assert len(scores[0].unique()) > 4090
    for row in scores:
        tenths = torch.histc(row, 10, 0, 2**24) / 4096
        assert (tenths - 0.1).abs().max() < 0.025
    together = torch.corrcoef(scores.double())[0, 1]
    neighbours = torch.corrcoef(torch.stack([scores[0, 1:], scores[0, :-1]]).double())[0, 1]
    assert abs(together) < 0.06 and abs(neighbours) < 0.06
