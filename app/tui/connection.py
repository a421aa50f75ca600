"""The UI's connection to the daemon: connects on demand, reconnects after a loss. Independent of widgets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from .. import paths
from ..client import NO_FLAGS, AdapterEntry, AdapterFolder, Catalog, Client, Job, LoadedModel, LoadFlags, ModelEntry
from ..config import Settings
from ..errors import AppError, DaemonUnreachable, WorkerDied
from .text import one_line

Connect = Callable[..., Awaitable[Client]]
Result = TypeVar("Result")
LOST = "not connected"  # there is no daemon


class Connection:
    """A connection that opens when it is needed. `state` is a short text for the status line.

    `on_change` is called after a change of `state`, `entries`, `loaded` or `adapters`; `on_warning` is called with each
    warning of a load. `load_flags` belong to the models that this connection loads; the daemon uses its settings for
    other models.
    """

    def __init__(self, settings: Settings, connect: Connect, load_flags: LoadFlags = NO_FLAGS) -> None:
        self._settings = settings
        self._connect = connect
        self._load_flags = load_flags
        self._client: Client | None = None
        self._lock = asyncio.Lock()
        self.on_change: Callable[[], None] = lambda: None
        self.on_warning: Callable[[str], None] = lambda warning: None
        self.state = "connecting"
        self.entries: list[ModelEntry] = []
        self.loaded: list[LoadedModel] = []
        self.adapters: list[AdapterEntry] = []  # loaded adapters of all models
        self.downloads: list[Job] = []

    async def client(self) -> Client:
        """The client of the daemon. Connects if there is no connection, or the daemon has stopped.

        Raises DaemonUnreachable.
        """
        async with self._lock:
            if self._client is not None and self._client.over:
                await self.close()
                self.loaded = []
            if self._client is None:
                self._client = await self._open()
            return self._client

    async def _open(self) -> Client:
        try:
            client = await self._connect(self._settings, start=True, on_status=self._show_state)
        except AppError:
            self._show_state(LOST)
            raise
        self._show_state("ready")
        return client

    async def use(self, model: str) -> None:
        """Load a model. `state` shows the progress. Raises AppError."""
        self._show_state(f"loading {model}")
        processes = {loaded.pid for loaded in self.loaded}
        try:
            client = await self.client()
            info = await client.load(
                model, flags=self._load_flags, exact=True, for_chat=True, on_progress=self._show_progress
            )
            await self.refresh()
        except AppError as error:
            self.lost(error)
            raise
        options = " ".join(info.options) or "its settings"
        self._show_state(f"ready, still with {options}" if info.kept else "ready")
        if info.pid not in processes:
            for warning in info.warnings:
                self.on_warning(warning)

    async def refresh(self) -> None:
        """Update the lists of models and loaded models. Raises AppError."""
        await self.call(self._list_models)
        self.on_change()

    async def _list_models(self, client: Client) -> None:
        self.entries = await client.models()
        self.loaded = await client.loaded()
        self.adapters = await client.adapters()

    async def catalog(self) -> Catalog:
        """This machine, and the models that it can download. The first call takes seconds. Raises AppError."""
        return await self.call(lambda client: client.catalog())

    async def refresh_downloads(self) -> list[Job]:
        """Update `downloads`. Raises AppError."""
        self.downloads = await self.call(lambda client: client.downloads())
        return self.downloads

    async def download(self, name: str) -> None:
        """Start a download in the daemon. Raises AppError."""
        await self.call(lambda client: client.download(name))
        await self.refresh_downloads()

    async def change_download(self, name: str, action: str) -> None:
        """`action`: pause, resume or cancel. Raises AppError."""
        await self.call(lambda client: client.change_download(name, action))
        await self.refresh_downloads()

    async def delete(self, model: str) -> None:
        """Delete the files of a model. Raises AppError."""
        await self.call(lambda client: client.delete(model))
        await self.refresh()

    async def adapter_folders(self) -> list[AdapterFolder]:
        """The adapters on this machine, loaded or not. Also updates `adapters`. Raises AppError."""
        return await self.call(self._list_adapters)

    async def load_adapter(self, model: str, name: str, path: str) -> None:
        """Load an adapter of a model, and the model if necessary. Raises AppError."""
        if self.running(model) is None:
            await self.use(model)
        await self.call(lambda client: client.load_adapter(name, path, model=model))
        await self.refresh()

    async def unload_adapter(self, model: str, name: str) -> None:
        """Raises AppError."""
        await self.call(lambda client: client.unload_adapter(name, model=model))
        await self.refresh()

    async def _list_adapters(self, client: Client) -> list[AdapterFolder]:
        self.adapters = await client.adapters()
        return await client.adapter_folders()

    async def call(self, request: Callable[[Client], Awaitable[Result]]) -> Result:
        """Send a request; after an error, update the state. Raises AppError."""
        client = await self.client()
        try:
            return await request(client)
        except AppError as error:
            self.lost(error)
            raise

    def lost(self, error: AppError) -> None:
        """Update `state` and `loaded` after an error. After a lost connection, the next call connects again."""
        if isinstance(error, DaemonUnreachable):
            self._client = None
        if isinstance(error, DaemonUnreachable | WorkerDied):
            self.loaded = []
        self._show_state(LOST if self._client is None else "ready")

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def running(self, model: str) -> LoadedModel | None:
        return next((loaded for loaded in self.loaded if loaded.id == model), None)

    def adapters_of(self, model: str) -> list[AdapterEntry]:
        """The loaded adapters of a model."""
        return [adapter for adapter in self.adapters if adapter.model == model]

    def context(self, model: str) -> int:
        """Context window in tokens; 0: unknown."""
        loaded = self.running(model)
        if loaded is not None and loaded.context:
            return loaded.context
        entry = self._entry(model)
        return 0 if entry is None else entry.context

    def is_bundled(self, model: str) -> bool:
        """True for the built-in model. Before the daemon has listed the models, only the name decides."""
        entry = self._entry(model)
        return model == paths.guide_dir().name if entry is None else entry.bundled

    def _entry(self, model: str) -> ModelEntry | None:
        return next((entry for entry in self.entries if entry.id == model), None)

    def _show_progress(self, stage: str, fraction: float) -> None:
        self._show_state(f"{stage} {fraction:.0%}")

    def _show_state(self, text: str) -> None:
        self.state = one_line(text, 40)
        self.on_change()
