"""Claims in circulation about the model, and what became of each when it was computed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from labkit.errors import InputError
from labkit.viz.palette import Mark
from labkit.viz.picture import STYLE, Picture, base_layout, table_html

WIDTH = 900
TEXTS = {"A": "a systems breakdown for developers", "B": "a serving team's post, 2026-09-10",
         "C": "a news item, 2026-09-11"}
VERDICTS = {
    "holds": Mark("holds", "#0072B2", "plain"),
    "wrong": Mark("wrong", "#D55E00", "hatched", "/"),
    "not derivable here": Mark("not derivable here", "#808080", "dotted", "."),
}


@dataclass(frozen=True)
class Claim:
    """What one or more of `TEXTS` say."""

    number: int
    says: str
    by: str


CLAIMS = tuple(Claim(n, says, by) for n, (says, by) in enumerate((
    ("552B backbone, 196B Engram, 8B active in prefill, 16B in decode", "ABC"),
    ("40 layers: 20 causal encoder, 20 decoder, whose KV comes from the encoder's end", "ABC"),
    ("prefill throughput 2.1 times that of a full 40-layer pass", "A"),
    ("890 bytes a token; V4 had 3,584", "ABC"),
    ("437 times less than DeepSeek V1", "C"),
    ("800K tokens: FP16 GQA (8 heads of 128, 40 layers) takes about 13.1 GB", "A"),
    ("800K tokens: MLA (a latent of 576) takes about 1.74 GB", "A"),
    ("800K tokens: V4.1 takes about 0.71 GB; 1,048,576 tokens about 0.87 GiB", "AB"),
    ("Engram is added after the embedding, before the first MoE layer", "A"),
    ("Engram sits in two modules, at layers 1 and 14, gated", "B"),
    ("the n-gram hashing is locality-sensitive", "A"),
    ("2-, 3- and 4-grams, eight heads, token ids compressed first", "B"),
    ("Full about 15 %, Reindex 25 %, Reuse 60 % of the layers", "A"),
    ("FP4 blocks of 32 with FP8 scales", "A"),
    ("FP4 with one scale for every 16 channels", "B"),
    ("a 64-dimensional high-precision channel is kept beside FP4", "A"),
    ("replay window 4,096, replay buffer 1,024", "A"),
    ("window 128, replay of the latest 128 tokens, approximate", "B"),
    ("replay projects KV from stored encoder states in 2.4 microseconds", "A"),
    ("the persistent cache is an eighth", "ABC"),
    ("DSpark: three blocks, five positions, confidence head, load-aware scheduler", "B"),
    ("reasoning effort is an integer from 1 to 100", "B"),
    ("48 shards, 475.25 GiB; four GPUs of 95.59 GiB miss it by 92.88 GiB", "B"),
    ("FP4 Engram saves roughly 98 GB", "B"),
    ("24 full streams of 1M tokens on a node of 8 x 141 GB", "A"),
    ("zero measurable degradation from FP4", "A"),
    ("a bidirectional encoder would break prefix caching; CED keeps it", "AB"),
    ("global KV is kept 72 hours on host or SSD; the window pool is 10 % of host memory", "B"),
), 1))


@dataclass
class Ledger:
    """Verdicts by number, in any order; shows itself as a table."""

    verdicts: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, number: int, verdict: str, why: str) -> str:
        """Enter a verdict, one of `VERDICTS`, and what it rests on; the line that was entered.

        InputError for a claim that there is none of, another word, or no reason.
        """
        if not 1 <= number <= len(CLAIMS):
            raise InputError(f"claim {number}: there are claims 1 to {len(CLAIMS)}")
        if verdict not in VERDICTS or not why:
            raise InputError(f"verdict is {verdict!r}: give one of {', '.join(VERDICTS)}, and why")
        self.verdicts[number] = verdict, why
        return f"{number:2} {verdict}: {why}"

    def judge(self, number: int, holds: bool, why: str) -> str:
        """The same from something that was computed."""
        return self.add(number, "holds" if holds else "wrong", why)

    @property
    def rows(self) -> tuple[tuple[Any, ...], ...]:
        return tuple((c.number, c.says, " ".join(c.by), *self.verdicts.get(c.number, ("open", "")))
                     for c in CLAIMS)

    COLUMNS = ("", "claim", "by", "verdict", "because")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        lines = "\n".join("  ".join(str(v) for v in row) for row in self.rows)
        table = table_html(self.COLUMNS, self.rows)
        return {"text/html": f'<div class="labkit">{STYLE}{table}</div>', "text/plain": lines}

    def counts(self) -> dict[str, Counter[str]]:
        """Text -> how many of its claims got which verdict."""
        found: dict[str, Counter[str]] = {text: Counter() for text in TEXTS}
        for claim in CLAIMS:
            if claim.number in self.verdicts:
                for text in claim.by:
                    found[text][self.verdicts[claim.number][0]] += 1
        return found

    def picture(self) -> Picture:
        """Bars: a row a text, a part a verdict."""
        import plotly.graph_objects as go

        counts, texts = self.counts(), list(TEXTS)
        fig = go.Figure(layout=base_layout(
            WIDTH, 90 + 44 * len(texts), margin={"l": 60, "r": 20, "t": 40, "b": 46},
            xaxis={"range": [0, len(CLAIMS)], "fixedrange": True, "zeroline": False,
                   "showgrid": False, "tickvals": list(range(0, len(CLAIMS) + 1, 4)),
                   "title": {"text": "claims"}},
            yaxis={"range": [len(texts) - 0.5, -0.5], "fixedrange": True, "showgrid": False,
                   "zeroline": False, "tickvals": list(range(len(texts))),
                   "ticktext": [f"text {t}" for t in texts]}))
        base = [0] * len(texts)
        for verdict, mark in VERDICTS.items():
            values = [counts[text][verdict] for text in texts]
            fig.add_bar(orientation="h", y=list(range(len(texts))), x=values, base=list(base),
                        width=0.6, name=mark.label, text=[str(v or "") for v in values],
                        textposition="inside", insidetextfont={"color": "#FFF"}, textangle=0,
                        marker={"color": mark.colour, "pattern": {"shape": mark.pattern},
                                "line": {"width": 0}}, hoverinfo="skip")
            base = [b + v for b, v in zip(base, values, strict=True)]
        all_ = Counter(verdict for verdict, _ in self.verdicts.values())
        caption = f"Of {len(CLAIMS)} claims " + ", ".join(
            f"{all_[v]} {'hold' if v == 'holds' else 'are ' + v}" for v in VERDICTS) + "."
        rows = tuple((t, TEXTS[t], *(counts[t][v] for v in VERDICTS)) for t in texts)
        alt = "Bars of verdicts by text. " + " ".join(
            f"Text {t}: " + ", ".join(f"{counts[t][v]} {v}" for v in VERDICTS) + "."
            for t in texts)
        return Picture(fig, alt, caption, ("text", "what it is", *VERDICTS), rows)
