"""The interface of the loaded models for the routes. The daemon implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...engine.quantization import Quant
from ..config import Settings
from ..frames import AskStats, Detokenize, Generate, ModelInfo, Stats, Tokenize
from .admin import LoadedModel
from .stream import Stream

Request = Generate | Tokenize | Detokenize | AskStats
Progress = Callable[[str, float], None]  # stage and done of a Loading frame


class Model(Protocol):
    """A model that is loaded or loads."""

    @property
    def model(self) -> str:
        """The id of the model."""

    @property
    def info(self) -> ModelInfo | None:
        """The description from the worker; None while the model loads."""


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
        self, name: str | None, requests: Sequence[Request], *, weight: int = 1, local: bool = False
    ) -> Stream:
        """Load the model if necessary and send requests to it. The stream returns the replies.

        `name`: None selects the only loaded model. `weight`: number of answers to the requests. `local`: the client
        uses the unix socket and may name a folder. Raises an AppError if the model cannot be loaded, or accepts no more
        requests.
        """

    async def load(
        self,
        name: str,
        *,
        local: bool = False,
        backend: str | None = None,
        quant: Quant | None = None,
        progress: Progress | None = None,
    ) -> str:
        """Load a model; returns its id. Raises an AppError if the load fails."""

    def find(self, model_id: str) -> Model | None:
        """The model with this id; None if it is not loaded."""

    async def stats(self) -> Sequence[tuple[Model, Stats | None]]:
        """Every model and its statistics; the statistics are None while the model loads or does not respond."""

    async def loaded(self) -> list[LoadedModel]:
        """A description of every model."""

    async def unload(self, name: str) -> None:
        """Unload a model after its running requests. Raises ModelNotFound if it is not loaded."""
