"""Wrong variants of prefills that are cut or chunked, and of how rows lie in memory."""

from __future__ import annotations

import torch

from labkit.mutants.faults_memory import groups_counted
from labkit.mutants.record import Patch, everywhere, method, mutant


# ------------------------------------------------------------------ causal encoder-decoder
@mutant("CED prefill", "Behind the cut the first rows of the candidate pool are used.",
        "A pipeline stage that began between a source and its readers kept the pool as it lay.",
        "A prefill cut after the last KV source: topk_indices of the next Reindex layer")
def ced_keeps_first_candidates() -> list[Patch]:
    return _first_rows("candidates")


@mutant("CED prefill", "Behind the cut the first rows of the selection are used.",
        "A pipeline stage that began between a source and its readers kept selections as they lay.",
        "A prefill cut after the last KV source: attn.out of the next Reuse layer")
def ced_keeps_first_selection() -> list[Patch]:
    return _first_rows("selection")


def _first_rows(part: str) -> list[Patch]:
    from labkit.model.run import Run

    def around(original):
        def tail(self, length):
            run, columns = original(self, length)
            whole = getattr(self.published, part)
            if whole is not None:
                setattr(run.published, part, whole[:, :length])
            return run, columns
        return tail
    return method(Run, "tail", around)


@mutant("CED prefill", "Of a prompt in chunks the decoder reads the end of every chunk.",
        "The cut was made per chunk by a scheduler that did not know the prompt's length.",
        "A last chunk shorter than the window: the decoder sees more than the last W tokens",
        "with the exact halo the last logits come out right, only more is computed")
def ced_decodes_every_chunk() -> list[Patch]:
    from labkit.engine.replay import passes

    def every(ids, tail, chunk):
        if chunk is None or tail is None:
            yield from passes(ids, tail, chunk)
            return
        for at in range(0, ids.shape[1], chunk):
            yield ids[:, at : at + chunk], tail
    return everywhere(passes, every)


@mutant("CED prefill", "The exact halo and the exact replay are one layer too short.",
        "Depth counted in layers between the first and the last instead of layers.",
        "Last logits of a cut prefill with the exact halo against those of a full one")
def halo_one_layer_short() -> list[Patch]:
    from labkit.engine.replay import reach

    def shorter(config, layers):
        return reach(config, layers - 1)
    return everywhere(reach, shorter)


# ------------------------------------------------------------------ chunks of queries
@mutant("indexer", "In every chunk of queries the positions start anew.",
        "Score matrices cut into pieces for memory, with a causal mask made per piece.",
        "topk_indices of late queries once a prompt is longer than a chunk of queries")
def query_chunks_start_anew() -> list[Patch]:
    from labkit.model.indexer import Indexer

    def around(original):
        def select(self, q, weights, positions, t, run):
            first = run.rows(run.pack(run.positions))[:, : q.shape[1]]
            return original(self, q, weights, first, t, run)
        return select
    return method(Indexer, "_select", around)


@mutant("candidate pool", "In every chunk of queries the pool is read from its first row on.",
        "Score matrices cut into pieces for memory, the candidate mask not cut with them.",
        "topk_indices of layers behind the pool's owner, in the second chunk of queries")
def query_chunks_share_pool_rows() -> list[Patch]:
    from labkit.model.indexer import Indexer

    def around(original):
        def select(self, q, weights, positions, t, run):
            return original(self, q, weights, positions, 0, run)
        return select
    return method(Indexer, "_select", around)


@mutant("compressor", "An unfinished group is published as an entry and never made again.",
        "Rounding up when counting groups: the entry lacks its last tokens for good.",
        "compressed_kv after a chunk that ends inside a group")
def unfinished_group_published() -> list[Patch]:
    return groups_counted(lambda run, r: -(-(run.start + run.count) // r) - run.start // r)


# ------------------------------------------------------------------ rows of the cache
@mutant("packed cache", "The scales of a packed row are read in the opposite order.",
        "Scales written by block and read as if the last block came first.",
        "compressed_kv of a packed cache: each block off by a factor")
def packed_scales_reversed() -> list[Patch]:
    def wrong(codec, rows):
        return torch.cat([rows[..., : codec._data], rows[..., codec._data :].flip(-1)], dim=-1)
    return _read_otherwise(wrong)


@mutant("packed cache", "The two codes of a byte are exchanged when a cache row is read.",
        "Writer and reader of a packed cache disagree about the low nibble.",
        "compressed_kv of a packed cache: neighbouring channels are exchanged")
def packed_nibbles_exchanged() -> list[Patch]:
    def wrong(codec, rows):
        data, scales = rows[..., : codec._data], rows[..., codec._data :]
        if codec.stored != "fp8":
            data = (data << 4) | (data >> 4)
        return torch.cat([data, scales], dim=-1)
    return _read_otherwise(wrong)


def _read_otherwise(wrong) -> list[Patch]:
    from labkit.numerics.rows import RowCodec

    def around(original):
        def decode(self, rows):
            if self.form in ("packed", "fp8"):
                rows = wrong(self, rows)
            return original(self, rows)
        return decode
    return method(RowCodec, "decode", around)


@mutant("fp8 cache", "An entry is rounded to FP8 at once, without its own FP4 rounding before.",
        "A store that quantises what it is given: entries carry more precision than the model's.",
        "An entry of an fp8 cache against the FP4 value that the packed one holds",
        "the golden vectors have no cache of the form fp8")
def fp8_rows_skip_fp4() -> list[Patch]:
    from labkit.numerics.rows import RowCodec

    def around(original):
        def encode(self, x):
            if self.form != "fp8":
                return original(self, x)
            return original(RowCodec(self.width, "fp8", "fp8", self.dtype), x)
        return encode
    return method(RowCodec, "encode", around)
