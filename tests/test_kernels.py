"""Every set of kernels equals the reference, which equals a loop that can be read in a minute."""

import math

import pytest
import torch
from golden_model import make_folder
from helpers import KERNELS
from hypothesis import given
from hypothesis import strategies as st

import labkit
import labkit.lab
from labkit.errors import InputError
from labkit.kernels import get, reference
from labkit.mutants import rules

NAMES = ("sparse_attention", "index_scores", "select_top", "routed_experts")


def test_every_set_has_every_kernel():
    for name in KERNELS:
        for kernel in NAMES:
            assert callable(getattr(get(name), kernel)), (name, kernel)


def test_unknown_kernels_are_refused_by_name():
    with pytest.raises(InputError, match="'fastest'.*reference"):
        get("fastest")


def test_auto_depends_on_the_device(monkeypatch, tmp_path):
    assert get() is get("auto", "cpu") is get("auto", torch.device("cpu")) is get("cpu")
    for device in ("cuda", "cuda:1", "mps", torch.device("cuda", 0)):
        assert get("auto", device) is reference
        assert get("cpu", device) is get("cpu")  # a name is a name
    folder = make_folder(tmp_path / "model")
    assert labkit.load(folder, device="cpu").model.kernels is get("cpu")
    # A model is built on the meta device; the device that it goes to is what counts.
    monkeypatch.setattr(labkit.lab, "choose_device", lambda *_: torch.device("meta"))
    assert labkit.load(folder).model.kernels is reference
    assert labkit.load(folder, kernels="cpu").model.kernels is get("cpu")


# ---------------------------------------------------------------------------- select_top
SCORES = st.sampled_from([-math.inf, -math.inf, -3.5, -1.0, -0.0, 0.0, 0.0, 0.5, 2.0, math.inf])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@given(st.lists(SCORES, min_size=1, max_size=20), st.integers(1, 24))
def test_select_top_is_python_s_stable_sort(name, dtype, scores, k):
    finite = [g for g in range(len(scores)) if scores[g] != -math.inf]
    best = sorted(sorted(finite, key=lambda g: (-scores[g], g))[:k])
    found = get(name).select_top(torch.tensor(scores, dtype=dtype)[None, None], k)
    assert found.shape == (1, 1, k) and found.dtype == torch.int64
    assert found.flatten().tolist() == best + [-1] * (k - len(best))


@pytest.mark.parametrize("name", KERNELS)
def test_select_top_of_close_and_extreme_scores(name):
    """Neighbouring fp32 numbers, subnormals and the largest numbers keep their order."""
    up = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    scores = torch.tensor([[1.0, up, 1e-45, -1e-45, 0.0, 3.4e38, -3.4e38, 1.0, up]])
    assert get(name).select_top(scores, 4).tolist() == [[0, 1, 5, 8]]
    assert get(name).select_top(scores, 6).tolist() == [[0, 1, 2, 5, 7, 8]]
    assert get(name).select_top(scores, 8).tolist() == [[0, 1, 2, 3, 4, 5, 7, 8]]


def test_select_top_of_nothing():
    for name in KERNELS:
        assert get(name).select_top(torch.zeros(2, 3, 0), 2).tolist() == [[[-1, -1]] * 3] * 2


# ---------------------------------------------------------------------------- index_scores
@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 4), st.integers(0, 9),
       st.integers(0, 99))
def test_index_scores_is_the_formula(name, B, T, heads, S, seed):
    made = torch.Generator().manual_seed(seed)
    q, keys, w = (torch.randn(*shape, generator=made, dtype=torch.float64)
                  for shape in ((B, T, heads, 8), (B, S, 8), (B, T, heads)))
    expected = torch.zeros(B, T, S, dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for g in range(S):
                for h in range(heads):
                    dot = float((q[b, t, h] * keys[b, g]).sum())
                    expected[b, t, g] += float(w[b, t, h]) * max(dot, 0.0)
    wrong = rules.close("scores", expected, get(name).index_scores(q, keys, w), 1e-12)
    assert wrong is None, wrong


@pytest.mark.parametrize("dtype, of_span", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_index_scores_over_many_entries(dtype, of_span):
    """Long enough that the fast set works through the queries in several blocks."""
    made = torch.Generator().manual_seed(1)
    q, keys, w = (torch.randn(*shape, generator=made).to(dtype)
                  for shape in ((2, 700, 8, 32), (2, 900, 32), (2, 700, 8)))
    expected, found = reference.index_scores(q, keys, w), get("cpu").index_scores(q, keys, w)
    assert found.dtype == dtype
    wrong = rules.close("scores", expected, found, of_span)
    assert wrong is None, wrong


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_index_scores_round_at_each_of_three_places(dtype):
    made = torch.Generator().manual_seed(2)
    q, keys, w = (torch.randn(*shape, generator=made).to(dtype)
                  for shape in ((1, 600, 8, 32), (1, 800, 32), (1, 600, 8)))
    dots = torch.relu((q.float().flatten(0, 2) @ keys[0].float().T).to(dtype).view(1, 600, 8, 800))
    expected = (dots * w[..., None]).float().sum(2).to(dtype)
    for name in KERNELS:
        found = get(name).index_scores(q, keys, w)
        assert found.dtype == dtype
        wrong = rules.equal(f"{name} scores", expected, found, share=0.98)
        assert wrong is None, wrong


@pytest.mark.parametrize("dtype, scores_of_span, attention_of_span", [
    (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 4e-3, 1e-5), (torch.float16, 1e-3, 1e-5),
], ids=str)
def test_the_fast_set_is_as_close_as_its_docstring_says(dtype, scores_of_span, attention_of_span):
    made = torch.Generator().manual_seed(3)
    B, T, S, W, H, d = 2, 500, 700, 24, 4, 64

    def randn(*shape):
        return torch.randn(*shape, generator=made).to(dtype)

    scores = randn(B, T, 8, 32), randn(B, S, 32), randn(B, T, 8)
    selected = torch.randint(-1, S, (B, T, 16), generator=made)
    attention = (3 * randn(B, T, H, d), randn(B, W + T, d), randn(B, S, d), selected, randn(H),
                 torch.tensor([0, 40]))
    for kernel, inputs, of_span in (("index_scores", scores, scores_of_span),
                                    ("sparse_attention", attention, attention_of_span)):
        expected, found = (getattr(get(n), kernel)(*inputs).double() for n in KERNELS)
        wrong = float((expected - found).abs().max() / (expected.max() - expected.min()))
        assert wrong <= of_span, (kernel, wrong)


# ---------------------------------------------------------------------------- sparse_attention
@st.composite
def attention_inputs(draw):
    B, T, H, W = (draw(st.integers(1, n)) for n in (3, 14, 3, 6))
    S, K = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    made = torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def randn(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    start = torch.randint(0, 2 * W, (B,), generator=made)
    selected = torch.randint(-1, max(S, 1) if S else 0, (B, T, K), generator=made)
    entries = randn(B, S, 8)
    if draw(st.booleans()):
        entries = selected = None
    return randn(B, T, H, 8), randn(B, W + T, 8), entries, selected, randn(H), start


def attention_by_loops(q, window, entries, selected, sink, start):
    out = torch.zeros_like(q)
    B, T, H, d = q.shape
    W = window.shape[1] - T
    for b in range(B):
        for t in range(T):
            # Column j is position start-W+j; the query at start+t sees the W up to itself.
            keys = [window[b, j] for j in range(t + 1, t + W + 1) if int(start[b]) - W + j >= 0]
            if entries is not None:
                keys += [entries[b, g] for g in selected[b, t].tolist() if g >= 0]
            for h in range(H):
                powers = [math.exp(float(q[b, t, h] @ k) / math.sqrt(d)) for k in keys]
                total = sum(powers) + math.exp(float(sink[h]))
                out[b, t, h] = sum(p / total * k for p, k in zip(powers, keys, strict=True))
    return out


@pytest.mark.parametrize("name", KERNELS)
@given(attention_inputs())
def test_sparse_attention_is_one_softmax_with_a_sink(name, inputs):
    expected = attention_by_loops(*inputs)
    wrong = rules.close("attention", expected, get(name).sparse_attention(*inputs), 1e-12, 1e-12)
    assert wrong is None, wrong


@pytest.mark.parametrize("T", (1, 4, 5, 8, 9, 40))
def test_gradients_of_the_sets_agree(T):
    W, made = 4, torch.Generator().manual_seed(T)
    shapes = ((2, T, 3, 8), (2, W + T, 8), (2, 9, 8), (3,))
    values = [torch.randn(*s, generator=made, dtype=torch.float64) for s in shapes]
    selected = torch.randint(-1, 9, (2, T, 5), generator=made)
    start, weight = torch.tensor([0, 7]), torch.randn(2, T, 3, 8, generator=made).double()
    grads = {}
    for name in KERNELS:
        q, window, entries, sink = (v.clone().requires_grad_() for v in values)
        out = get(name).sparse_attention(q, window, entries, selected, sink, start)
        (out * weight).sum().backward()
        grads[name] = [q.grad, window.grad, entries.grad, sink.grad]
    for which, a, b in zip(("q", "window", "entries", "sink"), *grads.values(), strict=True):
        wrong = rules.close(f"gradient of {which}", a, b, 1e-12)
        assert wrong is None, wrong


def test_the_weights_and_the_sink_add_up_to_one():
    made = torch.Generator().manual_seed(0)
    shapes, start = ((1, 6, 2, 8), (1, 9, 8), (2,)), torch.tensor([0])
    q, window, sink = (torch.randn(*s, generator=made).double() for s in shapes)
    weights, keys = reference.attention_probabilities(q, window, None, None, sink, start)
    scores = torch.einsum("bthd,btkd->bthk", q, keys) / math.sqrt(8)
    share = weights.sum(-1)
    for t in range(6):
        seen = scores[0, t][:, max(0, 2 - t):].exp().sum(-1)
        assert torch.allclose(share[0, t], seen / (seen + sink.exp()), atol=1e-12)


# ---------------------------------------------------------------------------- routed_experts
@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(1, 7), st.integers(1, 4), st.data())
def test_routed_experts_sum_the_picked(name, tokens, experts, data):
    k = data.draw(st.integers(1, experts))
    made = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 3, generator=made, dtype=torch.float64)
    picked = torch.stack([torch.randperm(experts, generator=made)[:k] for _ in range(tokens)])
    weights = torch.rand(tokens, k, generator=made, dtype=torch.float64)

    class Times(torch.nn.Module):
        """An expert that is not linear in its weight, so that the weight's place is seen."""

        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x, weight):
            return torch.tanh(self.factor * x * weight)

    modules = torch.nn.ModuleList(Times(e + 1.0) for e in range(experts))
    expected = torch.stack([
        sum(torch.tanh((int(picked[n, j]) + 1.0) * x[n] * weights[n, j]) for j in range(k))
        for n in range(tokens)])
    found = get(name).routed_experts(x, picked, weights, modules)
    wrong = rules.close("experts", expected, found, 1e-12)
    assert wrong is None, wrong
