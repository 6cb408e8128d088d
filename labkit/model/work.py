"""How much a pass computes: layer-token passes and multiply-adds, counted at each product.

    with counting(model) as work:
        model(ids)
    print(work.table())

Every number comes from the shapes of tensors that meet in a product while it is computed, never
from a configuration: forward hooks watch the modules that multiply, and the kernel set is wrapped
while the counting lasts. Results do not change by a bit.

A multiply-add is one product of two numbers, added to a sum: half of what "FLOP" usually counts.
Counted are contractions, sums of products along an axis. Left out is what costs a few operations
per element of a tensor: norms, rotations, softmax, activations, Sinkhorn, rounding. Some
contractions are so narrow that they are computed element by element; they have parts of their own
(`ELEMENTWISE`), since counters of matrix products do not see them. The sum of all others
(`Work.products`) is exactly half of what `torch.utils.flop_counter.FlopCounterMode` finds on the
reference kernels.

Attention and index scores are counted as the reference computes them: every query against W
window keys and K selected entries, every index query against all entries, masked or not. That is
what a pass needs; a faster kernel set may compute more (`cpu` multiplies blocks of W queries with
2W window columns) and the count stays that of the reference.

The draft is counted where it is computed: what the target's own pass adds for it (the features of
its tokens, made window KV for every stage) and the blocks of slots that `Transformer.draft` reads.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from labkit.model import block, dspark, transformer
from labkit.model.attention import Attention, GroupedLinear
from labkit.model.compressor import Compressor
from labkit.model.dspark import DSpark
from labkit.model.engram import Engram, gated_update
from labkit.model.hyper import collapse, expand, hyper_mix
from labkit.model.moe import Gate
from labkit.model.transformer import Transformer

PARTS = {
    "engram": "memory rows to keys and value",
    "engram.gate": "streams with keys, gates with the value",
    "hyper": "coefficients of a site, reading and mixing the streams",
    "hyper.write": "the output of a site into each stream",
    "attn.projections": "queries, window KV, output",
    "attn.scores": "queries with window keys and selected entries",
    "attn.values": "attention weights with values",
    "compressor": "values and gates of entries",
    "compressor.pool": "weighted sum over the tokens of a group",
    "indexer": "index queries, head weights, index keys",
    "indexer.scores": "index queries with index keys",
    "indexer.sum": "weighted sum over the index heads",
    "gate": "routing scores",
    "experts": "the routed experts",
    "shared_expert": "the expert that all tokens visit",
    "draft.features": "what the target thought of its tokens, to the window KV of all stages",
    "markov": "the logits' bias from the token before",
    "confidence": "whether a slot's token will survive",
    "head": "logits",
    "other": "modules that are none of these",
}
"""Parts of the work in the order of a table, and what is multiplied in each."""

ELEMENTWISE = ("engram.gate", "hyper.write", "compressor.pool", "indexer.sum")
"""Parts that the reference computes element by element, not as matrix products."""

SIDES = ("encoder", "decoder", "draft", "outside")
"""Layers before the last KV source, layers from it on, stages of the draft (with their head), and
what belongs to neither."""


@dataclass
class Work:
    """What was computed, by layer and part (see `PARTS`).

    The stages of the draft count on behind the `layers` layers; None is outside of both.

    passes  layer -> tokens whose queries the layer computed: its layer-token passes; of a stage
            of the draft, slots
    stored  layer -> tokens that the layer compressed into entries
    macs    (layer, part) -> multiply-adds

    What counts is what is computed. Rows of a batch that differ in length are padded for windows,
    groups and scores only, and there the padding counts.
    """

    encoder_layers: int
    layers: int
    passes: Counter[int] = field(default_factory=Counter)
    stored: Counter[int] = field(default_factory=Counter)
    macs: Counter[tuple[int | None, str]] = field(default_factory=Counter)

    def total(self, part: str | None = None, side: str | None = None) -> int:
        """Multiply-adds of one part (default: all) on one of `SIDES` (default: all)."""
        return sum(n for (layer, name), n in self.macs.items()
                   if part in (None, name) and side in (None, self._side(layer)))

    def products(self, layer: int | None = None) -> int:
        """Multiply-adds of matrix products: without the `ELEMENTWISE` parts; of one layer or all.

        Twice this is what counters of FLOP report.
        """
        return sum(n for (at, name), n in self.macs.items()
                   if name not in ELEMENTWISE and layer in (None, at))

    def copy(self) -> Work:
        """The count so far; later passes do not change it."""
        return Work(self.encoder_layers, self.layers, self.passes.copy(), self.stored.copy(),
                    self.macs.copy())

    def __sub__(self, earlier: Work) -> Work:
        """What was computed since `earlier`, a copy of this count."""
        return Work(self.encoder_layers, self.layers, self.passes - earlier.passes,
                    self.stored - earlier.stored, self.macs - earlier.macs)

    def table(self) -> str:
        """One row a part that occurs, one column a side (the draft's if it occurs), and totals."""
        sides = [side for side in SIDES if side != "draft" or self.total(side=side)]
        rows: list[tuple[str, ...]] = [("", *sides, "all")]

        def row(name: str, by_layer: Mapping[Any, int]) -> None:
            sums = [sum(n for layer, n in by_layer.items() if self._side(layer) == side)
                    for side in sides]
            rows.append((name, *(f"{n:,}" for n in (*sums, sum(sums)))))

        row("layer-token passes", self.passes)
        row("tokens compressed", self.stored)
        for part in PARTS:
            found = {layer: n for (layer, name), n in self.macs.items() if name == part}
            if found:
                row(part, found)
        total: Counter[int | None] = Counter()
        for (layer, _), n in self.macs.items():
            total[layer] += n
        row("multiply-adds", total)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join([row[0].ljust(widths[0])] + [
            cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)])
            for row in rows)

    def _side(self, layer: int | None) -> str:
        if layer is None:
            return "outside"
        return SIDES[(layer >= self.encoder_layers) + (layer >= self.layers)]


@contextmanager
def counting(model: Transformer) -> Iterator[Work]:
    """Count what `model` computes inside the block, over any number of passes.

    The model's hooks, its kernel set and the functions it calls are as before on the way out,
    also after an error. `Work.copy` and subtraction tell several passes apart. Other models may
    run in between, but not at the same moment in another thread: the streams that they read
    would be counted here.
    """
    work = Work(model.config.encoder_layers, len(model.layers))
    watch = _Watch(model, work)
    with ExitStack() as undo:
        watch.hook_modules(undo)
        undo.callback(setattr, model, "kernels", model.kernels)
        model.kernels = watch.wrapped(model.kernels)
        # These read the streams outside of a site too, where no kernel set is asked.
        for place in (block, dspark, transformer):
            undo.callback(setattr, place, "collapse", place.collapse)  # type: ignore[attr-defined]
            place.collapse = watch.direct(place.collapse)  # type: ignore[attr-defined]
        yield work


class _Watch:
    """Where the counts come from: what is called whenever something multiplies.

    Modules know their layer by name. Plain functions run inside or right after something that
    does: `layer` is the one that was last seen.
    """

    def __init__(self, model: Transformer, work: Work) -> None:
        self.model, self.work = model, work
        self.layer: int | None = None
        self.collapsed = 0  # multiply-adds of streams that were read, for a site not yet known
        self.feeding = False  # features of the target are on their way into the draft's windows
        self.layer_of = {id(p): self.number(name) for name, p in model.named_parameters()}
        self.functions: dict[Callable[..., Any], Callable[..., None]] = {
            hyper_mix: self.hyper_mix, collapse: self.collapse, expand: self.expand,
            gated_update: self.gated_update}

    def add(self, layer: int | None, part: str, macs: int) -> None:
        self.work.macs[layer, part] += macs

    def number(self, name: str) -> int | None:
        """The layer, counted on through the draft's stages, that a module or parameter is in."""
        first, _, rest = name.partition(".")
        if first not in ("layers", "mtp") or not rest:
            return None
        return int(rest.partition(".")[0]) + (self.work.layers if first == "mtp" else 0)

    # ------------------------------------------------------------------ modules
    def hook_modules(self, undo: ExitStack) -> None:
        def before(module: nn.Module, hook: Callable[..., None]) -> None:
            undo.callback(module.register_forward_pre_hook(hook).remove)

        def after(module: nn.Module, hook: Callable[..., None]) -> None:
            undo.callback(module.register_forward_hook(hook).remove)

        before(self.model, self.starts)
        ends = ["norm"]                                  # what the head multiplies comes from here
        if self.model.mtp is not None:
            ends.append(f"mtp.{len(self.model.mtp) - 1}.norm")
        for name, module in self.model.named_modules():
            layer = self.number(name)
            if isinstance(module, DSpark):
                before(module, self.starts)
            if name == "mtp.0.main_proj":
                before(module, self.feeds)
            if isinstance(module, (Attention, Engram)):
                before(module, functools.partial(self.enters, layer))
            if name in ends or name.endswith((".attn_norm", ".ffn_norm")):
                before(module, functools.partial(self.reads, layer))
            if name in ends:
                after(module, functools.partial(self.head, layer))
            if name.endswith(".attn.wq_b"):
                after(module, functools.partial(self.queries, cast(int, layer)))
            if isinstance(module, (nn.Linear, GroupedLinear)) and name != "head":
                after(module, functools.partial(self.projection, layer, _part(name)))
            elif isinstance(module, Compressor):
                after(module, functools.partial(self.compressor, cast(int, layer)))
            elif isinstance(module, Gate):
                after(module, functools.partial(self.gate, layer))

    def starts(self, model: nn.Module, args: Any) -> None:
        # An earlier pass may have been cut short.
        self.layer, self.collapsed, self.feeding = None, 0, False

    def feeds(self, projection: nn.Module, args: Any) -> None:
        """From here to the next pass, window KV is of features, not of a block's own slots."""
        self.feeding = True

    def head(self, layer: int | None, norm: nn.Module, args: Any, output: torch.Tensor) -> None:
        """The last norm gives what the head multiplies: [...,D] with the weight [V,D]."""
        self.add(layer, "head", output.numel() * self.model.head.weight.shape[0])

    def enters(self, layer: int | None, module: nn.Module, args: Any) -> None:
        self.layer = layer

    def reads(self, layer: int | None, module: nn.Module, args: Any) -> None:
        """A norm takes what was read from the streams: now it is known for which site."""
        self.add(layer, "hyper", self.collapsed)
        self.collapsed = 0

    def queries(self, layer: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.work.passes[layer] += output[..., 0].numel()

    def projection(self, layer: int | None, part: str, module: nn.Linear | GroupedLinear,
                   args: Any, output: torch.Tensor) -> None:
        """weight [out,in], or block-diagonal with blocks [out/G,in]: `in` products a number."""
        if self.feeding and part == "attn.projections":
            part = "draft.features"
        self.add(layer, part, output.numel() * module.weight.shape[1])

    def compressor(self, layer: int, module: Compressor, args: tuple[torch.Tensor, Any],
                   output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, latent = args[0], output[0]                                  # [B,T,D], [B,G,d]
        self.work.stored[layer] += x[..., 0].numel()
        if module.ratio > 1:  # with ratio 1 there is one projection, hooked as any other
            width = module.wkv.weight.shape[0] + module.wgate.weight.shape[0]
            self.add(layer, "compressor", x.numel() * width)
            self.add(layer, "compressor.pool", latent.numel() * module.ratio)

    def gate(self, layer: int | None, module: Gate, args: tuple[torch.Tensor, Any],
             output: Any) -> None:
        self.add(layer, "gate", args[0].numel() * module.weight.shape[0])

    # ------------------------------------------------------------------ kernels
    def wrapped(self, kernels: ModuleType) -> ModuleType:
        """The same operations, counted."""
        twin = ModuleType(kernels.__name__, kernels.__doc__)
        twin.__dict__.update(kernels.__dict__)

        def sparse_attention(q: torch.Tensor, window: torch.Tensor,
                             entries: torch.Tensor | None, selected: torch.Tensor | None,
                             *rest: Any) -> torch.Tensor:
            T = q.shape[1]                                              # q [B,T,H,d]
            keys = window.shape[1] - T
            if entries is not None and selected is not None:
                keys += selected.shape[-1]
            self.add(self.layer, "attn.scores", q.numel() * keys)
            self.add(self.layer, "attn.values", q.numel() * keys)
            return kernels.sparse_attention(q, window, entries, selected, *rest)

        def index_scores(q: torch.Tensor, keys: torch.Tensor,
                         weights: torch.Tensor) -> torch.Tensor:
            S = keys.shape[1]
            self.add(self.layer, "indexer.scores", q.numel() * S)       # q [B,T,Hi,di]
            self.add(self.layer, "indexer.sum", weights.numel() * S)    # [B,T,Hi]
            return kernels.index_scores(q, keys, weights)

        def fuse(function: Callable[..., Any]) -> Callable[..., Any]:
            # `collapse` arrives as `direct` left it; a kernel set may compile what it is given.
            plain = inspect.unwrap(function)
            fused, count = kernels.fuse(plain), self.functions.get(plain)
            if count is None:
                return fused

            def counted(*args: Any) -> Any:
                count(*args)
                return fused(*args)

            return counted

        twin.__dict__.update(sparse_attention=sparse_attention, index_scores=index_scores,
                             fuse=fuse)
        return twin

    # ------------------------------------------------------------------ functions
    def direct(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts when the model calls it by name, not through its kernel set."""
        count = self.functions[inspect.unwrap(function)]

        @functools.wraps(function)
        def counted(*args: Any) -> Any:
            count(*args)
            return function(*args)

        return counted

    def hyper_mix(self, h: torch.Tensor, fn: torch.Tensor, *rest: Any) -> None:
        self.layer = self.layer_of[id(fn)]
        self.add(self.layer, "hyper", h.numel() * fn.shape[0])          # [C(C+2), C*D]

    def collapse(self, h: torch.Tensor, pre: torch.Tensor) -> None:
        self.collapsed += h.numel()

    def expand(self, y: torch.Tensor, h: torch.Tensor, mix: Any) -> None:
        self.add(self.layer, "hyper", h.numel() * mix.comb.shape[-1])   # comb [B,T,C,C]
        self.add(self.layer, "hyper.write", h.numel())

    def gated_update(self, h: torch.Tensor, *rest: Any) -> None:
        self.add(self.layer, "engram.gate", 2 * h.numel())              # dot product, write


_PART_OF = {"engram.wkv": "engram", "attn.indexer": "indexer", "attn.compressor": "compressor",
            "attn": "attn.projections", "ffn.experts": "experts",
            "ffn.shared_experts": "shared_expert", "main_proj": "draft.features",
            "markov_head": "markov", "confidence_head": "confidence"}


def _part(name: str) -> str:
    """The part that a projection layers.{i}.* or mtp.{s}.* belongs to."""
    inside = name.split(".", 2)[-1] if name.startswith(("layers.", "mtp.")) else ""
    return next((part for prefix, part in _PART_OF.items()
                 if inside.startswith(prefix + ".") or inside == prefix), "other")
