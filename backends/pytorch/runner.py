"""The runner of the torch family: one model on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.batch import Batch, Ints, Want
from ...engine.errors import ModelRefused
from ...engine.lora import Adapter
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import Runner, RunnerSpec, StepResult
from ...kernels.ops import Ops
from ...kernels.ops.attention import Attention
from ...kernels.ops.sampling import Logprobs
from .choice import with_attention
from .device import Device, Recorder
from .failures import failures, load_failures
from .graphs.breakable import Answers, BreakableReplay, Pieces
from .graphs.compiling import Compiler
from .graphs.full import FullReplay
from .graphs.runner import GraphRunner
from .graphs.split import SplitModel
from .inputs import Inputs, Sent, Step
from .kv import PagedKV
from .loading import Loader
from .models import accepts
from .references import with_references
from .sampler import Drawn, draw_plainly, is_plain, sample
from .sizing import cache_dtype, chosen_graphs, plan, recordable_tokens

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
    """A step on its way; its answers go to main memory as soon as they are there."""

    def __init__(
        self,
        row_starts: Ints,
        drawn: Drawn,
        hidden: Tensor | None,
        device: Device,
        late_compiles: int = 0,
        answers: NDArray[np.int64] | None = None,
    ) -> None:
        """`row_starts`: of StepResult; `answers`: which of the drawn tokens are answers, where not all are."""
        self._row_starts, self._answers, self._late_compiles = row_starts, answers, late_compiles
        self._tokens = device.fetch(drawn.tokens)
        self._hidden = None if hidden is None else device.fetch(hidden)
        self._logprobs = None if drawn.logprobs is None else Logprobs(*map(device.fetch, drawn.logprobs))
        self._event = device.event()
        self._event.record()

    def result(self) -> StepResult:
        with failures("the step failed"):
            self._event.synchronize()
            tokens = self._of_answers(self._tokens).astype(np.int32, copy=False)
            hidden = None if self._hidden is None else self._hidden.numpy()
            result = StepResult(tokens, self._row_starts, hidden=hidden, late_compiles=self._late_compiles)
            if self._logprobs is None:
                return result
            chosen, top_tokens, top = map(self._of_answers, self._logprobs)
            return replace(result, logprobs=chosen, top_tokens=top_tokens.astype(np.int32), top_logprobs=top)

    def _of_answers(self, values: Tensor) -> np.ndarray:
        array: np.ndarray = values.numpy()
        return array if self._answers is None else array[self._answers]


class TorchRunner:
    """See engine.runner.Runner. With a compiler, steps of more than a token per row go through what it makes of the
    model's forward. Of steps longer than `recordable` the last layer computes only the answers; those that may be
    recorded compute it whole, recorded or not: what is recorded knows no rows, and is to give the same bits."""

    def __init__(
        self,
        model: Model,
        kv: PagedKV,
        spec: RunnerSpec,
        device: Device,
        compiler: Compiler | None = None,
        recordable: int = 0,
    ) -> None:
        self.model, self.kv, self._spec, self.device, self._recordable = model, kv, spec, device, recordable
        self.inputs = Inputs(spec, device)
        self._recorder = None if device.recorder is None else device.recorder()
        self.prompts: Callable[[Step, Ops, PagedKV], Tensor] = model
        self._compiler = compiler
        if compiler is not None and self._recorder is not None:
            self.prompts = SplitModel(model, kv, device.ops, compiler, self._recorder.call)

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @torch.inference_mode()
    def run(self, batch: Batch) -> TorchPending:
        with failures("the step failed"):
            self.kv.copy(batch.page_copies[0], self.device)
            sent = self.inputs.send(batch)
            if batch.num_tokens == batch.num_rows or self._compiler is None:
                step = sent.last_only() if batch.num_tokens > max(batch.num_rows, self._recordable) else sent.step
                return self._answer(batch, sent, self.model(step, self.device.ops, self.kv))
            late = self._compiler.late
            hidden = self.prompts(sent.step, self.device.ops, self.kv)
            return self._answer(batch, sent, hidden, self._compiler.late - late)

    @torch.inference_mode()
    def capture(self, rows: int) -> FullReplay:
        """Record steps of up to so many rows with one token each."""
        ops, frame = self.device.ops, self.inputs.frame(rows)

        def work() -> Tensor:
            self.inputs.take_in(frame)
            logits = self.model.logits(self.model(frame.step, ops, self.kv), ops)
            self.inputs.keep(frame, draw_plainly(logits, frame.settings, self.device))
            return logits

        with failures("capturing a step failed"), self._recording() as recorder:
            work()  # what compiles, loads or allocates at its first call must not do so while recording
            recorder.begin()
            logits = work()
            replay = recorder.end()
            return FullReplay(self, frame, recorder.weak(logits), replay)

    @torch.inference_mode()
    def capture_in_pieces(self, tokens: int, answers: Answers) -> BreakableReplay:
        """Record steps of up to `tokens` tokens, whatever their rows."""
        step = self.inputs.token_frame(tokens)

        def work(ops: Ops) -> Tensor:
            return self.prompts(step, ops, self.kv)

        unasked = Attention(paged=lambda query, *_: answers.place(query))
        with failures("capturing a step failed"), self._recording() as recorder:
            work(replace(self.device.ops, attention=unasked))
            pieces = Pieces(recorder, answers)
            return BreakableReplay(self, tokens, pieces.record(work, self.device.ops), pieces)

    @torch.inference_mode()
    def replayed(self, batch: Batch, frame: Sent, logits: Tensor, replay: Callable[[], None]) -> TorchPending:
        """The step that was captured with this frame and leaves `logits`, with the numbers of `batch`."""
        with failures("the step failed"):
            self.kv.copy(batch.page_copies[0], self.device)
            self.inputs.fill(batch, len(frame.answers))
            replay()
            rows = batch.num_rows
            answers = batch.wants.nonzero()[0]
            some = answers if len(answers) < rows else None
            if is_plain(batch):
                drawn = Drawn(self.inputs.drawn(rows), None)
                return TorchPending(batch.answer_starts, drawn, None, self.device, answers=some)
            part = frame.first(rows)
            logits = logits[:rows]
            if some is not None:
                part = part.some(answers, self.device.send(answers))
                logits = logits[part.answer_rows]
            drawn = sample(logits, batch, part, self.device)
            self.inputs.keep(part, drawn.tokens)
            return TorchPending(batch.answer_starts, drawn, None, self.device)

    @torch.inference_mode()
    def replayed_in_pieces(self, batch: Batch, tokens: int, hidden: Tensor, pieces: Pieces) -> TorchPending:
        """The same for a step that was captured in pieces."""
        with failures("the step failed"):
            self.kv.copy(batch.page_copies[0], self.device)
            sent = self.inputs.fill_tokens(batch, tokens)
            pieces.replay(sent.step.rows, batch.num_tokens)
            return self._answer(batch, sent, hidden[: len(sent.answers)])

    @contextmanager
    def _recording(self) -> Iterator[Recorder]:
        assert self._recorder is not None
        with self._recorder.session():
            yield self._recorder

    def _answer(self, batch: Batch, sent: Sent, hidden: Tensor, late_compiles: int = 0) -> TorchPending:
        drawn = sample(self.model.logits(hidden, self.device.ops), batch, sent, self.device)
        self.inputs.keep(sent, drawn.tokens)
        wants_hidden = (batch.wants == Want.HIDDEN).any()
        kept = hidden.to(torch.float32, copy=True) if wants_hidden else None
        return TorchPending(batch.answer_starts, drawn, kept, self.device, late_compiles)

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        raise ModelRefused(f"adapter {adapter.name}: this version loads no adapters")

    def close(self) -> None:
        """Give the memory back: the runner is of no use afterwards."""
        del self.model, self.prompts, self.kv, self.inputs, self._recorder


def open_runner(files: ModelFiles, options: LoadOptions, device: Device, free: int) -> Runner:
    """Load a model; `free` is the device's free memory in bytes.

    Raises ModelRefused, also where that does not suffice, SettingRefused, or RunnerFailed when the device breaks.
    """
    refusal = accepts(files)
    if refusal:
        raise ModelRefused(f"{files.name}: {refusal}")
    with load_failures(files.name):
        return _load(files, options, device, free)


def _load(files: ModelFiles, options: LoadOptions, device: Device, free: int) -> Runner:
    config = files.config
    device = with_attention(device, options)
    device = replace(device, ops=with_references(device.ops, options.reference_ops))
    dtype = DTYPES.get(options.dtype, device.dtype)
    loader = Loader(files, options, device, dtype)
    spec = plan(files, options, free, dtype, loader.expected_bytes(), device)
    with torch.inference_mode():
        build = import_module(f".models.{config.model_type}", __package__).build
        model: Model
        model, weights = loader.load(lambda weights: build(weights, config, spec.max_context))
        spec = replace(spec, weight_bytes=weights.bytes, token_bytes=weights.token_bytes)
        kv = PagedKV(
            config.num_layers,
            spec.groups[0].num_pages,
            spec.groups[0].page_size,
            config.num_kv_heads,
            config.head_dim,
            cache_dtype(options, dtype, device),
            device.type,
        )
    compiler = Compiler(options.compiler, options.compiled_dir) if chosen_graphs(options, device) == "split" else None
    runner = TorchRunner(model, kv, spec, device, compiler, recordable_tokens(config, spec.max_tokens, device))
    return GraphRunner(runner) if spec.graph_rows or spec.graph_tokens else runner
