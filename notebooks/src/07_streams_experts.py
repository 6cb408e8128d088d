# Source of notebooks/07_streams_experts.ipynb. Change this file, run
# tools/build_notebooks.py.

# %% [markdown] id="title"
# # Streams and experts: what stands between the attentions
#
# A transformer adds what each layer finds to one vector per token, the residual stream.
# DeepSeek-V4.1-Flash keeps four such streams for every token, and decides at each site
# anew from which ones to read, to which ones to write, and how to mix them:
# *manifold-constrained hyper-connections*, mHC. The other half of a layer is a *mixture
# of experts*: a token meets six of 384.
#
# **The questions of this notebook:** what do four streams do that one cannot, and how
# does a token find its experts?
#
# You need the notebook `00_start`. Cells that begin with `guess` are for your own
# prediction, before you run the next one.

# %% id="load"
import inspect

import torch
import torch.nn.functional as F
from IPython.display import Code

import labkit
from labkit.exercises import check

lab = labkit.load("mini")
c = lab.config
flash = labkit.ModelConfig.preset("flash")
text = "She was not at all afraid of the rain"
print(f"{c.hc_mult} streams of {c.hidden_size} numbers, {c.n_routed_experts} experts, "
      f"{c.num_experts_per_tok} a token")

# %% [markdown] id="site"
# ## 1. A site
#
# A *site* is an attention or a mixture of experts. Whatever it is, it reads one vector
# and gives one back.

# %% exercise="hyper_site"

# %% [markdown] id="site-source"
# The three sets of weights are computed from the streams of the token itself:

# %% id="source-mix"
from labkit.model.hyper import hyper_mix

Code(inspect.getsource(hyper_mix), language="python")

# %% [markdown] id="guess-first-text"
# **Predict.** At the start all four streams of a token are the same, its embedding. From
# how many of them does the *first* site read?

# %% id="guess-first"
guess = 4

# %% id="first"
from labkit.viz.streams import record

run = record(lab, text)
read = run.pre[0, -1]                    # [C]: the first site, the last token
print(f"your guess {guess}, the model {int((read > 0).sum())}: weights {read.tolist()}")

# %% id="first-facts"
sites = 2 * c.num_hidden_layers
T = len(run.texts)
assert run.pre.shape == (sites, T, c.hc_mult)                        # [sites,T,C]
assert run.comb.shape == (sites, T, c.hc_mult, c.hc_mult)
assert read.tolist() == [1.0] + [0.0] * (c.hc_mult - 1)
assert run.error < 1e-3, "the streams that follow from these are those of the run"

# %% [markdown] id="lag"
# A site does not read with weights of its own: it reads with those that the site
# *before* it computed. So the weights for reading are known before the streams are
# complete, and one pass over them is enough, hence *single-pass*. The first site has
# none before it and reads stream 0.
#
# ### Explore
#
# One token through all sites: how much of each stream is read, how much of a site's
# result is written to it, and how much of a stream stays in its place.

# %% id="explorer"
from labkit.explorers.streams import StreamsExplorer

explorer = StreamsExplorer(run=run)
explorer

# %% id="explorer-facts"
before = list(explorer.figure.data[2].y)
explorer.what.value = "post"
assert list(explorer.figure.data[2].y) != before
explorer.token.value = 1
assert all(0 < y < 2 for trace in explorer.figure.data for y in trace.y)
print(f"the last move took {explorer.seconds * 1000:.0f} ms")
explorer.what.value, explorer.token.value = "pre", T - 1

# %% id="explorer-static"
explorer.static()

# %% [markdown] id="read-roles"
# Streams take roles, and the sites choose. To see whether the roles hang on the token
# or on the site, compare the spread over tokens with the spread over sites:

# %% id="roles"
over_sites = float(run.pre.mean(1).std(0).mean())    # of the mean token
over_tokens = float(run.pre[1:].std(1).mean())       # at one site
print(f"standard deviation of pre: over sites {over_sites:.2f}, over tokens "
      f"{over_tokens:.2f}")
assert over_sites > over_tokens

# %% [markdown] id="mixing"
# ## 2. Mixing that keeps the sum
#
# Between two sites the streams are mixed by a matrix. In 80 sites any factor above 1
# explodes and any below 1 dies out. The *manifold* in the name is that of matrices
# whose rows and columns all sum to one.

# %% exercise="hyper_sinkhorn"

# %% [markdown] id="guess-iterations-text"
# **Predict.** After a single iteration the columns sum to one. By how much is the worst
# *row* off, at the first site of the last token, before the others (20 in all) repair it?

# %% id="guess-iterations"
guess = 0.01

# %% id="sinkhorn"
from labkit.explorers.streams import SinkhornExplorer

sums = SinkhornExplorer(run, c.hc_eps, iterations=1)
worst = max(abs(y - 1) for y in sums.figure.data[0].y)
print(f"your guess {guess}, the model {worst:.2f}")
sums

# %% id="sinkhorn-facts"
sums.iterations.value = c.hc_sinkhorn_iters
left = max(abs(y - 1) for y in sums.figure.data[0].y)
assert max(abs(y - 1) for y in sums.figure.data[1].y) < 1e-4, "columns come last"
assert left < worst
rows = run.comb.sum(-1)                                              # [sites,T,C]
print(f"after {c.hc_sinkhorn_iters}: worst row of this site off by {left:.3f}; of all "
      f"sites and tokens {float((rows - 1).abs().max()):.2f}, half of them by less "
      f"than {float((rows - 1).abs().median()):.1e}")

# %% id="sinkhorn-static"
sums.static()

# %% [markdown] id="sharp"
# Where the logits are sharp, 20 iterations are not enough for the rows. The iteration
# is cut off, not run to its limit: what the released code computes is this, and an
# implementation that iterates to convergence computes another model.
#
# Does mixing keep the sum over streams? Each source gives away what its row sums to:

# %% id="kept-sum"
h = lab.trace(lab.encode(text))["layers.3.streams_in"][0]   # [T,C,D]
mixed = torch.einsum("tsc,tsd->tcd", run.comb[6], h)         # layer 3, attention
change = (mixed.sum(1) - h.sum(1)).norm() / h.sum(1).norm()
print(f"the sum over streams changes by {float(change):.1e} of its length")
assert change < 0.2
spread = [float((x - x.mean(1, keepdim=True)).norm() / x.norm()) for x in (h, mixed)]
print(f"how far streams differ from their mean: {spread[0]:.2f}, mixed {spread[1]:.2f}")
assert spread[1] <= spread[0] * 1.01, "mixing brings streams together, never apart"

# %% [markdown] id="experts"
# ## 3. Experts
#
# The second site of a layer sends each token to a *shared* expert and to a few of the
# *routed* ones.

# %% exercise="moe_route"

# %% [markdown] id="guess-load-text"
# Training moved the biases until the experts had equal work on the training text, which
# was mostly prose. **Predict.** On code, how full is the fullest expert, over the mean
# (1 is perfect balance, 4 the most that is possible: 8 experts, 2 a token)? Take the
# mean over all layers.

# %% id="guess-load"
guess = 1.0

# %% id="load-of-texts"
from labkit.explorers.routing import RoutingExplorer
from labkit.text.corpus import load_corpus
from labkit.text.synthetic import document

texts = {"novel": load_corpus("heldout")["emma"][:3000]}
for kind in ("code", "arithmetic"):
    texts[kind] = document(kind, lab.tokenizer, split="heldout", length=600).text
routing = RoutingExplorer(lab, texts, layer=3)
found = routing.found
L = c.num_hidden_layers
loads = [sum(found.load(i, layer) for layer in range(L)) / L for i in range(3)]
print(f"your guess {guess}, the model {loads[1]:.2f}; on the novel {loads[0]:.2f}")
routing

# %% id="load-facts"
assert torch.allclose(found.shares.sum(-1), torch.ones(3, L, dtype=torch.float64))
assert loads[1] > loads[0], "a kind of text has experts of its own"
before = list(routing.figure.data[1].y)
routing.layer.value = 5
assert list(routing.figure.data[1].y) != before
routing.layer.value = 3

# %% id="load-static"
routing.static()

# %% [markdown] id="load-read"
# Balance over all of training does not mean balance over one text. Where experts lie on
# different devices, the fullest one decides how long a step takes.
#
# **Predict.** Take the bias away. Which share of the choices (token, layer) changes at
# least one expert?

# %% id="guess-bias"
guess = 0.0

# %% id="bias"
ids = lab.encode(texts["novel"])
names = [f"layers.{i}.ffn.picked" for i in range(L)]
own = lab.trace(ids, patterns=names)
gates = [layer.ffn.gate for layer in lab.model.layers]
kept = [gate.bias.clone() for gate in gates]
for gate in gates:
    gate.bias.data.zero_()
other = lab.trace(ids, patterns=names)
for gate, bias in zip(gates, kept, strict=True):
    gate.bias.data.copy_(bias)
changed = torch.stack([(own[n] != other[n]).any(-1) for n in names]).float().mean()
print(f"your guess {guess:.0%}, the model {float(changed):.0%}")
assert 0 < changed < 1
assert torch.equal(lab.trace(ids, patterns=names)[names[0]], own[names[0]])

# %% [markdown] id="limit"
# ### A limit that is rarely met
#
# An expert is a SwiGLU: one half of it, the gate, is cut off above `swiglu_limit`, the
# other on both sides. That keeps rare, large values from ruining FP8 scales.

# %% id="limits"
largest, hooks = {"gate": 0.0, "up": 0.0}, []
for layer in lab.model.layers:
    for half, name in (("w1", "gate"), ("w3", "up")):
        hooks.append(getattr(layer.ffn.shared_experts, half).register_forward_hook(
            lambda module, args, out, name=name: largest.__setitem__(
                name, max(largest[name], float(out.abs().max())))))
lab.trace(ids, patterns=[])
for hook in hooks:
    hook.remove()
print({name: round(value, 1) for name, value in largest.items()}, c.swiglu_limit)
assert largest["gate"] > 0 and c.swiglu_limit == flash.swiglu_limit == 10

# %% [markdown] id="break"
# ## 4. Break it
#
# Suppose that somebody reads the mixing matrix the wrong way round: first index target,
# second source. Rows and columns both sum to about one, so the lengths of the streams
# look right.
#
# **Predict.** Which is the first layer whose incoming streams differ?

# %% id="guess-broken"
guess = 7

# %% id="broken"
from labkit import mutants

patterns = [f"layers.{i}.streams_in" for i in range(L)] + ["logits"]
right = lab.trace(ids, patterns=patterns)
with mutants.active("transposed_comb"):
    wrong = lab.trace(ids, patterns=patterns)
different = [i for i in range(L)
             if not torch.equal(right[patterns[i]], wrong[patterns[i]])]
print(f"your guess {guess}, the model {different[0]}")

# %% id="broken-facts"
assert different[0] == 1, "in layer 0 all streams of a token are still alike"
last = patterns[L - 1]
lengths = [float(t[last].norm()) for t in (right, wrong)]
print(f"length of the last layer's streams: {lengths[0]:.0f}, wrong {lengths[1]:.0f}")
losses = [float(F.cross_entropy(t["logits"][0, :-1], torch.tensor(ids[1:])))
          for t in (right, wrong)]
print(f"nats a token: {losses[0]:.2f}, wrong {losses[1]:.2f}")
span = right["logits"].abs().max()
apart = float((right["logits"] - wrong["logits"]).abs().max() / span)
print(f"the logits differ by up to {apart:.0%} of their span")
assert abs(losses[1] - losses[0]) < 0.3 and apart > 0.01

# %% [markdown] id="broken-read"
# Layer 0's attention site mixes four equal streams, which a matrix whose columns sum to
# one leaves as they are. What was written with different `post` is mixed wrongly at the
# next site, and from there on everything is another model. Lengths look plausible, and
# the text is guessed about as well as before: no gate on perplexity would stop this
# fault. What notices is a comparison of the streams, one by one, with a matrix that is
# not symmetric. `labkit mutants transposed_comb pre_does_not_lag` shows such checks.
#
# ## 5. On the released model

# %% id="released"
from labkit.checkpoint.accounting import component_of, totals_by

parts = totals_by(flash, component_of)
total = sum(part.parameters for part in parts.values())
for name in ("routed experts", "shared expert", "router", "hyper-connections"):
    count = parts[name].parameters
    print(f"{name:18} {count:>16,}  {count / total:.4%}")
assert flash.hc_mult == 4 and flash.hc_sinkhorn_iters == 20
assert (flash.n_routed_experts, flash.num_experts_per_tok) == (384, 6)

# %% id="released-expert"
expert = 3 * flash.hidden_size * flash.moe_intermediate_size
each = flash.num_experts_per_tok + 1                      # with the shared one
print(f"an expert has {expert:,} parameters; a token visits {each} in each of "
      f"{flash.num_hidden_layers} layers, "
      f"{each * expert * flash.num_hidden_layers / 1e9:.1f} billion parameters")
assert expert == 35_389_440

# %% [markdown] id="not-shown"
# ## What this lesson does not show
#
# - Why four streams help: that is a question of training. `docs/ablations.md` compares
#   small models with one and with four, and says how far that carries.
# - That experts are specialists. A load says how often an expert was visited, not what
#   it does.
# - Balance on the released model, or what imbalance costs over many devices.
#
# ## Sources
#
# - Technical report of DeepSeek-V4.1, arXiv 2609.19969: hyper-connections, experts.
# - The released `config.json` (in this package: `labkit/presets/flash.json`): `hc_*`,
#   `n_routed_experts`, `scoring_func`, `swiglu_limit`.
# - Sinkhorn and Knopp, *Concerning nonnegative matrices and doubly stochastic
#   matrices* (1967).
# - Text: *Emma* by Jane Austen, public domain (`data/corpus`).
