"""One step of speculative decoding: what was drafted, what the target thinks of it, what stays.

A row for each slot: the wide bar is the target's probability of the drafted token, the narrow,
hatched one the draft's, the diamond the survival that the draft expects. The last row is the
token that the target adds. `parts` turns a step into numbers, the explorer replaces them.
"""

from __future__ import annotations

from html import escape
from typing import Any

from labkit.viz.palette import DRAFTING
from labkit.viz.picture import Picture, base_layout
from labkit.viz.speculation_data import Recording, Step
from labkit.viz.tokens import visible

WIDTH, LABEL = 860, 14      # pixels; characters of a token's text
SIGNS = {"kept": "\u2713", "rejected": "\u2717", "dropped": "\u2013", "not sent": "\u00b7"}


def speculation_step(recording: Recording, number: int, rows: int) -> Picture:
    """The figure of one step; rows: slots that there is room for (`dspark_block_size`)."""
    import plotly.graph_objects as go

    step = recording.steps[number]
    target, draft, survival = (DRAFTING[key] for key in ("target", "draft", "survival"))
    fig = go.Figure(layout=base_layout(
        WIDTH, 100 + 34 * (rows + 1), margin={"l": 190, "r": 250, "t": 40, "b": 46},
        xaxis={"range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": True,
               "ticktext": ["0", "25 %", "50 %", "75 %", "100 %"], "fixedrange": True,
               "gridcolor": "rgba(128,128,128,.3)", "zeroline": False,
               "title": {"text": "probability"}},
        yaxis={"range": [rows + 0.5, -0.5], "fixedrange": True, "showgrid": False,
               "zeroline": False, "tickfont": {"family": "monospace", "size": 13},
               **ticks(step, rows)}))
    fig.add_bar(orientation="h", width=0.72, name=target.label, hoverinfo="x",
                marker={"color": target.colour, "line": {"width": 0}})
    fig.add_bar(orientation="h", width=0.32, name=draft.label, hoverinfo="x",
                marker={"color": draft.colour, "pattern": {"shape": draft.pattern},
                        "line": {"width": 0}})
    fig.add_scatter(mode="markers", name=survival.label, hoverinfo="x", cliponaxis=False,
                    marker={"color": survival.colour, "symbol": survival.letter, "size": 12,
                            "line": {"color": "#FFF", "width": 1}})
    fig.add_scatter(mode="text", textposition="middle right", hoverinfo="skip", name="fates",
                    showlegend=False, cliponaxis=False, textfont={"size": 12})
    for trace, values in zip(fig.data, parts(step, rows), strict=True):
        trace.update(values)
    return Picture(fig, alt(recording, number), caption(recording, number), *table(step))


def parts(step: Step, rows: int) -> list[dict[str, Any]]:
    """What changes from step to step: one dict for each trace, in order."""
    own = rows                                    # the row of the target's own token
    slots = list(enumerate(step.slots))
    notes = [(j, f"  {SIGNS[slot.fate]} {_fate(step, j)}") for j, slot in slots]
    notes.append((own, f"  + {_added(step)}"))
    return [
        {"x": [s.target for _, s in slots if s.target is not None] + [step.target],
         "y": [j for j, s in slots if s.target is not None] + [own]},
        {"x": [s.draft for _, s in slots] + ([] if step.draft is None else [step.draft]),
         "y": [j for j, _ in slots] + ([] if step.draft is None else [own])},
        {"x": [s.survival for _, s in slots], "y": [j for j, _ in slots]},
        {"x": [1.0] * len(notes), "y": [row for row, _ in notes],
         "text": [text for _, text in notes]},
    ]


def ticks(step: Step, rows: int) -> dict[str, Any]:
    """Names of the rows: the slot and its token."""
    names = [f"slot {j + 1}  {_short(slot.text)}" for j, slot in enumerate(step.slots)]
    names += [""] * (rows - len(names))
    names.append(f"target  {_short(step.text)}")
    return {"tickvals": list(range(rows + 1)), "ticktext": [escape(n, quote=False) for n in names]}


def _short(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= LABEL else shown[: LABEL - 1] + "\u2026"


def _fate(step: Step, j: int) -> str:
    slot = step.slots[j]
    if slot.accept is not None:
        return f"{slot.fate} (chance to stay {slot.accept:.0%})"
    if slot.fate == "not sent":
        return "not sent to the target"
    return "dropped, never judged"


def _added(step: Step) -> str:
    if not step.bonus:
        return f"replaces slot {step.kept + 1}"
    return "bonus: nothing was rejected" if step.sent else "plain: nothing was sent"


# ---------------------------------------------------------------------------------- in words
def caption(recording: Recording, number: int) -> str:
    """The finding: how many stayed, what the target added, what had been expected."""
    step = recording.steps[number]
    added = "".join(recording.texts[step.start : step.start + step.kept + 1])
    return (f"Step {number + 1} of {len(recording.steps)}: {step.kept} of {step.sent} drafts stay "
            f"and the target adds \u201c{visible(step.text)}\u201d, so one pass writes "
            f"{step.kept + 1} token{'s' * (step.kept > 0)}: \u201c{visible(added)}\u201d. "
            f"Expected were {step.expected:.2f}.")


def alt(recording: Recording, number: int) -> str:
    step = recording.steps[number]
    told = "; ".join(
        f"slot {j + 1} {visible(s.text)}: draft {s.draft:.0%}, "
        + (f"target {s.target:.0%}, " if s.target is not None else "") + s.fate
        for j, s in enumerate(step.slots))
    return (f"Bars of step {number + 1} behind \u201c{visible(step.anchor)}\u201d. {told}"
            f"{'; ' if told else ''}target adds {visible(step.text)} with {step.target:.0%}.")


def table(step: Step) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """c and a beside the probabilities, slot by slot."""
    rows = [(str(j + 1), visible(s.text), f"{s.draft:.1%}",
             "\u2013" if s.target is None else f"{s.target:.1%}",
             "\u2013" if s.accept is None else f"{s.accept:.1%}",
             f"{s.confidence:.2f}", f"{s.survival:.2f}", s.fate)
            for j, s in enumerate(step.slots)]
    rows.append(("target", visible(step.text),
                 "\u2013" if step.draft is None else f"{step.draft:.1%}", f"{step.target:.1%}",
                 "\u2013", "\u2013", "\u2013", "bonus" if step.bonus else "replacement"))
    return ("slot", "token", "p_d", "p_t", "chance to stay", "confidence c", "survival a",
            "fate"), tuple(rows)
