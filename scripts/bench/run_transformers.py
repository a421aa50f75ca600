"""A program (programs.py): transformers in eager mode, with the products of oneDNN.

Settings: folder, threads, dtype.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from programs import Answer, peak_memory, serve, settings


class Transformers:
    """One loaded model."""

    def __init__(self, folder: str, threads: int, dtype: str) -> None:
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        start = time.perf_counter()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self.load_seconds = time.perf_counter() - start

    @torch.inference_mode()
    def do(self, kind: str, rows: int, context: int, tokens: int) -> Answer:
        """Compute prompts and steps without the loop of generate: one forward over the cache for each step."""
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
    program = Transformers(**settings(__doc__))
    hello = {"load_seconds": program.load_seconds, "peak": peak_memory(), "name": transformers.__version__}
    serve(hello, program.do)
