"""A contestant (programs.py): transformers in eager mode, its products by oneDNN, for prompts.

Settings: folder, threads, dtype.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from programs import Answer, peak_memory, serve, settings


class Peer:
    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        start = time.perf_counter()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.load_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def do(self, kind: str, rows: int, context: int, tokens: int) -> Answer:
        """Prompt and steps, each step its own forward over the cache, without the loop around generate."""
        ids = torch.randint(self.model.config.vocab_size, (rows, context))
        start = time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        if kind == "prefill":
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        for _ in range(tokens):
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self.model(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    peer = Peer(**settings())
    serve({"load_seconds": peer.load_seconds, "peak": peak_memory(), "name": transformers.__version__}, peer.do)
