"""Bytes a token at the released sizes, from what was really allocated; packed loses nothing."""

import pytest
import torch
from golden_model import make_folder

import labkit
from labkit.cache import Cache
from labkit.config import ModelConfig
from labkit.mutants import golden
from labkit.mutants.schedules import one_pass

FORMS = {"packed": (890, 534, 67_584), "fp8": (1650, 990, 67_584), "bf16": (3200, 1920, 131_072)}


def read(cache, tokens):
    """Give every store of a cache the entries of that many more tokens, without a model."""
    start = cache.lengths.clone()
    count = torch.tensor([tokens])
    cache.begin()
    for layer, store in cache.stores.items():
        r = cache.config.compress_ratios[layer]
        fresh = (start + count) // r - start // r
        size = int(fresh)
        store.append(torch.randn(1, size, cache.config.head_dim),
                     torch.randn(1, size, cache.config.index_head_dim), start // r, fresh)
    for ring in cache.windows:
        ring.take_in(torch.randn(1, tokens, cache.config.head_dim), start, count)
    cache.commit(torch.zeros(1, tokens, dtype=torch.int64), count)


@pytest.mark.parametrize("form", FORMS)
def test_the_released_model_keeps_890_bytes_a_token(form):
    total, encoder, window = FORMS[form]
    config = ModelConfig.preset("flash")
    cache = Cache(config, form=form)
    page = {layer: store.page_entries for layer, store in cache.stores.items()}
    assert page == {2: 64, 8: 64, 14: 64, 20: 128}
    first = cache.nbytes()
    assert first["window"] == 40 * window  # from the first token on
    seen = 0
    for tokens in (1, 1, 126, 1, 1, 37, 300):
        read(cache, tokens)
        seen += tokens
        found = cache.nbytes()
        even = seen // 2 * 2
        layers = {layer: sum(filled for _, filled, _ in store.nbytes())
                  for layer, store in cache.stores.items()}
        # Ratio 2: an entry comes with every second token; 890 a token at even lengths.
        assert found["global_kv"] + found["index_keys"] == sum(layers.values())
        assert sum(layers[layer] for layer in (2, 8, 14)) == encoder * even
        assert layers[20] == (total - encoder) * seen
        assert found["window"] == first["window"]
        for store in cache.stores.values():
            for name, filled, allocated in store.nbytes():
                rows = store.kv_codec if name == "global_kv" else store.key_codec
                assert 0 <= allocated - filled < store.page_entries * rows.nbytes
    held = {}
    tensors = [ring.rows for ring in cache.windows] + [tail.rows for tail in cache.tails.values()]
    tensors += [part for store in cache.stores.values() for page in store.pages[0]
                for part in (page.kv, page.keys)] + [cache.look_back.rows]
    for t in tensors:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    assert sum(found.values()) == sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", ["text", "ratio4"])
def test_packed_equals_quantise_dequantise_bit_for_bit(case, dtype, tmp_path):
    """Golden texts in one pass and in pieces: every tap that the forms share has the same bits."""
    lab = labkit.load(make_folder(tmp_path / "model", case), dtype=dtype, device="cpu")
    ids = golden.case(case).ids
    B, T = ids.shape
    for sizes in ([T], [7, 1, 1, T - 9], [T // 2, T - T // 2]):
        runs = {}
        for form in ("plain", "packed", "bf16"):
            cache, at, parts = lab.model.new_cache(B, form), 0, []
            for size in sizes:
                parts.append(one_pass(lab.model, ids[:, at : at + size], cache=cache))
                at += size
            runs[form] = parts
        for form in ("packed", "bf16"):
            for expected, found in zip(runs["plain"], runs[form], strict=True):
                assert expected.keys() == found.keys()
                for name in expected:
                    if not name.endswith("attn.window"):  # void columns may differ
                        assert torch.equal(expected[name], found[name]), (form, sizes, name)
