"""Wrong variants of the indexer, the selection, the window and the attention itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from labkit.mutants.record import Patch, kernel, method, mutant


@mutant("indexer", "ReLU is applied to the sum over heads, not to each head's product.",
        "Ports that moved the ReLU: short prompts look perfect, long ones lose half the entries.",
        "layers.2.attn.topk_indices: the first query with more visible entries than index_topk")
def relu_after_sum() -> list[Patch]:
    def scores(q, keys, weights):
        dots = torch.einsum("bthd,bsd->bths", q, keys)
        return torch.relu((dots * weights[..., None]).sum(dim=2))
    return kernel("index_scores", lambda original: scores)


@mutant("indexer", "Invisible entries get a very small number instead of minus infinity.",
        "A finite padding value in a top-k outranks the real minus infinity and is picked.",
        "layers.2.attn.topk_indices of the first queries: numbers where -1 should stand")
def finite_mask() -> list[Patch]:
    from labkit.model import indexer
    return [Patch(indexer, "MINUS_INF", -1e30)]


@mutant("attention", "A selection slot of -1 reads the last compressed entry.",
        "-1 used as an index gathers the last row, in Python as in many kernels.",
        "attn.out of the first tokens, which have fewer entries than index_topk")
def minus_one_reads_last() -> list[Patch]:
    def around(original):
        def attend(q, window, entries, selected, sink, start):
            if entries is not None and selected is not None and entries.shape[1]:
                selected = torch.where(selected < 0, entries.shape[1] - 1, selected)
            return original(q, window, entries, selected, sink, start)
        return attend
    return kernel("sparse_attention", around)


@mutant("candidate pool", "The block of the newest visible entry is not kept for certain.",
        "Pools that rank all blocks alike drop the newest text whenever it scores low.",
        "layers.6.attn.candidates: is the block at the query's own end always in it?")
def newest_block_not_pinned() -> list[Patch]:
    return _pool(pinned=False)


@mutant("candidate pool", "A ragged last block is padded with zeros: they outrank negative scores.",
        "A pad that is a plausible score: the unfinished block enters the pool for nothing.",
        "layers.6.attn.candidates of early queries when the cache does not divide into blocks")
def ragged_block_pads_zero() -> list[Patch]:
    return _pool(pad=0.0)


def _pool(pinned: bool = True, pad: float = float("-inf")) -> list[Patch]:
    from labkit.model import indexer

    def candidate_blocks(scores, positions, ratio, config, run):
        size, S = config.candidate_block_size, scores.shape[-1]
        best = F.pad(scores, (0, -S % size), value=pad).unflatten(-1, (-1, size)).amax(-1)
        if pinned:
            newest = (positions + 1) // ratio - 1
            at = torch.arange(best.shape[-1]) == (newest // size)[..., None]
            best = best.masked_fill(at & (newest >= 0)[..., None], float("inf"))
        kept = run.kernels.select_top(best, config.candidate_topk_blocks)
        return (kept[..., None] == torch.arange(best.shape[-1])).any(-2)

    return [Patch(indexer, "candidate_blocks", candidate_blocks)]


@mutant("candidate pool", "The pool also restricts the layer that publishes it.",
        "One mask for all index sources: the publisher then selects from its own shortlist.",
        "layers.6.attn.topk_indices: compare with its candidates")
def pool_restricts_its_source() -> list[Patch]:
    def around(original):
        def select(self, q, weights, positions, t, run):
            selection, blocks = original(self, q, weights, positions, t, run)
            if self.role.publishes_candidates:
                keys = run.published.index_keys.keys()
                scores = run.kernels.index_scores(q, keys, weights)
                mask = self._mask(blocks, positions, keys.shape[1])
                scores = scores.masked_fill(~mask, float("-inf"))
                selection = run.kernels.select_top(scores, self.config.index_topk)
            return selection, blocks
        return select
    from labkit.model.indexer import Indexer
    return method(Indexer, "_select", around)


@mutant("indexer", "The index key is made from the latent after its rotation.",
        "Rotating the latent in place first: the key is then rotated twice and shifts every score.",
        "layers.2.attn.index_keys: right in row 0, wrong from row 1 on")
def index_key_from_rotated_latent() -> list[Patch]:
    from labkit.model.indexer import Indexer
    from labkit.model.rope import rotate

    def around(original):
        def keys(self, latent, run):
            turned = rotate(latent, run.group_turns(self.role.ratio, latent.shape[1]))
            return original(self, turned, run)
        return keys
    return method(Indexer, "keys", around)


@mutant("compressor", "A compressed entry takes the position of its group's last token.",
        "Ports that number an entry by the token that completed it.",
        "layers.2.attn.compressed_kv: its rotated channels; with ratio 1 nothing is wrong")
def entry_at_last_token() -> list[Patch]:
    from labkit.model.rope import rotation
    from labkit.model.run import Run

    def group_turns(self, ratio, groups):
        numbers = (self.start // ratio)[:, None] + torch.arange(groups)
        return rotation(self.config, True, numbers * ratio + ratio - 1, self.dtype)
    return [Patch(Run, "group_turns", group_turns)]


@mutant("attention", "The values' rotation is not turned back at the query's position.",
        "Keys are values here; ports from models with separate values leave the inverse out.",
        "The same text at offsets 0 and 1000: logits should differ by rounding alone")
def no_inverse_rotation() -> list[Patch]:
    from labkit.model import attention
    from labkit.model.rope import rotate

    def forward_only(x, cos_sin, inverse=False):
        return x if inverse else rotate(x, cos_sin)
    return [Patch(attention, "rotate", forward_only)]


@mutant("attention", "The window holds one key fewer than sliding_window.",
        "Off by one between 'the last W tokens' and 'W tokens before this one'.",
        "layers.0.attn.out at token W-1: all earlier tokens are right")
def window_one_short() -> list[Patch]:
    def around(original):
        def attend(q, window, entries, selected, sink, start):
            return original(q, window[:, 1:], entries, selected, sink, start)
        return attend
    return kernel("sparse_attention", around)


@mutant("attention", "The sink logit is left out of the denominator.",
        "A plain softmax call: the weights then add up to one without the sink.",
        "layers.0.attn.out of token 0, which should be smaller than its only value")
def sink_left_out() -> list[Patch]:
    def around(original):
        def attend(q, window, entries, selected, sink, start):
            return original(q, window, entries, selected, torch.full_like(sink, -1e4), start)
        return attend
    return kernel("sparse_attention", around)


@mutant("attention", "Query heads are normed once more before rotation, as in the model before.",
        "Code carried over from V4, where queries have a norm per head: perplexity 244, not 2.2.",
        "layers.0.attn.out: wrong from the first layer and token on")
def query_norm_per_head() -> list[Patch]:
    from labkit.model import attention
    from labkit.model.rope import rotate

    def normed(x, cos_sin, inverse=False):
        if x.ndim == 4 and not inverse:  # only queries have a head axis before attention
            x = x * x.square().mean(-1, keepdim=True).rsqrt()
        return rotate(x, cos_sin, inverse)
    return [Patch(attention, "rotate", normed)]


@mutant("indexer", "A query sees the group that it is about to complete.",
        "Rounding up instead of down when counting visible groups: the future leaks in.",
        "Change one token and look at the logits before it")
def unfinished_group_visible() -> list[Patch]:
    from labkit.model import indexer

    def visible(positions, ratio, entries):
        number = torch.arange(entries, device=positions.device)
        return number < ((positions + ratio) // ratio)[..., None] + (ratio == 1)
    return [Patch(indexer, "visible", visible)]


@mutant("selection", "Of equal scores the later entry wins.",
        "An unstable or reversed sort: ReLU makes exact zeros, so ties are common.",
        "Experts and entries with equal scores; the golden selections, which are exact")
def ties_to_the_later() -> list[Patch]:
    def around(original):
        def select(scores, k):
            index = original(scores.flip(-1), k)
            back = torch.where(index < 0, scores.shape[-1], scores.shape[-1] - 1 - index)
            back = back.sort(dim=-1).values
            return back.masked_fill(back == scores.shape[-1], -1)
        return select
    return kernel("select_top", around)
