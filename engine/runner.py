"""The seam: what the engine asks of a backend, and what a backend may say of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .batch import Batch
    from .lora import Adapter
    from .modelfiles import ModelFiles
    from .options import LoadOptions


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What a runner can do, as data. The scheduler never exceeds it."""

    vocab_size: int
    max_tokens: int  # tokens in one step
    max_rows: int  # rows in one step
    max_context: int  # positions of one sequence
    cache: Literal["pages", "slots"]
    page_size: int = 16  # with pages: tokens per page
    num_pages: int = 0  # with pages: page ids are 1…num_pages; page 0 is for padding
    num_slots: int = 0  # with slots: slot ids are 0…num_slots-1, each max_context long
    num_adapters: int = 0  # adapter slots besides the base model's slot 0
    adapters_per_step: int = 0
    overlap: bool = False  # a step may be started before the last one's tokens are known (Batch.carry)
    graph_rows: tuple[int, ...] = ()  # shapes that were or will be captured, ascending
    graph_tokens: tuple[int, ...] = ()
    dtype: str = ""  # of activations, for people
    quant: str = ""  # the weights' format where they are quantised, e.g. "int8", for people
    weight_bytes: int = 0  # as held in memory
    token_bytes: int = 0  # of weights that computing one token reads; 0: unknown
    cache_bytes: int = 0  # all KV memory
    step_seconds: float = 0.0  # a step that takes longer hangs; 0: its length tells nothing
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built

    @property
    def cache_tokens(self) -> int:
        """Tokens that all KV memory holds."""
        return self.num_pages * self.page_size if self.cache == "pages" else self.num_slots * self.max_context


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave, rows in the batch's order."""

    tokens: NDArray[np.int32]  # [rows]; undefined where Want.NOTHING
    logprobs: NDArray[np.float32] | None = None  # [rows]: of the drawn token, where any row asked
    top_tokens: NDArray[np.int32] | None = None  # [rows, k] likeliest first, k the largest asked for
    top_logprobs: NDArray[np.float32] | None = None  # [rows, k]
    hidden: NDArray[np.float32] | None = None  # [rows, hidden] where any row wants HIDDEN
    late_compiles: int = 0  # of parts of the model, for which this step had to wait


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
