"""Runs the daemon: bind the sockets, announce the address, serve, drain the requests, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from uvicorn import Config, Server

from .. import paths
from ..api.routes import Address
from ..config import Settings
from ..errors import AppError
from ..version import VERSION
from .connection import MAX_HEAD, Connection
from .listeners import bind_tcp, bind_unix, tcp_key
from .models import LoadedModels
from .owner import Owner
from .process import COMMAND
from .server import build

BACKLOG = 512
KEEP_ALIVE_SECONDS = 75  # an idle connection closes after this time
CLOSING_SECONDS = 2  # time to send the last bytes of interrupted answers
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Announcement:
    """The address of a daemon that accepts requests, and the file of its API key."""

    url: str
    key_file: str = ""  # file of the generated key; empty: no key, or the key of the settings
    ollama_port: int = 0  # 0: none

    def __str__(self) -> str:
        key = f"; clients need the API key in {self.key_file}" if self.key_file else ""
        more = f", and for Ollama's clients at port {self.ollama_port} on loopback" if self.ollama_port else ""
        return f"localllm {VERSION} is listening at {self.url}{more}{key}"


def serve(settings: Settings) -> int:
    """Run the daemon in the foreground until a signal; returns the exit code.

    Raises PortTaken, ConfigError or StorageFailed if it cannot start.
    """
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    run(settings, lambda announcement: print(announcement, flush=True))
    return 0


def run(
    settings: Settings, on_ready: Callable[[Announcement], None], *, worker_command: Sequence[str] = COMMAND
) -> None:
    """Run the daemon until SIGTERM, SIGINT or POST /admin/shutdown. Calls `on_ready` when it accepts requests."""
    owner = Owner()
    try:
        with contextlib.ExitStack() as sockets:
            tcp = [sockets.enter_context(listener) for listener in bind_tcp(settings)]
            unix = sockets.enter_context(bind_unix())
            asyncio.run(_serve(settings, owner, tcp, unix, on_ready, worker_command))
    finally:
        paths.socket_file().unlink(missing_ok=True)
        owner.release()


async def _serve(
    settings: Settings,
    owner: Owner,
    tcp: list[socket.socket],
    unix: socket.socket,
    on_ready: Callable[[Announcement], None],
    worker_command: Sequence[str],
) -> None:
    address, port = tcp[0].getsockname()[:2]
    url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
    key = tcp_key(settings, address)
    key_file = "" if key == settings.api_key else str(paths.api_key_file())
    announcement = Announcement(url, key_file, settings.ollama_port)
    stop = asyncio.Event()
    second_signal = asyncio.Event()  # a second signal ends the wait for running answers
    models = LoadedModels(settings, command=worker_command)
    address = Address(url=url, key=key, names=(settings.host,), stop=stop.set)

    preloads: list[asyncio.Task[None]] = []

    def started() -> None:
        owner.publish(port)
        log.info("%s", announcement)
        on_ready(announcement)
        preloads.append(asyncio.create_task(_preload(models)))

    server = _Server(
        Config(
            build(models, address),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        ),
        started,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: (second_signal if stop.is_set() else stop).set())
    serving = asyncio.create_task(server.serve(sockets=[*tcp, unix]))
    await _first(asyncio.shield(serving), stop.wait())
    for preload in preloads:
        preload.cancel()
    log.info("stopping: running answers have %.0f s to finish", settings.developer.drain)
    await _first(models.drain(settings.developer.drain), second_signal.wait())
    await models.close()  # before the end of the server: clients still get the error Stopping
    server.should_exit = True
    await serving


async def _preload(models: LoadedModels) -> None:
    """Load the models of the setting `preload`, one after the other. An error is logged; the daemon goes on."""
    for name in models.settings.preload:
        try:
            await models.load(name, local=True)
        except AppError as error:
            log.error("cannot preload %s: %s", name, f"{error.message} ({error.hint})" if error.hint else error.message)


async def _first(*awaitables: Awaitable[object]) -> None:
    """Wait until the first of several awaitables is done; cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


class _Server(Server):
    """uvicorn's server, with a callback after its start and without its signal handlers."""

    def __init__(self, config: Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
