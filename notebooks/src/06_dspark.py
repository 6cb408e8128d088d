# Source of notebooks/06_dspark.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # DSpark: guess five, lose nothing
#
# Decoding reads all weights for every single token. DSpark adds a small *draft* that
# guesses the next five tokens; the large model, here called the *target*, checks all
# five in one pass and keeps what it can answer for.
#
# **The question of this notebook:** how can guesses of a small draft write a text that
# is distributed exactly as the target's own?
#
# A *step* is one pass of the draft and one of the target. Run the cells in order;
# where a cell begins with `guess`, put in your own prediction first.

# %% id="load"
import inspect
from collections import Counter
from contextlib import nullcontext

import torch
from IPython.display import Code

import labkit
from labkit import mutants
from labkit.engine.sampling import Sampling, sample
from labkit.exercises import check

lab = labkit.load("mini")
c, n, V = lab.config, lab.config.dspark_block_size, lab.tokenizer.vocab_size
assert lab.has_draft
own = sum(p.numel() for name, p in lab.model.named_parameters() if "mtp." in name)
print(f"{lab}\nof these the draft {own / 1e6:.1f} M, {n} slots")

# %% [markdown] id="guess-passes"
# ## 1. One step, several tokens
#
# **Predict.** The model writes 60 tokens. The prompt's pass gives the first; every
# further step gives at least one token. How many steps will it take with the draft?

# %% id="guess-passes-here"
guess = 59

# %% id="passes"
written = lab.generate("It is a truth universally acknowledged", 60, seed=0,
                       speculative=True)
told, rest = written.stats.speculation, len(written.ids) - 1
assert rest / (n + 1) <= told.steps <= rest <= told.steps + told.accepted
print(f"your guess {guess}, the model {told.steps}\n{told.line()}\n{written.text}")

# %% [markdown] id="draft"
# ## 2. The draft
#
# The draft is three blocks, *stages*, of the kind you know, with few experts. Two
# things make it cheap and good:
#
# - It does not read the text anew. Of every token that the target has read, it takes
#   what the target thought: the streams that *enter* three late layers, averaged, as
#   one *feature*. Each stage makes a window key of it.
# - It guesses all slots in one pass. The block holds the *anchor* (the newest token,
#   which the target has not read yet) and four copies of a learned *noise* token, at
#   positions a to a+4. Slot k guesses the token at a+1+k. Slots see each other, later
#   ones too: there is nothing in them to peek at.

# %% id="draft-source"
from labkit.model.dspark import DraftAttention, DSpark
from labkit.model.transformer import Transformer

parts = (Transformer.draft, DraftAttention.forward, DSpark.slots)
Code("\n".join(inspect.getsource(part) for part in parts), language="python")

# %% id="draft-facts"
from labkit.text.corpus import load_corpus

ids = lab.encode(load_corpus("heldout")["prideprejudice"])[:160]
a, layers = 60, c.dspark_target_layer_ids
run, block = lab.trace(ids), lab.draft(ids, [a])
names = [f"layers.{i}.streams_after_engram" for i in layers]           # [B,T,C,D] each
features = torch.cat([run[name].mean(2) for name in names], dim=-1)
assert torch.allclose(features, block["dspark.target_features"], atol=1e-5)
exact = labkit.load("mini", dtype=torch.float64)       # where rounding must not matter
whole, alone = (exact.draft(ids[:end], [a]) for end in (len(ids), a + 1))
for name in ("base_logits", "confidence_logits"):
    x, y = whole[f"dspark.{name}"], alone[f"dspark.{name}"]
    assert torch.allclose(x, y, atol=1e-9), "the draft reads nothing behind its anchor"
    print(f"{name:18} {list(x.shape)}")

# %% [markdown] id="guess-markov"
# ### What a slot cannot know
#
# Slot 2 guesses without knowing what slot 1 will come to: both are computed at once.
# So its *base logits* mix all texts that could stand before it. The *Markov head*
# repairs this: a bias on the logits from the token just before, as a product of two
# thin matrices. With it slots are drawn left to right; only this last, cheap part is
# sequential.
#
# **Predict.** Behind one anchor of a novel: in how many of the five slots does the
# bias make another token the likeliest?

# %% id="guess-markov-here"
guess = 2

# %% id="markov"
from labkit.viz.draft_slots import draft_slots, guesses

slots = guesses(lab, ids, a)
print(f"your guess {guess}, the model {sum(slot.changed for slot in slots)}")
draft_slots(lab, ids, a)

# %% id="markov-facts"
other = lab.draft(ids, [a], ids[a : a + n])            # the text's own tokens before
assert torch.equal(other["dspark.base_logits"], block["dspark.base_logits"])
bias = lab.model.mtp.markov_logits(torch.tensor(ids[a : a + n]))       # [n,V]
assert torch.allclose(other["dspark.markov_logits"][0], bias, atol=1e-5)
for slot in slots:
    assert abs(float(slot.biased.sum()) - 1) < 1e-9
print(f"a table of all pairs: {c.vocab_size**2:,} numbers; "
      f"the Markov head: {2 * c.vocab_size * c.dspark_markov_rank:,}")

# %% [markdown] id="guess-reject"
# ## 3. Keep or replace
#
# The draft drew its token from p_d; the target, in its one pass, says p_t at the same
# place. The token is kept with probability min(1, p_t/p_d). If it is rejected, another
# is drawn from the *residual*: the part of p_t that p_d does not cover, scaled to 1.
#
# **Predict.** Four tokens: the draft says 20, 20, 10 and 50 %, the target 50, 30, 15
# and 5 %. With what probability is a draft rejected?

# %% id="guess-reject-here"
guess = 0.5

# %% id="reject"
from labkit.viz.one_place import one_place, place

p_t = torch.tensor([0.50, 0.30, 0.15, 0.05], dtype=torch.float64)
p_d = torch.tensor([0.20, 0.20, 0.10, 0.50], dtype=torch.float64)
here = place(p_t, p_d)
print(f"your guess {guess:.0%}, the rule {here.rejected:.0%}")
assert torch.allclose(here.emitted, p_t, rtol=0, atol=1e-12)
one_place(p_t, p_d, ["a", "b", "c", "d"])

# %% exercise="dspark_one_token"

# %% [markdown] id="verify"
# In the figure above, kept and put-in parts end exactly at p_t. The reason takes one
# line: min(p_d, p_t) + max(0, p_t - p_d) = p_t, and rejections and residual have the same
# total, the *total variation* of the two. A bad draft is rejected oftener; what is
# written stays the same.
#
# A whole block goes left to right. Behind the first rejection everything is dropped:
# those tokens were drafted for a text that does not exist. If nothing is rejected, the
# target's last distribution gives a *bonus* token. Greedy decoding is the same code
# with distributions that hold a single 1.

# %% id="verify-source"
from labkit.engine.verification import acceptance, residual, verify

sources = [inspect.getsource(f) for f in (verify, acceptance, residual)]
Code("\n".join(sources), language="python")

# %% [markdown] id="explore"
# ### Explore
#
# Move through the steps of a text. Wide bars: the target's probability of the drafted
# token; narrow, hatched bars: the draft's. The diamond is the *survival* that the draft
# expected: the product of the *confidences* of this slot and all before it. The
# confidence head reads the slot's state and the token before: will this slot be
# accepted, if all before it are?
#
# Find a step in which a token with a low p_t was kept all the same (chance decides).
# Then set the temperature to 0: why are the target's bars all 0 or 100 %? At last send
# only slots with a of 0.5 or more: fewer drafts are wasted, and tokens a step go down.

# %% id="explorer"
from labkit.explorers.speculation import SpeculationExplorer

explorer = SpeculationExplorer(lab, "She was not at all", 40, seed=4)
explorer

# %% id="explorer-facts"
steps = explorer.recording.steps
best = max(range(len(steps)), key=lambda i: steps[i].kept)
explorer.step.value = best + 1           # what the slider does
print(f"the last move took {explorer.seconds * 1000:.0f} ms")
for step in steps:
    a_j = 1.0
    for slot in step.slots:
        a_j *= slot.confidence
        assert abs(a_j - slot.survival) < 1e-6
        assert slot.accept is None or abs(
            slot.accept - min(1, slot.target / slot.draft)) < 1e-12
explorer.static()

# %% exercise="dspark_tokens_a_step"

# %% [markdown] id="lossless"
# ## 4. Lossless: three checks
#
# 1. *Exactly, on small tables.* Target and draft are random tables over four tokens.
#    Instead of drawing, every outcome of every draw is taken in turn, with its
#    probability, through the engine's own code. The law of the next three tokens has to
#    be plain sampling's, whatever kind of tables.
# 2. *By chance, on mini.* Real draws over the whole vocabulary, at one place of the text
#    above: draft from p_d, verify, count what comes out. A chi-square test compares the
#    counts with p_t. A test that passes says little unless one knows what it would have
#    noticed, so that is printed too.
# 3. *Greedy, token for token.* At temperature 0 the text itself must be the same. This
#    runs in float64: in fp32 a pass of six tokens rounds otherwise than six passes, and
#    two tokens may be as likely as rounding allows.

# %% id="law"
from labkit.engine.scheduling import Fixed
from labkit.mutants.enumeration import bias as law_bias
from labkit.mutants.enumeration import random_toy

for kind in ("dense", "sparse", "disjoint", "top_p", "greedy"):
    toy = random_toy(3, vocabulary=4, block=2, kind=kind)
    off, _ = law_bias(toy, Fixed(2), requests=1, count=3)
    assert off < 1e-12
    print(f"{kind:9} total variation from plain sampling {off:.1e}")

# %% id="chance-test"
from labkit.mutants.chance import ALPHA, POWER, chi_square

flat = min(steps, key=lambda step: float(step.targets[0].max()))
p_t, p_d = flat.targets[0], flat.drafts[0]             # [V] each
law = {i: float(p_t[i]) for i in p_t.topk(9).indices.tolist() if p_t[i] > 0.002}
law["others"] = 1 - sum(law.values())
counts, generator = Counter(), torch.Generator().manual_seed(1)
for _ in range(8000):
    id_ = sample(p_d, generator)
    verdict = verify([p_t, p_t], [p_d], [id_], generator)
    first = id_ if verdict.accepted else verdict.next_id
    counts[first if first in law else "others"] += 1
found = chi_square(counts, law)
print(f"statistic {found.statistic:.1f}, limit {found.limit:.1f} (right code exceeds "
      f"it with {ALPHA});\na law that is off by {found.detectable:.1%} would be "
      f"noticed with {POWER:.0%}")
assert found.statistic < found.limit and sum(counts.values()) == 8000

# %% id="greedy-same"
plain, fast = (exact.generate("It is a truth universally acknowledged", 24,
                              temperature=0, speculative=s) for s in (False, True))
assert fast.ids == plain.ids
print(f"{len(plain.ids)} tokens alike; {fast.stats.speculation.line()}")

# %% [markdown] id="rewind"
# ## 5. Taking back
#
# The target's pass has written all six tokens into its state: windows, compressor
# remainders, the Engram look-back, entries, the draft's windows. What was rejected must
# leave all of them. `Cache.rewind` is one rule for all parts.
#
# Here five drafts that are surely wrong are verified and taken back; then the session
# must say what a session says that never saw them. The same again with one part of the
# state left out of the rule, as faulty engines do. (A spoilt remainder or entry may
# hardly show at first: it matters when a later token selects that entry.)

# %% id="rewind-check"
from labkit.engine import speculation as engine

bad = int(run["logits"][0, -1, :V].argmin())
one_hot = torch.eye(V, dtype=torch.float64)[bad]
request = engine.Request(ids[-2], Sampling(0), torch.Generator(), n)
wrong = engine.Proposal([bad] * n, [one_hot] * n, [0.5] * n, [0.0] * n)
apart = {}
for part in ("", "windows", "remainder", "lookback", "entries"):
    fault = mutants.active(f"rewind_forgets_{part}") if part else nullcontext()
    with fault, torch.no_grad():
        drafted, never = exact.session(), exact.session()
        drafted.prefill(ids[:-2]), never.prefill(ids[:-2])
        out, = engine.verify(exact.model, drafted.cache, [request], [wrong], [n], V)
        never.decode(ids[-2])
        assert out.accepted == 0 and len(out.ids) == 1
        x, y = (s.prefill([*out.ids, *ids[1:4]]) for s in (drafted, never))
    apart[part or "nothing"] = float((x - y).abs().max() / y.abs().max())
print({part: f"{value:.1e}" for part, value in apart.items()})
assert apart["nothing"] < 1e-6
assert all(apart[part] > 1e-3 for part in ("windows", "lookback"))

# %% [markdown] id="guess-calibration"
# ## 6. Are the confidences true?
#
# Products of confidences will decide how much is verified, so 0.3 should mean that 3
# of 10 survive. Behind every eighth token of held-out text the draft proposes, the
# target judges, and the text goes on. (At temperature 1, on rows that the calibration
# has not seen; and on held-out code, for section 7.)
#
# **Predict.** How many of the drafts in slot 3 survive in prose, that is, are accepted
# with both before them?

# %% id="guess-calibration-here"
guess = 0.4

# %% id="calibration"
from labkit.train.draft_figures import SAMPLED, code_rows, row_length, try_drafts
from labkit.train.drafter import heldout_rows
from labkit.viz.reliability import diagrams, reliability_diagram

rows = {"prose": heldout_rows(lab.tokenizer, row_length(c))[1::2][:, :225],
        "code": code_rows(lab.tokenizer, 128, 12)}
trials = {kind: try_drafts(lab.model, text, SAMPLED, vocabulary=V)
          for kind, text in rows.items()}
temperatures = lab.calibration.temperatures
seen = trials["prose"].survived[:, 2].double().mean()
print(f"your guess {guess:.0%}, the draft {seen:.0%}")
reliability_diagram(trials["prose"], temperatures)

# %% id="calibration-facts"
for bins in diagrams(trials["prose"], temperatures).values():
    assert sum(b.count for b in bins) == trials["prose"].survived.numel()
logits = trials["prose"].confidence_logits[:, 4]
order = logits.argsort()
assert (torch.sigmoid(logits / temperatures[4])[order].diff() >= 0).all()
for kind, t in trials.items():
    print(f"{kind}: a step keeps {t.accepted:.2f} drafts, gives {1 + t.accepted:.2f}")
    assert (t.survived[:, 1:] <= t.survived[:, :-1]).all()

# %% [markdown] id="temperatures"
# A temperature for each slot divides the logit before the sigmoid. It cannot change
# which of two drafts is trusted more, only how far. The temperatures are set slot by
# slot from the left, so that the *products* become true on held-out text. The grey
# diagonal is truth; the vertical lines span two standard errors. Where the head was
# true already, little is left to mend.
#
# ## 7. How much to verify
#
# A step of R requests that verifies B - R slots reads B tokens and gives
# tau = R + (sum of a) tokens. SPS(B) is the number of such steps a second, measured
# now, on your machine, for 1, 4 and 12 requests. Few steps are measured, so the rates
# scatter. Beside them a plane is fitted, seconds = fixed + x * R + y * B, which says what
# a step of any R and B takes.

# %% id="rates"
from labkit.engine.batching import measure_steps
from labkit.text.prompts import prompts
from labkit.viz.load_data import load, plane, pooled

texts = prompts("prose", lab.tokenizer, 12, 64)
drafting, without = (measure_steps(lab.model, lab.tokenizer, texts, (1, 4, 12), slots,
                                   repeats=2) for slots in (n, 0))
measured = load(trials, temperatures, pooled(drafting, without))
fitted = load(trials, temperatures, plane(drafting, without, n))
assert {m.requests for m in drafting} == {m.requests for m in without} == {1, 4, 12}
for m in drafting:
    if m.tokens in (m.requests, m.requests * (1 + n)):
        on_plane = 1 / fitted.rates.with_draft(m.requests)(m.tokens)
        print(f"R = {m.requests:2}, B = {m.tokens:2}: {1000 * m.seconds:6.1f} ms "
              f"measured, {1000 * on_plane:6.1f} ms on the plane")

# %% [markdown] id="guess-load"
# The policies: no draft; all slots; slots with a of at least 0.5; the *prefix
# scheduler*, which admits the likeliest slots of all requests one by one as long as
# each raises tau * SPS(B); and the *delayed budget*, which searches the whole curve, but
# for the confidences of two steps ago.
#
# **Predict.** With 12 requests of prose, how many slots a request does the prefix
# scheduler verify, by the rates of the plane? (Of five.)

# %% id="guess-load-here"
guess = 3

# %% id="load-explorer"
from labkit.explorers.load import LoadExplorer
from labkit.viz.load_data import mean

busy = mean(fitted.choices("prose", 12)["scheduler"]).slots
print(f"your guess {guess}, the scheduler {busy:.1f}")
loads = LoadExplorer({"on the plane": fitted, "as measured": measured}, requests=4)
loads

# %% id="load-facts"
for R in (1, 4, 12):
    choices = fitted.choices("half and half", R)
    best = max(y for _, y in fitted.curve("half and half", R, 5))
    assert abs(choices["scheduler"][5].throughput - best) < 1e-9 * best
    assert choices["none"][5].expected == R
    assert choices["fixed"][5].tokens == R * (1 + n)
loads.kind.value, loads.requests.value = "half and half", 12
print(f"the last move took {loads.seconds * 1000:.0f} ms")
loads.static()

# %% [markdown] id="load-read"
# Move R from 1 to 12, then change the text to code, and the rates to those measured.
# Verified slots go where they survive: with half code and half prose the scheduler
# serves code first. On the plane tau * SPS(B) has one summit, and stopping early finds it
# (asserted above). On the jagged measured rates it may stop at a small bump that the
# delayed budget looks over. Mini is so small that a step is mostly overhead, and its
# draft is large beside it; nothing here says what pays on a large machine.

# %% exercise="dspark_scheduler"

# %% [markdown] id="guess-coin"
# ### Why it may not look ahead
#
# The target tosses a fair coin for ever. The draft's first slot is a fair toss, too,
# and is always accepted. After a drafted 0 the draft is sure of its second slot, after a
# 1 it is not. One slot alone does not pay by the rates below; two together pay after a 0.
# A scheduler that searches the whole curve therefore verifies drafted zeros and throws
# drafted ones away, to toss again.
#
# **Predict.** With what probability is the first token then 0?

# %% id="guess-coin-here"
guess = 0.5

# %% id="coin"
from labkit.engine.scheduling import PrefixScheduler
from labkit.mutants.enumeration import STAIRS, coin, emitted_law

zero = ((0,),)                           # the texts of one request: its first token
honest = emitted_law(coin(), PrefixScheduler(STAIRS), 1, 1)[zero]
with mutants.active("scheduler_looks_ahead") as fault:
    ahead = emitted_law(coin(), PrefixScheduler(STAIRS), 1, 1)[zero]
print(f"your guess {guess}, looking ahead {ahead}, stopping early {honest}\n{STAIRS}")
assert abs(honest - 0.5) < 1e-12 and abs(ahead - 0.75) < 1e-12

# %% [markdown] id="guess-break"
# ## 8. Break it
#
# An off-by-one in the draft: the Markov bias of a slot comes from the token *two* before
# its own (where there is one; slot 1 has the anchor before it all the same).
#
# **Predict.** How many of the 24 greedy tokens of section 4 change? And in which slot
# would you look for the first difference?

# %% id="guess-break-here"
guess = 10

# %% id="broken"
few = rows["code"][:8, :97]
kept = {"right": try_drafts(lab.model, few, SAMPLED, vocabulary=V)}
with mutants.active("draft_markov_off_by_one"):
    broken = exact.generate("It is a truth universally acknowledged", 24,
                            temperature=0, speculative=True)
    late = lab.draft(ids, [a], ids[a : a + n])
    kept["with the fault"] = try_drafts(lab.model, few, SAMPLED, vocabulary=V)
changed = sum(x != y for x, y in zip(plain.ids, broken.ids, strict=True))
print(f"your guess {guess}, the model {changed}: the target judges")
for name, t in kept.items():
    share = ", ".join(f"{s:.0%}" for s in t.survived.double().mean(0).tolist())
    print(f"code, {name}: keeps {t.accepted:.2f} a step; survived by slot {share}")
difference = (late["dspark.markov_logits"] - other["dspark.markov_logits"]).abs()
first = int(difference[0].amax(-1).gt(1e-4).nonzero()[0]) + 1
print(f"the Markov bias first differs in slot {first}")
assert broken.ids == plain.ids and first == 2

# %% [markdown] id="rules"
# The text never shows it, and no test of texts can: only numbers within the block do,
# and fewer drafts stay. Faults of verification and scheduling are the opposite: speed
# looks fine and the *law* is bent. By how much, in total variation over the next three
# tokens, exactly, at the worst of the small tables and the coin:

# %% id="rules-broken"
from labkit.engine.scheduling import DelayedBudget, Threshold

toys = [(random_toy(3, 4, 2), Fixed(2))] + [(coin(), p) for p in (
    PrefixScheduler(STAIRS), Threshold(0.8), DelayedBudget(STAIRS, 1))]
for name, fault in mutants.MUTANTS.items():
    if fault.mechanism in ("verification", "scheduling"):
        with mutants.active(name):
            off = max(law_bias(toy, policy, 1, 3)[0] for toy, policy in toys)
        assert off > 0.01, name
        print(f"{off:6.1%}  {fault.fault}")

# %% [markdown] id="released"
# ## 9. The released model
#
# The same draft at the released sizes, from the configuration and the layout of its
# checkpoint.

# %% id="released-sizes"
from labkit.checkpoint.accounting import part_of, totals_by

flash = labkit.ModelConfig.preset("flash")
draft = totals_by(flash, part_of)["draft"]
stages, W, d = flash.num_nextn_predict_layers, flash.sliding_window, flash.head_dim
windows = stages * W * (d + d // 32)                   # fp8, a scale for each 32
head = 2 * flash.vocab_size * flash.dspark_markov_rank
assert (stages, flash.dspark_block_size, windows) == (3, 5, 202_752)
assert flash.dspark_target_layer_ids == (37, 38, 39) and draft.tensors > 2000
print(f"draft: {draft.parameters / 1e9:.1f} billion parameters, {draft.bytes:,} bytes, "
      f"{flash.dspark_num_experts_per_tok} of {flash.dspark_n_routed_experts} experts\n"
      f"its windows: {windows:,} bytes a request\nMarkov head over the vocabulary of "
      f"{flash.vocab_size:,}: {head:,} numbers, not {flash.vocab_size**2:,}")

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - That speculation pays. It depends on machine, load, draft and text; measured here is
#   mini on your machine, with few steps. `labkit bench dspark` measures with more.
# - That mini's draft is good, or how good the released one is.
# - That the law holds for large vocabularies and long texts to more than the test's
#   power: exactness is shown on small tables, by the code that also runs here.
# - Calibration at other temperatures than 1. Elsewhere the confidences are less true,
#   which costs speed and never correctness.
# - How a draft is trained (`labkit train-draft`, `docs/training.md`).
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: DSpark.
# - DSpark paper (DeepSpec repository): losses, sequential temperature scaling, the
#   hardware-aware prefix scheduler, the delayed budget.
# - Leviathan, Kalman and Matias, arXiv 2211.17192, and Chen et al., arXiv 2302.01318:
#   speculative decoding and its proof.
# - The released `config.json` (in this package: `labkit/presets/flash.json`).
# - In this repository: `docs/dspark.md`, `labkit/model/dspark.py`,
#   `labkit/engine/verification.py`, `speculation.py` and `scheduling.py`.
