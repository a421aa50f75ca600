"""llama.cpp with no code of localllm: the reference of its backend."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp
from numpy.typing import NDArray

CONTEXT = 512


class Reference:
    """One sequence of a model, without prefix reuse and with one token of decode at a time."""

    def __init__(
        self, model: llama_cpp.llama_model_p, adapter: Path | None = None, context: int = CONTEXT, **more: float
    ) -> None:
        """`more`: fields of llama_context_params."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = context
        parameters.n_batch = context
        parameters.n_threads = 1
        parameters.n_threads_batch = 1
        for name, value in more.items():
            setattr(parameters, name, value)
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        assert self._context
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._count = 0
        if adapter is not None:
            loaded = llama_cpp.llama_adapter_lora_init(model, str(adapter).encode())
            assert loaded
            adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(loaded)
            assert llama_cpp.llama_set_adapters_lora(self._context, adapters, 1, (ctypes.c_float * 1)(1.0)) == 0

    def logits(self, tokens: Sequence[int], *, only_last: bool = False) -> NDArray[np.float32]:
        """Append tokens. Returns [tokens, vocab]: the logits after each of them; `only_last`: [1, vocab].

        llama.cpp computes the end of the last layer only for tokens with logits. It rounds the results for one token
        and for several tokens differently.
        """
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = self._count + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = not only_last or index == len(tokens) - 1
        assert llama_cpp.llama_decode(self._context, batch) == 0
        wanted = [-1] if only_last else range(len(tokens))
        rows = [llama_cpp.llama_get_logits_ith(self._context, index) for index in wanted]
        values = np.stack([np.ctypeslib.as_array(row, (self._vocab,)).copy() for row in rows])
        llama_cpp.llama_batch_free(batch)
        self._count += len(tokens)
        return values

    def generate(self, prompt: Sequence[int], count: int) -> tuple[list[int], NDArray[np.float32]]:
        """The `count` likeliest tokens after a prompt, and the logits [count, vocab] that they were chosen from."""
        rows = [self.logits(prompt)[-1]]
        tokens = [int(rows[0].argmax())]
        while len(tokens) < count:
            rows.append(self.logits(tokens[-1:])[0])
            tokens.append(int(rows[-1].argmax()))
        return tokens, np.stack(rows)

    def close(self) -> None:
        llama_cpp.llama_free(self._context)


@contextmanager
def loaded(file: Path, *, repack: bool = True) -> Iterator[llama_cpp.llama_model_p]:
    """The model of a GGUF file, on the CPU. `repack`: whether its weights have the layouts of this CPU."""
    llama_cpp.llama_backend_init()
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_extra_bufts = repack
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
    assert model, f"llama.cpp cannot load {file}"
    yield model
    llama_cpp.llama_model_free(model)


@contextmanager
def reference(file: Path, adapter: Path | None = None) -> Iterator[Reference]:
    """llama.cpp with the model of a GGUF file, and at most one adapter."""
    with loaded(file) as model:
        sequence = Reference(model, adapter)
        yield sequence
        sequence.close()
