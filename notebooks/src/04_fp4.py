# Source of notebooks/04_fp4.ipynb. Change this file, run tools/build_notebooks.py.

# %% [markdown] id="title"
# # FP4: sixteen codes and a scale
#
# DeepSeek-V4.1-Flash keeps most of what it remembers in numbers of four bits. Four bits
# make sixteen codes: fewer than there are letters in this line.
#
# **The question of this notebook:** how can sixteen codes be enough, and what is lost?
#
# You follow the loss from one number to a block, to bytes, to what the index selects,
# to what attention reads, to the next word. The model is `mini`, trained and in this
# repository. Run the cells in order; put your prediction into each cell that begins
# with `guess` *before* you run the next one.

# %% id="load"
import inspect

import torch
from IPython.display import Code

import labkit
from labkit.exercises import check  # noqa: F401
from labkit.text.corpus import load_corpus

lab = labkit.load("mini")
flash = labkit.ModelConfig.preset("flash")
ids = lab.encode(load_corpus("heldout")["prideprejudice"])[:320]
lab

# %% [markdown] id="codes"
# ## 1. Sixteen codes
#
# E2M1 means: one bit for the sign, two for the exponent, one for the mantissa. A number
# is stored as the nearest value that has a code. Halfway between two values there is no
# nearest one; such a number is a *tie*, and fourteen of them exist.
#
# **Predict.** How many of the fourteen ties grow in magnitude when they are rounded?

# %% id="guess-ties"
guess = 14

# %% id="line"
from labkit.numerics import formats
from labkit.viz.formats import e2m1_line, ties

grow = sum(abs(tie.to) > abs(tie.at) for tie in ties())
print(f"your guess {guess}, E2M1 {grow}")
values = formats.decode_e2m1(torch.arange(16))
assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
assert torch.equal(values[8:], -values[:8]) and torch.signbit(values[8])
codes = formats.encode_e2m1(torch.tensor([tie.at for tie in ties()]))
assert (codes % 2 == 0).all(), "every tie goes to an even code"
e2m1_line()

# %% [markdown] id="line-read"
# Squares are even codes, circles odd ones, and the triangles are the ties: each points
# to a square. *Ties to even* sends about as many up as down, so that sums hardly
# drift. Between 0 and 2 the values stand 0.5 apart, beyond that the steps grow: a
# floating-point format spends its codes on small numbers.

# %% exercise="fp4_codes"

# %% [markdown] id="three"
# ### Two formats for scales
#
# Apart from zero, magnitudes reach from 0.5 to 6 only. So a group of neighbours, a
# *block*, shares a *scale* by which its codes are multiplied. Two formats serve as
# scales: UE8M0 is a bare exponent, a power of two, and E4M3 is a small floating-point
# number. E4M3 also serves as the element of FP8.

# %% id="three-formats"
from labkit.viz.formats import three_formats

assert formats.decode_ue8m0(torch.tensor([120])).item() == 2**-7     # a byte, no number
assert max(v for v in formats.e4m3_values() if v == v) == 448        # NaN is not itself
three_formats()

# %% [markdown] id="recipes"
# ## 2. A scale for every block
#
# The release has three recipes, no two alike: what they round, elements, block, scale.
#
# The scale should be about the smallest with which the block's largest magnitude, `amax`,
# fits. NVFP4 takes the E4M3 number nearest to amax / 6; where that is a little too small,
# the largest value is cut to 6 times the scale. The other two take the next power of two
# from amax / 6 (or amax / 448) *up*. Below the table stands the code of this package for
# that; it works on the bits of the number.

# %% id="recipes-table"
from labkit.numerics import FORMATS
from labkit.numerics.blocks import power_of_two_scale

for recipe, of in (("fp8", "window keys"), ("mxfp4", "index queries and keys"),
                   ("nvfp4", "compressed entries")):
    f = FORMATS[recipe]
    print(f"{recipe:6} {of:23} {f.element} in blocks of {f.block}, scale {f.scale:6}"
          f" {f.element_bits + 8 / f.block:.2f} bits a value")
assert FORMATS["mxfp4"].block == 32 and FORMATS["mxfp4"].scale == "ue8m0"
assert FORMATS["nvfp4"].block == 16 and FORMATS["nvfp4"].scale == "e4m3"
Code(inspect.getsource(power_of_two_scale), language="python")

# %% [markdown] id="log-why"
# Why not `2 ** ceil(log2(amax / 6))`? Try it on amax = 6 * 2^k, where k must come out,
# and on the next fp32 number above, where k + 1 must. There the quotient or its logarithm
# is rounded to k, and the step up is lost. (A logarithm that ends just above a whole
# number errs the other way, on the exact powers; the codes of 4 and 6 then lie idle.) A
# model would hardly feel either; but two engines that disagree about a scale byte do not
# have the same cache.

# %% id="log"
exact = 6 * torch.exp2(torch.arange(-100, 101).float())              # [201]
above = torch.nextafter(exact, torch.tensor(torch.inf))
for name, amax in (("6 * 2^k", exact), ("the next above", above)):
    naive = torch.exp2(torch.ceil(torch.log2(amax / 6)))
    wrong = naive != power_of_two_scale(amax, 6.0)
    print(f"{name}: the logarithm errs on {int(wrong.sum())} of {len(amax)}")
assert torch.equal(power_of_two_scale(exact, 6.0), exact / 6)
assert torch.equal(power_of_two_scale(above, 6.0), exact / 3)        # one step up

# %% exercise="fp4_block"

# %% [markdown] id="outliers"
# ### One large value
#
# A block has one scale. If one of its values is large, the scale is, and the others have
# to do with what codes are left for them.
#
# **Predict.** Take 32 neighbouring values of a compressed entry of this run and multiply
# the largest by 16. How many of the 31 others does MXFP4 store as zero?

# %% id="guess-outlier"
guess = 5

# %% id="outlier"
from labkit.viz.blocks import stored, unrounded, with_outlier

vectors = unrounded(lab, ids)         # one run with nothing rounded: what recipes get
block = vectors["entry of layer 1"].rows[100, :32]                    # [32]
grown, at = with_outlier(block, 16)
found = {recipe: stored(grown, at, recipe) for recipe in FORMATS}
print(f"your guess {guess},", ", ".join(f"{r} {found[r].zeros}" for r in FORMATS))
assert found["fp8"].zeros <= found["nvfp4"].zeros <= found["mxfp4"].zeros

# %% [markdown] id="explore-block"
# ### Explore: an outlier grows
#
# Hollow marks are the values of the run, bars what is stored of them, and under each bar
# stands its code. Dashed lines part the blocks. Move the outlier:
#
# 1. From which factor on does MXFP4 lose all the others? And NVFP4 half of them?
# 2. Why does FP8 lose none, although its block is as long? (Its elements have exponents
#    of their own.)
# 3. Set the factor to 1. Which of the two FP4 recipes is closer, and does it stay so for
#    index keys?

# %% id="block-explorer"
from labkit.explorers.blocks import BlockExplorer

blocks = BlockExplorer(tensors=vectors, tensor="entry of layer 1", row=100, outlier=16)
blocks

# %% id="block-facts"
before = list(blocks.figure.data[1].y)
blocks.outlier.value = 1              # what the slider does
assert list(blocks.figure.data[1].y) != before
errors = {one.recipe: one.error for one in (stored(block, at, r) for r in FORMATS)}
assert errors["fp8"] < errors["nvfp4"] < errors["mxfp4"]
far = slice(0, 16) if at >= 16 else slice(16, 32)    # the block without the outlier
huge = stored(with_outlier(block, 1024)[0], at, "nvfp4")
assert torch.equal(huge.values[far], stored(block, at, "nvfp4").values[far])
blocks.static()

# %% [markdown] id="bytes"
# ## 3. Bytes
#
# Two codes share a byte. A row of the cache is its codes, two a byte, then its scales.

# %% exercise="fp4_pack"

# %% id="rows"
from labkit.numerics import fake_quantize
from labkit.numerics.rows import RowCodec

entry = RowCodec(flash.head_dim, "nvfp4", "packed", torch.bfloat16)
key = RowCodec(flash.index_head_dim, "mxfp4", "packed", torch.bfloat16)
assert entry.nbytes == 512 // 2 + 512 // 16 == 288
assert key.nbytes == 128 // 2 + 128 // 32 == 68
row = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
back = entry.decode(entry.encode(row))
assert torch.equal(back, fake_quantize(row, "nvfp4").bfloat16()), "nothing is lost"
print(f"an entry {entry.nbytes} bytes, an index key {key.nbytes} bytes")

# %% [markdown] id="guess-ratio-why"
# **Predict.** Codes of 4 bits replace numbers of 16. By which factor does the packed form
# shrink the memory of a token, against keeping the rounded values in bf16?

# %% id="guess-ratio"
guess = 4.0

# %% id="stores"
from labkit.cache import Cache
from labkit.cache.filled import fill

per_token = {}
for form in ("packed", "bf16"):
    cache = Cache(flash, form=form)
    fill(cache, 1024)                 # 1,024 tokens' entries and keys, real storages
    used = cache.nbytes()
    per_token[form] = (used["global_kv"] + used["index_keys"]) / 1024
print(f"your guess {guess}, counted {per_token['bf16'] / per_token['packed']:.2f}: "
      f"{per_token['packed']} bytes a token against {per_token['bf16']}")
assert per_token["packed"] == 890.0 and per_token["bf16"] == 3200.0

# %% [markdown] id="forms"
# The scales make the difference: 4.5 bits a value in NVFP4, 4.25 in MXFP4. The lab's
# cache can hold its rows in four forms. What they weigh is counted at the released
# sizes; what they change is measured on `mini` and this notebook's text.

# %% id="forms-picture"
from labkit.viz.stores import stores_picture, weigh

forms = weigh(flash, lab, ids)
by_form = {one.form: one for one in forms}
assert by_form["bf16"].kl < 1e-6, "bf16 holds the rounded values: nothing more is lost"
assert by_form["fp8"].kl > by_form["bf16"].kl, "fp8 rounds the entries once more"
stores_picture(forms, "Flash", f"{len(ids)} tokens of a held-out novel")

# %% [markdown] id="forms-read"
# Packed loses nothing against keeping the rounded numbers: the loss lies in rounding, and
# that is part of the model. An FP4 code times its scale has at most six significant bits
# and fits bf16 exactly. It does not fit E4M3, so the larger form `fp8` is the one that
# changes something.
#
# ## 4. From the code to the text
#
# Now the loss itself. The same text runs eight times, with each of the three recipes on
# or off, and each run is compared with the one in which nothing is rounded.
#
# **Predict.** Which recipe changes the probabilities of the next token most: `fp8` of the
# window keys, `mxfp4` of the index, or `nvfp4` of the entries?

# %% id="guess-recipe"
guess = "nvfp4"

# %% id="chains"
from labkit.viz.rounding import ALL, measure

chains = measure(lab, ids)
single = {recipe: chains[frozenset([recipe])] for recipe in FORMATS}
most = max(single, key=lambda recipe: single[recipe].kl)
print(f"your guess {guess}, this run {most}:",
      ", ".join(f"{recipe} {one.kl:.1e} nats" for recipe, one in single.items()))

# %% id="chain-explorer"
from labkit.explorers.rounding import RoundingExplorer

rounding = RoundingExplorer(chains=chains)
rounding

# %% [markdown] id="chain-tasks"
# Try it:
#
# 1. Leave only the index on. Its keys are off by an eighth and a part of the selection is
#    exchanged. How much attention moves?
# 2. Leave only the window on. Its error is the smallest of the three. Where does its
#    effect become the largest?
# 3. Turn everything off. Why is every link zero and not merely small?

# %% id="chain-facts"
rounding.boxes["fp8"].value = rounding.boxes["nvfp4"].value = False
assert rounding.on == ["mxfp4"] and list(rounding.figure.data[2].customdata)[5] < 1e-5
index, window = single["mxfp4"], single["fp8"]
assert index.keys > 0.1 and index.exchanged > 0.02, "codes and selection change visibly"
assert index.attention < 1e-3, "and attention does not care"
assert all(value == 0 for value in vars(chains[frozenset()]).values()
           if isinstance(value, float) and value != 1)
rounding.static()

# %% [markdown] id="why"
# ### Where an error is read
#
# An error counts as far as it is read. In a novel most attention falls on the window,
# which all layers have, and what the index exchanges carries next to none. So take other
# texts: somewhere a number is stated, and 200 tokens later, beyond the window, it is
# asked for. Look at the answers alone.

# %% id="where"
from labkit.text.synthetic import recall
from labkit.train.agreement import Agreement
from labkit.viz.rounding import nats, run

W, layers = lab.config.sliding_window, range(lab.config.num_hidden_layers)
plain = run(lab, ids, ())
near = [float(plain.spread(layer)[..., :W].sum(-1).mean()) for layer in layers]
share = sum(near) / len(near)
answers = {recipe: Agreement() for recipe in FORMATS}
for index in range(4):
    needle = recall(lab.tokenizer, distance=200, length=400, index=index)
    text, (a,) = [lab.config.bos_token_id, *needle.ids], needle.answers
    at = slice(a.at, a.at + a.size)                    # positions that guess the answer
    exactly = run(lab, text, ()).taps["logits"][0, at]
    for recipe, told in answers.items():
        told.add(exactly, run(lab, text, [recipe]).taps["logits"][0, at])

# %% id="where-facts"
print(f"novel: {share:.0%} of the attention on the window; KL by recipe",
      {recipe: f"{one.kl:.1e}" for recipe, one in single.items()})
print("answers: KL by recipe", {r: f"{one.mean:.1e}" for r, one in answers.items()},
      f"same likeliest token {answers['nvfp4'].same} of {len(answers['nvfp4'].kl)}")
assert share > 0.5
assert answers["nvfp4"].mean > answers["fp8"].mean > answers["mxfp4"].mean
assert answers["nvfp4"].same == len(answers["nvfp4"].kl), "and yet no answer is lost"

# %% [markdown] id="measurable-why"
# Where an entry matters, the order turns: the rounding of entries weighs most. (And
# `mini` is so sure of these answers that none of them falls.)
#
# ### Is it measurable?
#
# In bits per byte, one text of a few hundred tokens cannot tell the loss from zero. More
# text narrows the error. Here are all six held-out novels, token by token against the
# same token without rounding:

# %% id="measurable"
from labkit.train.agreement import held_out

costs, agreement = [], Agreement()
for text in held_out(lab, 6, 256):
    rounded, exactly = run(lab, text, ALL), run(lab, text, ())
    costs.append(nats(rounded) - nats(exactly))                       # [T-1]
    agreement.add(exactly.taps["logits"][0], rounded.taps["logits"][0])
change = torch.cat(costs)
error = 2 * float(change.std()) / len(change) ** 0.5
other = 1 - agreement.same / len(agreement.kl)
print(f"nats a token: {float(change.mean()):+.5f}, two standard errors {error:.5f}; "
      f"KL {agreement.mean:.1e}; other likeliest token: {other:.1%} of {len(change)}")
assert agreement.mean > 1e-5, "the distributions do change"
assert abs(float(change.mean())) < 0.01, "the price of the text hardly does"

# %% [markdown] id="measurable-read"
# So two true sentences: the distributions change measurably, and on average the true
# next token does not become dearer by more than can be seen here. `mini` spent the end of
# its training with rounding on, as models are that ship this way.
#
# ## 5. Break it
#
# Four faults that people have shipped:
#
# - `high_nibble_first`: unpacking takes the even column from the high half of a byte;
# - `scale_bytes_as_numbers`: UE8M0 byte 120 is read as 120.0 instead of 2^-7;
# - `ties_away`: E2M1 rounds halves away from zero;
# - `exact_powers_step_up`: scales are rounded up from exact powers, too.
#
# With the packed cache, `high_nibble_first` exchanges neighbouring columns of everything
# that is stored in FP4.
#
# **Predict.** Which is the first tensor of the run that differs? (Names are those of
# `lab.trace`, such as `layers.0.attn.window`, `layers.1.attn.compressed_kv`, `logits`.)

# %% id="guess-fault"
guess = "layers.0.attn.window"

# %% id="faults"
from labkit import mutants

right = {form: lab.trace(ids[:160], form=form) for form in ("plain", "packed")}
found, prices = {}, {}
for fault in ("high_nibble_first", "scale_bytes_as_numbers", "ties_away",
              "exact_powers_step_up"):
    for form, good in right.items():
        with mutants.active(fault):
            bad = lab.trace(ids[:160], form=form)
        differs = (name for name in good if not torch.equal(good[name], bad[name]))
        found[fault, form], price = next(differs, "nothing"), Agreement()
        price.add(good["logits"][0], bad["logits"][0])
        prices[fault, form] = price.mean
first = found["high_nibble_first", "packed"]
print(f"your guess {guess}, the run {first}")

# %% id="faults-table"
for (fault, form), name in found.items():
    print(f"{fault:23} {form:7} first: {name:30} KL {prices[fault, form]:.1e}")
owner = lab.config.kv_source_layer_ids[0]
assert first == f"layers.{owner}.attn.compressed_kv"
assert found["scale_bytes_as_numbers", "packed"] == "layers.0.attn.window"
assert found["high_nibble_first", "plain"] == "nothing", "numbers were never packed"
assert found["scale_bytes_as_numbers", "plain"] == "nothing"
assert max(prices["ties_away", f] for f in right) < 1e-4
assert max(prices["exact_powers_step_up", f] for f in right) < 1e-4

# %% [markdown] id="faults-read"
# Two faults live in the bytes, so a run that keeps numbers instead of bytes cannot have
# them. Note how small the price of exchanged columns is: every entry is scrambled, but
# most attention goes elsewhere, and a look at the text may not tell. The other two faults
# hardly occur in fp32, where next to no number lies exactly between two codes. Let the
# numbers of the run be bf16 first, and count the ties:

# %% id="count-ties"
keys = vectors["index key of layer 1"].rows                            # [S,di]
shares = []
for x in (keys, keys.bfloat16()):
    even = fake_quantize(x, "mxfp4")
    with mutants.active("ties_away"):
        away = fake_quantize(x, "mxfp4")
    shares.append(float((even != away).float().mean()))
print(f"index keys that the fault changes: fp32 {shares[0]:.3%}, bf16 {shares[1]:.3%}")
assert shares[1] > 20 * shares[0] and shares[1] > 1e-3

# %% [markdown] id="count-ties-read"
# The released model computes in bf16. So tests for formats use made-up numbers at every
# border (ties, exact powers, zeros, the largest values), not numbers from a run.
#
# ## 6. On the released model
#
# Weights come in the same formats. The routed experts are E2M1 with a UE8M0 scale for 32
# columns of a row, the other large matrices E4M3 with one for 32 x 32.

# %% id="weights"
from labkit.checkpoint.accounting import totals_by
from labkit.checkpoint.layout import storage_of

stored_as = totals_by(flash, storage_of)
for kind, total in stored_as.items():
    bits = 8 * total.bytes / total.parameters
    print(f"{kind:9} {total.parameters / 1e9:7.2f} billion parameters, "
          f"{total.bytes / 1e9:7.2f} GB, {bits:.3f} bits each")
assert sum(total.bytes for total in stored_as.values()) == 510_286_023_000

# %% [markdown] id="claims"
# ### Four sentences from the press
#
# The third of them can be settled by arithmetic: what would a token take if 64 channels
# of an entry stayed in bf16, and the other 448 were NVFP4?

# %% id="claims-computed"
mixed = 64 * 2 + 448 // 2 + 448 // 16                        # bytes of such an entry
entries = sum(1 / flash.compress_ratios[layer] for layer in flash.kv_source_layer_ids)
assert (entry.nbytes + key.nbytes) * entries == per_token["packed"] == 890
such = (mixed + key.nbytes) * entries
print(f"with such a channel {such:,.0f} bytes a token, not {per_token['packed']:.0f}")
kept = run(lab, ids, ALL).taps[f"layers.{owner}.attn.compressed_kv"]    # [1,S,d]
assert torch.equal(kept, fake_quantize(kept, "nvfp4")), "all channels, the rotated too"

# %% id="claims-table"
from labkit.viz.legend import Legend

Legend(("sentence", "verdict", "why"), (
    ("FP4 blocks of 32 with FP8 scales", "wrong", "mixes two recipes: blocks of 32 "
     "have exponents as scales (index), E4M3 scales go with blocks of 16 (entries)"),
    ("FP4 with one scale for every 16 channels", "holds for entries",
     f"{entry.nbytes} = 256 + 32 bytes; index keys have one for 32"),
    ("a 64-dimensional high-precision channel is kept beside FP4", "wrong",
     f"that would make {such:,.0f} bytes a token, not 890"),
    ("zero measurable degradation from FP4", "not derivable here",
     f"of mini: KL {agreement.mean:.1e} nats and {other:.1%} other likeliest tokens "
     "are measurable, a higher price of the text is not"),
))

# %% [markdown] id="claims-read"
# The third sentence was true of an elder: the FP8 cache of DeepSeek-V3.2 keeps 64 rotated
# channels in bf16 beside 512 bytes of codes, 656 bytes a layer and token. In V4.1 the
# rotated channels are part of the entry and rounded like the rest. About the fourth, the
# technical report says that the loss was negligible in its tests; that is its sentence.
#
# ## What this lesson does not show
#
# - What FP4 costs the released model. `mini` has heads of 64 channels instead of 512 and
#   was trained on other text; only sizes and formats are those of the release.
# - Tasks. Bits per byte average over all tokens; a fact that must be recalled may hang on
#   one entry.
# - Speed. Packing here is plain PyTorch; a GPU reads FP4 faster because it reads less.
# - Rounding of weights: they were rounded once, before this notebook began.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: CSA2, formats of the cache.
# - The released `config.json` (in this package: `labkit/presets/flash.json`).
# - OCP Microscaling Formats (MX) specification 1.0: E2M1, E4M3, UE8M0 (there E8M0).
# - The 656-byte format of DeepSeek-V3.2: documentation of vLLM, `flashmla_sparse`.
# - Code: `labkit/numerics`; bytes: `docs/cache.md`. Text: six novels by Jane Austen,
#   public domain (`data/corpus`). Colours: Okabe and Ito, *Color Universal Design*
#   (2008).
