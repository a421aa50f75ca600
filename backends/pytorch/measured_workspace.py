"""Measures the workspace of a loaded model: the memory of intermediate results, libraries and captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...engine.batch import Batch, SampleSettings, Want
from ...engine.runner import CacheGroup, RunnerSpec
from .device import Device
from .failures import failures
from .kv import GroupedKV
from .lora import AdapterSlots
from .memory_plan import number_of_graphs
from .runner import Model, TorchRunner

FAILED = "the largest step failed"
LOGPROBS = 20  # listed log-probabilities in a measured step: the maximum of the API


def measured_workspace(
    model: Model,
    cache: Callable[[RunnerSpec], GroupedKV],
    spec: RunnerSpec,
    device: Device,
    capturable: int,
    slots: AdapterSlots,
) -> int:
    """Bytes of workspace that steps of at most `spec.max_tokens` tokens need. `cache` builds the pages of a spec;
    those of the measured steps have one page in each group.

    Runs the largest steps, whose results have no meaning. They also load kernels and libraries, whose memory is not a
    part of the workspace: it is not free afterwards. Raises OutOfMemory.
    """
    meter = device.meter
    assert meter is not None
    groups = tuple(CacheGroup(group.page_size, 1) for group in spec.groups)
    one_page = replace(spec, groups=groups, num_states=min(spec.num_states, 1), num_snapshots=0)
    kv = cache(one_page)
    kv.clear()
    runner = TorchRunner(model, kv, one_page, device, capturable=capturable)
    with failures(FAILED):
        meter.release()
        _run_largest(runner, slots, spec.max_tokens)
        lowest = meter.free()
        meter.release()
        steps = meter.free() - lowest
        if device.recorder is None or not (spec.graph_rows or spec.graph_tokens):
            return steps
        # A recorder has memory of its own: as much as the largest captured step needs.
        with device.recorder().session():
            _run_largest(runner, slots, max(spec.graph_tokens, default=1))
        lowest = meter.free()
        meter.release()
        captures = meter.free() - lowest
    graphs = number_of_graphs(spec.graph_rows, spec.graph_tokens, len(kv.cache.layers) + len(kv.cache.states))
    if spec.num_adapters:
        graphs *= 2  # steps with adapters have graphs of their own
    return steps + captures + meter.graph * graphs


def reserve_workspace(runner: TorchRunner, slots: AdapterSlots) -> None:
    """Run the largest steps, and leave their memory in torch's allocator: a later step does not run out of memory if
    other programs take the memory that is still free. Writes page 0 of the KV cache only. Raises OutOfMemory."""
    with failures(FAILED):
        _run_largest(runner, slots, runner.spec.max_tokens)


def _run_largest(runner: TorchRunner, slots: AdapterSlots, max_tokens: int) -> None:
    """Run a prefill step of at most `max_tokens` tokens, and a decode step of all rows at the largest position. If the
    model has adapter slots, also run each with an adapter."""
    spec = runner.spec
    batches = [_prefill(spec, max_tokens), _step(spec, [1] * spec.max_rows, spec.max_context - 1)]
    if runner.device.int8_copy and runner.kv.cache.scales is not None:
        queries = min(2, spec.max_context)  # several, because a single one reads int8 pages
        batches.append(_step(spec, [queries], spec.max_context - queries))
    for batch in batches:
        runner.run(batch).result()
    if not spec.num_adapters:
        return
    with slots.imitated():
        for batch in batches:
            adapted = replace(batch, adapters=np.ones(batch.num_rows, np.int32))
            runner.run(adapted).result()


def _prefill(spec: RunnerSpec, tokens: int) -> Batch:
    """A step of at most `tokens` tokens in rows of at most the maximum context, which begin at position 0."""
    rows = min(spec.max_rows, -(-tokens // spec.max_context))
    return _step(spec, [min(spec.max_context, tokens // rows)] * rows, 0)


def _step(spec: RunnerSpec, lens: Sequence[int], start: int) -> Batch:
    """A step whose rows have `lens` tokens at the positions from `start`. All positions are in page 0. Each row draws a
    token with the settings that need most memory."""
    rows = len(lens)
    pages = -(-(start + max(lens)) // spec.groups[0].page_size)
    zeros = np.zeros(rows, np.int32)
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=np.zeros(sum(lens), np.int32),
        positions=np.concatenate([np.arange(start, start + length, dtype=np.int32) for length in lens]),
        row_starts=np.cumsum([0, *lens]).astype(np.int32),
        drafts=zeros,
        page_tables=(np.zeros((rows, pages), np.int32),) * len(spec.groups),
        states=np.full(rows, -1, np.int32),
        adapters=zeros,
        adapter_scales=np.ones(rows, np.float32),
        carry=np.full(rows, -1, np.int32),
        wants=np.full(rows, Want.TOKEN, np.uint8),
        sampling=SampleSettings(
            temperature=np.ones(rows, np.float32),
            top_k=zeros,
            top_p=np.full(rows, 0.9, np.float32),
            min_p=np.zeros(rows, np.float32),
            repetition_penalty=np.ones(rows, np.float32),
            presence_penalty=np.zeros(rows, np.float32),
            frequency_penalty=np.zeros(rows, np.float32),
            seed=np.zeros(rows, np.uint64),
            draw=zeros,
            logprobs=np.full(rows, LOGPROBS, np.int32),
            bias_samples=none,
            bias_tokens=none,
            bias_values=np.zeros(0, np.float32),
            history_samples=none,
            history_tokens=none,
            history_prompt=none,
            history_output=none,
        ),
        mask_samples=np.arange(rows, dtype=np.int32),
        masks=np.full((rows, -(-spec.vocab_size // 32)), 0xFFFFFFFF, np.uint32),
        page_copies=(np.zeros((0, 2), np.int32),) * len(spec.groups),
        state_copies=np.zeros((0, 2), np.int32),
    )
