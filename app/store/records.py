"""The result of `localllm inspect`: the facts about a model or an adapter, and the backends that run it.

The classes convert to JSON with dataclasses.asdict, and back with msgspec.convert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class DtypeShare:
    """The tensors of one dtype."""

    dtype: str  # as in the file, such as BF16 or Q4_K
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TemplateVerdict:
    """The result of a trial of the chat template."""

    status: Literal["works", "missing", "fails"]
    reason: str = ""  # of a failure
    system: bool = False  # whether it renders system messages
    tools: bool = False  # whether it renders tools


@dataclass(frozen=True, slots=True)
class BackendVerdict:
    """Whether a backend of this machine runs the model."""

    backend: str
    runs: bool
    says: str  # the name of the device, or the reason
    available: bool = True  # False: the backend has no device on this machine, or is not installed


@dataclass(frozen=True, slots=True)
class Variant:
    """The GGUF files of one quantisation in a repository."""

    quant: str  # as in org/repo:QUANT
    bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """The facts in the configuration and the headers of a model, an adapter or a GGUF file."""

    name: str
    kind: Literal["model", "adapter", "gguf"]
    source: str  # the folder, or the repository and its commit
    local: bool  # False: not downloaded
    architecture: str  # model_type; empty: unknown
    parameters: int | None  # values of all weights before quantisation; None: unknown
    bytes: int  # of all tensors
    dtypes: tuple[DtypeShare, ...]  # the largest share first
    quantization: str  # format of quantised weights; empty: none
    context: int  # tokens; 0: unknown
    licence: str  # empty: unknown
    rope_scaling: str = ""  # the method that extends the context of the original training; empty: none
    embeddings: str = ""  # the vectors of an embedding model; empty: no embedding model
    template: TemplateVerdict | None = None  # None: adapters have none
    base: str = ""  # base model of an adapter; empty: unknown, or not named
    rank: int = 0  # of an adapter; 0: unknown
    pickles: tuple[str, ...] = ()  # weight files that could run code: never downloaded, never loaded
    code: tuple[str, ...] = ()  # code of the repository: never downloaded, never run
    problems: tuple[str, ...] = ()  # reasons why no backend can load it
    warnings: tuple[str, ...] = ()  # values and tensors of the files that a load does not use
    backends: tuple[BackendVerdict, ...] = ()  # in order of preference; empty for an adapter
    choice: str = ""  # the backend that would run the model; empty: none
    hint: str = ""  # how to go on if no backend runs the model
    variants: tuple[Variant, ...] = ()  # the GGUF models of the repository, of which this is one

    @property
    def usable(self) -> bool:
        """Whether a backend of this machine runs the model. For an adapter: whether its files are sound."""
        return not self.problems and (self.kind == "adapter" or bool(self.choice))

    def for_json(self) -> dict[str, Any]:
        """The inspection as JSON values, with `usable`."""
        from dataclasses import asdict

        return {**asdict(self), "usable": self.usable}


@dataclass(frozen=True, slots=True)
class Fit:
    """The memory of a model on one backend. All sizes are in bytes."""

    backend: str
    device: str
    fits: bool
    reason: str  # why the model does not fit, or cannot run; empty if it fits
    context: int  # positions of one sequence
    parallel: int  # sequences at the same time
    largest_context: int  # the largest context that fits `parallel` times; 0: none
    free: int = 0
    weights: int = 0
    adapters: int = 0  # all adapter slots
    cache: int = 0  # KV cache of `parallel` sequences of `context` positions
    max_cache: int = 0  # KV cache that a load may use at most
    remaining: int = 0  # what weights, adapters and the largest KV cache leave: for intermediate results, graphs
    tokens_per_second: float | None = None  # of one sequence at an empty context, estimated; None: unknown
    notes: tuple[str, ...] = ()  # for the user: settings of all models that a load on this backend would not have
    runs: bool = True  # False: the backend is unavailable or cannot run this model, whatever its size
