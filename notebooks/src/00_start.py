# Source of notebooks/00_start.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # Start here: what the model is, and where it looks
#
# DeepSeek-V4.1-Flash stores 763 billion parameters, yet when it reads a long text it
# keeps less than a kilobyte per token and looks at a small part of what it has kept.
#
# **The question of this notebook:** for each new token, what does the model look at,
# and what does it leave out?
#
# You will run a small model that has every mechanism of the large one's text backbone
# and its draft (not vision). It was trained on six novels by Jane Austen and on text
# written by code, and lies in this repository: nothing is downloaded. Run the cells in
# order with Shift+Enter. Where a cell begins with `guess`, put in your own prediction
# *before* you run the next one.

# %% id="load"
import inspect

import torch
from IPython.display import Code

import labkit

lab = labkit.load("mini")
lab

# %% [markdown] id="writes"
# ## 1. It writes
#
# Text goes in as ids, the numbers of vocabulary entries. The model returns a score for
# every entry of the vocabulary; one id is drawn, appended, and the next step begins.

# %% id="generate"
opening = "It is a truth universally acknowledged"
result = lab.generate(opening, 60, seed=0)
print(opening + result.text)

# %% id="generate-facts"
again = lab.generate(opening, 60, seed=0)
assert again.ids == result.ids, "the same seed must give the same text"
assert 1 <= result.stats.new_tokens <= 60

# %% [markdown] id="guess-next"
# **Predict.** After *It is a truth universally*, how sure is the model of its next
# token? Write down the probability of the likeliest one, from 0 to 1.

# %% id="guess-next-here"
guess = 0.5

# %% id="next-token"
from labkit.viz.next_token import next_token_bars

first = next(lab.stream("It is a truth universally", 1, seed=0, candidates=8))
print(f"your guess {guess:.0%}, the model {first.candidates[0].probability:.0%}")
next_token_bars(first)

# %% [markdown] id="next-token-read"
# The wide bars are the model's own probabilities. The narrow, hatched ones are what
# the draw is made from: temperature 0.8 sharpens the distribution and `top_p` 0.95
# cuts off its tail. A token outside the eight likeliest can still be drawn; it then
# has its own bar.
#
# **Live.** The same, token by token. The buttons draw one more token or twenty; a new
# prompt and Enter start over. (Every control can be reached with the Tab key.)

# %% id="writer"
from labkit.explorers.writing import WritingExplorer

writer = WritingExplorer(lab, "She was not at all", 60, seed=1)
writer

# %% id="writer-run"
written = writer.run(20)          # watch the figure above while this cell runs
assert writer.progress.value == len(writer.generation.ids) >= 1
bars = writer.figure.data[0].x
assert all(0 <= p <= 1 for p in bars) and sum(bars) <= 1 + 1e-9
written

# %% [markdown] id="writer-static"
# Without widgets (in print, in a repository's viewer) `.static()` gives the picture of
# this moment as an image:

# %% id="writer-static-here"
writer.static()

# %% [markdown] id="is"
# ## 2. What it is
#
# Eight layers work on four parallel *streams* of numbers per token. Each layer has an
# attention site and a mixture of experts.
#
# **Predict.** In the usual transformer every layer keeps keys and values of its own
# for all past tokens. How many of these eight layers keep such a memory of the whole
# text?

# %% id="guess-caches"
guess = 8

# %% id="dataflow"
from labkit.viz.dataflow import dataflow

print(f"your guess {guess}, the model {len(lab.config.kv_source_layer_ids)}")
dataflow(lab.config, "mini")

# %% [markdown] id="dataflow-read"
# Read the figure from left to right. Every layer sees the latest W tokens, its
# *window*. Beyond that:
#
# - A **Full** layer squeezes each group of r tokens into one *entry* and publishes the
#   entries for the layers behind it. It also *selects*, for each token, the K entries
#   worth reading.
# - A **Reindex** layer selects anew among the last Full layer's entries.
# - A **Reuse** layer takes both the entries and the selection as they are.
# - The *candidate pool* narrows what a later selection has to search.
# - **Engram** adds memory that is looked up by the last few tokens, not computed.
#
# The dashed line is the encoder-decoder split. It is nothing but the last Full layer:
# all memory of the decoder is one projection of what the encoder hands over.

# %% id="roles"
for role in lab.config.roles:
    print(role.layer, role.kind, "ratio", role.ratio, "| entries of", role.kv_source,
          "| selection of", role.index_source)

# %% id="roles-facts"
roles = lab.config.roles
owners = [role.layer for role in roles if role.kind == "full"]
assert owners == list(lab.config.kv_source_layer_ids)
assert all(role.kv_source in owners for role in roles if role.ratio)
assert {role.kind for role in roles} == {"window", "full", "reindex", "reuse"}

# %% [markdown] id="legend"
# ### One vocabulary of shapes
#
# These letters mean the same in the code, in every figure and in every notebook.
# *flash* is the released model.

# %% id="legend-table"
from labkit.viz.legend import shape_legend

flash = labkit.ModelConfig.preset("flash")
shape_legend(mini=lab.config, flash=flash)

# %% [markdown] id="shapes"
# ### The shapes of a run
#
# `lab.trace` runs the model once and keeps every tensor it passes through, by name.
# All pictures of this lab are drawn from such a run. It reads the beginning of a part
# of *Pride and Prejudice* that the model was not trained on.

# %% id="trace"
from labkit.text.corpus import load_corpus

passage = load_corpus("heldout")["prideprejudice"]
ids = lab.encode(passage)[:300]
run = lab.trace(ids)
for name in ("layers.1.streams_in", "layers.1.attn.q", "layers.1.attn.compressed_kv",
             "layers.1.attn.topk_indices", "logits"):
    print(f"{name:30} {list(run[name].shape)}")

# %% id="trace-facts"
c, T = lab.config, len(ids)
assert run["layers.1.streams_in"].shape == (1, T, c.hc_mult, c.hidden_size)  # [B,T,C,D]
assert run["layers.1.attn.q"].shape == (1, T, c.num_attention_heads, c.head_dim)
assert run["layers.1.attn.compressed_kv"].shape == (1, T // 2, c.head_dim)  # [B,S,d]
assert run["layers.1.attn.topk_indices"].shape == (1, T, c.index_topk)      # [B,T,K]
assert run["logits"].shape == (1, T, c.vocab_size)

# %% [markdown] id="looks"
# ## 3. Where a token looks
#
# **Predict.** Take the token at position 290 in layer 6, with 291 tokens to look at
# (itself included). To how many *places* (single tokens or entries) can it give
# attention at most? W and K are in the table above.

# %% id="guess-places"
guess = 291

# %% id="places"
from labkit.viz.attention_data import record

recording = record(lab, ids)
look = recording.look(layer=6, query=290)
places = len(look.window) + len(look.entries)
print(f"your guess {guess}, the model {places}: {len(look.window)} window tokens and "
      f"{len(look.entries)} entries")

# %% id="places-facts"
assert places == c.sliding_window + c.index_topk
total = look.window_share + look.entries_share + look.sink
assert abs(total - 1) < 1e-5, "window, entries and sink share one softmax"
assert all(entry <= 290 for entry, *_ in look.entries), "nobody reads the future"

# %% [markdown] id="sink"
# The *sink* takes part in the softmax but has no value: attention given to it is
# attention not given. It lets a head say "nothing here for me".
#
# ### Explore
#
# Choose a layer and a query. Blue bars stand on the window's tokens; hatched orange
# bars hang below the tokens of each selected entry; the line further below marks the
# candidate pool. Bars grow with the square root of the attention and are full at 10 %.

# %% id="explorer"
from labkit.explorers.attention import AttentionExplorer

explorer = AttentionExplorer(recording=recording, layer=6, query=290)
explorer

# %% id="explorer-facts"
before = list(explorer.figure.data[3].y)
explorer.query.value = 200          # what the slider does
assert list(explorer.figure.data[3].y) != before
print(f"the last move took {explorer.seconds * 1000:.0f} ms")
explorer.query.value = 290

# %% [markdown] id="tasks"
# Try it:
#
# 1. Go from layer 0 to layer 1 at the same query. What appears below the text, and in
#    which units?
# 2. Compare layers 1, 2 and 3. Which marks are the same in all three, and why may
#    their heights still differ?
# 3. In layer 6, move the query from 200 to 290. From which query on does the pool
#    leave something out? (It holds 32 blocks of 8 entries.)
# 4. Go through the heads one by one. Do all heads use the sink alike?

# %% id="tasks-facts"
selected = [[e for e, *_ in recording.look(layer, 290).entries] for layer in (1, 2, 3)]
assert selected[0] == selected[1] == selected[2]          # 2: one selection, reused
pool = c.candidate_topk_blocks * c.candidate_block_size
for query in (pool - 1, 290):
    seen = sum(last - first + 1 for first, last in recording.look(6, query).pool)
    print(f"query {query}: the pool holds {seen} of {query + 1} visible entries")
    assert seen == query + 1 if query < pool else seen <= pool

# %% id="explorer-static"
explorer.static()

# %% [markdown] id="source"
# ## 4. The source
#
# This is the function that computed those weights: the code of the running package,
# not a copy. Its docstring states the shapes; `-inf` is put where nothing may be seen.

# %% id="source-attention"
from labkit.kernels.reference import attention_probabilities

Code(inspect.getsource(attention_probabilities), language="python")

# %% [markdown] id="source-check"
# Is the picture really the run? Weigh the values with these weights, finish the layer
# by hand, and compare with the output that the run recorded.

# %% id="source-by-hand"
from labkit.model.rope import rotate, rotation

attn, start = lab.model.layers[6].attn, torch.tensor([0])
weights, values = attention_probabilities(
    run["layers.6.attn.q"], run["layers.6.attn.window"],
    run["layers.4.attn.compressed_kv"], run["layers.6.attn.topk_indices"],
    attn.attn_sink, start)
y = torch.einsum("bthk,btkd->bthd", weights, values)                       # [B,T,H,d]
cos, sin = rotation(c, True, torch.arange(T)[None], y.dtype)
y = rotate(y, (cos[:, :, None], sin[:, :, None]), inverse=True)
out = attn.wo_b(attn.wo_a(y.flatten(-2).unflatten(-1, (c.o_groups, -1))))  # [B,T,D]
error = (out - run["layers.6.attn.out"]).abs().max()
assert error < 1e-4 * run["layers.6.attn.out"].abs().max()
print(f"largest difference {error:.1e}")

# %% [markdown] id="break"
# ## 5. Break it
#
# The index scores an entry by a sum over index heads. Each head's product passes
# through a ReLU *before* the sum. Some ports put the ReLU after it. With the fault
# switched on, short prompts look perfect.
#
# **Predict.** In layer 1 (r = 2, K = 64), which is the first query whose selection can
# differ at all? As long as everything visible is selected, the scores do not matter.

# %% id="guess-break"
guess = 0

# %% id="broken"
from labkit import mutants

with mutants.active("relu_after_sum"):
    broken = lab.trace(ids)
right, wrong = (t["layers.1.attn.topk_indices"][0] for t in (run, broken))  # [T,K]
different = (right != wrong).any(-1).nonzero()[:, 0]
print(f"your guess {guess}, first different query: {different[0]}")

# %% id="broken-facts"
enough = 2 * c.index_topk           # up to here all visible entries fit into K
assert torch.equal(right[:enough], wrong[:enough])
assert len(different) > 0 and different[0] > enough
kept = sum(len(set(a) & set(b)) for a, b in zip(right[enough:].tolist(),
                                                wrong[enough:].tolist(), strict=True))
print(f"after that, {kept / right[enough:].numel():.0%} of the selection is the same")

# %% [markdown] id="broken-read"
# A test with a short prompt passes, and so would a look at the text. That is why this
# lab's tests compare selections exactly, at lengths where they matter. `labkit
# mutants` lists all such faults and what notices each of them.

# %% [markdown] id="released"
# ## 6. The released model
#
# The same figure from the released configuration: the code has no other source for it.

# %% id="released-dataflow"
dataflow(flash, "Flash")

# %% id="released-roles"
from collections import Counter

kinds = Counter(role.kind for role in flash.roles)
assert kinds == {"window": 2, "full": 4, "reindex": 4, "reuse": 30}
print(dict(kinds), "| encoder: layers 0 to", flash.encoder_layers - 1)

# %% [markdown] id="released-size"
# Every tensor of the checkpoint follows from the configuration: name, shape, number
# format, bytes. The totals are exact.

# %% id="released-totals"
from labkit.checkpoint import accounting

totals = accounting(flash).totals
assert (totals.tensors, totals.bytes) == (96_085, 510_286_023_000)
print(f"{totals.tensors:,} tensors, {totals.bytes:,} bytes, "
      f"{totals.parameters / 1e9:.1f} billion parameters")

# %% [markdown] id="memory"
# **Predict.** How many bytes does it keep per token of a long text, all layers
# together, window aside, when entries and keys are stored packed in FP4, as here?

# %% id="guess-memory"
guess = 100_000

# %% id="memory-bytes"
entry = flash.head_dim // 2 + flash.head_dim // 16       # FP4 codes, a scale per 16
key = flash.index_head_dim // 2 + flash.index_head_dim // 32    # FP4, a scale per 32
per_token = sum((entry + key) / flash.compress_ratios[layer]
                for layer in flash.kv_source_layer_ids)
assert per_token == 890
print(f"your guess {guess:,}, the model {per_token:.0f}: {entry + key} bytes an entry, "
      f"{per_token / (entry + key)} entries a token")

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - That attention weights explain an answer. They say what was read, not what was used.
# - Anything about the large model's text: only its sizes are computed here.
# - That the small model is good. It has read six novels and some text written by code,
#   and knows nothing else.
# - Speed and memory at scale, images, and the draft that speeds up generation.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: CSA2, CED, Engram, mHC.
# - The released `config.json` (in this package: `labkit/presets/flash.json`).
# - Text: six novels by Jane Austen, public domain (`data/corpus`).
# - Colours: Okabe and Ito, *Color Universal Design* (2008).
# - From checkpoint key to code: `docs/architecture.md`.
