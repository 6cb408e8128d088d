"""Hyper-connections of a run: how every site reads, writes and mixes the streams of a token.

Nothing is tapped for it: the coefficients follow from the streams and the outputs that a run
records, by the model's own function, and the streams that follow from them are compared with
those that the run recorded next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from labkit.errors import InputError
from labkit.model.hyper import Mix, expand, hyper_mix, sinkhorn
from labkit.viz.palette import NEUTRAL, OKABE_ITO
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import pieces, visible

if TYPE_CHECKING:
    from labkit.lab import Lab

WIDTH = 900
PATTERNS = ["layers.*.streams_in", "layers.*.streams_after_engram", "layers.*.attn.out"]
COLOURS = tuple(OKABE_ITO[name] for name in ("blue", "orange", "green", "purple"))
DASHES = ("solid", "dash", "dot", "dashdot")
WHAT = {"read: pre": "pre", "write: post": "post", "keep: comb's diagonal": "keep"}


@dataclass(frozen=True)
class Streams:
    """Of every site in order, attention and experts by turns (2L sites).

    ids [T], texts: one string a token
    pre, post  [sites,T,C]    pre: how the *site itself* reads, so from the site before it
    comb       [sites,T,C,C]  source stream -> target stream
    logits     [sites,T,C,C]  what comb was made of
    error      largest difference between streams computed from these and those of the run, as a
               share of the largest
    """

    texts: tuple[str, ...]
    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    logits: torch.Tensor
    error: float

    def values(self, what: str, token: int) -> torch.Tensor:
        """[sites,C] of one token: `pre`, `post` or `keep`. InputError for another name or token."""
        if what not in WHAT.values() or not 0 <= token < len(self.texts):
            raise InputError(f"what is {what!r} and token {token}: choose of "
                             f"{', '.join(WHAT.values())} and 0 to {len(self.texts) - 1}")
        if what == "keep":
            return self.comb[:, token].diagonal(dim1=-2, dim2=-1)
        return (self.pre if what == "pre" else self.post)[:, token]


@torch.no_grad()
def record(lab: Lab, text: str | Sequence[int]) -> Streams:
    """Run the model over a text and compute every site's coefficients from the run."""
    c, ids = lab.config, lab.encode(text)
    taps = lab.trace(ids, patterns=PATTERNS)
    layers: Any = lab.model.layers
    pre = torch.zeros(1, len(ids), c.hc_mult)
    pre[..., 0] = 1.0                       # before the first site there is one stream
    found: list[tuple[torch.Tensor, Mix, torch.Tensor]] = []
    error = 0.0
    for layer, block in enumerate(layers):
        h = taps[f"layers.{layer}.streams_after_engram"].float().cpu()      # [1,T,C,D]
        for site in ("attn", "ffn"):
            fn, base, scale = (getattr(block, f"hc_{site}_{part}").float().cpu()
                               for part in ("fn", "base", "scale"))
            mix = hyper_mix(h, fn, base, scale, c)
            found.append((pre, mix, _logits(h, fn, base, scale, c)))
            pre = mix.pre
            if site == "attn":
                h = expand(taps[f"layers.{layer}.attn.out"].float().cpu(), h, mix)
            elif layer + 1 < len(layers):
                # What the experts gave follows from the streams of the next layer.
                after = taps[f"layers.{layer + 1}.streams_in"].float().cpu()
                mixed = expand(torch.zeros_like(after[:, :, 0]), h, mix)
                y = ((after - mixed) / mix.post[..., None]).mean(2)         # [1,T,D]
                apart = (expand(y, h, mix) - after).abs().max() / after.abs().max()
                error = max(error, float(apart))
    return Streams(tuple(pieces(lab.tokenizer, ids)),
                   torch.stack([p[0] for p, _, _ in found]),
                   torch.stack([m.post[0] for _, m, _ in found]),
                   torch.stack([m.comb[0] for _, m, _ in found]),
                   torch.stack([a[0] for _, _, a in found]), error)


def _logits(h: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor,
            config: Any) -> torch.Tensor:
    """What the mixing matrix is made of [1,T,C,C]: the same with a Sinkhorn that does nothing."""
    from labkit.model.norm import mean_square_scale

    C, flat = config.hc_mult, h.flatten(-2)
    m = torch.nn.functional.linear(flat, fn[2 * C :])
    m = m * mean_square_scale(flat, config.rms_norm_eps)
    return (base[2 * C :] + m * scale[2]).unflatten(-1, (C, C))


def site_name(site: int) -> str:
    return f"{site // 2}{'ae'[site % 2]}"


# ---- coefficients over the sites -------------------------------------------------------------


def streams_picture(run: Streams, token: int, what: str) -> Picture:
    """One line a stream over all sites: how much of it is read, written or kept."""
    import plotly.graph_objects as go

    sites, C = run.pre.shape[0], run.pre.shape[-1]
    fig = go.Figure(layout=base_layout(
        WIDTH, 330, margin={"l": 60, "r": 20, "t": 40, "b": 50},
        xaxis={"range": [-0.5, sites - 0.5], "fixedrange": True, "showgrid": False,
               "zeroline": False, "tickvals": list(range(0, sites, max(1, sites // 16))),
               "ticktext": [site_name(i) for i in range(0, sites, max(1, sites // 16))],
               "title": {"text": "site: number of the layer, a attention, e experts"}},
        yaxis={"range": [0, 2.02], "fixedrange": True, "zeroline": True, "showgrid": True,
               "gridcolor": "rgba(128,128,128,.3)", "tickvals": [0, 0.5, 1, 1.5, 2],
               "ticktext": ["0", "0.5", "1", "1.5", "2"]}))
    for stream, values in enumerate(stream_parts(run, token, what)):
        fig.add_scatter(mode="lines+markers", name=f"stream {stream}",
                        line={"color": COLOURS[stream % 4], "width": 2, "dash": DASHES[stream % 4]},
                        marker={"color": COLOURS[stream % 4], "size": 6}, **values)
    assert C == len(fig.data)
    return Picture(fig, streams_alt(run, token, what), streams_caption(run, token, what),
                   STREAM_COLUMNS, streams_table(run, token, what))


STREAM_COLUMNS = ("stream", "mean over the sites", "least, at", "most, at")


def stream_parts(run: Streams, token: int, what: str) -> list[dict[str, Any]]:
    values = run.values(what, token)
    return [{"x": list(range(len(values))), "y": values[:, s].tolist()}
            for s in range(values.shape[1])]


def streams_table(run: Streams, token: int, what: str) -> tuple[tuple[Any, ...], ...]:
    values = run.values(what, token)
    return tuple((str(s), f"{v.mean():.2f}", f"{v.min():.2f} {site_name(int(v.argmin()))}",
                  f"{v.max():.2f} {site_name(int(v.argmax()))}") for s, v in enumerate(values.T))


def streams_caption(run: Streams, token: int, what: str) -> str:
    values = run.values(what, token)
    most = int(values.mean(0).argmax())
    verb = {"pre": "read", "post": "written to", "keep": "kept"}[what]
    return (f"Token {token}, {visible(run.texts[token])!r}: stream {most} is {verb} most, "
            f"{values[:, most].mean():.2f} in the mean of {len(values)} sites; the streams differ "
            f"by up to {float((values.amax(1) - values.amin(1)).max()):.2f} at one site.")


def streams_alt(run: Streams, token: int, what: str) -> str:
    values = run.values(what, token)
    return (f"Lines over {len(values)} sites, one a stream, of token {token}: " + "; ".join(
        f"stream {s} from {v.min():.2f} to {v.max():.2f}, mean {v.mean():.2f}"
        for s, v in enumerate(values.T)) + ".")


# ---- Sinkhorn --------------------------------------------------------------------------------


def sums(run: Streams, site: int, token: int, iterations: int, eps: float,
         ) -> tuple[list[float], list[float]]:
    """Sums of the rows and of the columns of a site's matrix after so many iterations.

    InputError unless iterations is 1 or more.
    """
    if iterations < 1:
        raise InputError(f"iterations is {iterations}: must be 1 or more")
    x = sinkhorn(run.logits[site, token].double(), iterations, eps)
    return x.sum(-1).tolist(), x.sum(-2).tolist()


def sinkhorn_picture(run: Streams, site: int, token: int, iterations: int, eps: float) -> Picture:
    """Bars of row and column sums; a line at one."""
    import plotly.graph_objects as go

    C = run.pre.shape[-1]
    rows, columns = sums(run, site, token, iterations, eps)
    fig = go.Figure(layout=base_layout(
        WIDTH, 280, margin={"l": 60, "r": 20, "t": 40, "b": 40},
        xaxis={"range": [-0.6, C - 0.4], "fixedrange": True, "showgrid": False, "zeroline": False,
               "tickvals": list(range(C)), "ticktext": [f"stream {i}" for i in range(C)]},
        yaxis={"range": [0, 2], "fixedrange": True, "showgrid": True, "zeroline": False,
               "gridcolor": "rgba(128,128,128,.3)", "tickvals": [0, 0.5, 1, 1.5, 2],
               "ticktext": ["0", "0.5", "1", "1.5", "2"]}))
    for name, colour, pattern, shift, values in (
            ("row: what a source gives", COLOURS[0], "", -0.36, rows),
            ("column: what a target gets", COLOURS[1], "/", 0.02, columns)):
        fig.add_bar(x=list(range(C)), y=values, width=0.34, offset=shift, name=name,
                    marker={"color": colour, "pattern": {"shape": pattern}, "line": {"width": 0}})
    fig.add_scatter(x=[-0.6, C - 0.4], y=[1, 1], mode="lines", name="one", hoverinfo="skip",
                    line={"color": NEUTRAL, "width": 2, "dash": "dash"})
    return Picture(fig, sinkhorn_alt(rows, columns, iterations),
                   sinkhorn_caption(rows, columns, iterations), SUM_COLUMNS,
                   sums_table(rows, columns))


SUM_COLUMNS = ("stream", "sum of its row", "sum of its column")


def sums_table(rows: list[float], columns: list[float]) -> tuple[tuple[Any, ...], ...]:
    return tuple((str(i), f"{r:.6f}", f"{c:.6f}") for i, (r, c) in enumerate(
        zip(rows, columns, strict=True)))


def sinkhorn_caption(rows: list[float], columns: list[float], iterations: int) -> str:
    off = [max(abs(v - 1) for v in values) for values in (rows, columns)]
    return (f"After {iterations} iteration" + "s" * (iterations != 1) + f" the rows are off by at "
            f"most {off[0]:.1e}, the columns by {off[1]:.1e}.")


def sinkhorn_alt(rows: list[float], columns: list[float], iterations: int) -> str:
    def told(values: list[float]) -> str:
        return ", ".join(f"{v:.3f}" for v in values)
    return (f"Bars of sums after {iterations} iterations: rows {told(rows)}; columns "
            f"{told(columns)}.")
