"""The seam: what the engine asks of a backend, and what a backend may say of itself."""

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
    """The abilities of a runner, as data. The scheduler never exceeds them."""

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
    overlap: bool = False  # a step may be started before the tokens of the last one are known (Batch.carry)
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
        """Positions of all sequences together that fit into the cache: of the smallest group without a window."""
        whole = [group.tokens for group in self.groups if not group.window]
        return min(whole) if whole else (self.num_states or self.max_rows) * self.max_context

    @property
    def max_length(self) -> int:
        """Positions that one sequence can have."""
        whole = [group.tokens for group in self.groups if not group.window]
        return min([self.max_context, *whole])


@dataclass(frozen=True, slots=True)
class StepResult:
    """The answers of one step. Row r of the batch gives the answers row_starts[r]…row_starts[r + 1] - 1.

    Answers after the first rejected draft of a row are not given.
    """

    tokens: NDArray[np.int32]  # [given]; undefined for Want.HIDDEN
    row_starts: NDArray[np.int32]  # [rows + 1]; Batch.answer_starts where no draft is rejected
    logprobs: NDArray[np.float32] | None = None  # [given] of the token, where an answer lists log-probabilities
    top_tokens: NDArray[np.int32] | None = None  # [given, k] likeliest first, k the largest number to list
    top_logprobs: NDArray[np.float32] | None = None  # [given, k]
    hidden: NDArray[np.float32] | None = None  # [given, hidden] where a row wants hidden states
    late_compiles: int = 0  # parts of the model that were compiled during this step


class Pending(Protocol):
    """A step that was started."""

    def result(self) -> StepResult:
        """Block until the step is done. Raises OutOfMemory or RunnerFailed, as Runner.run does."""
        ...


class Replay(Protocol):
    """A captured shape."""

    def run(self, batch: Batch) -> Pending:
        """The step, of a batch that fits this shape, as Runner.run would compute it."""
        ...


class Runner(Protocol):
    """Computes batches for one loaded model.

    Steps and adapter loads take effect in the order of the calls: a step may read what the steps before it write,
    and its memory or adapter slot may have been another's until the call before.
    """

    @property
    def spec(self) -> RunnerSpec: ...

    def run(self, batch: Batch) -> Pending:
        """Start the step and return at once where the device allows it.

        Raises OutOfMemory where nothing of the step counts and others may follow, RunnerFailed where none may.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter's weights into a slot >= 1. Raises ModelRefused when it does not fit the base model."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A backend that can run here."""

    backend: str
    name: str  # of the hardware, for people
    memory: int  # bytes in all
    free: int  # bytes free now
    features: Mapping[str, str] = field(default_factory=dict)  # shown by doctor
    main_memory: bool = False  # it computes from the machine's own memory, not from its own
    second_choice: bool = False  # another backend does better on the same hardware: only where that is missing


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A backend that cannot run here, and why, in words a person can act on."""

    backend: str
    reason: str


class Backend(Protocol):
    """One way to run models. A module `backends.<name>` that has these names is one."""

    name: str

    def probe(self) -> DeviceInfo | Unavailable:
        """Look at the machine; never raises, imports nothing heavy when the answer is no."""
        ...

    def accepts(self, files: ModelFiles) -> str:
        """Why these files cannot be loaded here; empty when they can."""
        ...

    def open(self, files: ModelFiles, options: LoadOptions) -> Runner:
        """Load the weights. Raises ModelRefused or SettingRefused."""
        ...

    def read_bandwidth(self) -> float | None:
        """Bytes per second that the memory it computes from can be read at, measured now; None: it cannot tell."""
        ...


def page_bytes(page_size: int, kv_heads: int, head_dim: int, layers: int, itemsize: int) -> int:
    """Bytes of keys and values that one page takes over all layers."""
    return 2 * page_size * kv_heads * head_dim * layers * itemsize
