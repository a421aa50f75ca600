"""Captures graphs on the NPU.

Kernels of attention get the context lengths as host numbers, which a graph stores. torch_npu puts each such kernel into
a task group behind an event. Before a replay, the update stream writes the new numbers to the groups and records the
events:

    update stream   wait for the end of the previous replay -> update group 1, event 1 -> update group 2, event 2 -> …
    main stream     work -> wait for event 1, reset it -> attention 1 -> work -> wait for event 2, reset it -> …
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch_npu
from torch import Tensor

from ...engine.batch import Ints
from ..pytorch.device import Captured
from ..pytorch.graphs.recorder import GraphRecorder


def _as_tensor(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


# Captured op -> the name of its context lengths in NPUGraph.update, and the form in which it takes them.
LENGTHS: Mapping[str, tuple[str, Callable[[list[int]], Any]]] = {
    "npu_fused_infer_attention_score.out": ("actual_seq_lengths_kv", list),
    "npu_fused_infer_attention_score_v2.out": ("actual_seq_kvlen", list),
    "_npu_paged_attention.default": ("context_lens", _as_tensor),
}
CONTEXT_ARGUMENT = 7  # index of context_lens in the arguments of _npu_paged_attention


class NpuRecorder(GraphRecorder):
    """See device.Recorder."""

    def __init__(self) -> None:
        super().__init__(torch_npu.npu)

    def begin(self) -> None:
        self._graph = torch_npu.npu.NPUGraph()
        self._graph.auto_dispatch_capture = True
        self._graph.graph_dispatch_mode.__enter__()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Captured:
        graph = self._graph
        self._graph = None
        try:
            graph.capture_end()
        finally:
            graph.graph_dispatch_mode.__exit__(None, None, None)
        return NpuReplay(graph)

    def weak(self, tensor: Tensor) -> Tensor:
        """See device.Recorder.weak."""
        reference: Tensor = torch_npu._C._weak_ref_tensor(tensor)
        return reference


class NpuReplay:
    """A captured graph whose attention gets the context lengths of each step."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._lengths = [_Lengths.of(record) for record in graph.graph_dispatch_mode.graph_dispatch_records]
        self._end = torch_npu.npu.Event()

    def __call__(self, contexts: Ints) -> None:
        if self._lengths:
            # The previous replay reads the task groups that the update writes.
            self._graph.graph_dispatch_mode.update_stream.wait_event(self._end)
            self._graph.update([lengths.updated(contexts.tolist()) for lengths in self._lengths])
        self._graph.replay()
        self._end.record()


class _Lengths(NamedTuple):
    """The context lengths of a captured kernel."""

    key: str
    convert: Callable[[list[int]], Any]
    rows: int  # of the captured step

    @classmethod
    def of(cls, record: Any) -> _Lengths:
        key, convert = LENGTHS[record.op_cache_entry.__name__]
        lengths = record.kwargs[key] if key in record.kwargs else record.args[CONTEXT_ARGUMENT]
        return cls(key, convert, len(lengths))

    def updated(self, contexts: list[int]) -> dict[str, Any]:
        """The argument of NPUGraph.update for a step. Padding rows have one position."""
        return {self.key: self.convert([*contexts, *[1] * (self.rows - len(contexts))])}
