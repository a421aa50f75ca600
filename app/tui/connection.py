"""The UI's connection to the daemon: connects on demand, reconnects after a loss. Independent of widgets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from .. import paths
from ..client import Client, LoadedModel, ModelEntry
from ..config import Settings
from ..errors import AppError, DaemonUnreachable, WorkerDied
from .text import one_line

Connect = Callable[..., Awaitable[Client]]


class Connection:
    """A lazy connection. `state` is a short text for the status line; `on_change` is called after every change.

    `backend` and `quant` apply to the models loaded here; the daemon uses its settings for others.
    """

    def __init__(
        self, settings: Settings, connect: Connect, backend: str | None = None, quant: str | None = None
    ) -> None:
        self._settings = settings
        self._connect = connect
        self._backend = backend
        self._quant = quant
        self._client: Client | None = None
        self._lock = asyncio.Lock()
        self.on_change: Callable[[], None] = lambda: None
        self.state = "connecting"
        self.entries: list[ModelEntry] = []
        self.loaded: list[LoadedModel] = []

    async def client(self) -> Client:
        """The client. Connects if there is no connection or the daemon has stopped. Raises DaemonUnreachable."""
        async with self._lock:
            if self._client is not None and self._client.over:
                await self.close()
                self.loaded = []
            if self._client is None:
                try:
                    self._client = await self._connect(self._settings, start=True, on_status=self._say)
                    self._say("ready")
                except AppError:
                    self._say("no daemon")
                    raise
            return self._client

    async def use(self, model: str) -> None:
        """Load a model. `state` shows the progress. Raises AppError."""
        self._say(f"loading {model}")
        try:
            client = await self.client()
            progress = lambda stage, done: self._say(f"{stage} {done:.0%}")  # noqa: E731
            await client.load(model, backend=self._backend, quant=self._quant, on_progress=progress)
            await self.refresh()
        except AppError as error:
            self.lost(error)
            raise
        self._say("ready")

    async def refresh(self) -> None:
        """Update the lists of models and loaded models. Raises AppError."""
        client = await self.client()
        try:
            self.entries = await client.models()
            self.loaded = await client.loaded()
        except AppError as error:
            self.lost(error)
            raise
        self.on_change()

    def lost(self, error: AppError) -> None:
        """Handle an error: if the daemon stopped, the next call reconnects; if the worker died, it loads again."""
        if isinstance(error, DaemonUnreachable):
            self._client = None
        if isinstance(error, DaemonUnreachable | WorkerDied):
            self.loaded = []
        self._say("no daemon" if self._client is None else "ready")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def running(self, model: str) -> LoadedModel | None:
        return next((loaded for loaded in self.loaded if loaded.id == model), None)

    def context(self, model: str) -> int:
        """Context window in tokens; 0: unknown."""
        loaded = self.running(model)
        entry = next((entry for entry in self.entries if entry.id == model), None)
        return (loaded.context if loaded else 0) or (entry.context if entry else 0)

    def is_bundled(self, model: str) -> bool:
        """True for the built-in model. Uses its name until the daemon has answered."""
        entry = next((entry for entry in self.entries if entry.id == model), None)
        return entry.bundled if entry else model == paths.guide_dir().name

    def _say(self, words: str) -> None:
        self.state = one_line(words, 40)
        self.on_change()
