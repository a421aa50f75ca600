"""A program (programs.py): transformers in eager mode, with the same weights as run_localllm.py.

Settings: model (a name in SHAPES, or "guide"), folder (for random weights), threads, dtype, device.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import transformers
from programs import Answer, peak_memory, serve, settings
from run_localllm import open_files

from localllm.backends.pytorch.mapped import MappedFiles


class Transformers:
    """One loaded model. Its steps are those of `generate`, without the loop of `generate`."""

    def __init__(self, model: str, folder: str, threads: int, dtype: str, device: str) -> None:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        files = open_files(model, Path(folder))
        config = transformers.AutoConfig.from_pretrained(files.path)
        with torch.device(device):
            loaded = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        maps = MappedFiles()
        with torch.inference_mode():
            for name, parameter in loaded.named_parameters():
                parameter.copy_(maps.tensor(files.tensors[name]))
        self._device = device
        self._model = loaded
        self.hello: Answer = {"load_seconds": time.perf_counter() - start, "peak_bytes": peak_memory()}

    @torch.inference_mode()
    def do(self, kind: str, rows: int, context: int, steps: int, adapters: int) -> Answer:
        ids = torch.randint(self._model.config.vocab_size, (rows, context), device=self._device)
        start = time.perf_counter()
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        if kind == "prefill":
            return {"seconds": time.perf_counter() - start}
        start = time.perf_counter()
        for _ in range(steps):
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(ids, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    program = Transformers(**settings(__doc__))
    serve(program.hello, program.do)
