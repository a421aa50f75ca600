"""Request and reply bodies of the /admin routes, which the command line uses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...engine.quantization import Quant
from ..frames import Machine
from ..store.offers import Offer
from .body import WireBody


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A model on this machine: bundled, or in the Hugging Face cache."""

    id: str
    bundled: bool = False
    loaded: bool = False
    size: int = 0  # bytes on disk
    context: int = 0  # maximum context in tokens; 0: unknown
    description: str = ""
    problem: str = ""  # the reason why the model cannot be used; empty: none is known


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a worker process loads or has loaded."""

    id: str
    state: Literal["loading", "ready"]
    pid: int
    backend: str = ""
    device: str = ""
    dtype: str = ""
    quant: str = ""  # format of quantised weights; empty: not quantised
    context: int = 0
    memory: int = 0  # bytes of weights and KV cache
    token_bytes: int = 0  # bytes of weights read to decode one token; 0: unknown
    cache_tokens: int = 0  # capacity of the KV cache
    cache_used: int = 0  # tokens in the KV cache
    requests: int = 0  # number of unfinished requests
    idle: float = 0.0  # seconds since the last request ended
    unload_in: float | None = None  # seconds until the model is unloaded; None: it stays loaded, or has requests
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    options: tuple[str, ...] = ()  # load options that differ from the settings, such as "--quant int8"
    kept: bool = False  # reply to a load with `exact`: the model is busy and keeps other options than requested


class AdapterEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a model. `id`, `path` and `scale` are the fields of llama.cpp's server."""

    id: int
    name: str
    model: str
    path: str
    scale: float  # default for requests that select no adapter; 0: they do not use this adapter
    pinned: bool  # the adapter keeps its slot on the device
    version: str = ""  # hash of the adapter's files when it was loaded
    base: str = ""  # name or path of the base model in the adapter's files
    warning: str = ""  # shown to the user, e.g. that the adapter names another base model


class AdapterFolder(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on this machine: built in, in the Hugging Face cache, or a loaded folder outside the cache."""

    id: str  # name in the model cache, or the path of a folder
    path: str
    base: str = ""  # name of the base model in the configuration; empty: unknown
    rank: int = 0  # largest rank in the configuration; 0: unknown
    size: int = 0  # bytes on disk
    bundled: bool = False


class AdapterScale(WireBody):
    """An entry of POST /lora-adapters. The default scale of an adapter that is not in the list becomes 0."""

    id: int
    scale: float


class LoadAdapterBody(WireBody):
    """POST /v1/load_lora_adapter: the fields of vLLM, and `model` and `pinned`."""

    lora_name: str
    lora_path: str  # a folder (unix socket only), or the name of a downloaded adapter
    load_inplace: bool = False  # replace an adapter of the same name
    model: str | None = None  # optional if exactly one model is loaded
    pinned: bool = False  # the adapter keeps its slot on the device


class UnloadAdapterBody(WireBody):
    """POST /v1/unload_lora_adapter: the fields of vLLM, and `model`."""

    lora_name: str
    lora_int_id: int | None = None  # without effect, as in vLLM
    model: str | None = None  # optional if only one model has an adapter of this name


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/status."""

    version: str
    pid: int
    url: str  # URL of the TCP endpoint
    stopping: bool = False
    settings: dict[str, Any] = {}  # the settings for loading models (config.loading)


class LoadFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of one call that loads a model. They belong to that load; None: the settings of the model."""

    backend: str | None = None
    quant: Quant | None = None
    context: int | None = None  # tokens; 0: the model's own limit


class LoadBody(WireBody):
    """POST /admin/load. The reply is server-sent events: any number of LoadProgress, then a LoadedModel or an error."""

    model: str
    backend: str | None = None
    quant: Quant | None = None
    context: Annotated[int, msgspec.Meta(ge=0)] | None = None
    exact: bool = False  # load the model again if it is idle and was loaded with other settings than these


class LoadProgress(msgspec.Struct, frozen=True):
    stage: str
    done: float  # completed fraction of the load, 0 to 1


class UnloadBody(WireBody):
    """POST /admin/unload."""

    model: str


class Catalog(msgspec.Struct, frozen=True, kw_only=True):
    """GET /admin/catalog."""

    machine: Machine
    offers: list[Offer]


class DownloadBody(WireBody):
    """POST /admin/downloads, and /admin/downloads/pause, resume and cancel."""

    name: str  # as in localllm pull


class DeleteBody(WireBody):
    """POST /admin/delete."""

    model: str
