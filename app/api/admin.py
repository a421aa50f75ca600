"""Request and reply bodies of the /admin routes, which the command line uses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...engine.files.quantization import Quant
from ...engine.options import RopeScaling
from ..frames import Machine
from ..purpose import Purpose
from ..store.offers import Offer
from ..store.records import ListedModel
from .body import WireBody

PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"


class ModelEntry(ListedModel, frozen=True, kw_only=True):
    """A model on this machine, or an unfinished download, as the daemon lists it."""

    loaded: bool = False


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a worker process loads or has loaded."""

    id: str
    state: Literal["loading", "ready"]
    pid: int
    backend: str = ""
    device: str = ""
    dtype: str = ""
    quant: str = ""  # format of quantised weights; empty: not quantised
    purpose: Purpose = "chat"
    context: int = 0
    memory: int = 0  # bytes of weights and KV cache
    token_bytes: int = 0  # bytes of weights read to decode one token; 0: unknown
    cache_tokens: int = 0  # capacity of the KV cache
    cache_used: int = 0  # tokens in the KV cache
    requests: int = 0  # number of unfinished requests
    idle: float = 0.0  # seconds since the last request ended
    unload_in: float | None = None  # seconds until the model is unloaded; None: it stays loaded, or has requests
    warnings: tuple[str, ...] = ()  # shown to the user, e.g. that the CUDA kernels are not built
    sampling: dict[str, float] = {}  # default of each sampling parameter that has one
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


class AdapterScale(WireBody):
    """An entry of POST /lora-adapters. The default scale of an adapter that is not in the list becomes 0."""

    id: int
    scale: float


class LoadAdapterBody(WireBody):
    """POST /v1/load_lora_adapter: the fields of vLLM, and `reuse`, `model` and `pinned`."""

    lora_name: str
    lora_path: str  # a folder (unix socket only), or the name of a downloaded adapter
    load_inplace: bool = False  # replace an adapter of the same name
    reuse: bool = False  # an adapter of the same name, folder and files is no error
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
    cache: str = ""  # the folder of the model cache; empty: the daemon is older than this field


class LoadFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of one call that loads a model. They belong to that load; None: the settings of the model."""

    backend: str | None = None
    quant: Quant | None = None
    context: int | None = None  # tokens; 0: the model's own limit
    rope_scaling: RopeScaling | None = None
    rope_scale: float | None = None  # 0: the model's own
    rope_base: float | None = None  # 0: the model's own


class LoadFields(WireBody, kw_only=True):
    """The options with which the model of a request must be loaded; None: the settings of the model."""

    backend: str | None = None
    quant: Quant | None = None
    context: Annotated[int, msgspec.Meta(ge=0)] | None = None  # tokens; 0: the model's own limit
    rope_scaling: RopeScaling | None = None
    rope_scale: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    rope_base: Annotated[float, msgspec.Meta(ge=0, le=1e15)] | None = None

    @property
    def flags(self) -> LoadFlags:
        return LoadFlags(**{name: getattr(self, name) for name in LoadFlags.__struct_fields__})


class LoadBody(LoadFields, kw_only=True):
    """POST /admin/load. The reply is server-sent events: any number of LoadProgress, then a LoadedModel or an error."""

    model: str
    exact: bool = False  # load the model again if it is idle and was loaded with other settings than these
    for_chat: bool = False  # refuse a base model and an embedding model before their weights are loaded


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


class ModelBody(WireBody):
    """POST /admin/show, /admin/inspect and /admin/verify."""

    model: str  # a model or an adapter; a path on the unix socket only


class FitBody(WireBody):
    """POST /admin/fit."""

    model: str
    context: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0  # tokens; 0: the largest that fits
    parallel: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1  # answers at the same time
    quant: Quant | None = None
    backend: str | None = None


class SearchBody(WireBody):
    """POST /admin/search."""

    query: Annotated[str, msgspec.Meta(max_length=1000, pattern=PRINTABLE)] = ""  # words; empty: the complete catalog
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20  # repositories of the hub, of each format
    offline: bool = False  # search only the catalog


class PruneBody(WireBody):
    """POST /admin/prune."""

    dry_run: bool = True  # delete nothing
    everything: bool = False  # include files that changed in the last 24 hours


class ImportBody(WireBody):
    """POST /admin/import, on the unix socket only."""

    path: str  # absolute
    name: str = ""  # the part after local/; empty: the name of the folder
    copy: bool = False  # copy the files; False: links to the files in `path`


class AliasBody(WireBody):
    """POST /admin/alias."""

    alias: str
    name: str | None  # a model; None: remove the alias


class ConfigureBody(WireBody):
    """POST /admin/settings."""

    model: str
    changes: dict[str, str] = {}  # setting -> text of the value; empty text: remove the setting


class FileProgress(msgspec.Struct, frozen=True):
    """An event of POST /admin/verify and /admin/import."""

    file: str  # the file that is read now
    done: int  # bytes of all files that have been read
    total: int  # bytes of all files


class InstallProgress(msgspec.Struct, frozen=True):
    """An event of POST /admin/install: a line of the output, and the steps of the compiler."""

    line: str
    done: int = 0
    total: int = 0  # 0: this line has no step


class Installed(msgspec.Struct, frozen=True):
    """The last event of POST /admin/install."""

    package: str
