"""`labkit accounting`: the accounts of a configuration as text."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.checkpoint.accounting import (
    PARTS,
    STORAGE_NAMES,
    Active,
    Totals,
    accounting,
    active_decode,
    active_prefill,
    component_of,
    part_of,
    totals_by,
)
from labkit.checkpoint.layout import storage_of
from labkit.config import ModelConfig


def accounting_text(config: ModelConfig, full: bool = False) -> str:
    """Tables by part, component and format, active parameters, and last the exact totals.

    full  also every tensor, one a line: name, dtype, shape, bytes
    """
    form = "released" if config.quantized else "plain"
    rows = accounting(config)
    blocks = []
    if full:
        blocks.append("\n".join(f"{r.name}\t{r.dtype}\t{list(r.shape)}\t{r.bytes}" for r in rows))
    parts = totals_by(config, part_of)
    blocks.append(_table(
        f"By part ({form} form)",
        [(f"{name} ({PARTS[name]})", parts[name]) for name in PARTS if name in parts],
    ))
    inner = totals_by(config, lambda n: component_of(n) if part_of(n) == "backbone" else "")
    inner.pop("", None)
    blocks.append(_table("Backbone by component", _largest_first(inner)))
    if form == "released":
        storage = totals_by(config, storage_of)
        blocks.append(_table(
            "By number format (weights with their scales)",
            [(STORAGE_NAMES[k], t) for k, t in _largest_first(storage)],
        ))
    blocks.append("\n".join([
        "Active parameters per token",
        *_active_lines("decode", active_decode(config)),
        *_active_lines("prefill", active_prefill(config)),
    ]))
    total = rows.totals
    blocks.append(
        f"parameters: {total.parameters:,} ({_short(total.parameters)})\n"
        f"total: {total.tensors:,} tensors, {total.bytes:,} bytes"
    )
    return "\n\n".join(blocks)


def _largest_first(groups: dict[str, Totals]) -> list[tuple[str, Totals]]:
    return sorted(groups.items(), key=lambda item: -item[1].parameters)


def _table(title: str, lines: Iterable[tuple[str, Totals]]) -> str:
    lines = list(lines)
    width = max(len(title), *(len(name) for name, _ in lines))
    out = [f"{title:<{width}}  {'tensors':>8}  {'parameters':>19}  {'':>8}  {'bytes':>19}"]
    for name, t in lines:
        out.append(f"{name:<{width}}  {t.tensors:>8,}  {t.parameters:>19,}  "
                   f"{_short(t.parameters):>8}  {t.bytes:>19,}")
    return "\n".join(out)


def _active_lines(name: str, active: Active) -> list[str]:
    lines = [f"  {name:<8}{_short(active.counted):>9}  {active.convention}"]
    total = active.counted
    for extra, count in active.not_counted.items():
        if count:
            total += count
            lines.append(f"{'':19}  with {extra} ({_short(count)}): {_short(total)}")
    return lines


def _short(count: int) -> str:
    """551,566,180,464 -> 551.57 B"""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
