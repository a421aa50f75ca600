"""The interface between engine and backends: protocols, and the records that they exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .batch import Batch
    from .files.model_files import ModelFiles
    from .lora import Adapter
    from .memory_plan import MemoryPlan
    from .options import LoadOptions


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """A group of layers whose KV pages have the same shape. A sequence has one page table in each group."""

    page_size: int  # tokens per page
    num_pages: int  # page ids are 1…num_pages; page 0 is for padding
    window: int = 0  # positions that a token reads, its own included; 0: all

    @property
    def tokens(self) -> int:
        """The number of positions that fit into all pages together."""
        return self.page_size * self.num_pages


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The limits of a runner. The scheduler never exceeds them."""

    vocab_size: int
    max_tokens: int  # maximum number of tokens in one step
    max_rows: int  # maximum number of rows in one step
    max_context: int  # maximum number of positions of one sequence
    groups: tuple[CacheGroup, ...] = ()  # empty: the runner has states only
    num_states: int = 0  # recurrent states, one per running sequence: slots 0…num_states - 1; 0: none
    num_snapshots: int = 0  # copies of states for prefix hits: ids num_states…num_states + num_snapshots - 1
    snapshot_interval: int = 0  # positions between the snapshots of a sequence; 0: the largest page size
    # Maximum number of paths: running sequences, and cached leaves of the prefix tree that no sequence uses. With a
    # limit, the engine lists the freed pages in each batch (Batch.freed_pages). 0: no limit.
    max_paths: int = 0
    max_drafts: int = 0  # maximum number of drafts in one row; 0: the runner does not verify drafts
    num_adapters: int = 0  # adapter slots besides the base model's slot 0
    adapters_per_step: int = 0
    slots_hint: str = ""  # the way to get adapter slots, if there are none
    hidden_size: int = 0  # numbers in a hidden state; 0: the runner returns none (Want.HIDDEN)
    overlap: bool = False  # whether a step may start before the host has the previous step's tokens (Batch.carry)
    graph_rows: tuple[int, ...] = ()  # sizes of the captured decode steps in rows, ascending
    graph_tokens: tuple[int, ...] = ()  # sizes of the captured prefill and mixed steps in tokens, ascending
    dtype: str = ""  # dtype of activations, for display
    quant: str = ""  # format of quantised weights, e.g. "int8", for display
    weight_bytes: int = 0  # bytes of all weights in memory
    token_bytes: int = 0  # bytes of weights that are read to compute one token; 0: unknown
    cache_bytes: int = 0  # bytes of the KV cache
    step_seconds: float = 0.0  # seconds after which a step counts as hung; 0: no limit
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built

    @property
    def cache_tokens(self) -> int:
        """The number of positions, of all sequences together, that fit into the cache."""
        if not self._full_groups:
            return (self.num_states or self.max_rows) * self.max_context
        return min(self._full_groups)

    @property
    def max_length(self) -> int:
        """The maximum number of positions of one sequence, limited by the context and the cache."""
        return min([self.max_context, *self._full_groups])

    @property
    def _full_groups(self) -> list[int]:
        """For each cache group without a window: the number of positions that fit."""
        return [group.tokens for group in self.groups if not group.window]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The results of one step. Row r of the batch has the results row_starts[r]…row_starts[r + 1] - 1.

    A row has one result for each of its samples (see Batch), up to the sample that rejects a draft. The samples after
    it have no results.
    """

    tokens: NDArray[np.int32]  # [results]; undefined for Want.HIDDEN
    row_starts: NDArray[np.int32]  # [rows + 1]; equals Batch.sample_starts if no draft is rejected
    logprobs: NDArray[np.float32] | None = None  # [results], of the tokens; None: no sample lists log-probabilities
    top_tokens: NDArray[np.int32] | None = None  # [results, k], likeliest first; k: the largest number in the batch
    top_logprobs: NDArray[np.float32] | None = None  # [results, k], of the tokens in top_tokens
    hidden: NDArray[np.float32] | None = None  # [results, hidden]; None: no row wants hidden states
    late_compiles: int = 0  # number of parts of the model that were compiled during this step


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

    Steps take effect in the order of the calls: a step may read pages that earlier steps write, and may reuse pages
    that earlier steps use for other sequences.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def run(self, batch: Batch) -> Pending:
        """Start the step; return at once if the device can overlap.

        Raises OutOfMemory if this step is lost, but later steps may run. Raises RunnerFailed if no later step may run.
        """
        ...

    def prepare_adapter(self, adapter: Adapter) -> None:
        """Read an adapter's files to main memory. May be called from any thread, also while steps run.

        Raises ModelRefused if the adapter does not fit the base model.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Load an adapter, for which `prepare_adapter` was called, into a slot. The first slot is 1.

        Returns when the slot is complete. Steps may run meanwhile, on another thread: none of them reads this slot.
        """
        ...

    def forget_adapter(self, adapter: Adapter) -> None:
        """Free the main memory of an adapter that has no slot any more. Does nothing if it was not prepared."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device of a backend that can run here."""

    backend: str
    name: str  # name of the hardware, for display
    memory: int  # bytes of the device's memory
    free: int  # bytes of it that are free
    features: Mapping[str, str] = field(default_factory=dict)  # title -> value, shown by `localllm doctor`
    main_memory: bool = False  # whether the device uses the main memory of the machine
    second_choice: bool = False  # True: AUTO chooses this backend only if no other backend works


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A backend that cannot run here. `reason` is a text for the user: the cause and the remedy.

    `install`: the shell command that installs the package that the backend lacks; empty if that is not the reason.
    """

    backend: str
    reason: str
    install: str = ""


class Backend(Protocol):
    """The names that a module `backends.<name>` must have."""

    name: str

    def probe(self) -> DeviceInfo | Unavailable:
        """Detect the device. Never raises; imports no large package if there is no device."""
        ...

    def accepts(self, files: ModelFiles) -> str:
        """The reason why this backend cannot load these files; empty if it can."""
        ...

    def open(self, files: ModelFiles, options: LoadOptions) -> Runner:
        """Load the model and return its runner. Raises ModelRefused or SettingRefused."""
        ...

    def plan_memory(self, files: ModelFiles, options: LoadOptions) -> MemoryPlan:
        """The memory that `open` would allocate. The model may not fit. Raises ModelRefused or SettingRefused."""
        ...

    def read_bandwidth(self) -> float | None:
        """Measure the read bandwidth of the device's memory in bytes per second; None if that is not possible."""
        ...


def page_bytes(page_size: int, kv_heads: int, head_dim: int, layers: int, itemsize: int, parts: int = 2) -> int:
    """Bytes of one page in all layers. Its parts are keys and values; a latent cache has one part."""
    return parts * page_size * kv_heads * head_dim * layers * itemsize
