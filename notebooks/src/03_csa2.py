# Source of notebooks/03_csa2.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # CSA2: compress, select, share
#
# A long text leaves one entry for every token or two. No layer reads all of them: an
# *index* picks K, and most layers do not even have an index of their own. They take the
# pick of a layer before them.
#
# **The question of this notebook:** what is lost when a layer reads a few entries that
# another layer chose for it, and what is saved?
#
# You will write the compressor, the index and the candidate pool, see what each of them
# keeps of the attention of a trained model, and find out how small K may be before the
# model forgets a number that it was told once.

# %% id="load"
import inspect

import torch
from IPython.display import Code

import labkit
from labkit.exercises import check
from labkit.text.corpus import load_corpus
from labkit.viz.dataflow import dataflow

lab = labkit.load("mini", device="cpu")
c = lab.config
ids = lab.encode(load_corpus("heldout")["prideprejudice"])[:640]

# %% [markdown] id="roles"
# ## 1. Who does what
#
# Layer 0 of `mini` has a window and nothing else. The seven others also read entries:
#
# - **Full**: compresses tokens into entries and publishes them, with a key for each;
#   scores the keys and publishes its selection.
# - **Reindex**: scores the keys of the last Full layer anew, with queries of its own.
# - **Reuse**: reads the last entries with the last selection. It scores nothing.
#
# **Predict.** How many of the seven layers have an index, that is, score entries?

# %% id="guess-sources"
guess = 7

# %% id="roles-map"
print(f"your guess {guess}, the model {len(c.index_source_layer_ids)}")
for kind in ("full", "reindex", "reuse"):
    own = {name.split(".", 3)[3] for role in c.roles if role.kind == kind
           for name, _ in lab.model.named_parameters()
           if name.startswith(f"layers.{role.layer}.attn.")
           and any(part in name for part in ("compressor", "indexer"))}
    print(f"{kind:8}", ", ".join(sorted(own)) or "nothing of its own")
    assert ("compressor.wkv.weight" in own) == (kind == "full")
    assert ("indexer.wq_b.weight" in own) == (kind != "reuse")
dataflow(c, "mini")

# %% [markdown] id="compress"
# ## 2. Compress
#
# The attention site of a layer reads x [T,D]. A Full layer makes a value and a gate of
# every token; r tokens are pooled into one entry, normed, rotated and rounded to FP4.
# With r = 1 (layer 4) a token is an entry and there is no gate.

# %% id="compress-source"
from labkit.model.compressor import Compressor

Code(inspect.getsource(Compressor.forward), language="python")

# %% exercise="csa_entries"

# %% [markdown] id="gates"
# **Predict.** Take all pairs of a novel's beginning in layer 1, and all channels. If
# the gates did nothing, the first token of a pair would have weight 0.5 everywhere. In
# which share of the channels does one of the two tokens get more than 0.9? (The cell then
# finishes the entries by hand and compares them with those of the run.)

# %% id="guess-gates"
guess = 0.05

# %% id="gates-here"
from labkit.model.rope import rotate, rotation
from labkit.numerics import fake_quantize
from labkit.viz.selection_data import record_selections
from labkit.viz.what_if import input_of

novel = record_selections(lab, ids)
x = input_of(lab, "layers.1.attn.compressor", ids)                     # [1,T,D]
pool = lab.model.layers[1].attn.compressor
value, gate = x @ pool.wkv.weight.T, x @ pool.wgate.weight.T           # [1,T,d]
weight = gate.unflatten(1, (-1, 2)).softmax(2)                         # [1,G,r,d]
sided = float((weight.amax(2) > 0.9).float().mean())
print(f"your guess {guess:.0%}, the model {sided:.0%} of the channels")
latent = pool.norm((weight * value.unflatten(1, (-1, 2))).sum(2))      # [1,G,d]
first = torch.arange(latent.shape[1])[None] * 2                        # g * r
turned = rotate(latent, rotation(c, True, first, latent.dtype))
same = fake_quantize(turned, "nvfp4") == novel.taps["layers.1.attn.compressed_kv"]
print(f"{latent.shape[1]} entries by hand, {same.float().mean():.2%} of values equal")
assert same.float().mean() > 0.999     # a value next to a rounding boundary may flip

# %% [markdown] id="ratio"
# **Predict.** `mini` was trained with r = 2 in its encoder. Its weights can be run with
# groups of 8 as well, without any training for it: a quarter of the entries. By how many
# bits per token does its prediction of the novel get worse? (It is at about 6.)

# %% id="guess-ratio"
guess = 1.0

# %% id="ratio-here"
from math import log

from labkit.train.controls import selecting
from labkit.viz.what_if import with_numbers

after, bits = torch.tensor(ids[1:])[:, None], {}
for r in (1, 2, 4, 8, "no entries in any layer"):
    other = with_numbers(lab, ratio=r if isinstance(r, int) else None)
    with selecting(other.model, "index" if isinstance(r, int) else "none"):
        logits = other.trace(ids, patterns=["logits"])["logits"][0, :-1]
    bits[r] = -float(logits.log_softmax(-1).gather(1, after).mean()) / log(2)
print({r: round(value, 3) for r, value in bits.items()})
print(f"your guess {guess:.3f} more, the model {bits[8] - bits[2]:+.4f}")
assert abs(bits[8] - bits[2]) < 0.1

# %% [markdown] id="select"
# Nothing happens, and that is worth a second look. It does *not* say that r is free.
# Without any entries at all the novel costs `mini` hardly more: its next tokens come from
# the window. An average over a novel cannot judge a long memory, so from here on we also
# ask for a fact that is nowhere in the window.
#
# ## 3. Select
#
# The index has keys of its own (made from the latent *before* its rotation, then rotated
# themselves), and queries from the layer's query latent. Both are rounded to FP4, so a
# score is cheap. This is the scoring of the running package:

# %% id="select-source"
from labkit.kernels import reference

Code(inspect.getsource(reference.index_scores) + "\n\n"
     + inspect.getsource(reference.select_top), language="python")

# %% exercise="csa_selection"

# %% [markdown] id="needle"
# ### A number that was told once
#
# A text of 640 tokens: novels, and in between *The number of ... is ...* for a few
# invented names. At the end one of these numbers is asked for, 480 tokens after it was
# stated. The window holds the last 64 tokens.
#
# **Predict.** `mini` gets the question twice: as it is, and with `selecting("none")`,
# that is, with its windows alone. How many digits of the number are right without
# selection?

# %% id="guess-needle"
guess = 2

# %% id="needle-here"
from labkit.text.synthetic import recall

text = recall(lab.tokenizer, distance=480, length=639, index=1)
(answer,) = text.answers
prompt, told = [c.bos_token_id, *text.ids[:answer.at]], {}
for how in ("index", "none", "random", "all"):
    with selecting(lab.model, how):
        told[how] = lab.generate(prompt, answer.size, temperature=0).text
right = sum(a == b for a, b in zip(told["none"], answer.text, strict=False))
print(lab.tokenizer.decode(prompt[-12:]).strip(), "...", answer.text)
print(f"your guess {guess}, the model {right} of {answer.size} digits right |", told)
assert told["index"] == told["all"] == answer.text and told["none"] != answer.text

# %% [markdown] id="explore"
# ### Explore
#
# Layer 4 fetches the number. The figure has its entries in the order of its own
# attention over *all* of them, which the model never computes. The strip says what the
# index takes with K; the curves say what a selection of K entries keeps. Move K; then go
# to the next digit (`query` + 1) and to other layers.

# %% id="explorer"
from labkit.explorers.selection import SelectionExplorer

story = record_selections(lab, [c.bos_token_id, *text.ids])
explorer = SelectionExplorer(story, layer=4, query=answer.at)
explorer

# %% id="explorer-facts"
kept = {}
for K in (4, 16, 64):
    explorer.topk.value = K                                 # what the slider does
    kept[K] = float(explorer.figure.data[8].y[0])
print({k: f"{share:.1%}" for k, share in kept.items()})
print(f"the last move took {explorer.seconds * 1000:.0f} ms")
assert kept[4] < kept[16] < kept[64] and kept[64] > 0.8
explorer.static()

# %% [markdown] id="small-k"
# **Predict.** The table under the figure names the place that the index gives each
# entry. Where does the digit stand, and what stands before it? `mini` selects 64. Write
# down the smallest K of 1, 2, 4, 8, 16 with which it still recalls the whole number.

# %% id="guess-small-k"
guess = 16

# %% id="small-k-here"
found = {k: with_numbers(lab, topk=k).generate(prompt, answer.size, temperature=0).text
         for k in (1, 2, 4, 8, 16)}
for j in range(answer.size):
    ranked = story.ranked(4, answer.at + j, c.index_topk)
    entry = answer.at + 1 - answer.distance + j             # r = 1: an entry is a token
    place = ranked.place[ranked.entries.index(entry)]
    print(f"digit {story.texts[entry]}: place {place} in the index of layer 4")
enough = min(k for k, said in found.items() if said == answer.text)
print(f"your guess {guess}, the model {enough} |", found)
assert found[16] == answer.text != found[1]

# %% [markdown] id="layers"
# ### All layers, all queries
#
# The same for every second query of the novel that has to choose, as a share of *all*
# attention: the window is always read, so only the rest can be lost.

# %% id="layers-figure"
from labkit.viz.selection import kept_of_layers

kept_of_layers(novel, every=2)

# %% [markdown] id="share"
# ## 4. Share
#
# Layer 5 reads what layer 4 selected, layer 7 what layer 6 did.
#
# **Predict.** Take the 64 entries that layer 5 would pick by its own attention, and the
# 64 that it is given. Of all entries in either set, what share is in both?

# %% id="guess-overlap"
guess = 0.95

# %% id="overlap"
from labkit.explorers.selection import OverlapExplorer

pairs = OverlapExplorer({"novel": novel, "needle": story})
table = {row[0]: row[1:] for row in pairs.picture().rows}
print(f"your guess {guess:.0%}, the model {table['layer 5'][1]}")
pairs

# %% id="overlap-facts"
pairs.measure.value, pairs.queries.value = "kept", (320, 639)
late = novel.comparison.mean("kept", 320, 639)
names = [column.name for column in novel.comparison.columns]
reuse = {source: round(float(late[names.index("own 7"), names.index(source)]), 4)
         for source in ("index 4", "index 6")}
print(f"layer 7 keeps with {reuse}; the last move took {pairs.seconds * 1000:.0f} ms")
common = novel.comparison.mean("jaccard", 320, 639)
J = float(common[names.index("own 5"), names.index("index 4")])
print(f"layer 5 would pick {2 * J / (1 + J):.0%} of what it is given itself")
assert J < 0.8 and min(reuse.values()) > 0.9
assert reuse["index 6"] - reuse["index 4"] < 0.05

# %% [markdown] id="overlap-read"
# Choose the other measure in the explorer, the share of its attention that a selection
# keeps, and a range of late queries. The two matrices disagree because attention is very
# uneven: a few entries matter, and all selections have those; the rest of the 64 is
# nearly arbitrary. So layer 7 would lose next to nothing with the older selection of
# layer 4: in `mini`, Reindex adds little. Whether it does at 40 layers cannot be seen
# here.
#
# A caution: `<bos>` takes much of the attention on entries, and every selection has it
# (section 6). A share of attention is a necessary test; the recall of a number is a
# harder one.
#
# ### What it saves
#
# `labkit.model.work` counts multiply-adds while one token is decoded, here the 640th.
# The formula that the last figure of this notebook draws must give the same numbers.

# %% id="work"
from labkit.model.work import counting
from labkit.viz.selection_cost import look_cost

session = lab.session()
session.prefill(ids[:-1])
with counting(lab.model) as work:
    session.decode(ids[-1])
counted = {part: work.total(part) for part in ("attn.scores", "attn.values",
                                               "indexer.scores", "indexer.sum")}
cost, alone = (look_cost(c, len(ids), design) for design in ("shared", "own"))
assert counted["attn.scores"] + counted["attn.values"] == cost.attention
assert counted["indexer.scores"] + counted["indexer.sum"] == cost.index
for part in ("attn.scores", "indexer.scores"):
    print(part, {role.layer: f"{work.macs[role.layer, part]:,}" for role in c.roles})
print(f"index: {cost.index:,} in all; with an index in every layer {alone.index:,}")

# %% [markdown] id="pool"
# ## 5. The candidate pool
#
# Layer 4 scores all entries and keeps the best 32 blocks of 8 for every query. Layer 6
# chooses from those 256 entries alone. The newest block is always among them.

# %% exercise="csa_pool"

# %% [markdown] id="pool-guess"
# **Predict.** Is the rule of the newest block needed, or would that block win its place
# anyway? With the fault `newest_block_not_pinned` all blocks compete. For which share of
# the queries from 256 on is the newest entry still in the pool?

# %% id="guess-pool"
guess = 0.99

# %% id="pool-broken"
from labkit import mutants

late = torch.arange(c.candidate_topk_blocks * c.candidate_block_size, len(ids))
with mutants.active("newest_block_not_pinned"):
    broken = lab.trace(ids, patterns=["*.candidates"])["layers.4.attn.candidates"][0]
pool = novel.taps["layers.4.attn.candidates"][0]                       # [T,S]
share = float(broken[late, late].float().mean())
print(f"your guess {guess:.0%}, the model {share:.0%}")
assert pool[late, late].all() and share < 1
assert int(pool.sum(-1).max()) == c.candidate_topk_blocks * c.candidate_block_size

# %% [markdown] id="softmax"
# ## 6. One softmax, a sink, and a rotation to undo
#
# Window tokens and selected entries share one softmax with a learned *sink*, a number
# per head that only enters the denominator. At the first token there is nothing but the
# token itself and the sink:

# %% id="sink"
first = [novel.look(0, query=0, head=h).sink for h in range(c.num_attention_heads)]
at = range(100, 640, 20)
later = {i: sum(novel.look(i, q).sink for q in at) / len(at) for i in range(8)}
bos = [dict((e, w) for e, _, _, w in novel.look(layer=4, query=q).entries).get(0, 0.0)
       for q in at]
print(f"layer 0, token 0: the sinks take {min(first):.0%} to {max(first):.0%}; later "
      f"{later[0]:.1%} on average, in other layers at most "
      f"{max(later[i] for i in range(1, 8)):.1%}")
print(f"layer 4, later on: the entry of <bos> takes {sum(bos) / len(bos):.0%}")
for layer in (4, 6):                   # the index always takes it
    assert (novel.selected(layer, torch.arange(64, 640)) == 0).any(-1).all()
q, own = novel.taps["layers.0.attn.q"][0, 0], novel.taps["layers.0.attn.window"][0, 64]
by_hand = torch.sigmoid(novel.sinks[0] - q @ own * c.head_dim**-0.5)   # [H]
assert torch.allclose(by_hand, torch.tensor(first), atol=1e-5)
assert max(later.values()) < 0.1

# %% [markdown] id="sink-read"
# In `mini` the sink is idle after a few tokens: the entry of the first token, which every
# selection holds, has taken over its job of receiving attention that means nothing.
#
# ### The inverse rotation
#
# A key is rotated by its position, so that scores depend on distances. Here the key is
# also the *value*, so the weighted sum is rotated, too, and has to be turned back at the
# query's position. Then the same text gives the same output at any place.
#
# **Predict.** Put a text at position 0 and at position 1000. By how much (as a share of
# the largest value) do the outputs of layer 0 differ if the inverse rotation is left
# out?

# %% id="guess-rotation"
guess = 0.01

# %% id="rotation"
from labkit.viz.what_if import window_site

x = input_of(lab, "layers.0.attn", ids)
site = window_site(lab, 0, x, rounded=True)
out = lab.trace(ids)["layers.0.attn.out"]
assert (site - out).abs().max() < 1e-4 * out.abs().max()
near, far = (window_site(lab, 0, x, offset) for offset in (0, 1000))
apart = float((far - near).abs().max() / near.abs().max())
with mutants.active("no_inverse_rotation"):
    near, far = (window_site(lab, 0, x, offset) for offset in (0, 1000))
without = float((far - near).abs().max() / near.abs().max())
print(f"your guess {guess}, without it {without:.2f}; with it {apart:.0e}")
assert apart < 1e-3 < 0.1 < without

# %% [markdown] id="break"
# ## 7. Break it
#
# A usual slip of ports: an entry gets the position of the token that *completed* it, the
# last of its group. The fault is `entry_at_last_token`.
#
# **Predict.** Which entry of layer 1 is the first to be wrong? And will the loss tell?

# %% id="guess-break"
guess = 1

# %% id="broken"
right = lab.trace(ids)
with mutants.active("entry_at_last_token"):
    wrong = lab.trace(ids)
name = "layers.1.attn.compressed_kv"
entries = (right[name] != wrong[name])[0].any(-1).nonzero()[:, 0]      # numbers
outs = (right["layers.1.attn.out"] != wrong["layers.1.attn.out"])[0].any(-1).nonzero()
print(f"your guess {guess}, first wrong entry: {int(entries[0])}; first token whose "
      f"output differs: {int(outs[0, 0])}")
assert int(entries[0]) == 0 and int(outs[0, 0]) == 1
still = (right[name] == wrong[name])[0, :, :c.head_dim - c.qk_rope_head_dim]
print(f"channels that are not rotated: {still.float().mean():.1%} equal")
loss = [float(-run["logits"][0, :-1].log_softmax(-1).gather(1, after).mean())
        for run in (right, wrong)]
print(f"loss {loss[0]:.4f}, with the fault {loss[1]:.4f}")
assert abs(loss[0] - loss[1]) < 0.02

# %% [markdown] id="released"
# Entry 0 already stands at position 1 instead of 0, and token 1 is the first that sees
# it. Only rotated channels change, and the average loss does not notice: an entry is off
# by one token among hundreds. With r = 1, in layer 4, the fault changes nothing of
# itself. What finds it is a comparison of `compressed_kv`, number for number.
#
# ## 8. The released model
#
# 40 layers, 512 entries a query. The curves below come from its configuration, with the
# formula that was held to the count in section 4. Change the ratio and K: which of the
# two moves the curves at 1 M tokens, and which one at 1 K? In `mini` it costs as much to
# score an entry as to read it, so only sharing saves anything; in the released model a
# score is sixteen times cheaper.

# %% id="released-cost"
from labkit.explorers.selection import CostExplorer

flash = labkit.ModelConfig.preset("flash")
n = 1_000_000
pool, own = look_cost(flash, n, "pool"), look_cost(flash, n, "own")
assert pool.scored == 3 * n // 2 + n + 4 * 16_384 == 2_565_536
assert own.scored == 18 * n // 2 + 20 * n == 29_000_000
print(f"1 M tokens: {pool.scored:,} entries scored a token instead of {own.scored:,}, "
      f"{own.scored / pool.scored:.1f} times fewer")
entry = [(c.index_n_heads * (c.index_head_dim + 1),
          2 * c.num_attention_heads * c.head_dim) for c in (lab.config, flash)]
print("multiply-adds to score and to read an entry: mini", entry[0], "flash", entry[1])
limits = {r: r * flash.index_topk for r in (2, 1)}
print(f"everything is selected up to {limits} tokens (by ratio); the pool leaves "
      f"nothing out up to {flash.candidate_topk_blocks * flash.candidate_block_size:,}")
assert limits == {2: 1024, 1: 512} and entry[1][1] > 15 * entry[1][0]
CostExplorer({"flash": flash, "mini": c})

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - That selection costs the large model nothing. Every number on attention is of `mini`.
# - How an index is trained. `mini` began with all entries (`data/mini/TRAINING.md`).
# - Time. An entry scored, an entry read and a byte moved cost different amounts.
# - That attention that is kept is information that is kept: most of it is on `<bos>`.
# - Vision, replay, and caches that outlive a request.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: CSA2, CED.
# - The released `config.json`: `compress_ratios`, `kv_source_layer_ids`,
#   `index_source_layer_ids`, `index_topk`, `candidate_topk_blocks`.
# - Text: Jane Austen, public domain (`data/corpus`); needles by `labkit.text.synthetic`.
# - How `mini` was trained and measured: `data/mini/TRAINING.md`.
