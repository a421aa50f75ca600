"""The client of the daemon, used by the terminal UI and the commands."""

from __future__ import annotations

from ...engine.files.adapter_base import agree
from ...engine.ranges import RANGES, Range
from ..api.admin import (
    AdapterEntry,
    Catalog,
    FileProgress,
    InstallProgress,
    LoadedModel,
    LoadFlags,
    ModelEntry,
)
from ..frames import Machine
from ..store.local.ggufs import need_llamacpp
from ..store.names import adapter_name
from ..store.offers import Offer, fit_of, speed_of
from ..store.pull.jobs import Job
from ..store.records import (
    AdapterFolder,
    BackendVerdict,
    CatalogMatch,
    DtypeShare,
    FileVerdict,
    Fit,
    HubMatch,
    Imported,
    Inspection,
    ModelFacts,
    Pruning,
    SearchResult,
    StoredFile,
    TemplateVerdict,
    UnusedFiles,
    Verification,
)
from .answers import ChatEvent, Done, ReasoningPiece, TextPiece, ToolCall, Usage, adapter_selection
from .client import NO_FLAGS, Client, kept_notice

__all__ = [
    "NO_FLAGS",
    "RANGES",
    "AdapterEntry",
    "AdapterFolder",
    "BackendVerdict",
    "Catalog",
    "CatalogMatch",
    "ChatEvent",
    "Client",
    "Done",
    "DtypeShare",
    "FileProgress",
    "FileVerdict",
    "Fit",
    "HubMatch",
    "Imported",
    "Inspection",
    "InstallProgress",
    "Job",
    "LoadFlags",
    "LoadedModel",
    "Machine",
    "ModelEntry",
    "ModelFacts",
    "Offer",
    "Pruning",
    "Range",
    "ReasoningPiece",
    "SearchResult",
    "StoredFile",
    "TemplateVerdict",
    "TextPiece",
    "ToolCall",
    "UnusedFiles",
    "Usage",
    "Verification",
    "adapter_name",
    "adapter_selection",
    "agree",
    "fit_of",
    "kept_notice",
    "need_llamacpp",
    "speed_of",
]
