"""From tokens to table rows: one line of text with its gates above and its rows below.

    ▂▅▁▂     one row of bars for each stream: its gate at each token, full height = 1
    the text the chosen token has a frame; under each token stands its class
     ━━━     a line under the tokens of each n-gram of the chosen token
    |  ◆ |   the layer's tables end to end; marks: rows read by the chosen token, grey ticks:
             rows read by the other tokens of the line

`parts` turns a recording into numbers, `engram_over_text` draws them, and the explorer replaces
them in the drawn figure.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from labkit.viz.engram_data import EngramRecording, Lookup
from labkit.viz.palette import NEUTRAL, OKABE_ITO, ORDERS
from labkit.viz.picture import Picture, base_layout
from labkit.viz.tokens import visible

WIDTH, COLUMNS = 900, 108
LEFT = 9               # columns kept for the names of the lines
GATE, FULL = 24, 20    # pixels of a stream's line, and of an open gate
SYMBOLS = {2: "circle", 3: "square", 4: "diamond", 5: "triangle-up", 6: "triangle-down"}
STRIP = 26             # pixels of the tables' height


@dataclass(frozen=True)
class Cell:
    """Where a token stands on the line; a negative index is padding before the start."""

    index: int
    column: int
    width: int
    text: str
    number: int


def lines(recording: EngramRecording) -> list[tuple[int, int]]:
    """Tokens [first, end) of each line. A line begins with what its tokens look back to."""
    back = recording.config.engram_max_ngram_size - 1
    found, first = [], -back
    while True:
        end, used = first, LEFT
        while end < len(recording) and used + _width(recording, end) <= COLUMNS:
            used += _width(recording, end)
            end += 1
        found.append((first, end))
        if end >= len(recording):
            return found
        first = max(end - back, first + 1)


def line_of(recording: EngramRecording, token: int) -> list[Cell]:
    """The line on which a token stands with all that it looks back to."""
    back = recording.config.engram_max_ngram_size - 1
    first, end = next((a, b) for a, b in lines(recording) if a + back <= token < b)
    cells, column = [], LEFT
    for index in range(first, end):
        slot, width = recording.slot(index), _width(recording, index)
        cells.append(Cell(index, column, width, _shown(slot.text), slot.number))
        column += width
    return cells


def _width(recording: EngramRecording, index: int) -> int:
    slot = recording.slot(index)
    return max(len(_shown(slot.text)), len(str(slot.number))) + 1


def _shown(text: str) -> str:
    return visible(text)[:16] or "\u2205"


# ---------------------------------------------------------------------------------- drawing
def engram_over_text(recording: EngramRecording, layer: int, token: int) -> Picture:
    """The figure of one token in one Engram layer. InputError for what the recording lacks."""
    import plotly.graph_objects as go

    fig = go.Figure(data=_empty_traces(go, recording), layout=_layout(recording))
    for trace, values in zip(fig.data, parts(recording, layer, token), strict=True):
        trace.update(values)
    columns, rows = table(recording, layer, token)
    return Picture(fig, alt(recording, layer, token), caption(recording, layer, token), columns,
                   rows)


def parts(recording: EngramRecording, layer: int, token: int) -> list[dict[str, Any]]:
    """What changes with layer and token: one dict for each trace, in order."""
    looked = recording.lookups(layer, token)
    cells, y = line_of(recording, token), _heights(recording)
    return [
        _gates(recording, layer, cells), _names(recording),
        _texts(cells, y["text"], [c.text for c in cells]),
        _texts(cells, y["class"], [str(c.number) for c in cells]),
        _frame(cells, token, y),
        *(_bracket(cells, token, look, y) for look in looked),
        _tables(recording, layer, y), _table_names(recording, layer, y),
        _other_rows(recording, layer, cells, token, y),
        *(_marks(recording, layer, look, y) for look in looked),
    ]


def _heights(recording: EngramRecording) -> dict[str, int]:
    """y of each part, in pixels from the top."""
    streams = recording.config.hc_mult if recording.gates else 0
    text = 8 + GATE * streams + 14
    orders = recording.config.engram_max_ngram_size - 1
    strip = text + 32 + 13 * orders + 22
    return {"text": text, "class": text + 17, "order": text + 32, "strip": strip,
            "end": strip + STRIP + 22}


def _layout(recording: EngramRecording) -> dict[str, Any]:
    end = _heights(recording)["end"]
    return base_layout(
        WIDTH, end + 62, margin={"l": 6, "r": 6, "t": 56, "b": 6},
        xaxis={"range": [0, COLUMNS], "visible": False, "fixedrange": True},
        yaxis={"range": [end, 0], "visible": False, "fixedrange": True})


def _empty_traces(go: Any, recording: EngramRecording) -> list[Any]:
    orders = range(2, recording.config.engram_max_ngram_size + 1)

    def text(name: str, size: int = 13, at: str = "middle right") -> Any:
        return go.Scatter(name=name, mode="text", textposition=at, hoverinfo="skip",
                          textfont={"family": "monospace", "size": size}, showlegend=False)

    def line(name: str, colour: str, width: float, legend: bool = False) -> Any:
        return go.Scatter(name=name, mode="lines", line={"color": colour, "width": width},
                          hoverinfo="skip", showlegend=legend)
    return [
        go.Bar(name="gate of a stream (full bar: open)", offset=0,
               showlegend=bool(recording.gates),
               marker={"color": OKABE_ITO["sky"], "line": {"width": 0}},
               hovertemplate="token %{customdata[0]}, stream %{customdata[1]}: "
                             "%{customdata[2]:.2f}<extra>gate</extra>"),
        text("names", 11), text("tokens"), text("classes", 11),
        line("the chosen token", OKABE_ITO["vermilion"], 2),
        *(line(f"{ORDERS[n].label} ({ORDERS[n].letter})", ORDERS[n].colour, 4) for n in orders),
        line("tables", NEUTRAL, 1), text("table names", 11, "middle center"),
        line("rows read by the other tokens", NEUTRAL, 1, True),
        *(go.Scatter(name=f"row of the {ORDERS[n].label}", mode="markers", showlegend=True,
                     marker={"color": ORDERS[n].colour, "symbol": SYMBOLS[n], "size": 11},
                     hovertemplate="row %{customdata[0]:,}<extra>head %{customdata[1]}</extra>")
          for n in orders),
    ]


def _gates(recording: EngramRecording, layer: int, cells: list[Cell]) -> dict[str, Any]:
    """One bar for every stream of every token."""
    x, width, base, y, data = [], [], [], [], []
    for cell in cells:
        if cell.index < 0 or not recording.gates:
            continue
        for stream, gate in enumerate(recording.gates[layer][cell.index].tolist()):
            x.append(cell.column)
            width.append(cell.width - 0.6)
            base.append(8 + GATE * (stream + 1))
            y.append(-FULL * gate)
            data.append([cell.index, stream, gate])
    return {"x": x, "width": width, "base": base, "y": y, "customdata": data}


def _names(recording: EngramRecording) -> dict[str, Any]:
    """The names of the lines, at the left."""
    y = _heights(recording)
    streams = range(recording.config.hc_mult if recording.gates else 0)
    named: list[tuple[str, float]] = [(f"stream {s}", GATE * (s + 1)) for s in streams]
    named += [("token", y["text"]), ("class", y["class"])]
    named += [(f"order {n}", y["order"] + 13 * (n - 2))
              for n in range(2, recording.config.engram_max_ngram_size + 1)]
    named += [("rows", y["strip"] + STRIP / 2), ("table", y["strip"] + STRIP + 11)]
    return {"x": [0] * len(named), "y": [at for _, at in named], "text": [n for n, _ in named]}


def _texts(cells: list[Cell], y: float, texts: list[str]) -> dict[str, Any]:
    return {"x": [c.column for c in cells], "y": [y] * len(cells),
            "text": [escape(t, quote=False) for t in texts],
            "customdata": [c.index for c in cells]}


def _frame(cells: list[Cell], token: int, y: dict[str, int]) -> dict[str, Any]:
    (cell,) = [c for c in cells if c.index == token]
    left, right = cell.column - 0.25, cell.column + cell.width - 0.45
    upper, lower = y["text"] - 9, y["class"] + 8
    return {"x": [left, right, right, left, left], "y": [upper, upper, lower, lower, upper],
            "customdata": [token] * 5}


def _bracket(cells: list[Cell], token: int, look: Lookup, y: dict[str, int]) -> dict[str, Any]:
    """A line under the n tokens of an n-gram."""
    covered = [c for c in cells if token - look.order < c.index <= token]
    at = y["order"] + 13 * (look.order - 2)
    return {"x": [covered[0].column, covered[-1].column + covered[-1].width - 0.7],
            "y": [at, at], "customdata": [covered[0].index, token]}


def _x_of(recording: EngramRecording, layer: int, row: float) -> float:
    """Column at which a row of the layer's table stands."""
    total = recording.config.engram_num_embeddings[recording.at(layer)]
    return LEFT + (COLUMNS - 0.5 - LEFT) * row / total


def _edges(recording: EngramRecording, layer: int) -> list[float]:
    """Columns of the tables' borders, (N-1)*E + 1 of them."""
    total = recording.config.engram_num_embeddings[recording.at(layer)]
    first = [offset for look in recording.lookups(layer, 0) for offset in look.offsets]
    return [_x_of(recording, layer, row) for row in (*first, total)]


def _tables(recording: EngramRecording, layer: int, y: dict[str, int]) -> dict[str, Any]:
    edges = _edges(recording, layer)
    upper, lower = y["strip"], y["strip"] + STRIP
    xs: list[float | None] = []
    ys: list[float | None] = []
    for edge in edges:
        xs += [edge, edge, None]
        ys += [upper, lower, None]
    for at in (upper, lower):
        xs += [edges[0], edges[-1], None]
        ys += [at, at, None]
    return {"x": xs, "y": ys}


def _table_names(recording: EngramRecording, layer: int, y: dict[str, int]) -> dict[str, Any]:
    """ "3.1": order 3, head 1."""
    edges, E = _edges(recording, layer), recording.config.engram_n_heads
    middle = [(a + b) / 2 for a, b in zip(edges, edges[1:], strict=False)]
    return {"x": middle, "y": [y["strip"] + STRIP + 11] * len(middle),
            "text": [f"{2 + i // E}.{i % E}" for i in range(len(middle))]}


def _other_rows(recording: EngramRecording, layer: int, cells: list[Cell], token: int,
                y: dict[str, int]) -> dict[str, Any]:
    xs: list[float | None] = []
    ys: list[float | None] = []
    number = recording.at(layer)
    for cell in cells:
        if cell.index < 0 or cell.index == token:
            continue
        for row in recording.rows[cell.index, number].flatten().tolist():
            at = _x_of(recording, layer, row)
            xs += [at, at, None]
            ys += [y["strip"] + 6, y["strip"] + STRIP - 6, None]
    return {"x": xs, "y": ys}


def _marks(recording: EngramRecording, layer: int, look: Lookup,
           y: dict[str, int]) -> dict[str, Any]:
    return {"x": [_x_of(recording, layer, row) for row in look.rows],
            "y": [y["strip"] + STRIP / 2] * len(look.rows),
            "customdata": [[row, head] for head, row in enumerate(look.rows)]}


# ---------------------------------------------------------------------------------- in words
def caption(recording: EngramRecording, layer: int, token: int) -> str:
    """The finding: what is read, how much of the table that is, and how far the gates open."""
    looked = recording.lookups(layer, token)
    count = sum(len(look.rows) for look in looked)
    total = recording.config.engram_num_embeddings[recording.at(layer)]
    text = (f"Layer {layer}, token {token} \u201c{_shown(recording.texts[token])}\u201d: "
            f"{count} of {total:,} rows are read, {len(looked[0].rows)} for each of the "
            f"{len(looked)} n-grams.")
    blocked = sum(slot.blocked for slot in looked[-1].slots)
    if blocked:
        text += f" {blocked} of its {len(looked[-1].slots) - 1} look-backs meet padding."
    if recording.gates:
        gates = recording.gates[layer][token].tolist()
        text += " Gates: " + ", ".join(f"{g:.2f}" for g in gates) + "."
        mean = recording.gates[layer].mean(1)
        best = int(mean.argmax())
        text += (f" Over the streams they open widest at token {best} "
                 f"\u201c{_shown(recording.texts[best])}\u201d ({mean[best]:.2f} on average).")
    cells = line_of(recording, token)
    if cells[-1].index < len(recording) - 1 or cells[0].index > 0:
        text += (f" Shown: tokens {max(0, cells[0].index)} to {cells[-1].index} of "
                 f"{len(recording)}.")
    return text


def alt(recording: EngramRecording, layer: int, token: int) -> str:
    looked = "; ".join(
        f"order {look.order} {' '.join(_shown(s.text) for s in look.slots)}: rows "
        f"{', '.join(f'{row:,}' for row in look.rows)}"
        for look in recording.lookups(layer, token))
    return ("A line of tokens with their classes, bars for the gate of each stream above, the "
            f"Engram table of layer {layer} below. Token {token} reads: {looked}.")


def table(recording: EngramRecording, layer: int, token: int,
          ) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    rows = [(ORDERS[look.order].label,
             " ".join(_shown(s.text) for s in look.slots),
             " ".join(str(s.number) for s in look.slots), f"{look.mix:,}",
             " ".join(f"{row:,}" for row in look.rows))
            for look in recording.lookups(layer, token)]
    return ("order", "n-gram", "classes", "XOR of products", "rows, one a head"), tuple(rows)
