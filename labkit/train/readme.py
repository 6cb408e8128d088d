"""What the README says of the model in the repository, from its figures and its runs."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.pages import plain_marks
from labkit.train.draft_record import DraftRecord, draft_minutes
from labkit.train.figures import Figures
from labkit.train.recall import AS_SHIPPED, RecallPoint
from labkit.train.runs import Run, tokens_read
from labkit.train.samples import Sample

SHOWN = (AS_SHIPPED, "window only", "random selection", "encoder blind", "decoder blind")
TEMPERATURE = 0.8    # of the sample that is shown


def readme_part(f: Figures, runs: Sequence[Run], draft: DraftRecord | None) -> str:
    """Markdown, for between the markers of README.md."""
    minutes = sum(run["seconds"] for run in runs) / 60
    million = sum(map(tokens_read, runs)) / 1e6
    parts = [
        f"`data/mini` has {f.parameters:,} parameters, of which a token uses "
        f"{f.active_parameters:,}"
        + (f", and a draft of {draft.figures.parameters:,} beside them" if draft else "")
        + f"; its context is {f.context:,} tokens. It was trained for {minutes:.0f} minutes on one "
        f"CPU core, on {million:.1f} million tokens of six novels and of text written by code"
        + (f"; the draft for {draft_minutes(draft.facts):.0f} minutes more" if draft else "")
        + ". Measured on held-out text, the last 5 % of each novel:",
        _table(("held-out text", "bits per byte"), [
            ("as shipped (weights and cache rounded)", f"{f.bits_per_byte:.3f}"),
            ("cache not rounded", f"{f.bits_per_byte_unrounded_cache:.3f}"),
            ("Engram muted", f"{f.bits_per_byte_engram_muted:.3f}"),
            *([("a plain transformer of as many active parameters, on the same rows",
                f"{f.plain.heldout_bits_per_byte:.3f}")] if f.plain else []),
            ("gzip -9 after reading the training text", f"{f.bits_per_byte_gzip:.3f}")])]
    if f.recall:
        parts += [
            "It finds again what was said once: the number of a name, both drawn fresh for every "
            "example, is given back whole through the hard top-k, so many tokens later:",
            _recall(f.recall)]
    shown = next((s for s in f.samples if s.temperature == TEMPERATURE), None)
    if shown:
        parts += [f"A sample at temperature {TEMPERATURE}, seed {shown.seed}; the prompt is its "
                  f"first {len(shown.prompt.split())} words:", _quoted(shown),
                  f"In the samples at temperature {TEMPERATURE}, {_percent(f.known_words, 1)} of "
                  "the words occur in the training text; the longest run of words copied from it, "
                  f"at any temperature, is {f.copied_run}."]
    if f.draft:
        parts += [f"Of five drafted tokens {f.draft.sampled_length:.2f} are accepted at "
                  "temperature 1 on held-out prose"
                  + (f" and {f.draft.code_sampled_length:.2f} on code"
                     if f.draft.code_sampled_length is not None else "")
                  + "; the target adds one to each. What that is worth is in "
                  "[docs/dspark.md](docs/dspark.md)."]
    return "\n\n".join(parts)


def _recall(points: Sequence[RecallPoint]) -> str:
    found = {(p.control, p.distance): p for p in points}
    distances = list(dict.fromkeys(p.distance for p in points))
    rows = [(control, *(_percent(p.share) if (p := found.get((control, d))) else "-"
                        for d in distances)) for control in SHOWN]
    return _table(("tokens back", *map(str, distances)), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _quoted(sample: Sample) -> str:
    lines = plain_marks(sample.prompt + sample.text).split("\n")
    return "\n".join(f"> {line}".rstrip() for line in lines)


def _percent(share: float, digits: int = 0) -> str:
    return f"{share:.{digits}%}".replace("%", " %")
