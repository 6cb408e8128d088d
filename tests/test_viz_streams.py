"""Figures and explorers of streams and experts: their numbers are those of the run."""

from __future__ import annotations

import pytest
import torch
from viz_helpers import nano_lab

import labkit
from labkit.errors import InputError
from labkit.explorers.routing import RoutingExplorer
from labkit.explorers.streams import SinkhornExplorer, StreamsExplorer
from labkit.model import hyper
from labkit.viz import routing, streams

TEXT = "It is a truth universally acknowledged, that a single man in possession"


@pytest.fixture(scope="module")
def lab():
    return nano_lab()


@pytest.fixture(scope="module")
def run(lab):
    return streams.record(lab, TEXT)


def test_coefficients_are_those_of_the_model(lab, run, monkeypatch):
    """What the sites really used, caught on its way: the same, site by site, and lagging by one."""
    c, used = lab.config, []
    for name in ("collapse", "expand"):
        plain = getattr(hyper, name)
        monkeypatch.setattr(f"labkit.model.block.{name}", lambda *args, plain=plain, name=name: (
            used.append((name, args)), plain(*args))[1])
    with torch.no_grad():
        lab.model.kernels, before = labkit.kernels.get("reference"), lab.model.kernels
        try:
            lab.model(torch.tensor([lab.encode(TEXT)]))
        finally:
            lab.model.kernels = before
    reads = [args[1] for name, args in used if name == "collapse"]
    mixes = [args[2] for name, args in used if name == "expand"]
    assert len(reads) == len(mixes) == 2 * c.num_hidden_layers == len(run.pre)
    for site, (pre, mix) in enumerate(zip(reads, mixes, strict=True)):
        torch.testing.assert_close(run.pre[site], pre[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run.post[site], mix.post[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run.comb[site], mix.comb[0], rtol=1e-4, atol=1e-5)
        again = hyper.sinkhorn(run.logits[site], c.hc_sinkhorn_iters, c.hc_eps)
        torch.testing.assert_close(again, run.comb[site], rtol=1e-4, atol=1e-5)
    assert run.error < 1e-3


def test_the_figure_shows_one_token(run):
    picture = streams.streams_picture(run, 3, "keep")
    shown = torch.tensor([list(trace.y) for trace in picture.figure.data])
    torch.testing.assert_close(
        shown.T, torch.stack([m[3].diagonal() for m in run.comb]).to(shown.dtype))
    assert "Token 3" in picture.caption and "stream 0 from" in picture.alt
    assert len(picture.rows) == run.pre.shape[-1]
    for what, token in (("mean", 0), ("pre", len(run.texts)), ("pre", -1)):
        with pytest.raises(InputError, match="choose of pre, post, keep and 0 to"):
            run.values(what, token)


def test_sums_come_nearer_to_one(lab, run):
    eps = lab.config.hc_eps
    off = [max(abs(v - 1) for v in streams.sums(run, 2, 1, n, eps)[0]) for n in (1, 3, 20)]
    assert off[0] > off[1] > off[2]
    assert max(abs(v - 1) for v in streams.sums(run, 2, 1, 1, eps)[1]) < 1e-4
    with pytest.raises(InputError, match="iterations is 0"):
        streams.sums(run, 0, 0, 0, eps)


def same(live, picture):
    for a, b in zip(live.figure.data, picture.figure.data, strict=True):
        assert list(a.y) == list(b.y)
    assert live.figure.layout.meta["alt"] == picture.alt
    assert live.static().alt == picture.alt


def numbers(explorer):
    return tuple(tuple(trace.y) for trace in explorer.figure.data)


def test_every_move_gives_the_picture_of_the_new_state(lab, run, capsys):
    explorer, sums = StreamsExplorer(run=run), SinkhornExplorer(run, lab.config.hc_eps)
    seen, seconds = set(), []
    for what in streams.WHAT.values():
        for token in (0, 4, 2):
            explorer.what.value, explorer.token.value = what, token
            same(explorer, explorer.picture())
            seen.add(numbers(explorer))
            seconds.append(explorer.seconds)
    for site in (0, 5):
        for iterations in (3, 1):
            sums.site.value, sums.iterations.value = site, iterations
            same(sums, sums.picture())
            seen.add(numbers(sums))
            seconds.append(sums.seconds)
    assert len(seen) == 13
    other = streams.record(lab, "Quite another text, of course")
    assert StreamsExplorer(run=other).picture().alt != StreamsExplorer(run=run).picture().alt
    with capsys.disabled():
        print(f"\na move of the streams explorers: 95 % within "
              f"{sorted(seconds)[int(0.95 * len(seconds))] * 1000:.0f} ms (aim 100)")


# ---- routing -----------------------------------------------------------------------------------
def test_shares_count_every_visit(lab):
    texts = {"one": TEXT, "two": list(range(5, 60))}
    found = routing.visits(lab, texts)
    c = lab.config
    for number, text in enumerate(texts.values()):
        ids = lab.encode(text)
        for layer in range(c.num_hidden_layers):
            picked = lab.trace(ids)[f"layers.{layer}.ffn.picked"].flatten().tolist()
            for expert in range(c.n_routed_experts):
                assert found.shares[number, layer, expert] == pytest.approx(
                    picked.count(expert) / len(picked))
    assert found.load(0, 1) == pytest.approx(float(found.shares[0, 1].max()) * c.n_routed_experts)
    with pytest.raises(InputError, match="0 texts: give one to 3"):
        routing.visits(lab, {})


def test_the_routing_explorer_follows_its_layer(lab, capsys):
    explorer = RoutingExplorer(lab, {"one": TEXT, "two": list(range(5, 60))})
    seen, seconds = set(), []
    for layer in (1, 3, 0, 2):
        explorer.layer.value = layer
        same(explorer, explorer.picture())
        assert f"Layer {layer}" in explorer.caption.value
        seen.add(explorer.picture().alt)
        seconds.append(explorer.seconds)
    assert len(seen) == 4
    with capsys.disabled():
        print(f"\na move of the routing explorer: at most {max(seconds) * 1000:.0f} ms (aim 100)")
