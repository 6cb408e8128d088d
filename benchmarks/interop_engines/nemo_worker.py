"""nemo-automodel: the training model of DeepSeek-V4.1, whole sequences, no cache, in fp32."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker import serve


class Engine:
    def __init__(self, folder: Path, mode: dict[str, Any]) -> None:
        from nemo_automodel.components.models.common import BackendConfig
        from nemo_automodel.components.models.deepseek_v41 import attention
        from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
        from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
        from transformers import PreTrainedTokenizerFast

        self.version = importlib.metadata.version("nemo-automodel")
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for name in ("model_type", "dtype", "quantization_config"):  # dequantised here, to fp32
            raw.pop(name, None)
        raw["text_config"] = dict(raw["text_config"], dtype="float32")
        config = DeepseekV41Config(dtype="float32", **raw)
        backend = BackendConfig(
            attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch",
            dispatcher="torch", rope_fusion=False, enable_hf_state_dict_adapter=True)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        torch.set_num_threads(int(mode["threads"]))
        self.model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer).eval()
        self.model.state_dict_adapter.dtype = torch.float32
        state = self.model.state_dict_adapter.from_hf(read(folder))
        own = self.model.state_dict()
        self.model.load_state_dict({k: v.to(own[k].dtype) for k, v in state.items()})  # strict
        self.taps: dict[str, Any] = {}
        self.layer = 0
        self._watch(attention, mode)

    def _watch(self, attention: Any, mode: dict[str, Any]) -> None:
        """Switch the cache quantiser as the mode says, and record what it and the choices give."""
        quantize = attention.quantize_cache

        def rounded(values: torch.Tensor, *, format: str, block_size: int) -> torch.Tensor:
            if mode["cache"]:
                values = quantize(values, format=format, block_size=block_size)
            site = {"fp8": "window", "nvfp4": "compressed_kv",
                    "mxfp4": "index_queries" if values.ndim == 4 else "index_keys"}[format]
            self.taps[f"layers.{self.layer}.attn.{site}"] = values
            return values

        attention.quantize_cache = rounded
        for number, layer in enumerate(self.model.model.layers.values()):
            def begin(module: Any, args: Any, number: int = number) -> None:
                self.layer = number

            def select(module: Any, args: Any, state: Any, number: int = number) -> None:
                self.taps[f"layers.{number}.attn.topk_indices"] = state.topk_indices
                if module.is_candidate_source:
                    self.taps[f"layers.{number}.attn.candidates"] = state.candidates

            def pick(module: Any, args: Any, out: Any, number: int = number) -> None:
                picked = next(t for t in out if torch.is_tensor(t) and not t.is_floating_point())
                self.taps[f"layers.{number}.ffn.picked"] = picked[None]

            layer.attn.register_forward_pre_hook(begin)
            if layer.attn.indexer is not None:
                layer.attn.indexer.register_forward_hook(select)
            layer.ffn.gate.register_forward_hook(pick)

    @torch.no_grad()
    def _run(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0].float()

    def logits(self, ids: list[int], rows: list[int]) -> np.ndarray:
        return self._run(ids)[rows].numpy()

    def greedy(self, prompt: list[int], steps: int, given: list[int] | None) -> tuple[Any, Any]:
        """Read off one pass over the prompt and the given tokens.

        There is no cache, so every step would be that pass again, cut short. Up to the first
        token that is not the given one the text is the engine's own; what comes later is not
        compared.
        """
        assert given is not None
        logits = self._run([*prompt, *given[:-1]])[len(prompt) - 1 :]
        return logits.argmax(-1).numpy(), logits.numpy()

    def trace(self, ids: list[int]) -> dict[str, np.ndarray]:
        self.taps.clear()
        logits = self._run(ids)
        found = {name: tensor[0].numpy() for name, tensor in self.taps.items()}
        return found | {"logits": logits.numpy()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {k: v for file in sorted(folder.glob("*.safetensors"))
            for k, v in load_file(str(file)).items()}


if __name__ == "__main__":
    serve(Engine)
