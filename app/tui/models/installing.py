"""The dialog that installs llama.cpp: the progress of the compiler, and the last lines of its output."""

from __future__ import annotations

import time
from collections import deque

from textual import work
from textual.app import ComposeResult
from textual.widgets import Static
from textual.worker import Worker

from ...client import InstallProgress
from ...errors import AppError
from ..connection import Connection
from ..dialog import Dialog
from ..text import clean, explain, joined, one_line, visible
from .facts import bar_text, duration

LINES = 8  # of the output
WIDTH = 84  # characters of a line


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
