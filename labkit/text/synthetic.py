"""Text written by code, with a structure that is known: what a mini trains and is examined on.

needle      a key and its value, novel text of a stated length, and the key again: recall
copy        a row of words said over and over
recite      the same with a row longer than a mini's window: what comes next is out of its sight
pairs       names and numbers listed over and over in changing order: recall, densely
code        classes of boilerplate: the same runs of tokens again and again
arithmetic  sums, differences and products, one a line, all right
facts       sentences about invented people from a fixed table, word for word every time
novels      passages of the corpus, so that one iterator can mix all of them

A document is a function of (kind, split, seed, index), the vocabulary and the length asked
for: nothing is kept between calls, so a run can be taken up at any index. What must not be
known from training differs by split: filler comes from the split's part of the novels, facts
from the split's half of the table, and arithmetic questions belong to one split each.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, count
from textwrap import indent

from labkit.errors import InputError
from labkit.text.corpus import Split
from labkit.text.passages import filler, passage, words
from labkit.text.tokenizer import Tokenizer

SHORTEST_DOCUMENT = 128
"""Tokens: the least length that may be asked for; every kind has room for its structure."""


@dataclass(frozen=True)
class Answer:
    """A value that the text before it determines.

    at: index of its first id. size: how many ids. distance: tokens back to the same ids, so
    `ids[at + k] == ids[at + k - distance]` for k < size.
    """

    text: str
    at: int
    size: int
    distance: int


@dataclass(frozen=True)
class Document:
    """One text; `tokenizer.encode(text)` is `ids` (no BOS). answers: needle documents only."""

    kind: str
    split: Split
    seed: int
    index: int
    text: str
    ids: tuple[int, ...]
    answers: tuple[Answer, ...] = ()


def _rng(kind: str, split: str, seed: int, index: int) -> random.Random:
    return random.Random(f"{kind} {split} {seed} {index}")


def invented(rng: random.Random) -> str:
    """A name that is no word: three syllables, over a million of them."""
    syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))
    return "".join(syllables).capitalize() + rng.choice("lnrstx")


# -- (a) key-value recall --------------------------------------------------------------------

def _joined(tokenizer: Tokenizer, parts: list[str]) -> tuple[list[int], list[int]]:
    """Ids of the joined parts, and the index at which each part starts."""
    each = [tokenizer.encode(part) for part in parts]
    ids = [id_ for part in each for id_ in part]
    if tokenizer.encode("".join(parts)) != ids:
        raise InputError(f"the vocabulary {tokenizer.source} joins a word to the one before it, "
                         "so distances in tokens cannot be set; use a byte-level BPE vocabulary "
                         "that splits text at spaces")
    return ids, list(accumulate((len(part) for part in each[:-1]), initial=0))


def _with_statements(words: list[str], statements: list[list[str]],
                     rng: random.Random) -> list[str]:
    """`words` with the statements put between them, each as its parts (head, value, stop)."""
    places = sorted(rng.randrange(len(words) + 1) for _ in statements)
    parts, done = [], 0
    for place, statement in zip(places, statements, strict=True):
        parts += ["".join(words[done:place]), *statement]
        done = place
    return [*parts, "".join(words[done:])]


def _needle(tokenizer: Tokenizer, split: Split, rng: random.Random, length: int,
            distance: int | None, others: int, ask_all: bool) -> tuple[list[str], dict[str, str]]:
    """Parts of a text of `length` tokens, and the head of each asked statement -> its value.

    distance None: drawn, evenly in its logarithm, from all that are possible; the text is then
    no longer than that takes.
    """
    def size(parts: list[str]) -> int:
        return len(tokenizer.encode("".join(parts)))

    heads: list[str] = []
    while len(heads) <= others:
        if (head := f" The number of {invented(rng)} is ") not in heads:
            heads.append(head)
    values = [str(value) for value in rng.sample(range(1000, 10_000), others + 1)]
    pairs = [[head, value, "."] for head, value in zip(heads, values, strict=True)]
    asked, rest = pairs[0], pairs[1:]
    # From the value to the value with nothing in between: one whole statement.
    shortest = size(asked)
    last = list(rest) if ask_all else []  # asked after it
    largest = length - shortest - sum(map(size, last))
    if largest < shortest:
        raise InputError(f"length is {length}, too short for a statement and its question; "
                         f"ask for {length + shortest - largest} tokens or more")
    drawn = distance is None
    if distance is None:
        distance = round(shortest * math.exp(rng.random() * math.log(largest / shortest)))
    if not shortest <= distance <= largest:
        raise InputError(f"distance is {distance}: in {length} tokens this key can be asked "
                         f"{shortest} to {largest} tokens after its value; choose one of these "
                         "or another length")
    lead, gap = largest - distance, distance - shortest  # tokens before and between
    if drawn:  # no more than the other statements and a few words
        lead = min(lead, sum(map(size, rest)) + rng.randrange(64))
    before: list[list[str]] = []
    between: list[list[str]] = []
    for pair in rest:  # a statement goes where there is room for it, if anywhere
        need = size(pair)
        fits = [(room, side) for room, side in ((lead, before), (gap, between)) if room >= need]
        if not fits:
            last = [kept for kept in last if kept is not pair]  # not stated, so not asked
            continue
        side = rng.choices([s for _, s in fits], [room for room, _ in fits])[0]
        side.append(pair)
        lead, gap = (lead - need, gap) if side is before else (lead, gap - need)
    rng.shuffle(last)
    words = filler(tokenizer, split, lead, rng)
    parts = [*_with_statements(words, before, rng), *asked]
    words = filler(tokenizer, split, gap, rng)
    parts += _with_statements(words, between, rng)
    for pair in [asked, *last]:
        parts += pair
    return parts, {pair[0]: pair[1] for pair in [asked, *last]}


def _answers(tokenizer: Tokenizer, parts: list[str], asked: dict[str, str],
             ) -> tuple[tuple[int, ...], tuple[Answer, ...]]:
    ids, starts = _joined(tokenizer, parts)
    stated: dict[str, int] = {}
    found = []
    for number, head in enumerate(parts):
        if head not in asked:
            continue
        at = starts[number + 1]
        if head in stated:
            value = parts[number + 1]
            found.append(Answer(value, at, len(tokenizer.encode(value)), at - stated[head]))
        stated[head] = at
    return tuple(ids), tuple(found)


def recall(tokenizer: Tokenizer, distance: int, length: int, *, split: Split = "heldout",
           seed: int = 0, index: int = 0, others: int = 3) -> Document:
    """A text of exactly `length` tokens with one answer, `distance` tokens after its statement.

    `ids[:answer.at]` is the prompt, the next `answer.size` ids are right. Key and value are
    drawn for this example; `others` more keys with other values stand where there is room, so
    that the latest number is not the answer. `length` leaves BOS out. InputError for a
    distance that does not fit (the shortest is a statement, about 15 tokens).
    """
    _check("needle", split, length)
    if others < 0:
        raise InputError(f"others is {others}: it must be 0 or more")
    rng = _rng(f"recall {distance} {length} {others}", split, seed, index)
    parts, asked = _needle(tokenizer, split, rng, length, distance, others, ask_all=False)
    ids, answers = _answers(tokenizer, parts, asked)
    return Document("needle", split, seed, index, "".join(parts), ids, answers)


# -- (b) copying ------------------------------------------------------------------------------

COPIED = 64  # words: from so few, looking back for what came next is learnt within minutes
RECITED = (66, 100)  # words of a row, one token each: more than the 64 of a mini's window


def _copy(tokenizer: Tokenizer, split: Split, seed: int, rng: random.Random) -> Iterator[str]:
    """A row of frequent words, over and over."""
    row = rng.choices(words(tokenizer)[:COPIED], k=rng.randint(6, 24))
    while True:
        yield from row


def _recite(tokenizer: Tokenizer, split: Split, seed: int, rng: random.Random) -> Iterator[str]:
    """A long row of frequent words, over and over."""
    row = rng.choices(words(tokenizer)[:COPIED], k=rng.randint(*RECITED))
    while True:
        yield from row


# -- (c) pairs -------------------------------------------------------------------------------

def _pairs(tokenizer: Tokenizer, split: Split, seed: int,
           rng: random.Random) -> Iterator[str]:
    """A few names with their numbers, over and over, each time in another order."""
    pairs = [f"{invented(rng)} {rng.randrange(1000, 10_000)}\n" for _ in range(rng.randint(2, 12))]
    while True:
        rng.shuffle(pairs)
        yield from pairs


# -- (d) code-like boilerplate ---------------------------------------------------------------

NAMES = ("name", "total", "count", "value", "letter", "answer", "number", "table")


def function(rng: random.Random, names: tuple[str, ...] = NAMES) -> str:
    """A method that sets one of `names`."""
    name, number = rng.choice(names), rng.randrange(10)
    return (f"def set_{name}(self, {name}):\n    self.{name} = {name} + {number}\n"
            f"    return self.{name}\n\n")


def _code(tokenizer: Tokenizer, split: Split, seed: int,
          rng: random.Random) -> Iterator[str]:
    """A class: two fields of the usual names and two invented ones, then methods of them."""
    names = (*rng.sample(NAMES, 2), invented(rng).lower(), invented(rng).lower())
    yield f"class {invented(rng)}:\n" + "".join(f"    {name} = 0\n" for name in names) + "\n"
    while True:
        name = rng.choice(names)
        yield indent(rng.choice((
            function(rng, names),
            f"def get_{name}(self):\n    return self.{name}\n\n",
            f"def reset_{name}(self):\n    self.{name} = 0\n    return self.{name}\n\n",
        )), "    ")


# -- (e) arithmetic ----------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
}


def question_split(question: str) -> Split:
    """The one split that has this question ("17 + 25"): a tenth of them are held out."""
    return "heldout" if zlib.crc32(question.encode()) % 10 == 0 else "train"


def _arithmetic(tokenizer: Tokenizer, split: Split, seed: int,
                rng: random.Random) -> Iterator[str]:
    while True:
        sign = rng.choice(tuple(OPERATIONS))
        a, b = sorted((rng.randrange(100), rng.randrange(100)), reverse=True)
        if sign == "*":
            b %= 10
        question = f"{a} {sign} {b}"
        if question_split(question) == split:
            yield f"{question} = {OPERATIONS[sign](a, b)}\n"


# -- (f) names and facts -----------------------------------------------------------------------

TRADES = ("baker", "carpenter", "doctor", "farmer", "lawyer", "merchant", "painter", "teacher")
PEOPLE = 64
"""In a table; half of them in each split."""
FACTS = 0
"""Seed of the table that all documents tell, whatever their own seed: facts do not change."""


@dataclass(frozen=True)
class Fact:
    """What a table says of one person; `cue + answer` begins `sentence`, which never varies."""

    name: str
    trade: str
    year: int
    place: str

    @property
    def cue(self) -> str:
        return f"{self.name}, a {self.trade} born in {self.year}, lives at"

    @property
    def answer(self) -> str:
        return f" {self.place}"

    @property
    def sentence(self) -> str:
        return f"{self.cue}{self.answer}.\n"


@lru_cache(maxsize=16)
def fact_table(seed: int, split: Split) -> tuple[Fact, ...]:
    """The split's half of the seed's table. No name, surname or place is in both halves."""
    _check("facts", split)
    rng = random.Random(f"fact table {seed}")
    words: dict[str, None] = {}  # distinct, in the order drawn
    while len(words) < 3 * PEOPLE:
        words[invented(rng)] = None
    drawn = iter(words)
    table = [Fact(f"{next(drawn)} {next(drawn)}", rng.choice(TRADES), rng.randrange(1700, 1800),
                  next(drawn)) for _ in range(PEOPLE)]
    return tuple(table[: PEOPLE // 2] if split == "train" else table[PEOPLE // 2 :])


def _facts(tokenizer: Tokenizer, split: Split, seed: int,
           rng: random.Random) -> Iterator[str]:
    """The split's half of the one table in a random order, over and over."""
    while True:
        table = list(fact_table(FACTS, split))
        rng.shuffle(table)
        yield from (fact.sentence for fact in table)


# -- documents -----------------------------------------------------------------------------------

WRITTEN = {"copy": _copy, "recite": _recite, "pairs": _pairs, "code": _code,
           "arithmetic": _arithmetic, "facts": _facts}
KINDS = ("needle", *WRITTEN, "novels")


def _check(kind: str, split: str, length: int | None = None, index: int = 0) -> None:
    if kind not in KINDS:
        raise InputError(f"kind is {kind!r}: choose one of {', '.join(KINDS)}")
    if split not in ("train", "heldout"):
        raise InputError(f'split is {split!r}: it must be "train" or "heldout"')
    if length is not None and length < SHORTEST_DOCUMENT:
        raise InputError(f"length is {length}: ask for {SHORTEST_DOCUMENT} tokens or more")
    if index < 0:
        raise InputError(f"index is {index}: documents are numbered from 0")


def document(kind: str, tokenizer: Tokenizer, *, split: Split = "train", seed: int = 0,
             index: int = 0, length: int = 2048) -> Document:
    """The document number `index` of a kind, at most `length` tokens (without BOS).

    needle: four keys, one asked again at a distance drawn evenly in its logarithm up to the
    length, the others after it; the text is no longer than that takes, so answers are dense.
    the others: as many whole blocks as fit a size drawn in the same way.
    InputError for unknown words or a length below `SHORTEST_DOCUMENT`.
    """
    _check(kind, split, length, index)
    if kind == "novels":
        ids = tuple(passage(tokenizer, split, seed, index, length))
        return Document(kind, split, seed, index, tokenizer.decode(ids), ids)
    rng = _rng(kind, split, seed, index)
    if kind == "needle":
        parts, asked = _needle(tokenizer, split, rng, length, None, 3, ask_all=True)
        ids, answers = _answers(tokenizer, parts, asked)
        return Document(kind, split, seed, index, "".join(parts), ids, answers)
    size = round(SHORTEST_DOCUMENT * math.exp(rng.random() * math.log(length / SHORTEST_DOCUMENT)))
    text, used = "", 0
    for block in WRITTEN[kind](tokenizer, split, seed, rng):  # whole blocks, as many as fit
        used += len(tokenizer.encode(block))
        if used > size:
            break
        text += block
    return Document(kind, split, seed, index, text, tuple(tokenizer.encode(text)))


def documents(kind: str, tokenizer: Tokenizer, *, split: Split = "train", seed: int = 0,
              start: int = 0, length: int = 2048) -> Iterator[Document]:
    """Documents of a kind from number `start` on, without end."""
    _check(kind, split, length, start)
    return (document(kind, tokenizer, split=split, seed=seed, index=index, length=length)
            for index in count(start))
