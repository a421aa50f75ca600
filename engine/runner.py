"""The interface between engine and backends: protocols, and the records that they exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .batch import Batch
    from .lora import Adapter
    from .modelfiles import ModelFiles
    from .options import LoadOptions


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV has pages of one shape. A sequence has one page table in each group."""

    page_size: int  # tokens per page
    num_pages: int  # page ids are 1…num_pages; page 0 is for padding
    window: int = 0  # positions that a token reads, its own included; 0: all

    @property
    def tokens(self) -> int:
        """Positions that fit into all pages."""
        return self.page_size * self.num_pages


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The limits of a runner. The scheduler never exceeds them."""

    vocab_size: int
    max_tokens: int  # tokens in one step
    max_rows: int  # rows in one step
    max_context: int  # positions of one sequence
    groups: tuple[CacheGroup, ...] = ()  # empty: the runner has states only
    num_states: int = 0  # recurrent states, one per running sequence: slots 0…num_states - 1; 0: none
    num_snapshots: int = 0  # copies of states for prefix hits: ids num_states…num_states + num_snapshots - 1
    snapshot_interval: int = 0  # positions between the snapshots of a sequence; 0: the largest page size
    max_drafts: int = 0  # drafts in one row; 0: the runner verifies none
    num_adapters: int = 0  # adapter slots besides the base model's slot 0
    adapters_per_step: int = 0
    overlap: bool = False  # a step may start before the tokens of the step before are read (Batch.carry)
    graph_rows: tuple[int, ...] = ()  # rows of the decode steps that are captured, ascending
    graph_tokens: tuple[int, ...] = ()  # tokens of the other steps that are captured, ascending
    dtype: str = ""  # of activations, for display
    quant: str = ""  # format of quantised weights, e.g. "int8", for display
    weight_bytes: int = 0  # in memory
    token_bytes: int = 0  # bytes of weights that are read to compute one token; 0: unknown
    cache_bytes: int = 0  # all KV memory
    step_seconds: float = 0.0  # seconds after which a step counts as hung; 0: no limit
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built

    @property
    def cache_tokens(self) -> int:
        """Positions of all sequences together that fit into the cache."""
        if not self._full_groups:
            return (self.num_states or self.max_rows) * self.max_context
        return min(self._full_groups)

    @property
    def max_length(self) -> int:
        """Positions that one sequence can have."""
        return min([self.max_context, *self._full_groups])

    @property
    def _full_groups(self) -> list[int]:
        """Positions that fit into each group without a window."""
        return [group.tokens for group in self.groups if not group.window]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. Row r of the batch has the results row_starts[r]…row_starts[r + 1] - 1.

    The answers of a row have one result each, up to the first rejected draft; later answers have none.
    """

    tokens: NDArray[np.int32]  # [results]; undefined for Want.HIDDEN
    row_starts: NDArray[np.int32]  # [rows + 1]; equals Batch.answer_starts if no draft is rejected
    logprobs: NDArray[np.float32] | None = None  # [results] of the token, if any answer lists log-probabilities
    top_tokens: NDArray[np.int32] | None = None  # [results, k] likeliest first; k: the largest number to list
    top_logprobs: NDArray[np.float32] | None = None  # [results, k]
    hidden: NDArray[np.float32] | None = None  # [results, hidden] if a row wants hidden states
    late_compiles: int = 0  # parts of the model that were compiled during this step


class Pending(Protocol):
    """A step that was started."""

    def result(self) -> StepResult:
        """Block until the step is done. Raises OutOfMemory or RunnerFailed, as Runner.run does."""
        ...


class Replay(Protocol):
    """A captured graph for batches of one padded shape."""

    def run(self, batch: Batch) -> Pending:
        """Replay the graph for a batch that fits it. The result equals that of Runner.run."""
        ...


class Runner(Protocol):
    """Computes batches for one loaded model.

    Steps and adapter loads take effect in the order of the calls: a step may read pages that earlier steps write, and
    a call may reuse pages or an adapter slot that earlier calls use for other sequences.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def run(self, batch: Batch) -> Pending:
        """Start the step; return at once if the device can overlap.

        Raises OutOfMemory if the step has no results and later steps may run, RunnerFailed if no step may run any more.
        """
        ...

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Read an adapter's files to main memory. May be called from any thread, also while steps run.

        Raises ModelRefused if it does not fit the base model.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Load a prepared adapter into a slot >= 1."""
        ...

    def forget_adapter(self, adapter: Adapter) -> None:
        """Free the main memory of an adapter that is in no slot any more. It may not have been prepared."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A backend that can run here."""

    backend: str
    name: str  # of the hardware, for display
    memory: int  # bytes, total
    free: int  # bytes
    features: Mapping[str, str] = field(default_factory=dict)  # shown by doctor
    main_memory: bool = False  # the device uses the main memory of the machine
    second_choice: bool = False  # use it only if the better backend for the same hardware is missing


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A backend that cannot run here. `reason` tells the user how to mend it."""

    backend: str
    reason: str


class Backend(Protocol):
    """A module `backends.<name>` that has these names."""

    name: str

    def probe(self) -> DeviceInfo | Unavailable:
        """Detect the device. Never raises; imports no large package if there is no device."""
        ...

    def accepts(self, files: ModelFiles) -> str:
        """The reason why this backend cannot load these files; empty if it can."""
        ...

    def open(self, files: ModelFiles, options: LoadOptions) -> Runner:
        """Load the weights. Raises ModelRefused or SettingRefused."""
        ...

    def read_bandwidth(self) -> float | None:
        """Measure the read bandwidth of the device's memory in bytes per second; None if that is not possible."""
        ...


def page_bytes(page_size: int, kv_heads: int, head_dim: int, layers: int, itemsize: int) -> int:
    """Bytes of keys and values that one page takes over all layers."""
    return 2 * page_size * kv_heads * head_dim * layers * itemsize
