"""The figures as tables, of which a terminal and the record show the same."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from labkit.train.attention_mass import Mass
from labkit.train.figures import Figures
from labkit.train.recall import CONTROLS, NEAR
from labkit.train.samples import SAMPLE_TOKENS
from labkit.train.targets import missed, targets

WIDTH = 100  # characters of a note's line on a terminal


@dataclass(frozen=True)
class Table:
    """words: columns of words, which are set to the left; numbers are set to the right."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    words: tuple[int, ...] = (0,)

    def text(self) -> str:
        lines = (self.head, *self.rows)
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        set_ = ["  ".join(cell.ljust(width) if i in self.words else cell.rjust(width)
                          for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
                for line in lines]
        return "\n".join([self.title, *("  " + line.rstrip() for line in set_),
                          *("  " + line for line in textwrap.wrap(self.note, WIDTH))])

    def markdown(self) -> list[str]:
        """Lines, the last one empty."""
        return [f"### {self.title}", "", *("| " + " | ".join(line) + " |" for line in (
                    self.head, ("---",) * len(self.head), *self.rows)), "",
                *([self.note, ""] if self.note else [])]


def tables(f: Figures) -> list[Table]:
    """Everything but the samples, the targets first."""
    return [target_table(f), size_table(f), text_table(f), *recall_tables(f), *mass_tables(f),
            kind_table(f), draft_table(f), sample_table(f)]


def figures_text(f: Figures) -> str:
    """The figures for a terminal."""
    return "\n\n".join(table.text() for table in tables(f))


def target_table(f: Figures) -> Table:
    found = targets(f)
    rows = tuple((t.name, _number(t.value), f"{t.direction} {_number(t.bound)}",
                  t.verdict + (" (an aim)" if t.aim else ""), t.measured) for t in found)
    lost = len(missed(found))
    asked = sum(not t.aim for t in found)
    return Table("Targets", ("", "value", "target", "verdict", "how"), rows,
                 f"{asked - lost} of {asked} targets are reached. What is not measured is not "
                 "reached.", words=(0, 3, 4))


def size_table(f: Figures) -> Table:
    rows = [("parameters", f"{f.parameters:,}"),
            ("parameters in a token's step", f"{f.active_parameters:,}")]
    if f.draft is not None:
        rows.append(("parameters of the draft", f"{f.draft.parameters:,}"))
    if f.file_bytes is not None:
        rows.append(("bytes of the weights", f"{f.file_bytes:,}"))
    rows.append(("context, tokens", f"{f.context:,}"))
    return Table("Size", ("", "count"), tuple(rows))


def text_table(f: Figures) -> Table:
    rows = [("as shipped (weights and cache rounded)", f.bits_per_byte),
            ("cache not rounded", f.bits_per_byte_unrounded_cache),
            ("Engram muted", f.bits_per_byte_engram_muted),
            ("gzip -9 after reading the training text", f.bits_per_byte_gzip),
            ("equal odds for every token", f.bits_per_byte_equal_odds)]
    if f.plain is not None:
        rows.insert(3, ("a plain transformer", f.plain.heldout_bits_per_byte))
    return Table("Held-out novels", ("", "bits per byte"),
                 tuple((name, f"{value:.4f}") for name, value in rows),
                 f"{f.tokens:,} tokens in windows of {f.window:,} that overlap by half.")


def recall_tables(f: Figures) -> list[Table]:
    """Rows by distance, columns by control; nothing where no distances can be set."""
    if not f.recall:
        return []
    points = {(p.distance, p.control): p for p in f.recall}
    controls = [c for c in CONTROLS if any(p.control == c for p in f.recall)]
    rows = []
    for distance in dict.fromkeys(p.distance for p in f.recall):
        length = next(p.length for p in f.recall if p.distance == distance)
        rows.append((str(distance), str(length), *(
            f"{p.share:.0%} of {p.count}" if (p := points.get((distance, control))) else "-"
            for control in controls)))
    low, high = min(p.interval for p in f.recall if p.control == controls[0])
    return [Table("Needle recall", ("distance", "text", *controls), tuple(rows),
                  "Values recalled whole, keys and values drawn fresh for each example, the same "
                  "examples for all controls. Distance and text are in tokens. 95 % interval of "
                  f"the worst as shipped: {low:.0%} to {high:.0%}. The target is for distances "
                  f"up to {NEAR}.")]


def mass_tables(f: Figures) -> list[Table]:
    if not f.attention_mass:
        return []
    def row(m: Mass) -> tuple[str, ...]:
        reads = "" if m.source == m.layer else f" of layer {m.source}"
        return (f"layer {m.layer}, {m.kind}{reads}", m.text, f"{m.queries:,}", f"{m.kept:.3f}",
                f"{m.kept_best:.3f}", f"{m.kept_random:.3f}", f"{m.kept_entries:.3f}",
                f"{m.kept_entries_random:.3f}")

    return [Table("Attention mass on what is read",
                  ("selection", "text", "queries", "(a) kept", "at best", "at random", "(b) kept",
                   "at random"), tuple(map(row, f.attention_mass)),
                  "(a) of the mass on all keys: the window, which is always read, and all visible "
                  "entries; without the sink, which has no value; the target is for this. "
                  "(b) of the mass on visible entries alone. At best, at random: "
                  "the selections of the same size that keep the most of (a), and random ones. "
                  "Only queries that see more entries than they may select.",
                  words=(0, 1))]


def kind_table(f: Figures) -> Table:
    rows = tuple((k.kind, f"{k.tokens:,}", f"{k.bits_per_byte:.3f}",
                  f"{k.bits_per_byte_muted:.3f}", f"{k.more:+.3f}", f"{k.more_nats:+.3f}")
                 for k in f.kinds)
    return Table("Engram muted, by kind of text",
                 ("text", "tokens", "bits per byte", "muted", "more", "nats a token more"), rows,
                 "All but the training half of the facts is held out.")


def draft_table(f: Figures) -> Table:
    if f.draft is None:
        return Table("Drafts", ("", ""), (("no draft", ""),))
    d = f.draft
    rows = [("held-out novels", d.proposals, d.sampled_length, d.greedy_length)]
    if d.code_sampled_length is not None and d.code_greedy_length is not None:
        rows.append(("held-out code", d.code_proposals or 0, d.code_sampled_length,
                     d.code_greedy_length))
    return Table(
        "Drafts, tokens a step (drafts alone)", ("text", "proposals", "temperature 1", "greedy"),
        tuple((name, f"{count:,}", f"{sampled + 1:.2f} ({sampled:.2f})",
               f"{greedy + 1:.2f} ({greedy:.2f})") for name, count, sampled, greedy in rows),
        "Calibration error of survival by slot, temperature 1: "
        + " ".join(f"{e:.3f}" for e in d.ece_after) + ".")


def sample_table(f: Figures) -> Table:
    written = [s for s in f.samples if s.temperature == 0.8]
    return Table(f"Samples of {SAMPLE_TOKENS} tokens", ("", "value"), (
        (f"words that occur in the training text, {len(written)} at temperature 0.8",
         f"{f.known_words:.1%}"),
        ("longest run copied from it, all samples", f"{f.copied_run} words")))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if value == 0 or abs(value) >= 0.001 else f"{value:.1e}"
