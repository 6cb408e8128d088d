#!/usr/bin/env python3
"""The cache: bytes a token, packing, decode speed, CED prefill, store forms, reuse of a past.

Bytes are those of the tensors' storages. Speeds move from machine to machine; the ratios of one
run are what counts. Quality is measured on held-out text: KL divergence in nats of the
next-token distributions, and how often both have the same likeliest token.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable

import torch

from labkit.cache import Cache
from labkit.cache.filled import fill
from labkit.config import ModelConfig
from labkit.engine.replay import decoder_tail, replay_start
from labkit.engine.session import Session, is_small
from labkit.lab import Lab
from labkit.model.work import counting
from labkit.numerics.rows import RowCodec
from labkit.tables import (
    check_context,
    check_counts,
    heading,
    load_model,
    print_tables,
    table_parser,
)
from labkit.train.agreement import REUSES, Agreement, Reuse, elsewhere, held_out

FORMS = ("packed", "fp8", "bf16")
TABLES = ("bytes", "packing", "decode", "ced", "forms", "reuse")

EXAMPLES = """examples:
  labkit bench cache                            every table (about two minutes)
  labkit bench cache --quick                    the same with few texts, for a first look
  labkit bench cache --only bytes               bytes a token alone
  labkit bench cache --only ced reuse --texts 24 --hit 768
  labkit bench cache --model path/to/checkpoint --threads 1
"""


def main() -> None:
    parser = table_parser(__doc__, EXAMPLES, TABLES, torch.get_num_threads())
    parser.add_argument("--texts", type=int, default=12, metavar="N",
                        help="held-out texts for quality (default 12)")
    parser.add_argument("--hit", type=int, default=512, metavar="T",
                        help="tokens of a prompt, or of a past that is used again (default 512)")
    parser.add_argument("--suffix", type=int, default=64, metavar="T",
                        help="tokens after it, which are compared (default 64)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N",
                        help="timed runs, of which the fastest counts (default 5)")
    parser.add_argument("--quick", action="store_true",
                        help="2 texts, 1 timed run, fewer rows to pack")
    options = parser.parse_args()
    check_counts(parser, options,
                 dict.fromkeys(("texts", "hit", "suffix", "repeats", "threads"), 1))
    options.rows = 4096
    if options.quick:
        options.texts, options.repeats, options.rows = min(2, options.texts), 1, 256
    lab = load_model(options)
    check_context(parser, options, lab, {"--hit and --suffix": options.hit + options.suffix})
    print_tables(lab, options, {
        "bytes": bytes_table, "packing": packing_table, "decode": decode_table,
        "ced": ced_table, "forms": forms_table, "reuse": reuse_table})


def model_threads(lab: Lab, options: argparse.Namespace) -> int:
    """Sessions of a small model run on one thread, whatever is set."""
    return 1 if is_small(lab.model) else int(options.threads)


# ---- bytes ----------------------------------------------------------------------------------


def bytes_table(lab: Lab, options: argparse.Namespace) -> None:
    """What full pages weigh, by part and side, what one token more reserves, and what does not
    grow: the windows, the draft's too."""
    for name, c in ((options.model, lab.config), ("flash", ModelConfig.preset("flash"))):
        pages = 8
        tokens = pages * Cache(c).page_tokens
        heading("Bytes a token of global KV and index keys", f"shapes of {name}", options.threads,
              f"{tokens} tokens = {pages} full pages a store, from the storages")
        print(f"  {'form':<8}{'a token':>9}{'global_kv':>11}{'index_keys':>12}{'encoder':>9}"
              f"{'decoder':>9}{'window/layer':>14}{'draft':>10}{'reserved +1 group':>19}")
        for form in FORMS:
            cache = Cache(c, form=form, draft=True)
            fill(cache, tokens)
            part = {"global_kv": 0, "index_keys": 0}
            side = {"encoder": 0, "decoder": 0}
            for layer, store in cache.stores.items():
                for kind, _, allocated in store.nbytes():
                    part[kind] += allocated
                    side["encoder" if layer < c.encoder_layers else "decoder"] += allocated
            used = cache.nbytes()
            assert used["reserved"] == 0 and all(used[kind] == n for kind, n in part.items())
            window = used["window"] / c.num_hidden_layers
            group = math.lcm(*(c.compress_ratios[layer] for layer in cache.stores))
            fill(cache, group, tokens)
            total = sum(part.values())
            print(f"  {form:<8}{total / tokens:9.1f}"
                  + "".join(f"{n / tokens:{w}.1f}" for n, w in zip(
                      (*part.values(), *side.values()), (11, 12, 9, 9), strict=True))
                  + f"{window:14,.0f}{used['draft']:10,}{cache.nbytes()['reserved']:19,}")
        if used["draft"]:
            print(f"  draft: windows of its {c.num_nextn_predict_layers} stages, once a request")


# ---- packing --------------------------------------------------------------------------------


def packing_table(lab: Lab, options: argparse.Namespace) -> None:
    """Encoding and decoding the entries of a token against copying the same fp32 values."""
    c = ModelConfig.preset("flash")
    a_token = sum(1 / r.ratio for r in c.roles if r.kind == "full")     # entries
    n = round(options.rows * a_token)
    seeded = torch.Generator().manual_seed(0)
    values = [torch.randn(n, c.head_dim, generator=seeded),
              torch.randn(n, c.index_head_dim, generator=seeded)]
    room = [torch.empty_like(x) for x in values]
    size = sum(x.nbytes for x in values)
    heading("Packing", "widths of flash", options.threads,
          f"{options.rows} tokens = {n} entries of {c.head_dim} + {c.index_head_dim} values, "
          f"{size / 1e6:.1f} MB in fp32; GB/s of fp32 values")
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: [to.copy_(x) for to, x in zip(room, values, strict=True)]}
    for form in FORMS:
        codecs = [RowCodec(c.head_dim, "nvfp4", form, torch.float32),
                  RowCodec(c.index_head_dim, "mxfp4", form, torch.float32)]
        rows = [codec.encode(x) for codec, x in zip(codecs, values, strict=True)]

        def write(codecs: list[RowCodec] = codecs) -> object:
            return [codec.encode(x) for codec, x in zip(codecs, values, strict=True)]

        def read(codecs: list[RowCodec] = codecs, rows: list[torch.Tensor] = rows) -> object:
            return [codec.decode(x) for codec, x in zip(codecs, rows, strict=True)]

        calls[f"{form} pack"], calls[f"{form} unpack"] = write, read
    best = fastest(calls, options.repeats)
    print(f"  {'':<16}{'GB/s':>8}{'of copy':>10}{'tokens/s':>12}")
    for name, seconds in best.items():
        print(f"  {name:<16}{size / seconds / 1e9:8.2f}{best['copy'] / seconds:10.3f}"
              f"{options.rows / seconds:12,.0f}")


def fastest(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest of `repeats` runs; in turn, so that all meet the same neighbours."""
    for call in calls.values():  # warm up
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(seconds_of(call))
    return {name: min(found) for name, found in times.items()}


def seconds_of(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# ---- decoding -------------------------------------------------------------------------------


def decode_table(lab: Lab, options: argparse.Namespace) -> None:
    """Decode speed behind the same past in each form."""
    text = held_out(lab, 1, options.hit + options.suffix)[0]
    past, new = text[: options.hit], text[options.hit :]
    heading("Decoding", repr(lab), model_threads(lab, options),
          f"{len(new)} tokens one by one behind {len(past)}")
    calls: dict[str, Callable[[], object]] = {}
    for form in (*FORMS, "plain"):
        session = lab.session(form)
        session.prefill(past, last_only=True)

        def run(session: Session = session) -> object:
            twin = session.fork()
            return [twin.decode(id_) for id_ in new]

        calls[form] = run
    best = fastest(calls, options.repeats)
    print(f"  {'form':<8}{'tokens/s':>10}{'of packed':>11}")
    for form, seconds in best.items():
        print(f"  {form:<8}{len(new) / seconds:10.1f}{best['packed'] / seconds:11.3f}")


# ---- quality --------------------------------------------------------------------------------


def ced_table(lab: Lab, options: argparse.Namespace) -> None:
    """What follows a CED prefill against what follows a full one."""
    texts = held_out(lab, options.texts, options.hit + options.suffix)
    c = lab.config
    heading("CED prefill against full prefill, KL(full || ced)", repr(lab),
          model_threads(lab, options),
          f"{len(texts)} held-out texts: prompt {options.hit}, then {options.suffix} tokens; the "
          f"logits of the prompt's last token and of those; window {c.sliding_window}")
    print(f"  {'cut':<8}{'halo':<8}{'decoder reads':>14}{Agreement.HEAD}   prompt's last alone:"
          f"{Agreement.HEAD}")

    def logits(ids: list[int], **how: str) -> torch.Tensor:
        session = lab.session()
        last = session.prefill(ids[: options.hit], last_only=True, **how)  # type: ignore[arg-type]
        return torch.cat([last, session.prefill(ids[options.hit :])], dim=1)[0]

    full = [logits(ids) for ids in texts]
    for cut in ("inside", "after"):
        for halo in ("window", "exact"):
            all_, last = Agreement(), Agreement()
            for ids, expected in zip(texts, full, strict=True):
                found = logits(ids, mode="ced", halo=halo, cut=cut)
                all_.add(expected, found)
                last.add(expected[:1], found[:1])
            reads = min(options.hit, decoder_tail(c, halo, cut))
            print(f"  {cut:<8}{halo:<8}{reads:14}{all_}   {'':20}{last}", flush=True)


def forms_table(lab: Lab, options: argparse.Namespace) -> None:
    """Store forms against packed, which is what the recipe says."""
    texts = held_out(lab, options.texts, options.hit + options.suffix)
    heading("Store forms, KL(packed || form)", repr(lab), model_threads(lab, options),
          f"{len(texts)} held-out texts of {options.hit + options.suffix} tokens, all positions")
    print(f"  {'form':<8}{Agreement.HEAD}")
    packed = [lab.session("packed").prefill(ids)[0] for ids in texts]
    for form in ("fp8", "bf16"):
        found = Agreement()
        for ids, expected in zip(texts, packed, strict=True):
            found.add(expected, lab.session(form).prefill(ids)[0])
        print(f"  {form:<8}{found}", flush=True)


# ---- reuse ----------------------------------------------------------------------------------


def reuse_table(lab: Lab, options: argparse.Namespace) -> None:
    """A prompt whose beginning was read before: what each kind of hit costs and changes.

    cold         nothing is there: all is read
    full hit     entries and windows of that moment are there (`Session.restore`)
    global-only  the entries are there, the windows have been lost and are read again
                 (`Session.crop`), bounded or exact
    """
    hit, suffix = options.hit, options.suffix
    texts = held_out(lab, min(6, options.texts), hit + suffix)
    other, kinds = elsewhere(lab, texts[-1], hit), REUSES
    again = {kind: hit - replay_start(lab.config, hit, kind.split()[-1])
             for kind in kinds[2:]}
    heading("Reuse, KL(cold || hit)", repr(lab), model_threads(lab, options),
          f"{len(texts)} held-out texts: hit {hit}, suffix {suffix}, whose logits are compared; "
          f"read again {', '.join(f'{n} ({k.split()[-1]})' for k, n in again.items())}; "
          f"fastest of {options.repeats}; sums over the texts")
    seconds = dict.fromkeys(kinds, 0.0)
    passes = dict.fromkeys(kinds, 0)
    quality = {kind: Agreement() for kind in kinds}
    for ids in texts:
        reuse = Reuse(lab, ids, hit, other)
        cold = reuse.logits("cold")
        for kind in kinds:
            with counting(lab.model) as work:
                quality[kind].add(cold, reuse.logits(kind))
            passes[kind] += work.passes.total()
        best = fastest({kind: functools.partial(reuse.logits, kind) for kind in kinds},
                       options.repeats)
        for kind in kinds:
            seconds[kind] += best[kind]
    print(f"  {'':<20}{'seconds':>9}{'of cold':>9}{'passes':>10}{'saved':>10}{'share':>8}"
          f"{Agreement.HEAD}")
    for kind in kinds:
        less = passes["cold"] - passes[kind]
        print(f"  {kind:<20}{seconds[kind]:9.3f}{seconds[kind] / seconds['cold']:9.3f}"
              f"{passes[kind]:10,}{less:10,}{less / passes['cold']:8.1%}{quality[kind]}")
    print("  passes: layer-token passes computed")


if __name__ == "__main__":
    main()
