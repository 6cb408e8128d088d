"""A thousand random steps over sessions that share what they have read.

Whatever came before (chunks, forks, crops, snapshots, hits of any kind, evictions, expired
windows), the logits must be those of one pass over the same text. In float64 without rounding
and with exact replay that is exact; packed and fake-quantised caches agree bit for bit.
"""

from __future__ import annotations

import random

import pytest
import torch

from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.session import Session
from labkit.mutants.models import random_ids, random_model, small_config
from labkit.mutants.rules import FP64, close

PAGE, LONGEST = 4, 72


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Party:
    """Sessions of one model, a prefix cache between them, and snapshots with their texts."""

    def __init__(self, model, form, folder):
        self.model, self.form, self.clock = model, form, Clock()
        block = 6 * 4096  # some blocks only: the device and the host must evict
        self.cache = PrefixCache(
            model, form=form, page_tokens=PAGE, replay="exact", device=block, host=block,
            disk=str(folder), disk_budget=1 << 20, host_memory=1 << 19, window_lifetime=60,
            clock=self.clock, wall=self.clock)
        self.sessions = [self.new()]
        self.saved: list = []

    def new(self):
        return Session(self.model, self.form, PAGE)


def step(party: Party, dice: random.Random, texts: list[list[int]]) -> tuple[str, object]:
    """One random operation; gives its name and, where it computed some, (ids, logits of all)."""
    sessions, clock = party.sessions, party.clock
    at = dice.randrange(len(sessions))
    session = sessions[at]
    room = LONGEST - session.length
    what = dice.choice(["prefill", "decode", "decode", "rewind", "fork", "crop", "snapshot",
                        "restore", "keep", "keep", "hit", "hit", "hit", "time", "drop"])
    if what in ("prefill", "rewind") and room > 0:
        count = dice.randint(1, min(room, 13))
        text = dice.choice(texts)
        new = text[session.length : session.length + count]  # texts that others may have read too
        if what == "prefill":
            logits = session.prefill(new, chunk=dice.choice([None, 1, 3]))
            return what, (session.ids, logits)
        before = session.length
        with torch.no_grad():
            party.model(torch.tensor([new]), cache=session.cache, keep=True)
        if dice.random() < 0.5:  # what is lent now must not be written into afterwards
            party.cache.keep(session)
        left = dice.randint(0, len(new))
        session.cache.rewind(torch.tensor([before + left]))
        if room > left:
            return what, (session.ids + [5], session.decode(5))
    elif what == "decode" and room > 0:
        id_ = dice.choice(texts)[session.length]
        return what, (session.ids + [id_], session.decode(id_))
    elif what == "fork" and len(sessions) < 5:
        sessions.append(session.fork())
    elif what == "crop":
        session.crop(dice.randint(0, session.length), "exact")
        if session.length < LONGEST:
            return what, (session.ids + [7], session.decode(7))
    elif what == "snapshot":
        party.saved = [*party.saved[-3:], session.snapshot()]
    elif what == "restore" and party.saved:
        session.restore(dice.choice(party.saved))
        if session.length < LONGEST:
            return what, (session.ids + [9], session.decode(9))
    elif what == "keep":
        party.cache.keep(session)
    elif what == "hit":
        source = dice.choice([s.ids for s in sessions] + texts)
        length = dice.randint(1, LONGEST)
        wanted = (source[: dice.randint(0, LONGEST)] + dice.choice(texts))[:length]
        found, logits, hit = party.cache.prefill(wanted, last_only=False)
        assert hit.computed == logits.shape[1] and found.ids == wanted
        sessions[at] = found
        return f"{what} {hit.kind}", (wanted, logits)
    elif what == "time":
        clock.now += dice.choice([1, 20, 90, 3600.0])
    elif what == "drop" and len(sessions) > 1:
        del sessions[at]
    return what, None


def test_a_thousand_steps_equal_single_passes(tmp_path):
    config = small_config()
    model = random_model(config)
    texts = random_ids(config, LONGEST + 1, 3, seed=4).tolist()
    party, dice = Party(model, "plain", tmp_path), random.Random(2026)
    counts: dict[str, int] = {}
    for number in range(1000):
        what, outcome = step(party, dice, texts)
        counts[what] = counts.get(what, 0) + 1
        if outcome is None:
            continue
        ids, logits = outcome
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[:, -logits.shape[1]:]
        # Of what an exact replay reads, the last window is exact, as is all that is new.
        new = 1 if what.startswith("hit global") else logits.shape[1]
        wrong = close("logits", expected[:, -new:], logits[:, -new:], FP64)
        assert wrong is None, f"step {number}, {what}, {len(ids)} tokens: {wrong}"
    stats = party.cache.tiers.stats
    print(dict(sorted(counts.items())), stats, party.cache.nbytes())
    # The test is worth something only if all of it happened.
    assert min(counts.get(kind, 0) for kind in ("hit cold", "hit full", "hit global-only")) > 10
    assert min(stats.device, stats.host, stats.disk, stats.moved_to_host) > 10
    assert party.cache.pool.evictions > 10 and not stats.spoilt and not stats.refused
    party.cache.close()


@pytest.mark.parametrize("form", ["packed", "bf16"])
def test_packed_caches_equal_fake_quantised_ones_step_by_step(form, tmp_path):
    """The same 300 steps with rounding on, in two forms: the same bits, whatever is reused."""
    config = small_config()
    model = random_model(config, dtype=torch.float32, cache_rounding=True)
    texts = random_ids(config, LONGEST + 1, 3, seed=5).tolist()
    parties = [Party(model, kind, tmp_path / kind) for kind in ("plain", form)]
    dice = [random.Random(7), random.Random(7)]
    compared = 0
    for number in range(300):
        (what, a), (other, b) = (step(p, d, texts) for p, d in zip(parties, dice, strict=True))
        if what != other:
            # Blocks of another size are evicted at other moments: then the kinds of hit differ,
            # and both go on from the same text, read anew.
            assert what.startswith("hit") and other.startswith("hit")
            for party in parties:
                party.sessions = [party.new()]
            continue
        if a is not None:
            assert a[0] == b[0]
            if not what.startswith("hit"):
                assert torch.equal(a[1], b[1]), f"step {number}, {what}"
                compared += 1
    print(f"{compared} outcomes compared")
    assert compared > 60
    for party in parties:
        party.cache.close()
