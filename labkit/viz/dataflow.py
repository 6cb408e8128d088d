"""The model in one figure, drawn from its config: who computes what, and who reads whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.config import LayerRole, ModelConfig
from labkit.viz.palette import FLOWS, NEUTRAL, ROLES
from labkit.viz.picture import Picture, base_layout

WIDTH = 920
HALF = 0.42              # half the width of a layer's box, in layers
BOX = (3.0, 4.0)         # lower and upper edge of the layers
ENGRAM_Y = 4.85


@dataclass(frozen=True)
class Lane:
    """One published thing: a bar from its source to its last reader.

    flow     key of `FLOWS`
    source   the layer that publishes it
    readers  the layers that read it (the source itself left out)
    """

    flow: str
    source: int
    readers: tuple[int, ...]


def lanes(config: ModelConfig) -> list[Lane]:
    """Every compressed cache, selection and pool with its readers, from the roles."""
    roles = config.roles
    found = []
    for flow, of in (("kv", lambda r: r.kv_source), ("selection", lambda r: r.index_source)):
        for source in sorted({of(r) for r in roles if of(r) is not None}):
            readers = tuple(r.layer for r in roles if of(r) == source and r.layer != source)
            found.append(Lane(flow, source, readers))
    for role in roles:
        if role.publishes_candidates:
            users = tuple(r.layer for r in roles if r.uses_candidates)
            found.append(Lane("candidates", role.layer, users))
    return found


def dataflow(config: ModelConfig, name: str = "") -> Picture:
    """Layers from left to right with their roles, above them Engram, below them what is shared.

    Down from a box: what the layer publishes; up to a box: what it reads. Works for any config.
    """
    import plotly.graph_objects as go

    L, roles, shared = config.num_hidden_layers, config.roles, lanes(config)
    heights = _heights(shared)
    bottom = min([*heights.values(), BOX[0]]) - 0.8
    height = int(90 + 62 * (5.6 - bottom))
    fig = go.Figure(layout=base_layout(
        WIDTH, height, margin={"l": 110, "r": 10, "t": 60, "b": 10},
        xaxis={"range": [-0.5 - 0.03 * L, L - 0.5 + 0.09 * L], "visible": False,
               "fixedrange": True},
        yaxis={"range": [bottom, 5.6], "visible": True, "fixedrange": True, "showgrid": False,
               "zeroline": False, **_row_names(config, heights)},
    ))
    for flow in FLOWS:  # lines first: what is drawn after them covers them
        _add_lines(fig, flow, [lane for lane in shared if lane.flow == flow], heights)
    fig.add_scatter(x=[-0.5 - 0.02 * L, L - 0.5 + 0.02 * L], y=[3.5, 3.5], mode="lines",
                    name="streams", line={"color": NEUTRAL, "width": 2 * config.hc_mult},
                    opacity=0.5, showlegend=False, hoverinfo="skip")
    for kind, mark in ROLES.items():
        own = [role for role in roles if role.kind == kind]
        if own:
            fig.add_bar(
                x=[r.layer for r in own], y=[BOX[1] - BOX[0]] * len(own), base=BOX[0],
                width=2 * HALF, name=f"{mark.letter} {mark.label}",
                marker={"color": mark.colour, "line": {"color": "#444", "width": 1}},
                text=[mark.label.removesuffix(" only") if L <= 12 else mark.letter] * len(own),
                textposition="inside",
                insidetextfont={"color": "#000", "size": 12 if L <= 12 else 11},
                insidetextanchor="middle", textangle=0, constraintext="none",
                customdata=[r.layer for r in own], hovertext=[_told(r, config) for r in own],
                hoverinfo="text",
            )
    _add_engram(fig, config)
    for flow in FLOWS:
        _add_lanes(fig, flow, [lane for lane in shared if lane.flow == flow], heights, config)
    _add_words(fig, config)
    picture_name = f"DeepSeek-V4.1 {name}".strip()
    return Picture(fig, _alt(config, shared, picture_name), _caption(config, shared),
                   ("role", "layers", "count"), _rows(roles))


def _heights(shared: list[Lane]) -> dict[Lane, float]:
    """One row a flow; a lane that would overlap the one before goes half a row lower."""
    heights: dict[Lane, float] = {}
    y = 2.3
    for flow in ("kv", "selection", "candidates"):
        own = [lane for lane in shared if lane.flow == flow]
        for lane in own:
            heights[lane] = y
        y -= 0.95 if own else 0.0
    return heights


def _row_names(config: ModelConfig, heights: dict[Lane, float]) -> dict[str, Any]:
    names = {3.5: f"ids \u2192 {config.hc_mult} streams"}
    for lane, y in heights.items():
        names[y] = {"kv": "caches", "selection": "selections", "candidates": "pool"}[lane.flow]
    if config.engram_layer_ids:
        names[ENGRAM_Y] = "Engram"
    return {"tickvals": list(names), "ticktext": list(names.values())}


def _add_engram(fig: Any, config: ModelConfig) -> None:
    layers = config.engram_layer_ids
    if not layers:
        return
    mark = FLOWS["engram"]
    fig.add_scatter(x=[x for i in layers for x in (i, i, None)],
                    y=[y for _ in layers for y in (ENGRAM_Y, BOX[1], None)], mode="lines",
                    line={"color": mark.colour, "width": 1.5}, hoverinfo="skip", showlegend=False,
                    name="into the streams")
    fig.add_scatter(x=list(layers), y=[ENGRAM_Y] * len(layers), mode="markers", name=mark.label,
                    marker={"symbol": "diamond", "size": 14, "color": mark.colour},
                    customdata=list(layers),
                    hovertext=[f"layer {i}: {n:,} rows, {config.engram_tables} read per token"
                               for i, n in zip(layers, config.engram_num_embeddings, strict=True)],
                    hoverinfo="text")
    fig.add_scatter(x=list(layers), y=[BOX[1] + 0.12] * len(layers), mode="markers",
                    marker={"symbol": "triangle-down", "size": 8, "color": mark.colour},
                    hoverinfo="skip", showlegend=False, name="into the streams")


SHIFT = {"kv": -0.22, "selection": 0.0, "candidates": 0.22}  # so that lines stay apart


def _add_lines(fig: Any, flow: str, own: list[Lane], heights: dict[Lane, float]) -> None:
    """From every lane one line to its source and one to each reader."""
    ends = [(layer + SHIFT[flow], heights[lane])
            for lane in own for layer in (lane.source, *lane.readers)]
    if ends:
        fig.add_scatter(x=[v for x, _ in ends for v in (x, x, None)],
                        y=[v for _, y in ends for v in (y, BOX[0], None)], mode="lines",
                        line={"color": FLOWS[flow].colour, "width": 1.5}, hoverinfo="skip",
                        showlegend=False, name=f"{FLOWS[flow].label}: lines")


def _add_lanes(fig: Any, flow: str, own: list[Lane], heights: dict[Lane, float],
               config: ModelConfig) -> None:
    """A named bar a lane, and arrow heads at its readers."""
    if not own:
        return
    mark, shift = FLOWS[flow], SHIFT[flow]
    pairs = [(lane.source, reader) for lane in own for reader in lane.readers]
    fig.add_bar(
        x=[(last(lane) + lane.source) / 2 + shift for lane in own], y=[0.4] * len(own),
        base=[heights[lane] - 0.2 for lane in own],
        width=[last(lane) - lane.source + 0.36 for lane in own], name=mark.label,
        marker={"color": mark.colour}, customdata=[lane.source for lane in own],
        hovertext=[_lane_told(lane, config) for lane in own], hoverinfo="text",
        text=[_short(lane, config) for lane in own], textposition="inside", textangle=0,
        insidetextanchor="middle", constraintext="none",
        insidetextfont={"color": "#FFF" if flow == "kv" else "#000", "size": 11},
    )
    fig.add_scatter(x=[reader + shift for _, reader in pairs], y=[BOX[0] - 0.14] * len(pairs),
                    mode="markers", showlegend=False, customdata=pairs, hoverinfo="text",
                    marker={"symbol": "triangle-up", "size": 8, "color": mark.colour},
                    name=f"{mark.label}: readers",
                    hovertext=[f"layer {reader} reads layer {source}" for source, reader in pairs])


def last(lane: Lane) -> int:
    return max((lane.source, *lane.readers))


def _short(lane: Lane, config: ModelConfig) -> str:
    if lane.flow == "kv":
        r = config.compress_ratios[lane.source]
        return f"layer {lane.source}: r = {r}"
    if lane.flow == "selection":
        return f"layer {lane.source}"
    return (f"layer {lane.source}: {config.candidate_topk_blocks} blocks of "
            f"{config.candidate_block_size}")


def _add_words(fig: Any, config: ModelConfig) -> None:
    """Layer numbers, the two ends, and the line between encoder and decoder."""
    L, split = config.num_hidden_layers, config.encoder_layers
    step = 1 if L <= 12 else 2
    for layer in range(0, L, step):
        fig.add_annotation(x=layer - HALF, y=BOX[1] + 0.16, text=str(layer), showarrow=False,
                           font={"size": 10}, xanchor="left")
    fig.add_annotation(x=L - 0.5 + 0.025 * L, y=3.5, text="\u2192 logits", showarrow=False,
                       xanchor="left", font={"size": 12})
    if 0 < split < L:
        fig.add_shape(type="line", x0=split - 0.5, x1=split - 0.5, y0=fig.layout.yaxis.range[0],
                      y1=5.5, line={"color": NEUTRAL, "width": 1.5, "dash": "dash"})
        fig.add_annotation(x=split - 0.6, y=5.4, xanchor="right", showarrow=False,
                           text=f"causal encoder, layers 0\u2013{split - 1}", font={"size": 12})
        fig.add_annotation(x=split - 0.4, y=5.4, xanchor="left", showarrow=False,
                           text=f"decoder, layers {split}\u2013{L - 1}", font={"size": 12})


# ---------------------------------------------------------------------------------- in words
def _told(role: LayerRole, config: ModelConfig) -> str:
    text = f"layer {role.layer}: {ROLES[role.kind].label}, window of {config.sliding_window}"
    if role.kind == "full":
        text += f", compresses {role.ratio} token{'s' * (role.ratio > 1)} into an entry"
    elif role.kv_source is not None:
        text += f", entries of layer {role.kv_source}, selection of layer {role.index_source}"
    return text


def _lane_told(lane: Lane, config: ModelConfig) -> str:
    who = _layers(lane.readers) if lane.readers else "no other layer"
    return f"{FLOWS[lane.flow].label} of layer {lane.source}, read by {who}"


def _layers(numbers: tuple[int, ...] | list[int]) -> str:
    """(2, 3, 4, 7) -> "layers 2-4, 7"."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    told = ", ".join(str(a) if a == b else f"{a}\u2013{b}" for a, b in runs)
    return f"layer{'s' * (len(numbers) != 1)} {told}"


def _rows(roles: tuple[LayerRole, ...]) -> tuple[tuple[Any, ...], ...]:
    rows: list[tuple[Any, ...]] = []
    for kind, mark in ROLES.items():
        own = [r.layer for r in roles if r.kind == kind]
        which = _layers(own).split(" ", 1)[1] if own else "none"
        rows.append((f"{mark.letter} {mark.label}", which, len(own)))
    return tuple(rows)


def _caption(config: ModelConfig, shared: list[Lane]) -> str:
    caches = [lane for lane in shared if lane.flow == "kv"]
    readers = sum(1 + len(lane.readers) for lane in caches)
    L, split = config.num_hidden_layers, config.encoder_layers
    plural = "s" * (len(caches) != 1)
    text = (f"{len(caches)} compressed cache{plural} for {readers} of {L} layers; window alone: "
            f"{L - readers}.")
    if 0 < split < L:
        text += (f" All of the decoder ({_layers(range(split, L))}) reads one cache, that of "  # type: ignore[arg-type]
                 f"layer {split}: a projection of what the encoder hands over.")
    return text


def _alt(config: ModelConfig, shared: list[Lane], name: str) -> str:
    counts = ", ".join(f"{row[2]} {row[0][2:]}" for row in _rows(config.roles))
    flows = "; ".join(_lane_told(lane, config) for lane in shared)
    engram = f" Engram memory enters at {_layers(config.engram_layer_ids)}." * bool(
        config.engram_layer_ids)
    return (f"Data flow of {name}: {config.num_hidden_layers} layers from left to right ({counts})."
            f"{engram} {flows}.")
