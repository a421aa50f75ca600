"""The dialog of a long operation on files, with a progress bar."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Generic

from textual import work
from textual.app import ComposeResult
from textual.widgets import Static
from textual.worker import Worker

from ...client import FileProgress
from ...errors import AppError
from ...sizes import size
from ..dialog import Dialog, Result
from ..text import one_line
from .facts import bar_text

OnFile = Callable[[FileProgress], None]


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
