# Source of notebooks/01_ced.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # CED: half of the layers read the prompt
#
# Most of what a model in service reads is prompt: files, search results, the
# conversation so far. DeepSeek-V4.1-Flash has 40 layers, and 20 of them never see most
# of it. They are called the *decoder*; the first 20 are the *encoder*. Both look to the
# past only, hence *causal encoder-decoder*, CED.
#
# **The question of this notebook:** how can half of a model skip the prompt and still
# answer from it?
#
# You need the notebook `00_start`. Cells that begin with `guess` are for your own
# prediction, before you run the next one.

# %% id="load"
import inspect
from collections import Counter

from IPython.display import Code

import labkit
from labkit.exercises import check
from labkit.text.corpus import load_corpus

lab = labkit.load("mini")
c = lab.config
flash = labkit.ModelConfig.preset("flash")
novel = lab.encode(load_corpus("heldout")["emma"][:4000])
print(f"{c.num_hidden_layers} layers, of which {c.encoder_layers} are the encoder")

# %% [markdown] id="who"
# ## 1. Who writes the memory, who reads it
#
# A layer that attends to the whole text needs a compressed *entry* of past tokens.
# In most transformers each layer makes its own. Here, few layers do.

# %% id="kinds"
for role in c.roles:
    print(role.layer, role.kind)

# %% exercise="ced_sources"

# %% [markdown] id="who-decoder"
# Every layer of the decoder reads the entries of one layer. And what are those made
# of? Of the streams that *enter* this layer, so of what the encoder hands over:

# %% id="source-compressor"
from labkit.model.attention import Attention

Code(inspect.getsource(Attention.publish), language="python")

# %% id="sources-facts"
readers = Counter(role.kv_source for role in flash.roles if role.ratio)
split = flash.encoder_layers
assert flash.roles[split].kind == "full"
assert all(role.kv_source == split for role in flash.roles[split:])
print("released model, entries of layer: read by so many layers", dict(readers))

# %% [markdown] id="so"
# So the decoder's memory of the text is finished as soon as the encoder is. A decoder
# layer has to compute a token for two other reasons only: its *window*, the latest W
# tokens, and the logits. Both concern the end of the prompt.
#
# ## 2. What a prefill computes
#
# **Predict.** A prompt has 512 tokens; mini's window is 64. A full prefill takes
# 8 x 512 = 4,096 *layer-token passes*. How many does a prefill take whose decoder reads
# the last window alone?

# %% id="guess-passes"
guess = 2048

# %% id="passes"
from labkit.viz.passes import prefill

ced = prefill(lab, novel[:512], "CED, last window")
full = prefill(lab, novel[:512], "full")
print(f"your guess {guess:,}, counted {ced.work.passes.total():,}")

# %% id="passes-facts"
W, E, L = c.sliding_window, c.encoder_layers, c.num_hidden_layers
assert full.work.passes.total() == 512 * L
assert ced.work.passes.total() == 512 * E + W * (L - E)
assert ced.work.stored[E] == 512, "the decoder's entries are there for every token"

# %% [markdown] id="explore-text"
# These are counts, not a formula: hooks watch the modules while the model reads.
# Choose how the prompt is read, and how long it is.
#
# - *last window*: what is done in service.
# - *exact halo*: the decoder reads so much more that its windows come out as in a full
#   prefill.
# - *cut after the source*: the decoder's first layer reads everything, as some engines
#   do it.

# %% id="explorer"
from labkit.explorers.passes import PrefillExplorer

explorer = PrefillExplorer(lab, novel)
explorer

# %% id="explorer-facts"
explorer.mode.value = "CED, exact halo"
assert explorer.run.computed(L - 1) == W + (L - E - 1) * (W - 1)
explorer.tokens.value = 64          # no longer than the window: nothing to save
assert explorer.run.work.passes.total() == explorer.full.work.passes.total()
explorer.tokens.value, explorer.mode.value = 512, "CED, last window"
print(f"the last move took {explorer.seconds * 1000:.0f} ms")

# %% id="explorer-static"
explorer.static()

# %% exercise="ced_passes"

# %% [markdown] id="work-text"
# **Predict.** Passes fall to 56 %. Do the multiply-adds fall by more, or by less? Think
# of the widths: the encoder's compressed layers hold one entry for two tokens, the
# decoder's one for each token.

# %% id="guess-work"
guess = 0.56

# %% id="work"
share = ced.work.total() / full.work.total()
print(f"your guess {guess:.2f}, counted {share:.2f}")
for side in ("encoder", "decoder"):
    print(f"{side}: {full.work.total(side=side):,} multiply-adds of a full prefill, "
          f"{ced.work.total(side=side):,} of this one")

# %% id="work-facts"
assert ced.work.total(side="encoder") == full.work.total(side="encoder")
saved = 1 - ced.work.total(side="decoder") / full.work.total(side="decoder")
kept_anyway = ced.work.total("compressor", "decoder")
assert kept_anyway == full.work.total("compressor", "decoder")
print(f"{saved:.0%} of the decoder's multiply-adds are saved; its compressor runs on")

# %% [markdown] id="price"
# ## 3. What it costs in quality
#
# The decoder's windows hold keys of tokens that saw too little: the first token of the
# tail had no window at all. That is an approximation.
#
# **Predict.** Next token behind the prompt: how far is the distribution from a full
# prefill's? Give the KL divergence in nats (0 is the same, 1 is another text).

# %% id="guess-kl"
guess = 0.1

# %% id="kl"
from labkit.train.agreement import held_out
from labkit.viz.passes import kl

texts = held_out(lab, 6, 400)
found = {mode: [] for mode in ("CED, last window", "CED, exact halo")}
for ids in texts:
    whole = prefill(lab, ids, "full")
    for mode in found:
        found[mode].append(kl(whole, prefill(lab, ids, mode)))
mean = sum(found["CED, last window"]) / len(texts)
print(f"your guess {guess}, mean of {len(texts)} texts {mean:.1e}")
print("exact halo:", f"{max(found['CED, exact halo']):.1e} at most")

# %% id="kl-facts"
assert 0 < mean < 0.1
assert max(found["CED, exact halo"]) < 1e-3

# %% [markdown] id="kl-read"
# With the exact halo only rounding is left. Why bother with a window at all, then, if
# the long memory is exact? Because the newest tokens are not in the entries in full
# detail, and in a text the newest tokens matter most. The experiment below takes the
# window away altogether: the decoder reads the last token alone.

# %% id="no-window"
import torch

ids = torch.tensor([texts[0]])
with torch.no_grad():
    bare = lab.model(ids, last_only=True, tail=1).logits[0, 0].double().log_softmax(-1)
whole = prefill(lab, texts[0], "full").logits.double().log_softmax(-1)
bare_kl = float((whole.exp() * (whole - bare)).sum())
print(f"a tail of one token: KL {bare_kl:.2f}; of a window: "
      f"{found['CED, last window'][0]:.1e}")
assert bare_kl > 10 * found["CED, last window"][0]

# %% [markdown] id="active"
# ## 4. Two numbers of active parameters
#
# A mixture of experts has parameters that a token does not meet. With CED a token of
# the prompt meets still fewer than a token that is generated.

# %% exercise="ced_active"

# %% [markdown] id="active-guess"
# **Predict.** The released backbone has 552 billion parameters. How many billions does
# a token of the prompt meet?

# %% id="guess-active"
guess = 50

# %% id="active-flash"
from labkit.checkpoint.accounting import active_decode, active_prefill

reading, writing = active_prefill(flash), active_decode(flash)
print(f"your guess {guess}, counted {reading.counted / 1e9:.1f} billion;")
print(f"a generated token meets {writing.counted / 1e9:.1f} billion")
print(reading.convention)
billions = [round(active.counted / 1e9, 1) for active in (reading, writing)]
assert billions == [7.9, 15.8]

# %% [markdown] id="causal"
# ## 5. Why the encoder is causal
#
# An encoder of the usual kind reads both ways: each token sees what follows it, too.
# That is better for understanding a finished text. It is bad for a conversation, which
# is never finished.
#
# Replace one token of a text and compare two runs bit for bit. What has changed cannot
# be taken from a cache. The slider says which token; the other control centres the
# encoder's windows on their token, so that half of each window lies ahead.

# %% id="causal-explorer"
from labkit.explorers.causal import CausalExplorer

causal = CausalExplorer(lab, novel[:160], position=130)
causal

# %% [markdown] id="causal-guess"
# **Predict.** With windows of 64 centred on their token, each of four encoder layers
# sees 32 tokens ahead. Token 130 is replaced. Up to which token is the *last* encoder
# layer's output still the same?

# %% id="guess-causal"
guess = 130

# %% id="causal-run"
assert causal.found.reusable == 130, "causal: nothing before the token moves"
causal.model.value = "an encoder that reads both ways"
print(f"your guess {guess}, measured {causal.found.first[E - 1]}; "
      f"by layer {causal.found.first[:E]}")
print(f"a move took {causal.seconds * 1000:.0f} ms")
assert causal.found.first[0] == 130 - W // 2
assert causal.found.reusable < 130 - W

# %% id="causal-static"
causal.static()

# %% [markdown] id="causal-read"
# The reach ahead adds up, layer by layer, and the end of every text has changed by the
# next turn of the conversation. A prefix cache would have nothing to keep. (The weights
# were not trained for centred windows; that does not matter here, since only *whether*
# a number moves is asked, not what it is.)
#
# ## 6. Break it
#
# How would you notice that the exact halo is one layer too short? The mutant
# `halo_one_layer_short` reads W-1 tokens fewer.
#
# **Predict.** The largest difference of a logit from a full prefill's, as a share of
# the span: with the right halo it is 1e-7 to 1e-6, which is fp32's rounding. With a
# halo that is one layer too short?

# %% id="guess-broken"
guess = 0.01

# %% id="broken"
from contextlib import nullcontext

from labkit import mutants
from labkit.viz.passes import MODES

FAULTS = {"right": None, "short": "halo_one_layer_short"}
sharp = labkit.load("mini", dtype=torch.float64, cache_rounding=False)
apart = {}
for model in (lab, sharp):
    whole = model.session().prefill(texts[0], True)[0, 0]                   # [V]
    for name, fault in FAULTS.items():
        with mutants.active(fault) if fault else nullcontext():
            found = model.session().prefill(texts[0], True, **MODES["CED, exact halo"])
        distance = (found[0, 0] - whole).abs().max() / whole.abs().max()
        apart[name, model is sharp] = float(distance)
print(f"your guess {guess}, measured {apart['short', False]:.0e}")
print(f"in fp32 the right halo gives {apart['right', False]:.0e}")

# %% id="broken-facts"
assert apart["short", False] < 1e-5
assert apart["right", True] < 1e-12
assert apart["short", True] > 1000 * apart["right", True]
print(f"in float64, nothing rounded: right {apart['right', True]:.0e}, "
      f"short {apart['short', True]:.0e}")

# %% [markdown] id="broken-read"
# In fp32 the fault hides in rounding: what the oldest keys of the lowest layer add is
# next to nothing on this text. No look at the text and no test with a tolerance for
# rounding finds it. In float64 with all rounding off, a difference is either 1e-12 or
# less, or it is a fault. That is why this lab runs its comparisons of schedules there.
# `labkit mutants halo_one_layer_short` shows the checks that notice.
#
# ## 7. On the released model

# %% id="released-reach"
from labkit.engine.replay import decoder_tail

print("decoder reads", decoder_tail(flash), "tokens of a prompt; exactly:",
      decoder_tail(flash, "exact"), "or, cut after the source,",
      decoder_tail(flash, "exact", "after"))
assert decoder_tail(flash) == 128 and decoder_tail(flash, "exact") == 2541

# %% id="released-passes"
T = 100_000
E, L, W = flash.encoder_layers, flash.num_hidden_layers, flash.sliding_window
share = (T * E + W * (L - E)) / (T * L)
print(f"{T:,} tokens: {share:.4f} of the passes, a factor of {1 / share:.2f} at most")
assert 1.99 < 1 / share < 2

# %% [markdown] id="claims"
# Press texts give 2.1 times the prefill throughput of a full pass. From passes alone at
# most 2 follows, and passes are not all of a prefill's time. Here, at 512 tokens:

# %% id="claims-here"
seconds = {p.mode: p.seconds for p in (explorer.run, explorer.full)}
print({mode: f"{s:.3f} s" for mode, s in seconds.items()},
      f"ratio {explorer.full.seconds / explorer.run.seconds:.2f}")

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - That a decoder without the prompt is enough for every task. One small model, novels
#   and a few texts were measured; the technical report says the effect is negligible
#   and prints no figure.
# - Training: there all 40 layers read every token.
# - Speed at scale, where memory traffic and communication decide.
# - Replay, the same idea for what a cache has lost: see the notebook on the cache.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: CED, bounded replay.
# - The released `config.json` (in this package: `labkit/presets/flash.json`).
# - `labkit bench prefill` measures full and CED prefill on your machine, at 4,096 tokens.
# - Text: *Emma* by Jane Austen, public domain (`data/corpus`).
