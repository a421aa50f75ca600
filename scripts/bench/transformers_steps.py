"""transformers in eager mode on the same device with the same weights, in the same process."""

from __future__ import annotations

import json
import time

import torch
import transformers
from shapes import Shape

from localllm.backends.pytorch.mapped import MappedFiles
from localllm.engine.files.model_files import ModelFiles


class Transformers:
    """A model of transformers. Its steps are those of `generate`, without the loop of `generate`."""

    def __init__(self, shape: Shape, files: ModelFiles, device: str) -> None:
        self.label = f"transformers {transformers.__version__}, eager"
        self._device = device
        (files.path / "config.json").write_text(json.dumps(shape.config()))
        config = transformers.AutoConfig.from_pretrained(files.path)
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        maps = MappedFiles()
        with torch.inference_mode():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(maps.tensor(files.tensors[name]))

    @torch.inference_mode()
    def steps(self, rows: int, context: int, count: int) -> float:
        """The mean time in seconds of `count` steps with a mean context of `context` tokens in each row."""
        out = self._model(self._tokens(rows, max(1, context - count // 2)), use_cache=True, logits_to_keep=1)
        self._wait()
        start = time.perf_counter()
        for _ in range(count):
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(tokens, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        self._wait()
        return (time.perf_counter() - start) / count

    @torch.inference_mode()
    def first_token(self, length: int) -> float:
        tokens = self._tokens(1, length)
        self._wait()
        start = time.perf_counter()
        out = self._model(tokens, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - start

    def close(self) -> None:
        del self._model

    def _tokens(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(self._model.config.vocab_size, (rows, length), device=self._device)

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
