"""The results of the store: commands print them as JSON, the API sends them, and clients decode them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..purpose import Purpose

Kind = Literal["model", "gguf", "adapter", "weights"]  # weights: files that are no complete model of any kind


class DtypeShare(msgspec.Struct, frozen=True):
    """The tensors of one dtype."""

    dtype: str  # as in the file, such as BF16 or Q4_K
    tensors: int
    bytes: int


class TemplateVerdict(msgspec.Struct, frozen=True):
    """The result of a trial of the chat template."""

    status: Literal["works", "missing", "fails"]
    reason: str = ""  # cause of a failure
    system: bool = False  # whether it renders system messages
    tools: bool = False  # whether it renders tools


class BackendVerdict(msgspec.Struct, frozen=True):
    """Whether a backend of this machine runs the model."""

    backend: str
    runs: bool
    says: str  # the name of the device, or the reason
    available: bool = True  # False: the backend has no device on this machine, or is not installed


class Variant(msgspec.Struct, frozen=True):
    """The GGUF files of one quantisation in a repository."""

    quant: str  # as in org/repo:QUANT
    bytes: int


class Inspection(msgspec.Struct, frozen=True):
    """The facts in the configuration and the headers of a model, an adapter or a GGUF file."""

    name: str
    kind: Literal["model", "adapter", "gguf"]
    source: str  # the folder, or the repository and its commit
    local: bool  # False: not downloaded
    architecture: str = ""  # model_type; empty: unknown
    parameters: int | None = None  # values of all weights before quantisation; None: unknown
    bytes: int = 0  # size of all tensors
    dtypes: tuple[DtypeShare, ...] = ()  # the largest share first
    quantization: str = ""  # format of quantised weights; empty: none
    context: int = 0  # tokens; 0: unknown
    licence: str = ""  # empty: unknown
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
    variants: tuple[Variant, ...] = ()  # all GGUF models of the repository, including this one

    usable: bool = False  # a backend of this machine runs the model; the files of an adapter are sound

    def __post_init__(self) -> None:
        is_usable = not self.problems and (self.kind == "adapter" or bool(self.choice))
        msgspec.structs.force_setattr(self, "usable", is_usable)


class Fit(msgspec.Struct, frozen=True):
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
    remaining: int = (
        0  # bytes that weights, adapters and the largest KV cache leave for intermediate results and graphs
    )
    tokens_per_second: float | None = None  # of one sequence at an empty context, estimated; None: unknown
    notes: tuple[str, ...] = ()  # texts for the user about settings that this backend does not support
    runs: bool = True  # False: the backend is unavailable or cannot run this model, whatever its size
    window_savings: int = 0  # KV cache that the layers with a sliding window do not need


class ListedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine, or an unfinished download."""

    id: str
    path: str = ""
    bundled: bool = False
    revision: str = ""  # commit; empty: not in the Hugging Face cache
    size: int = 0  # bytes on disk
    unfinished: int = 0  # bytes of its repository that no model has: those of an unfinished download, and unused files
    packed: int = 0  # bytes of cached quantised weights, which `size` does not include
    context: int = 0  # maximum context in tokens; 0: unknown
    description: str = ""
    purpose: Purpose = "chat"
    problem: str | None = None  # the reason why the model cannot be used; None: none is known
    install: str = ""  # the command that solves the problem, if that is a package that is not installed
    gguf: bool = False  # whether it is a GGUF model, which needs GGUF adapters


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on this machine: built in, in the Hugging Face cache, or a loaded folder outside the cache."""

    id: str  # name in the model cache, or the path of a folder
    path: str
    base: str = ""  # name of the base model in the configuration; empty: unknown
    rank: int = 0  # largest rank in the configuration; 0: unknown
    size: int = 0  # bytes on disk
    bundled: bool = False


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a model on this machine."""

    name: str
    size: int  # bytes
    hash: str  # sha256:… or git:…; empty: the cache has no hash of the file


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model or an adapter on this machine."""

    id: str
    kind: Kind
    path: str
    repository: str  # empty: built in, or a folder
    revision: str  # commit; empty: not in the Hugging Face cache
    stored: str  # time at which the last file was stored, in ISO 8601
    size: int  # bytes of all files
    context: int | None  # tokens; None: unknown
    description: str = ""  # architecture, format or origin
    purpose: Purpose | None = None  # None: adapters and other weights have none
    backend: str = ""  # the backend that runs a GGUF model, and the reason; empty for other models
    base: str = ""  # base model of an adapter; empty: unknown
    weights: list[DtypeShare] = []  # the types of tensors of a GGUF model, with bytes and number of tensors
    embeddings: str = ""  # the vectors of an embedding model; empty for other models
    licence: str
    template: TemplateVerdict | None  # verdict on the chat template; None: adapters have none
    aliases: list[str]
    problems: list[str]
    warnings: list[str] = []  # values and tensors of the files that a load does not use
    settings: dict[str, Any]
    files: list[StoredFile]


class CatalogMatch(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the catalog that a search matches. The sizes are approximate."""

    name: str  # short name
    repository: str
    revision: str = ""
    licence: str = ""
    size: int = 0  # bytes to download; 0: unknown
    memory: int = 0  # bytes to run; 0: unknown
    formats: tuple[str, ...] = ()
    gated: bool = False
    description: str = ""


class HubMatch(msgspec.Struct, frozen=True, kw_only=True):
    """A repository on a hub that a search matches."""

    id: str
    downloads: int = 0
    licence: str = ""
    likes: int = 0
    size: int = 0  # bytes of the weights; 0: unknown
    gated: bool = False  # the hub gives access to accounts that accepted the licence
    formats: tuple[str, ...] = ("safetensors",)  # safetensors, gguf or both
    quants: tuple[str, ...] = ()  # of its GGUF models; `id:QUANT` is the name of one of them


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The entries of the catalog and the repositories of the hub with some words."""

    catalog: list[CatalogMatch]
    hub: list[HubMatch]
    error: str | None = None  # why the hub was not searched


class FileVerdict(msgspec.Struct, frozen=True):
    """The comparison of one file with its hash."""

    file: str
    status: Literal["ok", "damaged", "missing", "unknown"]  # unknown: no hub has named its hash
    size: int
    hash: str = ""  # the expected hash


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of all files of a model with their hashes."""

    id: str
    ok: bool
    problems: list[str]  # sentences; empty if no file is damaged or missing
    files: list[FileVerdict]


class UnusedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Files in the cache that no model uses."""

    repo: str
    folder: str
    kind: str  # blob, or partial
    paths: list[str]  # in the order of deletion
    disk_bytes: int
    resumable: bool = False  # a download would continue with these files


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """The files in the cache that no model uses, and whether they were deleted."""

    unused: list[UnusedFiles]
    bytes: int  # size of all unused files
    deleted: bool  # False: a dry run, or there is nothing to delete
    freed: int  # bytes


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """A model or an adapter that an import has added."""

    id: str
    path: str
    size: int  # bytes
    copied: bool = False  # False: links to the files of the user
    purpose: Purpose | None = None  # None: an adapter
    problem: str | None = None  # the reason why it cannot be used


class Usable(msgspec.Struct, frozen=True):
    """The purpose of stored files, or the problem that prevents their use."""

    purpose: Purpose | None  # None: an adapter
    problem: str | None  # None: they can be used


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a model on the backends of this machine."""

    model: str
    fits: list[Fit]
    hint: str = ""  # how to go on if no backend runs the model


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The files that were deleted."""

    deleted: str  # the name of the files
    freed: int  # bytes
    aliases: tuple[str, ...] = ()  # of these files, which were deleted too
    unloaded: list[str] = []  # models and adapters that were loaded from these files


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one model."""

    model: str
    file: str
    settings: dict[str, Any]
    inherited: dict[str, Any] = {}  # the settings of its repository
