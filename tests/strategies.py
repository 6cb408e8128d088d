"""What hypothesis draws: lengths, pieces of a text, ragged batches, whole configs."""

from hypothesis import strategies as st

from labkit.config import RopeScaling
from labkit.mutants.models import small_config


def pieces(length):
    """At most eight positive sizes that add up to `length`."""
    cuts = st.sets(st.integers(1, max(1, length - 1)), max_size=min(7, length - 1))
    return cuts.map(lambda found: _between(sorted(c for c in found if c < length), length))


def _between(cuts, length):
    edges = [0, *cuts, length]
    return [b - a for a, b in zip(edges, edges[1:], strict=False)]


@st.composite
def texts_in_pieces(draw, lengths):
    length = draw(lengths)
    return length, draw(pieces(length))


@st.composite
def ragged_batches(draw, longest=24):
    """(lengths, counts): counts[p][b] tokens of row b in pass p, each at least 1."""
    passes = draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(passes, longest), min_size=2, max_size=4))
    rows = []
    for length in lengths:
        cuts = draw(st.sets(st.integers(1, length - 1), min_size=passes - 1, max_size=passes - 1)
                    if passes > 1 else st.just(set()))
        rows.append(_between(sorted(cuts), length))
    return lengths, [list(column) for column in zip(*rows, strict=True)]


@st.composite
def configs(draw):
    """Any schedule that the rules allow, at a size that the oracle can follow."""
    layers = draw(st.integers(1, 6))
    ratios, kv_sources, index_sources, ratio = [], [], [], 0
    for layer in range(layers):
        kinds = ["window", "full"] + (["reuse", "reindex"] if ratio else [])
        kind = draw(st.sampled_from(kinds))
        if kind == "full":
            ratio = draw(st.integers(1, 4))
            kv_sources.append(layer)
        if kind in ("full", "reindex"):
            index_sources.append(layer)
        ratios.append(0 if kind == "window" else ratio)
    owners = [s for s in kv_sources
              if all(ratios[i] == ratios[s] for i in index_sources if i > s)]
    engram = sorted(draw(st.sets(st.integers(0, layers - 1), max_size=2)))
    experts = draw(st.integers(1, 4))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]))
    return small_config(
        num_hidden_layers=layers, compress_ratios=tuple(ratios),
        kv_source_layer_ids=tuple(kv_sources), index_source_layer_ids=tuple(index_sources),
        candidate_source_layer_id=draw(st.sampled_from([-1, *owners])),
        candidate_topk_blocks=draw(st.integers(1, 3)), candidate_block_size=draw(st.integers(1, 4)),
        index_topk=draw(st.integers(1, 5)), index_n_heads=draw(st.integers(1, 3)),
        sliding_window=draw(st.integers(1, 6)), hc_mult=draw(st.integers(1, 4)),
        hc_sinkhorn_iters=draw(st.integers(1, 5)),
        qk_rope_head_dim=draw(st.sampled_from([2, 6, 8])),
        num_attention_heads=heads[0], o_groups=heads[1], n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)), norm_topk_prob=draw(st.booleans()),
        swiglu_limit=draw(st.sampled_from([0.5, 10.0])), engram_layer_ids=tuple(engram),
        engram_max_ngram_size=draw(st.integers(2, 4)), engram_n_heads=draw(st.integers(1, 2)),
        rope_scaling=draw(st.sampled_from([RopeScaling(), RopeScaling(16.0, 32.0, 1.0, 64),
                                           RopeScaling(4.0, 8.0, 2.0, 16)])),
    )
