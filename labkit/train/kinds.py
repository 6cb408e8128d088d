"""What each kind of text costs, and how much more without Engram."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from labkit.lab import Lab
from labkit.text.corpus import Split
from labkit.text.synthetic import documents
from labkit.train.controls import muted_engram
from labkit.train.evaluate import Cost, text_cost
from labkit.train.recall import needles_fit

LENGTH = 512  # tokens of a document at most: the sentences of a fact table come once each
NOVELS, MEMORISED = "novels", "facts, training half"
KINDS: dict[str, tuple[str, Split]] = {
    MEMORISED: ("facts", "train"), "facts, held-out half": ("facts", "heldout"),
    "code": ("code", "heldout"), "arithmetic": ("arithmetic", "heldout"),
    "needle": ("needle", "heldout"),
}
"""Name -> kind and split of `labkit.text.synthetic`. Facts of the training half are word for word
what was trained on; all else is held out."""


@dataclass(frozen=True)
class KindCost:
    """Bits per byte and nats a token of one kind of text, as shipped and with Engram muted."""

    kind: str
    tokens: int
    bits_per_byte: float
    bits_per_byte_muted: float
    nats_per_token: float
    nats_per_token_muted: float

    @property
    def more(self) -> float:
        """Bits per byte that muting Engram adds."""
        return self.bits_per_byte_muted - self.bits_per_byte

    @property
    def more_nats(self) -> float:
        return self.nats_per_token_muted - self.nats_per_token


def kind_cost(kind: str, shipped: Cost, muted: Cost) -> KindCost:
    return KindCost(kind, shipped.tokens, shipped.bits_per_byte, muted.bits_per_byte,
                    shipped.nats_per_token, muted.nats_per_token)


def kind_costs(lab: Lab, count: int,
               progress: Callable[[list[str]], Iterable[str]] = iter) -> tuple[KindCost, ...]:
    """Of `count` documents of every written kind."""
    names = [name for name in KINDS if name != "needle" or needles_fit(lab.tokenizer)]
    length = min(LENGTH, lab.config.max_position_embeddings - 1)
    out = []
    for name in progress(names):
        kind, split = KINDS[name]
        found = islice(documents(kind, lab.tokenizer, split=split, length=length), count)
        texts = {str(number): document.text for number, document in enumerate(found)}

        def cost(texts: dict[str, str] = texts) -> Cost:
            return text_cost(lab.model, lab.tokenizer, texts, length=length + 1, batch=4)

        shipped = cost()
        with muted_engram(lab.model):
            out.append(kind_cost(name, shipped, cost()))
    return tuple(out)
