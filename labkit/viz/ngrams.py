"""N-grams of a corpus: how unevenly they occur, and how many share a row of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from labkit.viz.ngram_data import Census, Ngrams, expected_sharing
from labkit.viz.palette import NEUTRAL, ORDERS
from labkit.viz.picture import Picture, base_layout

WIDTH, HEIGHT = 720, 380
SYMBOLS = {2: "circle", 3: "square", 4: "diamond", 5: "triangle-up", 6: "triangle-down"}
POINTS = 80           # points of a curve
GRID = "rgba(128,128,128,.3)"


def _axis(title: str, end: int, start: int = 0) -> dict[str, Any]:
    """An axis of powers of ten."""
    ticks = list(range(start, end + 1))
    return {"range": [start, end], "tickvals": ticks, "ticktext": [_power(t) for t in ticks],
            "showgrid": True, "gridcolor": GRID, "zeroline": False, "fixedrange": True,
            "title": {"text": title}}


def _power(exponent: int) -> str:
    names = {0: "1", 3: "thousand", 6: "million", 9: "billion"}
    whole, rest = exponent // 3 * 3, 10 ** (exponent % 3)
    return f"{rest:,}" if whole == 0 else f"{rest} {names[whole]}"


def _title(text: str) -> dict[str, Any]:
    """What the vertical axis counts, above the figure, where it can be read without turning."""
    return {"text": text, "x": 0.01, "y": 0.98, "yanchor": "top", "font": {"size": 15}}


def _share_axis() -> dict[str, Any]:
    return {"range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": True,
            "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "gridcolor": GRID,
            "zeroline": False, "fixedrange": True}


def _decades(most: int) -> int:
    return max(1, math.ceil(math.log10(max(2, most))))


# ---------------------------------------------------------------------------------- collisions
def collisions(counted: Census, rows: int) -> Picture:
    """Share of distinct n-grams that share a row of a table of `rows` rows, as the text grows."""
    import plotly.graph_objects as go

    end = _decades(max(len(found) for found in counted.ngrams.values()))
    fig = go.Figure(layout=base_layout(
        WIDTH, HEIGHT, margin={"l": 60, "r": 44, "t": 86, "b": 50},
        title=_title("Share of the distinct n-grams that share their row"),
        xaxis=_axis("distinct n-grams read so far", end, 1), yaxis=_share_axis()))
    fig.add_scatter(name="expected (birthday curve)", mode="lines", hoverinfo="skip",
                    line={"color": "#D55E00", "width": 2})
    fig.add_scatter(name="as many n-grams as rows", mode="lines", hoverinfo="skip",
                    line={"color": NEUTRAL, "width": 2, "dash": "dash"})
    for order in counted.ngrams:
        fig.add_scatter(
            name=f"measured, {ORDERS[order].label}s", mode="markers", cliponaxis=False,
            marker={"color": ORDERS[order].colour, "symbol": f"{SYMBOLS[order]}-open", "size": 9,
                    "line": {"width": 2}},
            hovertemplate="%{customdata[0]:,} distinct: %{customdata[1]:.2%}<extra></extra>")
    found = measure(counted, rows)
    for trace, values in zip(fig.data, collision_parts(counted, rows, found), strict=True):
        trace.update(values)
    return Picture(fig, collision_alt(rows, found), collision_caption(counted, rows, found),
                   COLLISION_COLUMNS, collision_rows(rows, found))


def stops(found: Ngrams) -> list[int]:
    """Numbers of distinct n-grams at which is measured: 10, 20, 40, ... and all."""
    doubled = [10 * 2**i for i in range(40) if 10 * 2**i < len(found)]
    return [*doubled, len(found)]


@dataclass(frozen=True)
class Point:
    """Of the first `distinct` n-grams of an order, the share that share a row."""

    distinct: int
    measured: float
    expected: float


def measure(counted: Census, rows: int) -> dict[int, list[Point]]:
    """Order -> points as the text grows; the last one is the whole text."""
    points = {}
    for order, found in counted.ngrams.items():
        at = stops(found)
        shared = np.searchsorted(found.sharing(rows), at, "right").tolist()
        points[order] = [Point(k, count / k, expected_sharing(k, rows))
                         for k, count in zip(at, shared, strict=True)]
    return points


def collision_parts(counted: Census, rows: int, found: dict[int, list[Point]]
                    ) -> list[dict[str, Any]]:
    """What changes with the table: one dict for each trace, in order."""
    end = _decades(max(len(ngrams) for ngrams in counted.ngrams.values()))
    xs = np.linspace(1, end, POINTS)
    middle = math.log10(rows)
    return [
        {"x": xs.tolist(), "y": [expected_sharing(round(10**x), rows) for x in xs]},
        {"x": [middle, middle] if middle <= end else [], "y": [0, 1] if middle <= end else []},
        *({"x": [math.log10(p.distinct) for p in points], "y": [p.measured for p in points],
           "customdata": [[p.distinct, p.measured] for p in points]}
          for points in found.values()),
    ]


def collision_caption(counted: Census, rows: int, found: dict[int, list[Point]]) -> str:
    """The finding: how many share at the end, and how far the measured points are off."""
    off = max((abs(p.measured - p.expected) for points in found.values() for p in points
               if p.distinct >= 1000), default=0.0)
    ends = "; ".join(f"of {points[-1].distinct:,} {ORDERS[order].label}s "
                     f"{points[-1].measured:.1%}" for order, points in found.items())
    half = round(rows * math.log(2))
    return (f"A table of {rows:,} rows after {counted.tokens:,} tokens. Distinct n-grams that "
            f"share their row: {ends}. Half of them do at about {half:,}. From 1,000 on, the "
            f"points are at most {100 * off:.1f} percentage points off the curve.")


def collision_alt(rows: int, found: dict[int, list[Point]]) -> str:
    ends = "; ".join(
        f"{ORDERS[order].label}s end at {points[-1].distinct:,} with {points[-1].measured:.1%}, "
        f"expected {points[-1].expected:.1%}" for order, points in found.items())
    return (f"Share of distinct n-grams that share a row in a table of {rows:,} rows, over the "
            f"number of distinct n-grams: measured points on the birthday curve. {ends}.")


COLLISION_COLUMNS = ("order", "distinct", "a row", "share a row", "expected")


def collision_rows(rows: int, found: dict[int, list[Point]]) -> tuple[tuple[Any, ...], ...]:
    """The table: the whole text, one line an order."""
    return tuple((ORDERS[order].label, f"{points[-1].distinct:,}",
                  f"{points[-1].distinct / rows:.2f}", f"{points[-1].measured:.1%}",
                  f"{points[-1].expected:.1%}") for order, points in found.items())


# ---------------------------------------------------------------------------------- frequency
def rank_frequency(counted: Census) -> Picture:
    """How often the n-gram of each rank occurs, both axes logarithmic."""
    import plotly.graph_objects as go

    ngrams = counted.ngrams.values()
    fig = go.Figure(layout=base_layout(
        WIDTH, HEIGHT, margin={"l": 90, "r": 44, "t": 66, "b": 50},
        title=_title("How often the n-gram of a rank occurs"),
        xaxis=_axis("rank, most frequent first", _decades(max(map(len, ngrams)))),
        yaxis=_axis("", _decades(max(int(f.counts.max()) for f in ngrams)))))
    rows = []
    for found in ngrams:
        mark, ordered = ORDERS[found.order], np.sort(found.counts)[::-1]
        ranks = _ranks(len(ordered))
        fig.add_scatter(name=f"{mark.label}s ({SYMBOLS[found.order]})", mode="lines+markers",
                        x=np.log10(ranks).tolist(), y=np.log10(ordered[ranks - 1]).tolist(),
                        customdata=[[int(r), int(ordered[r - 1])] for r in ranks],
                        line={"color": mark.colour, "width": 2},
                        marker={"color": mark.colour, "symbol": SYMBOLS[found.order], "size": 6},
                        hovertemplate="rank %{customdata[0]:,}: %{customdata[1]:,} times"
                                      "<extra></extra>")
        once = float((ordered == 1).mean())
        rows.append((mark.label, f"{found.total:,}", f"{len(found):,}", f"{int(ordered[0]):,}",
                     f"{once:.0%}"))
    told = "; ".join(f"{n}s: the most frequent one {most} times, {once} of them once"
                     for n, _, _, most, once in rows)
    return Picture(fig, f"Rank-frequency lines of {counted.tokens:,} tokens, falling, on "
                   f"logarithmic axes. {told}.",
                   f"In {counted.tokens:,} tokens a few n-grams are met very often, most of them "
                   f"once. {told[0].upper()}{told[1:]}.",
                   ("order", "look-ups", "distinct", "most frequent", "met once"), tuple(rows))


def hit_shares(counted: Census, tops: Iterable[float] = (0.001, 0.01, 0.1)) -> Picture:
    """Share of all look-ups that go to the k most frequent n-grams, over k."""
    import plotly.graph_objects as go

    tops, ngrams = list(tops), counted.ngrams.values()
    fig = go.Figure(layout=base_layout(
        WIDTH, HEIGHT, margin={"l": 60, "r": 44, "t": 66, "b": 50},
        title=_title("Share of all look-ups that the most frequent n-grams serve"),
        xaxis=_axis("n-grams kept at hand, most frequent first",
                    _decades(max(map(len, ngrams)))),
        yaxis=_share_axis()))
    rows = []
    for found in ngrams:
        mark = ORDERS[found.order]
        served = np.sort(found.counts)[::-1].cumsum() / found.total
        ranks = _ranks(len(served))
        fig.add_scatter(name=f"{mark.label}s ({SYMBOLS[found.order]})", mode="lines+markers",
                        x=np.log10(ranks).tolist(), y=served[ranks - 1].tolist(),
                        customdata=[[int(r), float(served[r - 1])] for r in ranks],
                        line={"color": mark.colour, "width": 2},
                        marker={"color": mark.colour, "symbol": SYMBOLS[found.order], "size": 6},
                        hovertemplate="the first %{customdata[0]:,}: %{customdata[1]:.1%}"
                                      "<extra></extra>")
        shares = [served[max(1, round(top * len(served))) - 1] for top in tops]
        rows.append((mark.label, f"{len(found):,}", *(f"{share:.0%}" for share in shares)))
    middle = len(tops) // 2
    told = "; ".join(f"{row[0]}s {row[2 + middle]}" for row in rows)
    return Picture(fig, "Share of look-ups served by the most frequent n-grams, over how many "
                   f"are kept. The most frequent {tops[middle]:.1%} serve: {told}.",
                   f"Keeping the most frequent {tops[middle]:.0%} of the distinct n-grams at hand "
                   f"serves this share of all look-ups: {told}.",
                   ("order", "distinct", *(f"top {top:.1%}" for top in tops)), tuple(rows))


def _ranks(n: int) -> np.ndarray:
    """Ranks 1..n, evenly spread over the logarithm."""
    return np.unique(np.geomspace(1, n, 22).round().astype(int))
