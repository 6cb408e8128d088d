"""What every token of a text costs more, or less, when a part of the model is muted.

    ▂▁ ▅      a hatched bar on each token that costs more
    the text
     ▁        a plain bar below each token that costs less
"""

from __future__ import annotations

from html import escape
from typing import Any

from labkit.viz.engram_data import MutedCosts
from labkit.viz.palette import MUTED
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import Placed, lay_out, visible

COLUMNS, WIDTH = 108, 900
LINE, BAR = 50, 16     # pixels of a line of text, and of a full bar
FULL = 4.0             # nats that fill a bar; more is cut and said in the hover text
TOP = 6


def muted_over_text(costs: MutedCosts, what: str = "Engram") -> Picture:
    """Bars over the text: nats that muting adds to each token (below: takes from it)."""
    import plotly.graph_objects as go

    placed = lay_out(costs.texts, COLUMNS)
    total = TOP + LINE * (placed[-1].line + 1)
    fig = go.Figure(layout=base_layout(
        WIDTH, total + 44, margin={"l": 6, "r": 6, "t": 38, "b": 6},
        xaxis={"range": [0, COLUMNS], "visible": False, "fixedrange": True},
        yaxis={"range": [total, 0], "visible": False, "fixedrange": True}))
    more = costs.more.tolist()
    for key, sign in (("more", -1), ("less", 1)):
        mark = MUTED[key]
        chosen = [(token, nats) for token, nats in zip(placed[1:], more, strict=True)
                  if (nats > 0) == (key == "more")]
        fig.add_bar(name=f"{mark.label} ({mark.letter})", offset=0,
                    x=[token.column for token, _ in chosen],
                    width=[token.width - 0.15 for token, _ in chosen],
                    base=[_line(token) + (18 if key == "more" else 34) for token, _ in chosen],
                    y=[sign * BAR * min(1.0, abs(nats) / FULL) for _, nats in chosen],
                    customdata=[[token.index, nats] for token, nats in chosen],
                    marker={"color": mark.colour, "pattern": {"shape": mark.pattern},
                            "line": {"width": 0}},
                    hovertemplate="token %{customdata[0]}: %{customdata[1]:+.2f} nats"
                                  "<extra></extra>")
    fig.add_scatter(name="tokens", mode="text", textposition="middle right", hoverinfo="skip",
                    textfont={"family": "monospace", "size": 13}, showlegend=False,
                    x=[t.column + len(t.text) - len(t.text.lstrip(" ")) for t in placed],
                    y=[_line(t) + 26 for t in placed],
                    text=[escape(t.text.lstrip(" "), quote=False) for t in placed])
    rows = tuple(_row(costs, index) for index in costs.more.argsort(descending=True)[:8].tolist())
    return Picture(fig, _alt(costs, what, rows), _caption(costs, what, rows),
                   ("token", "before it", "nats", "nats muted", "more"), rows)


def _line(token: Placed) -> int:
    return TOP + LINE * token.line


def _row(costs: MutedCosts, index: int) -> tuple[Any, ...]:
    """Of target `index`, which is token index+1."""
    before = visible("".join(costs.texts[max(0, index - 2) : index + 1]))
    return (visible(costs.texts[index + 1]), before, f"{float(costs.nats[index]):.2f}",
            f"{float(costs.muted[index]):.2f}", f"{float(costs.more[index]):+.2f}")


def _caption(costs: MutedCosts, what: str, rows: tuple[tuple[Any, ...], ...]) -> str:
    higher = float((costs.more > 0).float().mean())
    largest = costs.more.sort(descending=True).values
    tenth = max(1, len(largest) // 10)
    part = float(largest[:tenth].sum() / costs.more.sum())
    text = (f"Without {what} this passage costs {costs.bits_per_byte_muted:.2f} bits per byte "
            f"instead of {costs.bits_per_byte:.2f}. {higher:.0%} of its {len(largest)} tokens cost "
            f"more; the worst is \u201c{rows[0][0]}\u201d after \u201c{rows[0][1]}\u201d, "
            f"{rows[0][4]} nats.")
    if costs.more.sum() > 0:
        text += (f" The {tenth} tokens that lose most lose {part:.1f} times what the whole "
                 "passage loses." if part > 1 else
                 f" The {tenth} tokens that lose most make up {part:.0%} of the loss.")
    return text


def _alt(costs: MutedCosts, what: str, rows: tuple[tuple[Any, ...], ...]) -> str:
    listed = ", ".join(f"{row[0]} {row[4]}" for row in rows[:4])
    return (f"Text of {len(costs.texts)} tokens with bars: above a token where it costs more "
            f"nats without {what}, below it where it costs less. Most: {listed}.")
