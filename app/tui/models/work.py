"""The dialogs of long operations: on files, with a progress bar, and the installation of llama.cpp."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic

from textual import work
from textual.app import ComposeResult
from textual.widgets import Static
from textual.worker import Worker

from ...client import FileProgress, InstallProgress
from ...errors import AppError
from ...sizes import size
from ..connection import Connection
from ..dialog import Dialog, Result
from ..text import clean, explain, joined, one_line, visible
from .facts import bar_text, duration

OnFile = Callable[[FileProgress], None]
LINES = 8  # number of lines of the output that are shown
WIDTH = 84  # characters of a line


class WorkScreen(Dialog[Result | AppError | None], Generic[Result]):
    """Runs an operation. Returns its result, the AppError that ended it, or None if the user cancels."""

    BINDINGS = [("escape", "cancel", "Cancel")]

    def __init__(self, title: str, operation: Callable[[OnFile], Awaitable[Result]]) -> None:
        """`operation` gets a callback for its progress."""
        super().__init__()
        self._title = title
        self._operation = operation
        self._worker: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        progress = Static("", id="progress", markup=False)
        yield self.frame(one_line(self._title), progress, keys="Esc cancels", is_wide=False)

    def on_mount(self) -> None:
        self._worker = self._run()

    @work
    async def _run(self) -> None:
        try:
            self.dismiss(await self._operation(self._show))
        except AppError as error:
            self.dismiss(error)

    def _show(self, progress: FileProgress) -> None:
        share = f"{size(progress.done)} of {size(progress.total)}"
        text = f"{bar_text(progress.done, progress.total)}  {share}\n{one_line(progress.file, 54)}"
        self.query_one("#progress", Static).update(text)

    def action_cancel(self) -> None:
        """Cancel the operation: the daemon stops it when the connection closes."""
        if self._worker is not None:
            self._worker.cancel()
        self.dismiss(None)


class InstallScreen(Dialog[bool]):
    """Installs llama.cpp. Returns True if it is installed. After an error, the screen stays open."""

    BINDINGS = [("escape", "cancel", "Cancel")]

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._worker: Worker[None] | None = None
        self._start = time.monotonic()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._progress = InstallProgress("")

    def compose(self) -> ComposeResult:
        body = [Static("", id=id, markup=False) for id in ("progress", "output")]
        yield self.frame("Installing llama.cpp", *body, keys="Esc cancels")

    def on_mount(self) -> None:
        self._worker = self._run()
        self.set_interval(1.0, self._show)
        self._show()

    @work
    async def _run(self) -> None:
        try:
            await self._connection.call(lambda client: client.install_llamacpp(on_progress=self._add))
        except AppError as error:
            self._end(error)
            return
        self.dismiss(True)

    def _add(self, progress: InstallProgress) -> None:
        """Show a line of the output. The step of the compiler stays until the next one."""
        self._lines.append(progress.line)
        if progress.total:
            self._progress = progress
        self._show()

    def _show(self) -> None:
        if self._worker is None or not self._worker.is_running:
            return
        done, total = self._progress.done, self._progress.total
        step = f"{bar_text(done, total)}  step {done} of {total}" if total else "preparing"
        self.query_one("#progress", Static).update(joined([step, duration(time.monotonic() - self._start)]))
        self.query_one("#output", Static).update("\n".join(one_line(line, WIDTH) for line in self._lines))

    def _end(self, error: AppError) -> None:
        """Show the error, with the last lines of the output."""
        self.query_one("#progress", Static).update("")
        if error.hint:
            self.query_one("#output", Static).update(visible(clean(error.hint)))
        self.say(explain(type(error)(error.message)))
        self.show_keys("Esc closes")

    def action_cancel(self) -> None:
        """Cancel the installation: the daemon ends it when the connection closes."""
        if self._worker is not None:
            self._worker.cancel()
        self.dismiss(False)
