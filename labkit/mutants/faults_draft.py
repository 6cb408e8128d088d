"""Wrong variants of the draft: texts stay right, since the target verifies; guesses get poor.

That is what makes these faults last: nothing fails, and the one symptom, a low acceptance, looks
like a draft that was not trained well. Only numbers within the block show them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.mutants.record import Patch, everywhere, kernel, method, mutant
from labkit.numerics.precision import wide

RAW = "dspark.raw_hidden of the first slot"


# ------------------------------------------------------------------ features
@mutant("draft", "Features are what leaves the target layers, not what enters them.",
        "Hidden states counted from the other side of a layer: acceptance 0.8 fell to 0.22.",
        "dspark.target_features: each part is the next layer's input")
def draft_features_one_layer_late() -> list[Patch]:
    from labkit.model.block import Block
    from labkit.model.run import Run
    entering = Run.entering

    def around(original):
        def sites(self, h, pre, run, published=False):
            h, pre = original(self, h, pre, run, published)
            entering(run, self.role.layer, h)
            return h, pre
        return sites
    return [Patch(Run, "entering", lambda run, layer, h: None), *method(Block, "sites", around)]


@mutant("draft", "A feature is taken before its layer's Engram update.",
        "Streams saved at the top of a layer that begins by changing them.",
        "dspark.target_features of a target layer that has an Engram memory",
        "no target layer of the vectors has an Engram memory")
def draft_features_before_engram() -> list[Patch]:
    from labkit.model.block import Block

    def around(original):
        def enter(self, h, run, rows, blocked):
            out = original(self, h, run, rows, blocked)
            run.entering(self.role.layer, h)
            return out
        return enter
    return method(Block, "enter", around)


@mutant("draft", "A feature is the first stream, not the mean of all.",
        "Code from models with a single residual stream, where there is nothing to average.",
        "dspark.target_features against the mean of streams_after_engram")
def draft_features_first_stream() -> list[Patch]:
    from labkit.model.run import Run

    def around(original):
        def entering(self, layer, h):
            original(self, layer, h[:, :, :1])
        return entering
    return method(Run, "entering", around)


@mutant("draft", "Features pass the stage's input norm on their way into its window.",
        "Window keys made as a block makes its own, from normed streams; a feature is normed once.",
        "mtp.0.attn.window against main_norm, wkv and kv_norm by hand")
def draft_features_through_attn_norm() -> list[Patch]:
    return _window_keys(lambda stage, first, x, turns:
                        stage.attn.key_values(stage.attn_norm(x), turns))


@mutant("draft", "Window keys are made without the key's norm.",
        "The feature has been normed already, so the second norm was taken for a mistake.",
        "The length of the rows of mtp.0.attn.window")
def draft_windows_without_kv_norm() -> list[Patch]:
    from labkit.model import attention
    return _window_keys(lambda stage, first, x, turns:
                        attention.rotate(stage.attn.wkv(x), turns))


@mutant("draft", "All stages read the window of the first one.",
        "One key projection for the features, as in drafts whose layers share a cache.",
        "mtp.1.attn.window: each stage has keys of its own")
def draft_stages_share_a_window() -> list[Patch]:
    return _window_keys(lambda stage, first, x, turns: first.attn.key_values(x, turns))


def _window_keys(keys) -> list[Patch]:
    """A draft whose window keys are keys(stage, first stage, x [B,T,D], turns)."""
    from labkit.model.dspark import DSpark

    def key_values(self, features, run):
        x = self.first.main_norm(self.first.main_proj(features))
        return [keys(stage, self.first, x, run.turns(compressed=False)) for stage in self]
    return [Patch(DSpark, "key_values", key_values)]


# ------------------------------------------------------------------ windows
@mutant("draft", "A block reads the feature of its own anchor.",
        "Positions a-W+1 to a: in training the feature is there, in use it is not computed yet.",
        RAW + " at any anchor; a session cannot make this mistake")
def draft_sees_anchor_feature() -> list[Patch]:
    from labkit.model.dspark import windows_at
    return everywhere(windows_at, lambda rows, anchors, window: windows_at(
        rows, anchors + 1, window))


@mutant("draft", "The windows lag a token behind the text.",
        "Features handed over at the start of a step, before the newest token has been read.",
        RAW + " behind a session, against the same block on a text")
def draft_windows_lag() -> list[Patch]:
    from labkit.cache.window import WindowRing

    def around(original):
        def read(self, length):
            rows, known = original(self, length)
            return rows.roll(1, dims=1), (known - 1).clamp(min=0)
        return read
    return method(WindowRing, "read", around)


@mutant("draft", "Keys before the first feature are not masked.",
        "A window taken to be full: near the start of a text zeros take part in the softmax.",
        RAW + " at an anchor below W")
def draft_reads_void_window() -> list[Patch]:
    from labkit.model.dspark import DSpark

    def around(original):
        def forward(self, x, run):
            run.windows = [(rows, torch.full_like(known, rows.shape[1]))
                           for rows, known in run.windows]
            return original(self, x, run)
        return forward
    return method(DSpark, "forward", around)


@mutant("draft", "The draft's windows are stored without rounding to fp8.",
        "Rounding placed in the layers' attention, which features never pass.",
        "mtp.0.attn.window with cache rounding on")
def draft_windows_unrounded() -> list[Patch]:
    from labkit.cache.cache import Cache
    from labkit.cache.window import WindowRing
    from labkit.numerics.rows import RowCodec

    def around(original):
        def __init__(self, config, batch=1, dtype=torch.float32, device="cpu", *args, **kwargs):
            original(self, config, batch, dtype, device, *args, **kwargs)
            codec = RowCodec(config.head_dim, "fp8", "plain", dtype, False)
            self.draft_windows = [WindowRing(batch, config.sliding_window, codec, self.device)
                                  for _ in self.draft_windows]
        return __init__
    return method(Cache, "__init__", around)


@mutant("draft", "The block's own keys are not rounded to fp8.",
        "They are never stored, so nothing rounds them unless it is asked to.",
        "mtp.0.attn.out with cache rounding on, where there is no window: at anchor 0")
def draft_keys_unrounded() -> list[Patch]:
    from labkit.model.dspark import BlockRun
    from labkit.model.run import Run

    def around(original):
        def round(self, x, form):
            return x if isinstance(self, BlockRun) else original(self, x, form)
        return round
    return method(Run, "round", around)


# ------------------------------------------------------------------ the block
@mutant("draft", "A slot does not see the slots behind it.",
        "The causal mask of every other attention, applied inside the block too.",
        RAW + ": it should change with the number of slots")
def draft_block_causal() -> list[Patch]:
    def around(original):
        def attend(q, window, entries, selected, sink, start):
            n = q.shape[1]
            if window.shape[1] == n:    # W = 0: the draft, whose keys are all among the entries
                column, slot = torch.arange(selected.shape[2]), torch.arange(n)[:, None]
                selected = selected.masked_fill(column > selected.shape[2] - n + slot, -1)
            return original(q, window, entries, selected, sink, start)
        return attend
    return kernel("sparse_attention", around)


@mutant("draft", "All slots are rotated at the anchor's position.",
        "Noise tokens without a place of their own: slots differ by nothing but the anchor.",
        "dspark.raw_hidden of the second slot and the third: they are alike")
def draft_rotates_at_anchor() -> list[Patch]:
    from labkit.model.dspark import DSpark

    def around(original):
        def forward(self, x, run):
            run.positions = run.positions[:, :1].expand_as(run.positions)
            return original(self, x, run)
        return forward
    return method(DSpark, "forward", around)


@mutant("draft", "A block begins at the position behind its anchor.",
        "Slot 0 guesses token a+1 and was therefore placed there.",
        RAW + "; without a window nothing is wrong, as only distances count")
def draft_block_one_late() -> list[Patch]:
    from labkit.model.transformer import Transformer

    def around(original):
        def draft(self, anchors, positions, *args, **kwargs):
            return original(self, anchors, positions + 1, *args, **kwargs)
        return draft
    return method(Transformer, "draft", around)


@mutant("draft", "The draft rotates with the frequencies of the compressed layers.",
        "Stages taken for layers like those before them, which have YaRN and another theta.",
        "mtp.0.attn.window from token 1 on")
def draft_uses_compressed_rope() -> list[Patch]:
    from labkit.model.dspark import BlockRun, DSpark
    from labkit.model.run import Run
    features = False

    def around_turns(original):
        def turns(self, compressed):
            return original(self, compressed or features or isinstance(self, BlockRun))
        return turns

    def around_keys(original):
        def key_values(self, *args):
            nonlocal features
            features = True
            try:
                return original(self, *args)
            finally:
                features = False
        return key_values
    return [*method(Run, "turns", around_turns), *method(DSpark, "key_values", around_keys)]


@mutant("draft", "The slots behind the anchor hold the anchor, not the noise token.",
        "A block filled by repeating what there is; the noise token is a learned embedding.",
        "dspark.raw_hidden of the second slot")
def draft_noise_is_anchor() -> list[Patch]:
    from labkit.model.dspark import DSpark

    def around(original):
        def forward(self, x, run):
            return original(self, x[:, :1].expand_as(x), run)
        return forward
    return method(DSpark, "forward", around)


@mutant("draft", "A block's streams begin empty but for the first.",
        "The initial pre (1,0,..,0) read as a statement about the streams: they are all copies.",
        RAW + ": the first mixing has one stream to mix")
def draft_one_stream() -> list[Patch]:
    def start(stage, h, pre):
        return (h * pre[..., None] if hasattr(stage, "main_proj") else h), pre
    return _stage_starts(start)


@mutant("draft", "Every stage starts with pre (1,0,..,0).",
        "Stages treated as models of their own; pre goes on from one to the next.",
        RAW + ": the stages after the first read another mixture")
def draft_pre_restarts() -> list[Patch]:
    def start(stage, h, pre):
        return h, F.one_hot(torch.zeros_like(pre[..., 0]).long(), pre.shape[-1]).to(pre.dtype)
    return _stage_starts(start)


def _stage_starts(start) -> list[Patch]:
    """A draft whose stages begin with start(stage, h, pre) instead of h and pre."""
    from labkit.model.block import Block
    from labkit.model.dspark import Stage

    def around(original):
        def sites(self, h, pre, *args, **kwargs):
            if isinstance(self, Stage):
                h, pre = start(self, h, pre)
            return original(self, h, pre, *args, **kwargs)
        return sites
    return method(Block, "sites", around)


@mutant("draft", "The draft's last hidden state is the mean of its streams.",
        "The rule for features, a mean, used where the streams are collapsed by pre.", RAW)
def draft_collapses_evenly() -> list[Patch]:
    from labkit.model import dspark
    return [Patch(dspark, "collapse", lambda h, pre: wide(h).mean(-2).to(h.dtype))]


@mutant("draft", "A slot visits as many experts as a token of the target does.",
        "One config key for both: the draft has its own number of experts a token.",
        "mtp.0.ffn.picked of a model whose two numbers differ",
        "in the vectors both numbers are 2")
def draft_visits_as_many_experts() -> list[Patch]:
    from labkit.model.dspark import BlockRun
    from labkit.model.moe import Gate

    def around(original):
        def forward(self, x, run, image=None):
            own = self.per_token
            try:
                if isinstance(run, BlockRun):
                    self.per_token = self.config.num_experts_per_tok
                return original(self, x, run, image)
            finally:
                self.per_token = own
        return forward
    return method(Gate, "forward", around)


# ------------------------------------------------------------------ what is read off the slots
@mutant("draft", "The hidden state passes the target's last norm instead of the draft's own.",
        "Head and embedding are the target's, so the norm in front of the head was too.",
        "dspark.normalized_hidden")
def draft_uses_target_norm() -> list[Patch]:
    from labkit.model.dspark import Slots
    from labkit.model.transformer import Transformer

    def around(original):
        def draft(self, *args, **kwargs):
            raw = original(self, *args, **kwargs).raw_hidden
            x = self.norm(raw)
            return Slots(raw, x, F.linear(wide(x), wide(self.head.weight)))
        return draft
    return method(Transformer, "draft", around)


@mutant("draft", "The confidence head reads the normalised hidden state.",
        "A public trainer does so: its drafts and the released ones are not interchangeable.",
        "dspark.confidence_logits")
def draft_confidence_normalised() -> list[Patch]:
    from labkit.model.dspark import DSpark

    def around(original):
        def confidence_logits(self, raw, previous):
            return original(self, self.last.norm(raw), previous)
        return confidence_logits
    return method(DSpark, "confidence_logits", around)


@mutant("draft", "The Markov bias of a slot comes from the token two before it.",
        "Off by one: slot k has the token at a+k before it, the anchor for slot 0.",
        "dspark.markov_logits of the second slot")
def draft_markov_off_by_one() -> list[Patch]:
    from labkit.model.dspark import DSpark
    from labkit.model.transformer import Transformer
    before: list[torch.Tensor] = []     # what the slots of this block were asked with

    def around_block(original):
        def draft(self, *args, **kwargs):
            before.clear()
            return original(self, *args, **kwargs)
        return draft

    def around_bias(original):
        def markov_logits(self, previous):
            if previous.ndim > 1:       # all slots of blocks at once
                return original(self, torch.cat([previous[:, :1], previous[:, :-1]], dim=1))
            before.append(previous)
            return original(self, before[-2] if len(before) > 1 else previous)
        return markov_logits
    return [*method(Transformer, "draft", around_block),
            *method(DSpark, "markov_logits", around_bias)]


@mutant("draft", "Temperatures are applied one slot late.",
        "Counted from 0 by one side and from 1 by the other.",
        "Survival of the first slot with temperatures that differ",
        "the golden vectors hold no temperatures")
def draft_temperatures_one_late() -> list[Patch]:
    from labkit.engine.calibration import calibrated
    return everywhere(calibrated, lambda logits, temperatures: calibrated(
        logits, [temperatures[0], *temperatures[:-1]]))


@mutant("draft", "Survival is each slot's own confidence, not the product so far.",
        "Confidences are conditional: a slot only counts if all before it were accepted.",
        "Survival of the second slot: it never exceeds the first's",
        "the golden vectors hold no survivals")
def draft_survival_of_one_slot() -> list[Patch]:
    from labkit.engine.scheduling import survival
    return everywhere(survival, lambda confidences: [float(c) for c in confidences])
