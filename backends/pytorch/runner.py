"""The runner of the torch family: one model on one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused
from ...engine.lora import Adapter
from ...engine.runner import RunnerSpec, StepResult
from ...kernels.ops import Ops
from ...kernels.ops.sampling import Logprobs
from ...kernels.ops.step import Adapters
from .device import Device
from .failures import failures, load_failures
from .inputs import Inputs, Sent, Step
from .kv import GroupedKV
from .lora import AdapterSlots
from .sampler import Drawn, sample


class Model(Protocol):
    """A model that a file in models/ has built."""

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> Tensor:
        """Hidden states [samples, hidden] of the tokens `step.last`. Keys, values and states of all tokens go to the
        cache."""
        ...

    def logits(self, hidden: Tensor, ops: Ops, adapters: Adapters | None = None) -> Tensor:
        """The logits [samples, vocab] float32 of hidden states [samples, hidden]. `adapters` has the adapter of each
        hidden state; None: no row has an adapter."""
        ...

    def set_context(self, context: int) -> None:
        """Set the maximum context, before any step is captured."""
        ...


class TorchPending:
    """A step in the device's stream. When it ends, its tokens and hidden states are copied to main memory."""

    def __init__(
        self,
        row_starts: Ints,
        drawn: Drawn,
        hidden: Tensor | None,
        device: Device,
        late_compiles: int = 0,
        samples: NDArray[np.int64] | None = None,
    ) -> None:
        """`row_starts`: see StepResult. `samples`: indices of the drawn tokens that are returned; None: all."""
        self._row_starts = row_starts
        self._samples = samples
        self._late_compiles = late_compiles
        self._tokens = device.fetch(drawn.tokens)
        self._hidden = None if hidden is None else device.fetch(hidden)
        self._logprobs = None if drawn.logprobs is None else Logprobs(*map(device.fetch, drawn.logprobs))
        self._event = device.event()
        self._event.record()

    def result(self) -> StepResult:
        with failures("the step failed"):
            self._event.synchronize()
            tokens = self._sample_values(self._tokens).astype(np.int32, copy=False)
            hidden = None if self._hidden is None else self._hidden.numpy()
            result = StepResult(tokens, self._row_starts, hidden=hidden, late_compiles=self._late_compiles)
            if self._logprobs is None:
                return result
            chosen, top_tokens, top = map(self._sample_values, self._logprobs)
            return replace(result, logprobs=chosen, top_tokens=top_tokens.astype(np.int32), top_logprobs=top)

    def _sample_values(self, values: Tensor) -> np.ndarray:
        array: np.ndarray = values.numpy()
        return array if self._samples is None else array[self._samples]


class Split(Protocol):
    """The model's forward pass in compiled segments, for steps in which some row has several tokens."""

    @property
    def late(self) -> int:
        """The number of segments that were compiled again during requests."""
        ...

    def __call__(self, step: Step, ops: Ops, kv: GroupedKV) -> Tensor:
        """See Model."""
        ...


class TorchRunner:
    """See engine.runner.Runner. In a step of more than `capturable` tokens the last layer computes only the samples.

    In a shorter step the last layer computes all tokens. A captured step must do this, because a capture does not
    depend on the rows; and a step must give the same bits with and without graphs.
    """

    def __init__(
        self,
        model: Model,
        kv: GroupedKV,
        spec: RunnerSpec,
        device: Device,
        split: Split | None = None,
        capturable: int = 0,
        slots: AdapterSlots | None = None,
    ) -> None:
        """`split`: the compiled segments for prefill, if any."""
        self.model = model
        self.kv = kv
        self.device = device
        self.split = split
        self.inputs = Inputs(spec, device)
        self._slots = slots
        self._spec = spec
        self._capturable = capturable

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @torch.inference_mode()
    def run(self, batch: Batch) -> TorchPending:
        with failures("the step failed"):
            self.copy(batch)
            sent = self.inputs.send(batch)
            is_decode = batch.num_tokens == batch.num_rows
            if is_decode or self.split is None or sent.step.adapters is not None:
                is_long = batch.num_tokens > max(batch.num_rows, self._capturable)
                step = sent.last_only() if is_long else sent.step
                return self.sample(batch, sent, self.model(step, self.device.ops, self.kv))
            late = self.split.late
            hidden = self.split(sent.step, self.device.ops, self.kv)
            return self.sample(batch, sent, hidden, self.split.late - late)

    def copy(self, batch: Batch) -> None:
        """Make the copies of pages and recurrent states that a step needs."""
        self.kv.copy(batch.page_copies, self.device)
        if self.kv.states is not None:
            self.kv.states.copy(batch.state_copies, self.device)

    def prefill(self, step: Step, ops: Ops) -> Tensor:
        """Hidden states [samples, hidden] of a step in which some row has several tokens. The compiled segments have no
        LoRA products: a step with adapters runs the model itself, so that no adapter waits for a compilation."""
        forward = self.model if self.split is None or step.adapters is not None else self.split
        return forward(step, ops, self.kv)

    def sample(self, batch: Batch, sent: Sent, hidden: Tensor, late_compiles: int = 0) -> TorchPending:
        """Draw a token for each sample from `hidden` [samples, hidden], and store the tokens for the next step."""
        logits = self.model.logits(hidden, self.device.ops, sent.step.sample_adapters)
        drawn = sample(logits, batch, sent, self.device)
        self.inputs.keep(sent, drawn.tokens)
        wants_hidden = (batch.wants == Want.HIDDEN).any()
        returned = hidden.to(torch.float32, copy=True) if wants_hidden else None
        return TorchPending(batch.sample_starts, drawn, returned, self.device, late_compiles)

    def prepare_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        if self._slots is None or not self._slots.count:
            raise ModelRefused(
                f"adapter {adapter.name}: the model was loaded without adapter slots", self._spec.slots_hint
            )
        with load_failures(f"adapter {adapter.name}"), torch.inference_mode():
            self._slots.prepare(adapter)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        assert self._slots is not None
        with failures("the adapter was not loaded"), torch.inference_mode():
            self._slots.load(slot, adapter)

    def forget_adapter(self, adapter: Adapter) -> None:
        """See engine.runner.Runner."""
        if self._slots is not None:
            self._slots.forget(adapter)

    def close(self) -> None:
        """Free the memory. The runner cannot be used afterwards."""
        del self.model, self.split, self.kv, self.inputs
        self._slots = None
