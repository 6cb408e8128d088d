"""The front door: `labkit.load` gives a `Lab`, in which a model is run, traced and written with."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from labkit import paths
from labkit.checkpoint.files import find_tensors, stored_engram_digest
from labkit.checkpoint.reader import read_state
from labkit.checkpoint.weights import target_dtype
from labkit.config import PRESETS, ModelConfig
from labkit.engine.batching import Batch
from labkit.engine.calibration import FILE as CALIBRATION
from labkit.engine.calibration import Calibration, load_calibration, target_digest
from labkit.engine.drafting import draft_at
from labkit.engine.generate import Generation, Result
from labkit.engine.prefix_cache import PrefixCache
from labkit.engine.sampling import Sampling
from labkit.engine.scheduling import Policy
from labkit.engine.session import Session, as_ids
from labkit.engine.speculator import Speculator
from labkit.errors import CheckpointError, ConfigError, InputError
from labkit.model.init import init_weights
from labkit.model.transformer import Transformer
from labkit.numerics.blocks import Rounding
from labkit.text.engram_map import checked_classes
from labkit.text.tokenizer import Tokenizer
from labkit.trace import Taps

RELEASED = "deepseek-ai/DeepSeek-V4.1-Flash"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def load(
    source: str | Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "auto",
    kernels: str = "auto", cache_rounding: Rounding = True,
) -> Lab:
    """A preset or a folder -> a `Lab`, its model in evaluation mode and without gradients.

    source  "mini" (trained, in the repository), "nano" (random weights, for tests), or a folder
            that holds config.json, tokenizer.json and safetensors, plain or released
    dtype   of the model; what must stay wider does (`labkit.checkpoint.target_dtype`)
    device  "auto": CUDA, MPS, CPU, in that order, skipping one that lacks the dtype
    kernels "auto", or the name of a set in `labkit.kernels`
    cache_rounding  False switches every cache quantiser off; a set of names ("fp8": window,
            "nvfp4": compressed entries, "mxfp4": index) leaves those on
    Errors (LabError, one sentence): anything that is missing, damaged or does not fit.
    """
    if dtype not in DTYPES:
        raise InputError(f"dtype is {dtype!r}: choose one of "
                         f"{', '.join(str(d) for d in DTYPES)}")
    target = choose_device(device, dtype)
    if str(source) == "nano":
        config = ModelConfig.preset("nano")
        tokenizer = Tokenizer.from_file(paths.data_dir() / "nano")
        classes = class_map(config, tokenizer)
        state = _random_state(config, classes, dtype)
        warnings.warn("the preset nano has random weights: it is for tests, its text is noise",
                      stacklevel=2)
    else:
        folder = model_folder(source)
        config = ModelConfig.from_file(folder)
        _refuse_borrowed_weights(folder)
        find_tensors(folder)  # absent or cut files are told first; only headers are read for it
        tokenizer = Tokenizer.from_file(folder)
        classes = class_map(config, tokenizer, stored_engram_digest(folder))
        state = read_state(folder, config, dtype)
    # Built without memory, then given the tensors that were read.
    with torch.device("meta"):
        model = Transformer(config, classes.to(target), kernels, cache_rounding, target,
                            draft=any(name.startswith("mtp.") for name in state))
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict({name: state[name].to(target) for name in names}, assign=True)
    model.requires_grad_(False)
    lab = Lab(model.eval(), tokenizer, str(source))
    if str(source) != "nano" and model.mtp is not None:
        # The digests are of fp32 values, which a narrower model does not have any more.
        told = dtype in (torch.float32, torch.float64) and (folder / CALIBRATION).exists()
        lab.calibration = load_calibration(
            folder, config.dspark_block_size,
            model.mtp.last.confidence_head.proj.weight if told else None,
            target_digest(model) if told else None)
    return lab


class Lab:
    """A loaded model with its vocabulary.

    config     `ModelConfig`
    model      `Transformer`; `model(ids, lengths=None)` -> output with `.logits` [B,T,V]
    tokenizer  `Tokenizer`
    source     what it was loaded from
    calibration  temperatures of the draft's confidence head, where the checkpoint has some
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, source: str = "") -> None:
        self.config = model.config
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.calibration: Calibration | None = None

    def __repr__(self) -> str:
        millions = sum(p.numel() for p in self.model.parameters()) / 1e6
        kind = str(self.model.dtype).removeprefix("torch.")
        return (f"Lab({self.source!r}: {self.config.num_hidden_layers} layers, {millions:.1f} M "
                f"parameters, {kind} on {self.model.device})")

    def encode(self, prompt: str | Sequence[int] | torch.Tensor) -> list[int]:
        """Text -> ids with BOS in front, as in training; ids are taken as they are.

        InputError for an empty prompt: a text from nothing starts with `[bos_token_id]`.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
            if ids:
                ids = [self.config.bos_token_id, *ids]
        else:
            ids = as_ids(prompt).flatten().tolist()
        if not ids:
            raise InputError("the prompt is empty: give some text, or the ids "
                             f"[{self.config.bos_token_id}] to start from nothing")
        return ids

    def trace(self, ids: torch.Tensor | Sequence[int] | str,
              lengths: torch.Tensor | Sequence[int] | None = None,
              patterns: Sequence[str] | None = None, form: str | None = None) -> Taps:
        """One pass over a fresh cache; every tensor that it passes through, by name.

        ids      int [B,T] (or [T], or text: with BOS in front); lengths [B]: live tokens a row
        patterns shell patterns of the names to keep, e.g. ["*.topk_indices"]; None keeps all
        form     how the cache stores its vectors (`session`); None: as numbers, since it is
                 thrown away
        Names (i = layer): engram_hash_ids [B,T,engram layers,(N-1)*heads]; layers.{i}.streams_in
        (before the Engram update) and .streams_after_engram [B,T,C,D]; layers.{i}.attn.out
        [B,T,D], .q [B,T,H,d], .window [B,W+T,d], .topk_indices [B,T,K] (-1 = none), .candidates
        [B,T,S], .compressed_kv [B,S,d], .index_keys [B,S,index_head_dim], .index_queries,
        .index_weights; layers.{i}.engram.gate [B,T,C]; layers.{i}.ffn.picked and .weights
        [B,T,experts a token]; logits [B,T,V].
        """
        if isinstance(ids, str):
            ids = self.encode(ids)
        if patterns is not None and (
            not isinstance(patterns, (list, tuple))
            or not all(isinstance(pattern, str) for pattern in patterns)
        ):
            raise InputError(f"patterns is {patterns!r}: it must be a list of strings, e.g. "
                             "['*.topk_indices']")
        taps = Taps(None if patterns is None else list(patterns))
        count = None if lengths is None else as_ids(lengths, "lengths")
        tokens = as_ids(ids)
        rows = 1 if tokens.ndim < 2 else len(tokens)
        cache = None if form is None else self.model.new_cache(rows, form, draft=False)
        with torch.no_grad():
            self.model(tokens, count, cache=cache, taps=taps)
        return taps

    def session(self, form: str | None = None, page_tokens: int | None = None,
                stale_index_keys: bool = False, draft: bool | None = None) -> Session:
        """An empty sequence: `prefill`, `decode`, `snapshot`, `restore`, `fork`, `crop`, `nbytes`.

        form         how the cache stores its vectors: "packed" (4-bit global KV and index keys,
                     8-bit windows), "fp8" (rounds the global KV once more), "bf16" (the rounded
                     values, nothing lost) or "plain" (the model's dtype); None: packed, or plain
                     where cache rounding is off
        page_tokens  tokens whose entries share a page of memory; a multiple of every ratio
        stale_index_keys  a fault of the released reference code, to be looked at: a decode step
                     that leaves a pair of tokens half full scores another layer's index keys
        draft        hold the draft's windows, which speculation reads; None: if there is a draft
        InputError for an unknown form or one that cannot hold the values, and for page_tokens
        that would cut a group.
        """
        return Session(self.model, form, page_tokens, stale_index_keys, draft)

    def prefix_cache(self, **options: Any) -> PrefixCache:
        """A `labkit.engine.prefix_cache.PrefixCache` of this model, with its options."""
        return PrefixCache(self.model, **options)

    def batch(self, policy: Policy | None = None, slots: int | None = None,
              **options: Any) -> Batch:
        """Requests that are decoded together, a `labkit.engine.batching.Batch` of this model.

            batch = lab.batch(Fixed(5))
            jobs = [batch.add(lab.encode(text), 40, Sampling(temperature=0)) for text in texts]
            for job, event in batch.run():
                ...

        policy   how many drafts of each request are verified in a step, one of
                 `labkit.engine.scheduling`; None: no drafts
        slots    drafted in a step at most; None: as many as the draft was trained for
        options  of the `Batch`, such as limit=64 requests at once
        """
        temperatures = self.calibration.temperatures if self.calibration else None
        return Batch(self.model, self.tokenizer, policy, slots, temperatures, **options)

    def stream(
        self, prompt: str | Sequence[int] | torch.Tensor, max_new_tokens: int = 100, *,
        temperature: float = 0.8, top_p: float = 0.95, top_k: int = 0,
        stop: str | Sequence[str] | None = None, seed: int | None = None, candidates: int = 0,
        prefill: str = "full", halo: str = "window", cut: str = "inside",
        cache_form: str | None = None, chunk: int | None = None, speculative: bool = False,
        draft_slots: int | None = None, policy: Policy | None = None,
    ) -> Generation:
        """Write on from a prompt, token by token: iterate over it for `Event`s.

        max_new_tokens  at most so many; with the prompt they must fit the context
        temperature     0: always the likeliest id; top_k 0 and top_p 1 cut nothing off
        stop            string or strings that end the text and are left out of it; the config's
                        eos_token_id ends it as well
        seed            the same seed gives the same text; None draws one (`.stats.seed`)
        candidates      how many of the likeliest ids each event lists
        prefill         "full": all layers read the whole prompt; "ced": the decoder reads its
                        end only
        halo, cut       of prefill "ced": how much of the prompt the decoder reads, "window" (the
                        last `sliding_window` ids, as in production; approximate) or "exact" (so
                        many more that the result is that of a full prefill), and whether it
                        begins "inside" the last KV source or "after" that layer
        cache_form      how the cache stores its vectors (`session`)
        chunk           read at most so many ids of the prompt in a pass, which bounds the memory
                        of a long prompt
        speculative     let the draft (DSpark) guess several ids a step, which the model verifies
                        in one pass: the same distribution of texts (temperature 0: the same
                        text) in fewer passes; `.stats.speculation` counts
        draft_slots     ids drafted a step, 0 to 16; None: as many as the draft was trained for
        policy          how many of them are verified, one of `labkit.engine.scheduling`; None: all
        InputError for whatever the model cannot take, before anything is computed.
        """
        speculator = None
        if speculative:
            temperatures = self.calibration.temperatures if self.calibration else None
            speculator = Speculator(self.model, draft_slots, policy, temperatures)
        elif draft_slots is not None or policy is not None:
            raise InputError("draft_slots and policy belong to speculative=True: set that, or "
                             "leave them out")
        # A plain generation need not fill windows that only a draft reads.
        session = self.session(cache_form, draft=bool(speculator and speculator.slots))
        return Generation(
            session, self.tokenizer, self.encode(prompt), max_new_tokens,
            Sampling(temperature, top_k, top_p), stop, seed, candidates, prefill, halo, cut, chunk,
            speculator,
        )

    def generate(self, prompt: str | Sequence[int] | torch.Tensor, max_new_tokens: int = 100,
                 **options: Any) -> Result:
        """Run `stream` (same options) to its end -> `.text`, `.ids`, `.stats`.

        Ctrl-C gives what there is by then, with stop_reason "interrupted".
        """
        generation = self.stream(prompt, max_new_tokens, **options)
        try:
            for _ in generation:
                pass
        except KeyboardInterrupt:
            generation.interrupt()
        return generation.result()

    @property
    def has_draft(self) -> bool:
        """Whether the checkpoint came with a draft (`mtp.*`)."""
        return self.model.mtp is not None

    def draft(self, ids: torch.Tensor | Sequence[int] | str,
              anchor_positions: torch.Tensor | Sequence[int],
              previous_token_ids: torch.Tensor | Sequence[int] | None = None,
              slots: int | None = None) -> Taps:
        """What the draft (DSpark) guesses behind some tokens of a text, from one pass over it.

        ids                 int [B,T] (or [T], or text: with BOS in front)
        anchor_positions    [B,A] (or [A]: the same in every row), 0..T-1; slot k of the block of
                            an anchor at a guesses the token at a+1+k
        previous_token_ids  [B,A*n]: the token before the one that each slot guesses; None: as
                            drafted greedily, left to right
        slots               n, by default `dspark_block_size`
        Names: dspark.target_features [B,T,targets*D]; of all slots, block after block, [B,A*n,...]:
        dspark.raw_hidden, .normalized_hidden, .base_logits, .markov_logits (the bias alone),
        .confidence_logits (before the sigmoid), .previous_token_ids; and .anchor_positions.
        InputError for a model without draft and for what does not fit.
        """
        if self.model.mtp is None:
            raise InputError(f"{self.source or 'this model'} has no draft: its checkpoint holds "
                             "no mtp.* tensors; `labkit train-draft` makes some")
        ids = as_ids(self.encode(ids) if isinstance(ids, str) else ids)
        return draft_at(self.model, ids, as_ids(anchor_positions, "anchor_positions"),
                        None if previous_token_ids is None
                        else as_ids(previous_token_ids, "previous_token_ids"), slots)


def model_folder(source: str | Path) -> Path:
    """Where a source's files lie. InputError for neither a preset nor a folder; CheckpointError
    for a preset that has none."""
    if not isinstance(source, (str, Path)):
        raise InputError(f"the model to load is {source!r}: name a preset ({', '.join(PRESETS)}) "
                         "or a folder")
    if str(source) == "flash":
        raise CheckpointError(
            f"the preset flash has no weights here (510 GB): download {RELEASED} and load that "
            "folder; `labkit accounting flash` works without them")
    if str(source) == "nano":
        raise CheckpointError("the preset nano has no files: its weights are drawn when it is "
                              "loaded")
    if str(source) == "mini":
        folder = paths.data_dir() / "mini"
        # One or more shards, with or without an index.
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise CheckpointError(f"{folder} holds no trained model: restore the folder from the "
                                  "repository, or train one with `labkit train`")
        return folder
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise InputError(f"{str(source)!r} is neither a preset ({', '.join(PRESETS)}) nor a "
                         "folder: name a folder that holds config.json, tokenizer.json and "
                         "safetensors")
    return folder


def class_map(config: ModelConfig, tokenizer: Tokenizer,
              digest: str | None = None) -> torch.Tensor:
    """The Engram class of every id, int64 [V]; ConfigError if the tokenizer does not fit.

    digest: `class_digest` of the map that the weights belong to, where it was stored with them.
    """
    if tokenizer.vocab_size > config.vocab_size:
        raise ConfigError(
            f"vocab_size is {config.vocab_size}, but the tokenizer {tokenizer.source} has "
            f"{tokenizer.vocab_size} entries: use the tokenizer.json that belongs to the model")
    if not config.engram_layer_ids:
        return torch.zeros(config.vocab_size, dtype=torch.int64)
    return checked_classes(config, tokenizer, digest)


def choose_device(device: str | torch.device, dtype: torch.dtype) -> torch.device:
    """"auto" or a device's name -> the device. InputError when it is absent or lacks the dtype."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if str(device) == "auto":
        if cuda:
            return torch.device("cuda")
        if mps and dtype != torch.float64:
            return torch.device("mps")
        if mps:
            warnings.warn("MPS has no float64: the model runs on the CPU", stacklevel=3)
        return torch.device("cpu")
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"unknown device {device!r}: choose auto, cpu, cuda or mps") from None
    if target.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"device {str(device)!r} is not supported: choose auto, cpu, cuda or mps")
    if (target.type == "cuda" and not cuda) or (target.type == "mps" and not mps):
        raise InputError(f"device {str(device)!r} is not available on this machine: choose auto")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {str(device)!r} does not exist: this machine has "
                         f"{torch.cuda.device_count()} CUDA devices")
    if target.type == "mps" and dtype == torch.float64:
        raise InputError("MPS has no float64: choose device='cpu' or dtype=torch.float32")
    return target


def _refuse_borrowed_weights(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "weights_from" in raw:
        raise ConfigError(
            f"{folder / 'config.json'} has weights_from {raw['weights_from']!r}, so this is not a "
            "whole checkpoint: put the weights beside it and remove the field")


def _random_state(config: ModelConfig, classes: torch.Tensor,
                  dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state = init_weights(Transformer(config, classes, draft=True), seed=0).state_dict()
    return {name: p.to(target_dtype(name, config, dtype)) for name, p in state.items()}
