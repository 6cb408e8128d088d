"""What is measured of a trained model, with a control beside every figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from labkit.checkpoint.accounting import active_decode
from labkit.config import ModelConfig
from labkit.lab import Lab, model_folder
from labkit.text.stats import gzip_bits_per_byte, share_of_known_words
from labkit.train.agreement import bounded_replay
from labkit.train.attention_mass import Mass, attention_mass
from labkit.train.controls import cache_rounding, muted_engram, selecting
from labkit.train.draft_figures import DraftFigures, judge_draft
from labkit.train.evaluate import Cost, heldout_window, text_cost
from labkit.train.kinds import NOVELS, KindCost, kind_cost, kind_costs
from labkit.train.recall import AS_SHIPPED, NEAR, RecallPoint, needles_fit, recall_curve
from labkit.train.runs import Plain, read_plain
from labkit.train.samples import Sample, samples


@dataclass(frozen=True)
class Effort:
    """How much of everything is measured; None: all there is."""

    windows: int | None = None                  # of held-out text
    recalls: tuple[int, int] = (64, 16)         # at a distance up to `NEAR`: shipped, controls
    far_recalls: tuple[int, int] = (16, 6)      # farther
    documents: int = 10                         # of every written kind
    mass_rows: int = 6
    mass_answers: int = 4
    replays: int = 24
    draft_rows: int = 22                        # of text, and of so many tokens
    draft_length: int = 384
    prompts: int | None = None

    def recall_count(self, control: str, distance: int) -> int:
        near_far = self.recalls if distance <= NEAR else self.far_recalls
        return near_far[control != AS_SHIPPED]


FULL = Effort()
QUICK = Effort(6, (4, 2), (1, 1), 1, 1, 1, 2, 2, 128, 1)


@dataclass(frozen=True)
class Replay:
    """KL(all read || bounded replay), nats: of `positions` tokens behind `hit` tokens that are
    known without their windows, of `texts` held-out texts."""

    texts: int
    hit: int
    positions: int
    mean: float
    largest: float


@dataclass(frozen=True)
class Figures:
    """Bits per byte are of the whole held-out text, in windows of `window` tokens that overlap by
    half: behind the start of a text, a token is seen with half a window before it at least."""

    parameters: int              # without a draft, which has figures of its own
    active_parameters: int       # of a token's step, as `labkit accounting` counts them
    file_bytes: int | None       # of the weights, with the draft; None: not from files
    context: int
    window: int
    tokens: int                  # of held-out text that were guessed
    bits_per_byte: float
    bits_per_byte_unrounded_cache: float
    bits_per_byte_engram_muted: float
    bits_per_byte_equal_odds: float      # log2(vocabulary) a token: what knowing nothing costs
    bits_per_byte_gzip: float            # gzip -9 that has just read the training text
    plain: Plain | None                  # what a plain transformer reaches; None: not measured
    recall: tuple[RecallPoint, ...]      # empty: the vocabulary sets no distances
    attention_mass: tuple[Mass, ...]
    kinds: tuple[KindCost, ...]          # the novels first
    replay: Replay
    draft: DraftFigures | None           # None: the checkpoint has no draft
    samples: tuple[Sample, ...]

    @property
    def known_words(self) -> float:
        """Share of known words over all samples at temperature 0.8, weighted by words."""
        return share_of_known_words(" ".join(s.text for s in self.samples if s.temperature == 0.8))

    @property
    def copied_run(self) -> int:
        return max(s.copied_run for s in self.samples)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; with the targets and what follows from the samples."""
        from labkit.train.targets import targets

        return {**asdict(self), "known_words": self.known_words, "copied_run": self.copied_run,
                "targets": [target.to_dict() for target in targets(self)]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Figures:
        """What `to_dict` gave, also by way of JSON."""
        known = {name: raw[name] for name in cls.__dataclass_fields__}
        for name, part in (("recall", RecallPoint), ("attention_mass", Mass), ("kinds", KindCost),
                           ("samples", Sample)):
            known[name] = tuple(part(**one) for one in raw[name])
        known["replay"] = Replay(**raw["replay"])
        known["plain"] = raw["plain"] and Plain(**raw["plain"])
        known["draft"] = raw["draft"] and DraftFigures.from_dict(raw["draft"])
        return cls(**known)


# ---- measuring -------------------------------------------------------------------------------


def measure(lab: Lab, effort: Effort = FULL, *, quiet: bool = False,
            draft: DraftFigures | None = None) -> Figures:
    """Every figure of a lab. draft: figures of its draft that were measured already."""
    def bar(title: str) -> Callable[[list[Any]], Iterable[Any]]:
        return lambda jobs: tqdm(jobs, desc=title, disable=quiet, leave=False)

    folder = None if lab.source in ("", "nano") else model_folder(lab.source)
    model = lab.model
    with cache_rounding(model, True), selecting(model, "index"):
        shipped = held_out_cost(lab, effort, bar("held-out text"))
        with muted_engram(model):
            muted = held_out_cost(lab, effort, bar("the same, Engram muted"))
        with cache_rounding(model, False):
            exact = held_out_cost(lab, effort, bar("the same, cache not rounded"))
        recall = () if not needles_fit(lab.tokenizer) else recall_curve(
            model, lab.tokenizer, effort.recall_count, bar("needles"))
        mass = attention_mass(lab, effort.mass_rows, effort.mass_answers, bar("attention mass"))
        kinds = (kind_cost(NOVELS, shipped, muted),
                 *kind_costs(lab, effort.documents, bar("kinds of text")))
        replay = measure_replay(lab, effort, bar("bounded replay"))
        if draft is None and lab.has_draft:
            draft = judge_draft(lab, effort.draft_length, effort.draft_rows, quiet)
        written = tuple(samples(lab, effort.prompts, quiet))
    return Figures(
        parameters=sum(p.numel() for n, p in model.named_parameters() if not n.startswith("mtp.")),
        active_parameters=active_decode(lab.config).counted,
        file_bytes=None if folder is None else sum(
            path.stat().st_size for path in folder.glob("*.safetensors")),
        context=lab.config.max_position_embeddings, window=window(lab.config),
        tokens=shipped.tokens,
        bits_per_byte=shipped.bits_per_byte, bits_per_byte_unrounded_cache=exact.bits_per_byte,
        bits_per_byte_engram_muted=muted.bits_per_byte,
        bits_per_byte_equal_odds=math.log2(lab.config.vocab_size) * shipped.tokens / shipped.bytes,
        bits_per_byte_gzip=gzip_bits_per_byte(),
        plain=None if folder is None else read_plain(folder), recall=recall, attention_mass=mass,
        kinds=kinds, replay=replay, draft=draft, samples=written)


def window(config: ModelConfig) -> int:
    return heldout_window(config.max_position_embeddings)


def held_out_cost(lab: Lab, effort: Effort, progress: Callable[[list[Any]], Iterable[Any]]) -> Cost:
    length = window(lab.config)
    return text_cost(lab.model, lab.tokenizer, length=length, stride=length // 2,
                     limit=effort.windows, progress=progress)


def measure_replay(lab: Lab, effort: Effort,
                   progress: Callable[[list[Any]], Iterable[Any]]) -> Replay:
    """Behind half a window of held-out text, as long as the window of the layers."""
    hit = window(lab.config) // 2
    suffix = min(lab.config.sliding_window, window(lab.config) - hit)
    found = bounded_replay(lab, effort.replays, hit, suffix, progress)
    return Replay(effort.replays, hit, len(found.kl), found.mean, max(found.kl))

