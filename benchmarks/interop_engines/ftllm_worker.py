"""ftllm: a C++ engine, on its CPU library, in bf16; it gives the logits of the last token only."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from worker import serve


class Engine:
    def __init__(self, folder: Path, mode: dict[str, Any]) -> None:
        os.environ["FASTLLM_SKIP_WARMUP"] = "1"
        os.environ["FASTLLM_DSV41_DISABLE_PREFIX_CACHE"] = "1"  # every prompt is read anew
        if not mode["cache"]:
            os.environ["FASTLLM_DSV41_DISABLE_FAKE_QUANT"] = "1"
        from ftllm import llm

        self.version = importlib.metadata.version("ftllm")
        self.library = llm.fastllm_lib
        llm.set_cpu_threads(1)  # two threads wait for each other here
        llm.set_device_map("cpu")
        llm.set_device_map("cpu", True)
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.vocabulary = int(raw.get("text_config", raw)["vocab_size"])
        self.model = llm.model(str(folder), dtype="bfloat16")

    def _write(self, ids: list[int], steps: int) -> tuple[list[int], list[np.ndarray]]:
        """Greedy tokens and the logits that each was taken from."""
        count, stop = self.model.stop_token_ctypes(None)
        # steps, at least so many, no sampling, top_k 1, top_p, temperature, penalty; with logits
        handle = self.library.launch_response_llm_model(
            self.model.model, len(ids), (ctypes.c_int * len(ids))(*ids), steps, steps, False, 1, 1,
            1, 1, True, count, stop)
        buffer = (ctypes.c_float * (4 * self.vocabulary))()
        tokens: list[int] = []
        logits: list[np.ndarray] = []
        while True:
            # The call below waits in a loop of its own, which takes the core from the engine.
            while not self.library.can_fetch_response_llm_model(self.model.model, handle):
                time.sleep(0.002)
            token = self.library.fetch_response_logits_llm_model(self.model.model, handle, buffer)
            if token <= -1:
                return tokens, logits
            tokens.append(token)
            logits.append(np.array(buffer[: self.vocabulary], dtype=np.float32))

    def logits(self, ids: list[int], rows: list[int]) -> np.ndarray:
        return np.stack([self._write(ids[: row + 1], 1)[1][0] for row in rows])

    def greedy(self, prompt: list[int], steps: int, given: list[int] | None) -> tuple[Any, Any]:
        tokens, logits = self._write(prompt, steps)
        return tokens, np.stack(logits)


if __name__ == "__main__":
    serve(Engine)
