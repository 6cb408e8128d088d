"""The shape vocabulary as one table, with the numbers of the models at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit.config import ModelConfig
from labkit.viz.picture import STYLE, table_html

SYMBOLS = (  # symbol, meaning, field of the config (None: of a run)
    ("B", "batch: rows of a forward", None),
    ("T", "tokens of a row", None),
    ("D", "hidden size", "hidden_size"),
    ("C", "residual streams (mHC)", "hc_mult"),
    ("H", "attention heads", "num_attention_heads"),
    ("d", "head dimension", "head_dim"),
    ("R", "rotated channels of a head", "qk_rope_head_dim"),
    ("r", "compression ratio: tokens per entry", "compress_ratios"),
    ("S", "compressed entries, floor(T / r)", None),
    ("K", "entries that a query selects", "index_topk"),
    ("W", "window: latest tokens, seen uncompressed", "sliding_window"),
)


@dataclass(frozen=True)
class Legend:
    """A table that shows itself in a notebook; `rows` holds what it says."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        lines = "\n".join("  ".join(str(v) for v in row) for row in self.rows)
        table = table_html(self.columns, self.rows)
        return {"text/html": f'<div class="labkit">{STYLE}{table}</div>', "text/plain": lines}


def shape_legend(**configs: ModelConfig) -> Legend:
    """shape_legend(mini=..., flash=...): symbol, meaning, field, and each model's number."""
    rows = []
    for symbol, meaning, field in SYMBOLS:
        numbers = [_number(config, field) for config in configs.values()]
        rows.append((symbol, meaning, field or "of a run", *numbers))
    return Legend(("symbol", "meaning", "config field", *configs), tuple(rows))


def _number(config: ModelConfig, field: str | None) -> str:
    if field is None:
        return ""
    value = getattr(config, field)
    if isinstance(value, tuple):  # per layer
        return ", ".join(str(v) for v in sorted({v for v in value if v}, reverse=True))
    return f"{value:,}"
