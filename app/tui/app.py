"""The application: it connects the parts, owns themes, palette and the way out."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.screen import Screen

from .. import paths
from ..config import Settings
from ..errors import AppError
from . import commands, theme
from .chat.screen import ChatScreen
from .connection import Connect, Connection
from .conversation import Conversation
from .history.recorder import Recorder
from .history.store import Store

PATIENCE = 3.0  # seconds that leaving waits for a last save


class ChatApp(App[int]):
    """The terminal UI. Ends with the exit code."""

    TITLE = "localllm"
    CSS_PATH = paths.assets_dir() / "tui.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]

    BINDINGS = [Binding("ctrl+c", "interrupt", "Stop or leave", show=False)]

    def __init__(
        self,
        settings: Settings,
        conversation: Conversation,
        *,
        connect: Connect,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
        backend: str | None = None,
        quant: str | None = None,
    ) -> None:
        super().__init__()
        for known in (theme.DARK, theme.LIGHT):
            self.register_theme(known)
        self.theme = theme.suited(os.environ)
        self._connection = Connection(settings, connect, backend, quant)
        self._recorder = Recorder(store)
        self._clock = clock
        self._interrupted = -1e9
        self._chat = ChatScreen(self._connection, self._recorder, conversation, clock, folder or Path.cwd())

    async def on_mount(self) -> None:
        await self.push_screen(self._chat)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self._leave)
            signal.signal(signal.SIGHUP, lambda *_: self._hang_up(loop))

    def _leave(self) -> None:
        """As Ctrl+Q does: answer saved, terminal restored."""
        self.run_worker(self.action_quit())

    def _hang_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """The terminal is gone. A write to it would end Textual's writing thread, for which all others would then
        wait for ever; so what is still written goes nowhere, from this very moment on. The SIGCONT that comes with a
        hang-up would have Textual start its screen, and its threads, once more."""
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        os.close(nowhere)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._leave)

    async def on_unmount(self) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                await self._connection.close()
                await self._recorder.close()
        except (AppError, TimeoutError):
            pass  # nobody is left to tell, and what mattered was saved before

    async def action_quit(self) -> None:
        """Leave: the running answer is cancelled and kept."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._chat.stop()
                await self._chat.save()
        except TimeoutError:
            pass  # a hanging disk must not hold the terminal
        self.exit(0)

    async def action_interrupt(self) -> None:
        """Ctrl+C with nothing selected: stop the answer; a second time, leave."""
        if self._chat.is_answering:
            await self._chat.stop()
        elif self._clock() - self._interrupted < 2:
            await self.action_quit()
        else:
            self._interrupted = self._clock()
            self._chat.say("Ctrl+C again leaves localllm.")

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in commands.COMMANDS:
            if command.name != "theme":
                call = commands.Call(command.name, "")
                yield SystemCommand(command.name.capitalize(), command.sentence, partial(self._chat.obey, call))
        yield SystemCommand("Theme", "Change the colours.", self.action_change_theme)
