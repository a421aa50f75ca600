"""The runner of the torch family: one model on one device."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...engine.batch import Batch, Want
from ...engine.errors import ModelRefused, RunnerFailed
from ...engine.lora import Adapter
from ...engine.modelfiles import ModelFiles
from ...engine.runner import Budget, RunnerSpec, StepResult
from ...kernels.ops import Ops
from .device import Device
from .inputs import Inputs, Sent, Step
from .kv import PagedKV
from .loading import Loader
from .models import accepts
from .references import with_references
from .sampler import Drawn, sample
from .sizing import plan

# What torch raises when a kernel, an index or an allocation fails.
_FAILURES = (RuntimeError, IndexError, ValueError, MemoryError)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # "auto" is the device's choice


class Model(Protocol):
    """What a file in models/ builds."""

    def __call__(self, step: Step, ops: Ops, kv: PagedKV) -> Tensor:
        """Hidden states [answers, hidden] of the tokens `step.last` names; keys and values go to the cache."""
        ...

    def logits(self, hidden: Tensor, ops: Ops) -> Tensor:
        """[answers, vocab] float32."""
        ...


class TorchPending:
    """A step on its way; its tensors are the step's own, so a later step does not touch them."""

    def __init__(self, batch: Batch, sent: Sent, drawn: Drawn, hidden: Tensor | None, device: Device) -> None:
        self._rows, self._answers, self._drawn, self._hidden = batch.num_rows, sent.answers, drawn, hidden
        self._event = device.event()
        self._event.record()

    def result(self) -> StepResult:
        try:
            self._event.synchronize()
            tokens = self._by_row(self._drawn.tokens).astype(np.int32)
            hidden = None if self._hidden is None else self._by_row(self._hidden)
            logprobs = self._drawn.logprobs
            if logprobs is None:
                return StepResult(tokens, hidden=hidden)
            top_tokens = self._by_row(logprobs.top_tokens).astype(np.int32)
            return StepResult(tokens, self._by_row(logprobs.chosen), top_tokens, self._by_row(logprobs.top), hidden)
        except _FAILURES as error:
            raise RunnerFailed(f"the step failed: {error}") from error

    def _by_row(self, answers: Tensor) -> np.ndarray:
        found = answers.cpu().numpy()
        rows = np.zeros((self._rows, *found.shape[1:]), found.dtype)
        rows[self._answers] = found
        return rows


class TorchRunner:
    """See engine.runner.Runner."""

    def __init__(self, model: Model, kv: PagedKV, spec: RunnerSpec, device: Device) -> None:
        self.model, self.kv, self._spec, self.device = model, kv, spec, device
        self.inputs = Inputs(spec, device)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @torch.inference_mode()
    def run(self, batch: Batch) -> TorchPending:
        ops = self.device.ops
        try:
            self.kv.copy(batch.copies, ops)
            sent = self.inputs.send(batch)
            hidden = self.model(sent.step, ops, self.kv)
            drawn = sample(self.model.logits(hidden, ops), batch, sent, ops.sampling)
            self.inputs.keep(sent, drawn.tokens)
        except _FAILURES as error:
            raise RunnerFailed(f"the step failed: {error}") from error
        wants_hidden = (batch.wants == Want.HIDDEN).any()
        return TorchPending(batch, sent, drawn, hidden.float() if wants_hidden else None, self.device)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        raise ModelRefused(f"adapter {adapter.name}: this version loads no adapters")

    def close(self) -> None:
        """Give the memory back: the runner is of no use afterwards."""
        del self.model, self.kv, self.inputs


def open_runner(files: ModelFiles, budget: Budget, device: Device, free: int) -> TorchRunner:
    """Load a model; `free` is the device's free memory in bytes. Raises ModelRefused or SettingRefused."""
    refusal = accepts(files)
    if refusal:
        raise ModelRefused(f"{files.name}: {refusal}")
    config = files.config
    device = replace(device, ops=with_references(device.ops, budget.reference_ops))
    dtype = DTYPES.get(budget.dtype, device.dtype)
    loader = Loader(files, budget, device, dtype)
    spec = plan(files, budget, free, dtype, loader.expected_bytes(), overlap=device.overlap)
    with torch.inference_mode():
        build = import_module(f".models.{config.model_type}", __package__).build
        model: Model
        model, weights = loader.load(lambda weights: build(weights, config, spec.max_context))
        spec = replace(spec, weight_bytes=weights.bytes, token_bytes=weights.token_bytes)
        kv = PagedKV(
            config.num_layers,
            spec.num_pages,
            spec.page_size,
            config.num_kv_heads,
            config.head_dim,
            dtype,
            device.name,
        )
        return TorchRunner(model, kv, spec, device)
