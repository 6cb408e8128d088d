"""`labkit inspect cache`: what a conversation's cache holds, part by part and turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

from labkit.cache.cache import Cache
from labkit.engine.inspection import columns
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.session import Session
from labkit.engine.timeline import Conversation, ManualClock, record
from labkit.errors import InputError
from labkit.model.transformer import Transformer
from labkit.text.corpus import load_corpus
from labkit.text.tokenizer import Tokenizer


def talk(model: Transformer, tokenizer: Tokenizer, turns: int, waits: Sequence[float],
         form: str | None = None, replay: str = "bounded", store: str | None = None,
         reply: int = 16) -> Conversation:
    """A conversation about held-out text: each turn says the next paragraph of one novel.

    The device's budget holds few blocks, so that all tiers are seen at work. store: a folder for
    the disk tier; what an earlier talk left there is found again.
    """
    if turns < 1:
        raise InputError(f"turns is {turns}: say at least 1")
    text = load_corpus("heldout")["emma"]
    paragraphs = [p for p in text.split("\n\n") if len(p) > 80][:turns]
    clock = ManualClock()
    page = model.new_cache(1, form)
    block = sum(n * codec.nbytes for s in page.stores.values()
                for codec in (s.kv_codec, s.key_codec) for n in (s.page_entries,))
    with PrefixCache(model, device=2 * block, host=4 * block, disk=store, form=form,
                     replay=replay, clock=clock) as cache:
        return record(cache, tokenizer, clock, paragraphs, waits, reply)


def parts_table(session: Session) -> str:
    """The session's cache, a row per part; bytes are those of the tensors."""
    cache: Cache = session.cache
    rows = [("part", "form", "holds", "bytes", "reserved")]
    for layer, store in cache.stores.items():
        ratio, pages = cache.config.compress_ratios[layer], len(store.pages[0])
        for name, filled, allocated in store.nbytes():
            codec = store.kv_codec if name == "global_kv" else store.key_codec
            rows.append((f"layer {layer} {name}", f"{codec.recipe} {codec.form}",
                         f"{store.counts[0]:,} entries of {ratio} tokens in {pages} pages",
                         f"{filled:,}", f"{allocated - filled:,}"))
    ring = cache.windows[0]
    held = cache.nbytes()
    rows.append((f"windows of {len(cache.windows)} layers",
                 f"{ring.codec.recipe} {ring.codec.form}", f"the last {ring.window} tokens",
                 f"{held['window']:,}", "0"))
    if cache.draft_windows:
        rows.append((f"windows of the draft's {len(cache.draft_windows)} stages",
                     f"{ring.codec.recipe} {ring.codec.form}",
                     f"features of the last {ring.window} tokens", f"{held['draft']:,}", "0"))
    rows.append(("compressor remainders", "fp32", f"{len(cache.tails)} layers",
                 f"{held['remainder']:,}", "0"))
    rows.append(("Engram look-back", "int64", f"{cache.look_back.rows.shape[1]} classes",
                 f"{held['engram']:,}", "0"))
    growing = held["global_kv"] + held["index_keys"]
    return (columns(rows) + f"\n{session.length:,} tokens; {growing:,} bytes of global KV and "
            f"index keys, {growing / max(1, session.length):.1f} a token")


def turns_table(conversation: Conversation) -> str:
    """The recorded turns: time, what was found, what was read, what the stores hold."""
    rows: list[tuple[str, ...]] = [(
        "turn", "at", "tokens", "hit", "known", "read again", "read", "ms", "device", "host",
        "disk", "windows", "lost")]
    for t in conversation.turns:
        h, s = t.hit, t.stores
        lost = ", ".join(f"{n} {name}" for name, n in t.lost.items() if n)
        rows.append((str(t.number), f"{t.at:,.0f} s", f"{t.length:,}", h.kind, f"{h.known:,}",
                     f"{h.replayed:,}", f"{h.computed:,}", f"{h.seconds * 1e3:,.0f}",
                     *(f"{s[name]:,}" for name in ("device", "host", "disk", "windows")), lost))
    return columns(rows)


def conversation_view(conversation: Conversation) -> str:
    """Both tables of a recorded conversation."""
    assert conversation.session is not None, "nothing was said"
    stats = conversation.cache.tiers.stats
    found = (f"blocks found: {stats.device:,} on the device, {stats.host:,} on the host, "
             f"{stats.disk:,} on disk; {stats.spoilt:,} spoilt, {stats.refused:,} refused")
    return "\n\n".join([parts_table(conversation.session), turns_table(conversation), found])
