"""The application: starts the chat screen, and handles themes, command palette, signals and shutdown."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from textual import on, work
from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import Provider
from textual.screen import Screen
from textual.system_commands import SystemCommandsProvider
from textual.theme import ThemeProvider

from .. import paths
from ..client import NO_FLAGS, LoadFlags
from ..config import Settings
from ..errors import AppError
from . import commands, theme
from .chat import dispatch
from .chat.screen import ChatScreen
from .connection import Connect, Connection
from .conversation import Conversation
from .history.recorder import Recorder
from .history.store import Store
from .palette import Finder, Palette

FIND = "Find a command, a model, an adapter or a chat…"
QUIT_SECONDS = 3.0  # maximum wait for the last save when the user quits


class ChatApp(App[int]):
    """The application of the terminal UI. `run` returns the exit code."""

    TITLE = "localllm"
    CSS_PATH = paths.assets_dir() / "tui.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (60, "-normal"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-tall")]

    BINDINGS = [Binding("ctrl+c", "interrupt", "Stop or quit", show=False)]

    def __init__(
        self,
        settings: Settings,
        conversation: Conversation,
        *,
        connect: Connect,
        store: Store,
        clock: Callable[[], float] = time.monotonic,
        folder: Path | None = None,
        load_flags: LoadFlags = NO_FLAGS,
    ) -> None:
        super().__init__()
        for colours in (theme.DARK, theme.LIGHT):
            self.register_theme(colours)
        self.theme = theme.default(os.environ)
        self._connection = Connection(settings, connect, load_flags)
        self._recorder = Recorder(store)
        self._clock = clock
        self._interrupt_time = -1e9
        self._is_quitting = False
        self._chat = ChatScreen(self._connection, self._recorder, conversation, clock, folder or Path.cwd())

    async def on_mount(self) -> None:
        await self.push_screen(self._chat)
        if not self.is_headless:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, self._leave)
            signal.signal(signal.SIGHUP, lambda *_: self._hang_up(loop))

    def _leave(self) -> None:
        """Quit like Ctrl+Q: save the answer, restore the terminal."""
        self.run_worker(self.action_quit())

    def _hang_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Quit after the terminal has closed (SIGHUP).

        Output goes to /dev/null from now on: a write to the closed terminal would end Textual's writer thread, and the
        other threads would wait for it forever. SIGCONT follows SIGHUP and would make Textual start its screen again.
        """
        signal.signal(signal.SIGCONT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(null, stream)
        os.close(null)
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._leave)

    async def on_unmount(self) -> None:
        try:
            async with asyncio.timeout(QUIT_SECONDS):
                await self._connection.close()
                await self._recorder.close()
        except (AppError, TimeoutError):
            pass  # the user has quit, and action_quit has saved the conversation

    async def action_quit(self) -> None:
        """Quit. A running answer is cancelled and its text is saved. Does nothing if the application quits already."""
        if self._is_quitting:
            return
        self._is_quitting = True
        try:
            async with asyncio.timeout(QUIT_SECONDS):
                await self._chat.stop()
                await self._chat.save()
        except TimeoutError:
            pass  # a slow disk must not block quitting
        self._connection.on_change = lambda: None  # the screens close now
        self.exit(0)

    async def action_interrupt(self) -> None:
        """Handle Ctrl+C without a selection: stop the running answer, or quit if it is pressed twice."""
        if self._chat.is_answering:
            await self._chat.stop()
        elif self._clock() - self._interrupt_time < 2:
            await self.action_quit()
        else:
            self._interrupt_time = self._clock()
            self._chat.say("Press Ctrl+C again to quit localllm.")

    @on(ChatScreen.Commanded)
    @work
    async def _execute(self, command: ChatScreen.Commanded) -> None:
        try:
            await dispatch.execute(self._chat, command.call, command.message)
        except AppError as error:
            self._chat.refuse(command, error)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        for command in commands.COMMANDS:
            if command.name != "theme" and (screen is self._chat or command.name == "quit"):
                call = partial(self._chat.command, command.name)
                yield SystemCommand(command.name.capitalize(), command.sentence, call)
        yield SystemCommand("Theme", "Change the colours.", self.action_change_theme)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, Palette):
            finders: list[type[Provider]] = [Finder] if self.screen is self._chat else []
            self.push_screen(Palette([SystemCommandsProvider, *finders], placeholder=FIND, id="--command-palette"))

    def search_themes(self) -> None:
        if not isinstance(self.screen, Palette):
            self.push_screen(Palette(providers=[ThemeProvider], placeholder="Search for themes…"))
