"""Probabilities, draws and stop strings: properties, edges, one test of chance."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.sampling import distribution, sample
from labkit.engine.stopping import StopFilter, checked_stops
from labkit.errors import InputError

LOGITS = st.lists(st.floats(-30, 30), min_size=1, max_size=40)


def tensor(values):
    return torch.tensor(values, dtype=torch.float32)


# ---- distribution ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.05, 5), st.integers(0, 50), st.floats(0.01, 1))
def test_it_is_a_distribution_that_keeps_the_order(values, temperature, top_k, top_p):
    x = tensor(values)
    p = distribution(x, temperature, top_k, top_p)
    assert p.dtype == torch.float64 and p.shape == x.shape
    assert float(p.sum()) == pytest.approx(1, abs=1e-12) and bool((p >= 0).all())
    kept = p > 0
    assert bool(kept[x.argmax()])
    if top_k:
        assert int(kept.sum()) <= top_k
    if not bool(kept.all()):  # nothing that was cut off is likelier than something that was kept
        assert x[~kept].max() <= x[kept].min()
    # What was kept keeps its ratios.
    full = torch.softmax(x.double() / temperature, 0)
    torch.testing.assert_close(p[kept], full[kept] / full[kept].sum(), rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(LOGITS, st.floats(0.01, 0.999))
def test_top_p_keeps_the_smallest_set_that_reaches_the_share(values, top_p):
    full = distribution(tensor(values))
    kept = distribution(tensor(values), top_p=top_p) > 0
    mass = float(full[kept].sum())
    assert mass >= top_p - 1e-12
    assert mass - float(full[kept].min()) < top_p + 1e-12


@settings(max_examples=40, deadline=None)
@given(LOGITS, st.integers(1, 40), st.floats(0.05, 5))
def test_top_k_keeps_exactly_k_and_ties_go_to_the_lowest_id(values, k, temperature):
    x = tensor([round(v) for v in values])  # whole numbers: many ties
    kept = (distribution(x, temperature, top_k=k) > 0).nonzero().flatten().tolist()
    best = sorted(range(len(values)), key=lambda i: (-float(x[i]), i))[:k]
    assert set(kept) <= set(best)  # a very small share may round to 0
    shares = torch.softmax((x.double() - x.max()) / temperature, 0)
    assert set(kept) == {i for i in best if shares[i] > 0}


def test_greedy_and_very_small_temperatures_take_the_first_largest():
    x = tensor([1, 3, 3, 2])
    assert distribution(x, temperature=0).tolist() == [0, 1, 0, 0]
    assert distribution(x, temperature=1e-300).tolist() == [0, 0.5, 0.5, 0]
    assert distribution(x, temperature=1e-300, top_k=1).tolist() == [0, 1, 0, 0]
    assert distribution(tensor([0, -math.inf])).tolist() == [1, 0]


def test_a_shift_of_the_logits_changes_nothing():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(distribution(x + 1e6), distribution(x), rtol=1e-8, atol=0)


@pytest.mark.parametrize(("options", "said"), [
    ({"temperature": -1}, "temperature is -1"), ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": math.inf}, "temperature is inf"), ({"temperature": True}, "temperature"),
    ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.1}, "top_p is 1.1"), ({"top_p": math.nan}, "top_p"),
    ({"top_k": -1}, "top_k is -1"),
    ({"top_k": 1.5}, "top_k is 1.5"), ({"top_k": True}, "top_k"),
])  # fmt: skip
def test_options_out_of_range_are_named(options, said):
    with pytest.raises(InputError, match=said):
        distribution(torch.zeros(3), **options)


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_damaged_logits_are_refused(bad):
    with pytest.raises(InputError, match="NaN or infinity"):
        distribution(tensor(bad))


def test_logits_of_a_batch_are_refused():
    with pytest.raises(InputError, match=r"shape \[V\]"):
        distribution(torch.zeros(1, 3))


# ---- sample ----------------------------------------------------------------------------------


def test_draws_follow_the_probabilities():
    """Chi-square over 8 ids, 40,000 draws, alpha 1e-4, seed fixed."""
    p = torch.tensor([0.4, 0.25, 0.0, 0.15, 0.1, 0.06, 0.03, 0.01], dtype=torch.float64)
    draws, critical = 40_000, 27.856  # 6 degrees of freedom
    generator = torch.Generator().manual_seed(20_240_601)
    counts = torch.zeros(8, dtype=torch.float64)
    for _ in range(draws):
        counts[sample(p, generator)] += 1
    live = p > 0
    assert counts[2] == 0
    statistic = float(((counts - draws * p)[live].square() / (draws * p)[live]).sum())
    # Cohen's w that 99 % of runs would show: noncentrality 52 for 6 degrees of freedom.
    print(f"chi-square {statistic:.2f} (limit {critical}); detectable effect w = "
          f"{math.sqrt(52 / draws):.3f}")
    assert statistic < critical
    # The same count against wrong odds (0.4 -> 0.37, 0.25 -> 0.28) is far beyond the limit.
    wrong = p + torch.tensor([-0.03, 0.03, 0, 0, 0, 0, 0, 0], dtype=torch.float64)
    assert float(((counts - draws * wrong)[live].square() / (draws * wrong)[live]).sum()) > 100


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-12, 0.3, 1.0]), min_size=1, max_size=20),
       st.integers(0, 2**32))
def test_an_id_of_probability_zero_is_never_drawn(weights, seed):
    p = torch.tensor(weights, dtype=torch.float64)
    if p.sum() == 0:
        return
    p = p / p.sum()
    assert p[sample(p, torch.Generator().manual_seed(seed))] > 0


def test_the_ends_of_the_interval(monkeypatch):
    p = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64)
    for drawn, wanted in ((0.0, 1), (0.4999, 1), (0.5, 3), (1 - 2**-53, 3), (1.0, 3)):
        monkeypatch.setattr(torch, "rand", lambda *a, d=drawn, **k: torch.tensor(d).double())
        assert sample(p, torch.Generator()) == wanted


# ---- stop strings ----------------------------------------------------------------------------

PIECES = st.lists(st.text("ab.\n", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab.\n", min_size=1, max_size=4), max_size=3)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Grow the text a character at a time until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        at = [end - len(s) for s in stops if text[:end].endswith(s)]
        if at:
            return text[: min(at)], True
    return text, False


@settings(max_examples=300, deadline=None)
@given(PIECES, STOPS)
def test_how_text_is_cut_into_pieces_changes_nothing(pieces, stops):
    stop_filter = StopFilter(stops)
    out = ""
    for n, piece in enumerate(pieces):
        out += stop_filter.push(piece)
        so_far = "".join(pieces[: n + 1])
        wanted, ended = oracle(so_far, stops)
        assert stop_filter.stopped == ended
        assert wanted.startswith(out)
        if not ended:  # only what may become a stop string is held back
            held = so_far[len(out):]
            assert held == "" or any(s.startswith(held) for s in stops)
    out += stop_filter.finish()
    assert out == oracle("".join(pieces), stops)[0]


def test_stop_strings_are_checked():
    assert checked_stops(None) == () and checked_stops("x") == ("x",)
    assert checked_stops(["a", "b"]) == ("a", "b")
    for bad in ("", ["a", ""], [1]):
        with pytest.raises(InputError, match="at least one character"):
            checked_stops(bad)


class OnMps(torch.overrides.TorchFunctionMode):
    """A device without float64: casting to it is an error until the tensor is on the CPU."""

    def __init__(self):
        super().__init__()
        self.moved = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        called = [*args, *(kwargs or {}).values()]
        doubles = function is torch.Tensor.double or torch.float64 in called[1:]
        if not self.moved and doubles:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
        self.moved |= function is torch.Tensor.cpu
        return function(*args, **(kwargs or {}))


def test_logits_are_moved_to_the_cpu_before_they_become_float64():
    logits = torch.tensor([0.0, 1.0, -2.0])
    with pytest.raises(TypeError, match="MPS"), OnMps():
        logits.to("cpu", torch.float64)
    with OnMps():
        p = distribution(logits)
    assert torch.equal(p, torch.softmax(logits.double(), 0))
    generator = torch.Generator().manual_seed(0)
    with OnMps():
        assert sample(torch.tensor([0.0, 1.0]), generator) == 1
