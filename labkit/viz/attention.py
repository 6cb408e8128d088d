"""Attention of one query drawn over the text: bars above it, bars below it, a line under it.

    ▂▁ ▅      window: a bar on each token that the window holds
    the text  the query's token has a frame, later tokens are faint
    ▔▔  ▔▔▔   entries: a hatched bar hangs from the r tokens that a selected entry covers
    ━━━━━━━   pool: the blocks from which a later index source may select

`parts` turns a look into numbers, `attention_over_text` draws them, and the explorer replaces
them in the drawn figure.
"""

from __future__ import annotations

from html import escape
from typing import Any

from labkit.viz.attention_data import Look, Recording
from labkit.viz.palette import ATTENTION, OKABE_ITO, ROLES
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import Placed, lay_out, visible

COLUMNS = 108           # characters a line
WIDTH = 900
LINE = 48               # pixels a line of text takes
BAR = 13                # pixels of a full bar
FULL = 0.1              # the weight that fills a bar; more is cut and said in the hover text
LEAST = 2.0             # pixels of a bar whose weight is next to nothing: it is there all the same
TOP = 40                # pixels above the first line, for the bar of shares


def attention_over_text(recording: Recording, layer: int, query: int,
                        head: int | None = None) -> Picture:
    """The figure of one query in one layer; head None: the mean over heads.

    InputError for a layer, query or head that the run does not have.
    """
    import plotly.graph_objects as go

    look = recording.look(layer, query, head)
    placed = lay_out(recording.texts, COLUMNS)
    fig = go.Figure(data=_empty_traces(go), layout=_layout(placed))
    for trace, values in zip(fig.data, parts(recording, look, placed), strict=True):
        trace.update(values)
    columns, rows = table(recording, look)
    return Picture(fig, alt(recording, look), caption(recording, look), columns, rows)


def height(weight: float) -> float:
    """Pixels of a bar: proportional to the square root, so that small weights can be seen."""
    return max(LEAST, BAR * min(1.0, (weight / FULL) ** 0.5))


def parts(recording: Recording, look: Look, placed: list[Placed]) -> list[dict[str, Any]]:
    """What changes with layer, query and head: one dict for each trace, in order."""
    return [
        *_shares(look),
        _window(look, placed),
        _entries(look, placed),
        _pool(look, placed),
        _text(placed, upto=look.query),
        _text(placed, after=look.query),
        _frame(placed[look.query]),
    ]


def _empty_traces(go: Any) -> list[Any]:
    window, entries = ATTENTION["window"], ATTENTION["entries"]
    pool, sink = ATTENTION["candidates"], ATTENTION["sink"]
    hatched = {"shape": entries.pattern}
    text = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip",
            "textfont": {"family": "monospace", "size": 13}, "showlegend": False}
    share = {"orientation": "h", "width": 16, "textposition": "inside", "showlegend": False,
             "insidetextanchor": "middle", "constraintext": "none", "textangle": 0,
             "hovertemplate": "%{text}<extra></extra>"}
    return [
        go.Bar(name="share of the window", marker={"color": window.colour, "line": {"width": 0}},
               insidetextfont={"color": "#FFF"}, **share),
        go.Bar(name="share of the entries", marker={"color": entries.colour, "line": {"width": 0}},
               insidetextfont={"color": "#000"}, **share),
        go.Bar(name="share of the sink", marker={"color": sink.colour, "line": {"width": 0}},
               insidetextfont={"color": "#000"}, **share),
        go.Bar(name=f"{window.label} ({window.letter})", offset=0,
               marker={"color": window.colour, "line": {"width": 0}},
               hovertemplate="token %{customdata[0]}: %{customdata[1]:.2%}<extra>window</extra>"),
        go.Bar(name=f"{entries.label} ({entries.letter})", offset=0,
               marker={"color": entries.colour, "pattern": hatched, "line": {"width": 0}},
               hovertemplate="entry %{customdata[0]}: %{customdata[1]:.2%}<extra>selected</extra>"),
        go.Scatter(name=f"{pool.label} ({pool.letter})", mode="lines", hoverinfo="skip",
                   line={"color": pool.colour, "width": 4}),
        go.Scatter(name="tokens", **text),
        go.Scatter(name="tokens to come", opacity=0.4, **text),
        go.Scatter(name="the query", mode="lines", hoverinfo="skip",
                   line={"color": OKABE_ITO["vermilion"], "width": 2}),
    ]


def _layout(placed: list[Placed]) -> dict[str, Any]:
    lines = placed[-1].line + 1
    total = TOP + LINE * lines
    return base_layout(
        WIDTH, total + 52, margin={"l": 6, "r": 6, "t": 46, "b": 6},
        xaxis={"range": [0, COLUMNS], "visible": False, "fixedrange": True},
        yaxis={"range": [total, 0], "visible": False, "fixedrange": True},
    )


# ------------------------------------------------------------------- one function per trace
def _shares(look: Look) -> list[dict[str, Any]]:
    """Three pieces of one bar that add up to 1."""
    out, start = [], 0.0
    for name, share in (("window", look.window_share), ("entries", look.entries_share),
                        ("sink", look.sink)):
        label = f"{name} {share:.0%}" if share > 0.085 else ""
        out.append({"x": [share * COLUMNS], "y": [TOP / 2], "base": [start * COLUMNS],
                    "text": [label], "customdata": [share]})
        start += share
    return out


def _window(look: Look, placed: list[Placed]) -> dict[str, Any]:
    tokens = [placed[position] for position, _ in look.window]
    return {
        "x": [t.column for t in tokens], "width": [t.width - 0.15 for t in tokens],
        "base": [_line(t) + 15 for t in tokens], "y": [-height(w) for _, w in look.window],
        "customdata": [[position, weight] for position, weight in look.window],
    }


def _entries(look: Look, placed: list[Placed]) -> dict[str, Any]:
    """An entry whose tokens stand on two lines has a bar on each."""
    x, width, base, y, data = [], [], [], [], []
    for entry, first, end, weight in look.entries:
        for line, start, stop in _stretches(placed, first, end):
            x.append(start)
            width.append(stop - start - 0.15)
            base.append(line + 29)
            y.append(height(weight))
            data.append([entry, weight])
    return {"x": x, "width": width, "base": base, "y": y, "customdata": data}


def _pool(look: Look, placed: list[Placed]) -> dict[str, Any]:
    x: list[float | None] = []
    y: list[float | None] = []
    for first, end in look.pool or []:
        for line, start, stop in _stretches(placed, first, end):
            x += [start + 0.2, stop - 0.2, None]
            y += [line + 45, line + 45, None]
    return {"x": x, "y": y, "visible": look.pool is not None}


def _text(placed: list[Placed], upto: int | None = None, after: int | None = None,
          ) -> dict[str, Any]:
    tokens = placed[: upto + 1] if upto is not None else placed[(after or 0) + 1 :]
    return {
        "x": [t.column + len(t.text) - len(t.text.lstrip(" ")) for t in tokens],
        "y": [_line(t) + 22 for t in tokens],
        "text": [escape(t.text.lstrip(" "), quote=False) for t in tokens],
        "customdata": [t.index for t in tokens],
    }


def _frame(token: Placed) -> dict[str, Any]:
    left, right = token.column - 0.1, token.column + token.width
    upper, lower = _line(token) + 15, _line(token) + 29
    return {"x": [left, right, right, left, left], "y": [upper, upper, lower, lower, upper],
            "customdata": [token.index] * 5}


def _line(token: Placed) -> int:
    return TOP + LINE * token.line


def _stretches(placed: list[Placed], first: int, end: int) -> list[tuple[int, int, int]]:
    """[(y of the line, first column, column behind the last)] that tokens first..end cover."""
    found: dict[int, tuple[int, int]] = {}
    for token in placed[first : end + 1]:
        line = _line(token)
        start = found.get(line, (token.column, 0))[0]
        found[line] = (start, token.column + token.width)
    return [(line, start, stop) for line, (start, stop) in found.items()]


# ---------------------------------------------------------------------------------- in words
def told(recording: Recording, look: Look) -> str:
    role = recording.config.roles[look.layer]
    kind = ROLES[role.kind].label + (f", r = {role.ratio}" if role.ratio else "")
    heads = "mean over heads" if look.head is None else f"head {look.head}"
    return (f"Layer {look.layer} ({kind}), query {look.query} "
            f"\u201c{visible(recording.texts[look.query])}\u201d, {heads}")


def caption(recording: Recording, look: Look) -> str:
    """The finding: shares, how much was selected, and the strongest single weight."""
    text = f"{told(recording, look)}: {look.window_share:.0%} to {len(look.window)} window tokens"
    if look.ratio:
        seen = (look.query + 1) // look.ratio
        text += (f", {look.entries_share:.0%} to {len(look.entries)} selected of {seen} visible "
                 "entries")
    text += f", {look.sink:.0%} to the sink."
    role = recording.config.roles[look.layer]
    if look.pool is not None:
        count = sum(end - first + 1 for first, end in look.pool) // role.ratio
        text += (f" Its pool for later layers holds {count} entries."
                 if role.publishes_candidates else f" The pool left it {count} to select from.")
    strongest = ranked(recording, look, 1)
    if strongest:
        what, where, words, weight = strongest[0]
        text += f" Strongest: {what} at {where}, \u201c{words}\u201d, with {weight}."
    return text


def alt(recording: Recording, look: Look) -> str:
    best = "; ".join(f"{what} {where} {words} {weight}"
                     for what, where, words, weight in ranked(recording, look, 3))
    return (f"Text of {len(recording)} tokens with attention bars. {told(recording, look)}. "
            f"Window {look.window_share:.0%}, entries {look.entries_share:.0%}, sink "
            f"{look.sink:.0%}. Strongest: {best}.")


def table(recording: Recording, look: Look) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    return ("what", "position", "text", "attention"), tuple(ranked(recording, look, 8))


def ranked(recording: Recording, look: Look, count: int) -> list[tuple[str, str, str, str]]:
    """The strongest single weights: (window or entry n, positions, text, percent)."""
    found = [(weight, "window", position, position) for position, weight in look.window]
    found += [(weight, f"entry {entry}", first, end) for entry, first, end, weight in look.entries]
    found.sort(key=lambda row: (-row[0], row[2], row[1]))
    return [
        (what, str(first) if first == end else f"{first}\u2013{end}",
         visible("".join(recording.texts[first : end + 1])), f"{weight:.1%}")
        for weight, what, first, end in found[:count]
    ]
