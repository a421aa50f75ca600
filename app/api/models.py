"""The interface of the loaded models for the routes. The daemon implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from ..config import Settings
from ..frames import (
    AskStats,
    Detokenize,
    Embed,
    Generate,
    LoadAdapter,
    Machine,
    ModelInfo,
    Stats,
    Tokenize,
    UnloadAdapter,
)
from .admin import AdapterEntry, LoadedModel, LoadFlags
from .stream import Stream

Request = Generate | Embed | Tokenize | Detokenize | LoadAdapter | UnloadAdapter | AskStats
Progress = Callable[[str, float], None]  # called with the fields `stage` and `done` of each Loading frame


class Model(Protocol):
    """A model that is loaded or loads."""

    @property
    def model(self) -> str:
        """The id of the model."""

    @property
    def info(self) -> ModelInfo | None:
        """The description of the model from its worker; None while the model loads."""


class Models(Protocol):
    """All models that are loaded or load."""

    @property
    def settings(self) -> Settings: ...

    @property
    def stopping(self) -> bool:
        """True after the daemon began to stop; it then refuses new requests."""

    @property
    def deaths(self) -> dict[str, int]:
        """Number of worker processes that ended unexpectedly, by model id."""

    async def open(
        self,
        name: str | None,
        requests: Sequence[Request],
        *,
        weight: int = 1,
        local: bool = False,
        flags: LoadFlags | None = None,
        lifetime: float | None = None,
    ) -> Stream:
        """Load the model if necessary and send requests to it. The stream returns the replies.

        `name`: a model, or `model:adapter`; None selects the only loaded model. `weight`: number of answers to the
        requests. `local`: the client uses the unix socket and may name a folder. `flags`: the model must be loaded with
        these flags; None: the requests use the model as it is loaded. `lifetime`: seconds that the model stays loaded
        after its last request; None: unchanged. Raises an AppError if the model cannot be loaded or accepts no more
        requests, or OtherOptions if it is busy with other flags.
        """

    async def load(
        self,
        name: str,
        *,
        local: bool = False,
        flags: LoadFlags = ...,
        exact: bool = False,
        for_chat: bool = False,
        progress: Progress | None = None,
    ) -> LoadedModel:
        """Load a model and describe it. `exact`: load it again if it is idle and was loaded with other settings.
        `for_chat`: raise WrongKind for a model that does not chat.

        Raises an AppError if the load fails.
        """

    async def machine(self) -> Machine:
        """The device on which models run, measured once."""

    def find(self, model_id: str) -> Model | None:
        """The model with this id; None if it is not loaded."""

    async def stats(self) -> Sequence[tuple[Model, Stats | None]]:
        """Every model and its statistics; the statistics are None while the model loads or does not respond."""

    async def loaded(self) -> list[LoadedModel]:
        """A description of every model."""

    def adapters(self) -> list[AdapterEntry]:
        """The adapters of all models, in the order in which they were first loaded."""

    async def load_adapter(
        self,
        name: str,
        path: str,
        *,
        model: str | None = None,
        local: bool = False,
        replace: bool = False,
        reuse: bool = False,
        pinned: bool = False,
    ) -> AdapterEntry:
        """Load an adapter for a model, which is loaded if necessary. `path`: a folder, or a name in the model cache.

        `model`: None selects the only loaded model. Raises an AppError if the adapter cannot be loaded.
        """

    async def unload_adapter(self, name: str, *, model: str | None = None) -> None:
        """Unload an adapter. `model`: None selects the only model with this adapter. Raises AdapterNotFound."""

    def set_adapter_scales(self, scales: Mapping[int, float]) -> None:
        """Set the default scales by adapter id; an adapter that is not in `scales` gets 0."""

    async def unload(self, name: str) -> None:
        """Unload a model when its running requests have ended. Raises ModelNotFound if it is not loaded."""

    def without(self, folders: Sequence[Path]) -> AbstractAsyncContextManager[None]:
        """Unload the models with files in these folders; until the end of the block, no call loads them again."""
