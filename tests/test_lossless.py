"""Greedy speculation writes what plain decoding writes: the trained mini, 20 prompts x 200 tokens.

In float64 without cache rounding the texts must be the same, token for token. In fp32 with
rounding a pass of several tokens and passes of one differ in their last bits, a bit may move a
value over a rounding boundary, and where the two likeliest tokens are closer than that noise the
texts may part. The noise is measured on the same texts; where they part must be such a place.
"""

import pytest
import torch

import labkit
from labkit.cache.rows import join, select
from labkit.engine.sampling import Sampling
from labkit.engine.session import Session
from labkit.engine.speculation import Proposal, Request, propose, verify
from labkit.text.prompts import prompts

COUNT, LENGTH, NEW = 20, 40, 200
GREEDY = Sampling(temperature=0)


def texts(lab):
    """Half prose, the rest code-like and counting, where drafts are accepted oftener."""
    return (prompts("prose", lab.tokenizer, 10, LENGTH) + prompts("code", lab.tokenizer, 5, LENGTH)
            + prompts("counting", lab.tokenizer, 5, LENGTH))


def write(lab, started, slots):
    """NEW greedy ids behind each prompt, all in one batch.

    -> (ids, steps, drafts accepted, the logits where each id was decided [NEW,V] a prompt)
    """
    model, vocabulary = lab.model, lab.tokenizer.vocab_size
    cache, going = read(lab, started), list(range(len(started)))
    said, logits = [[ids[-1]] for ids in started], [[] for _ in started]
    steps = accepted = 0
    generator = torch.Generator().manual_seed(0)
    while going:
        requests = [Request(said[i][-1], GREEDY, generator, min(slots, NEW - len(said[i])))
                    for i in going]
        proposals = (propose(model, cache, requests, vocabulary) if slots
                     else [Proposal() for _ in going])
        emissions = verify(model, cache, requests, proposals, [len(p.ids) for p in proposals],
                           vocabulary)
        steps += len(going)
        for i, emission in zip(going, emissions, strict=True):
            said[i] += emission.ids
            logits[i] += emission.logits
            accepted += emission.accepted
        stay = [row for row, i in enumerate(going) if len(said[i]) <= NEW]
        if len(stay) < len(going):
            going = [going[row] for row in stay]
            cache = select(cache, stay) if stay else cache
    return ([ids[1 : NEW + 1] for ids in said], steps, accepted,
            [torch.stack(rows[:NEW]) for rows in logits])


def read(lab, started):
    """A cache whose rows have read all but the last id of each prompt."""
    caches = []
    for ids in started:
        session = Session(lab.model)
        session.prefill(ids[:-1])
        caches.append(session.cache)
    return join(caches)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_in_float64_without_rounding_the_texts_are_the_same():
    lab = labkit.load("mini", dtype=torch.float64, cache_rounding=False)
    started = texts(lab)
    plain, steps, _, _ = write(lab, started, 0)
    spec, fewer, accepted, _ = write(lab, started, 5)
    print(f"{COUNT} prompts x {NEW} tokens: {steps} plain steps, {fewer} speculative ones, "
          f"{accepted} drafts accepted")
    assert len(plain) == COUNT and all(len(ids) == NEW for ids in plain)
    assert plain == spec
    # It was speculation that wrote this: drafts were accepted and drafts were refused.
    assert accepted > 0.1 * COUNT * NEW and fewer + accepted >= steps - COUNT > fewer
    # and the batch is no other way of decoding than a text alone
    for i in (0, 13):
        for speculative in (False, True):
            alone = lab.generate(started[i], NEW, temperature=0, speculative=speculative)
            assert list(alone.ids) == plain[i][: len(alone.ids)]


def test_in_fp32_with_rounding_they_part_only_where_the_choice_was_noise():
    lab = labkit.load("mini")
    started = texts(lab)
    plain, _, _, rows = write(lab, started, 0)
    spec, _, _, _ = write(lab, started, 5)
    # The same texts again, six tokens a pass: how far do logits move?
    cache, fed = read(lab, started), [[a[-1], *b] for a, b in zip(started, plain, strict=True)]
    chunks = []
    with torch.no_grad():
        for at in range(0, NEW, 6):
            ids = torch.tensor([row[at : min(at + 6, NEW)] for row in fed])
            chunks.append(lab.model(ids, cache=cache).logits[..., : lab.tokenizer.vocab_size])
    moved = (torch.cat(chunks, dim=1) - torch.stack(rows)).abs().amax(-1)           # [20,NEW]
    noise, parted = float(moved.max()), []
    for text, (a, b) in enumerate(zip(plain, spec, strict=True)):
        differ = [i for i in range(NEW) if a[i] != b[i]]
        if differ:
            two = rows[text][differ[0]].topk(2).values
            parted.append((differ[0], round(float(two[0] - two[1]), 4)))
    print(f"chunking noise of the logits: median of the largest {float(moved.median()):.1e}, at "
          f"most {noise:.2f}; {len(parted)} of {COUNT} texts part (place, margin of plain decoding "
          f"there): {parted}")
    assert len(parted) <= 1
    assert all(margin < noise for _, margin in parted)
