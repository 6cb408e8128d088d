"""mlx-vlm on mlx-cpu: an inference engine with a cache, here with fp32 activations."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from worker import serve


class Engine:
    def __init__(self, folder: Path, mode: dict[str, Any]) -> None:
        mx.set_default_device(mx.cpu)
        from mlx_vlm.models.deepseek_v41 import engram, fakequant, language
        from mlx_vlm.utils import load_model

        self.version = importlib.metadata.version("mlx-vlm")
        model = load_model(folder, lazy=False, strict=False)  # there is no vision tower to load
        model.model_path = folder
        model.set_dtype(mx.float32)  # exact: what bf16 holds, fp32 holds
        self.model = model.language_model
        self.model._ensure_engram_hash()
        if self.model.layout is not None and self.model.engram_hash is None:
            raise RuntimeError("mlx-vlm found no token map and would skip Engram silently")
        self.taps: dict[str, Any] = {}
        self.language = language
        fakequant.DISABLE = not mode["cache"] and mode["linear"] == "none"
        if mode["cache"] and mode["linear"] == "none":
            rounded = language.fake_quant_fp8_ue8m0

            def window_only(x: mx.array, block: int = 32) -> mx.array:
                # One function rounds the window and the inputs of linear layers; the window is
                # what it gets in `_window_part` once `kv` is there.
                caller = sys._getframe(1)
                window = caller.f_code.co_name == "_window_part" and "kv" in caller.f_locals
                return rounded(x, block) if window else x

            language.fake_quant_fp8_ue8m0 = window_only
            engram.fake_quant_fp8_ue8m0 = lambda x, block=32: x
        self._watch()

    def _watch(self) -> None:
        """Record what the quantisers and the choices give, by wrapping the classes' methods."""
        language, taps = self.language, self.taps
        attention, indexer = language.DeepseekV41Attention, language.Indexer
        layer_of = {id(layer.ffn.gate): n for n, layer in enumerate(self.model.layers)}

        def wrap(owner: Any, name: str, after: Any) -> None:
            plain = getattr(owner, name)

            def wrapped(self: Any, *args: Any) -> Any:
                out = plain(self, *args)
                after(self, args, out)
                return out
            setattr(owner, name, wrapped)

        def window(self: Any, args: Any, out: Any) -> None:
            taps[f"layers.{self.layer_idx}.attn.window"] = out[0]

        def compressed(self: Any, args: Any, out: Any) -> None:
            if self.is_kv_source:
                taps[f"layers.{self.layer_idx}.attn.compressed_kv"] = out[0]

        def selected(self: Any, args: Any, out: Any) -> None:
            name, cache = f"layers.{self.layer_idx}.attn", args[-1]
            taps[f"{name}.topk_indices"] = out
            taps[f"{name}.index_queries"] = taps.pop("queries")
            if self.owns_k:
                taps[f"{name}.index_keys"] = cache.keys[self.layer_idx]
            if self.is_candidate_source:
                taps[f"{name}.candidates"] = cache.candidates

        def picked(self: Any, args: Any, out: Any) -> None:
            taps[f"layers.{layer_of[id(self)]}.ffn.picked"] = out[0]

        wrap(attention, "_window_part", window)
        wrap(attention, "_compress_part", compressed)
        wrap(indexer, "__call__", selected)
        wrap(language.DeepseekV41MoEGate, "__call__", picked)
        scores = language._index_scores

        def scored(q: mx.array, *args: Any) -> mx.array:
            taps["queries"] = q
            return scores(q, *args)

        language._index_scores = scored

    def _run(self, ids: list[int], cache: Any = None) -> mx.array:
        return self.model(mx.array([ids]), cache=cache).logits[0]

    def logits(self, ids: list[int], rows: list[int]) -> np.ndarray:
        return np.array(self._run(ids))[rows]

    def greedy(self, prompt: list[int], steps: int, given: list[int] | None) -> tuple[Any, Any]:
        cache = self.model.make_cache()
        tokens: list[int] = []
        logits: list[np.ndarray] = []
        for _ in range(steps):
            row = np.array(self._run(prompt if not tokens else tokens[-1:], cache)[-1])
            logits.append(row)
            tokens.append(int(row.argmax()))
        return tokens, np.stack(logits)

    def trace(self, ids: list[int]) -> dict[str, np.ndarray]:
        self.taps.clear()
        logits = np.array(self._run(ids))
        return {name: np.array(array[0]) for name, array in self.taps.items()} | {"logits": logits}


if __name__ == "__main__":
    serve(Engine)
