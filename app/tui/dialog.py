"""Opens and closes screens over the chat, each only once at a time.

A terminal sends keys faster than screens change: a second key can reach a screen that has closed already, or that opens
another screen now. Textual would then close the screen below, or open the same screen twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from textual.await_complete import AwaitComplete
from textual.containers import Vertical
from textual.screen import ModalScreen, Screen
from textual.widget import Widget
from textual.widgets import Static
from textual.worker import Worker, WorkerState

from ..errors import AppError
from .text import explain, one_line

Result = TypeVar("Result")
MAX_NOTICE = 400  # characters


class ClosesOnce(Screen[Result]):
    """A screen that closes with its first result. Under another screen, it closes when that one has closed."""

    _first_result: tuple[Result | None, ...] = ()  # the first one

    def dismiss(self, result: Result | None = None) -> AwaitComplete:
        """Close the screen. Does nothing if it has a result already."""
        if self._first_result:
            return AwaitComplete()
        self._first_result = (result,)
        return self._close_if_on_top()

    def on_screen_resume(self) -> None:
        if self._first_result:
            self._close_if_on_top()

    def _close_if_on_top(self) -> AwaitComplete:
        return super().dismiss(self._first_result[0]) if self.app.screen is self else AwaitComplete()


class Dialog(ModalScreen[Result], ClosesOnce[Result]):
    """A screen over the chat with one result.

    It shows the AppError that ends one of its workers: these have the option `exit_on_error=False`.
    """

    def frame(self, title: str, *body: Widget, keys: str = "", is_wide: bool = True) -> Vertical:
        """The window of the dialog: a title, the body, a notice and the keys."""
        return Vertical(
            Static(title, classes="dialog-title", markup=False),
            *body,
            Static("", id="notice", markup=False),
            Static(keys, classes="keys", markup=False),
            classes="dialog wide" if is_wide else "dialog",
        )

    def say(self, words: str) -> None:
        self.query_one("#notice", Static).update(one_line(words, MAX_NOTICE))

    def show_keys(self, keys: str) -> None:
        self.query_one(".keys", Static).update(keys)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        error = event.worker.error
        if event.state != WorkerState.ERROR or error is None:
            return
        if not isinstance(error, AppError):
            raise error
        self.say(explain(error))


def show(
    screen: Screen[Any], dialog: Screen[Result], use: Callable[[Result | None], Awaitable[None]] | None = None
) -> None:
    """Open a dialog over `screen`, and call `use` with its result.

    If the same dialog is open there, its key was pressed again before the dialog opened: that closes it. Does nothing
    if another screen is open there.
    """
    top = screen.app.screen
    if top is screen:
        screen.app.push_screen(dialog, use)
    elif type(top) is type(dialog):
        top.call_later(top.action_dismiss)  # after the dialog has been mounted


async def ask(screen: Screen[Any], dialog: Screen[Result]) -> Result:
    """The result of a dialog over `screen`, in a worker. Ends the worker if another screen is open there."""
    if screen.app.screen is not screen:
        raise asyncio.CancelledError
    # A cancelled worker does not cancel the dialog.
    return await asyncio.shield(screen.app.push_screen(dialog, wait_for_dismiss=True))


class Work:
    """A coroutine in a worker that can be stopped. Stopping waits for the end of its `finally` blocks.

    Worker.wait raises an error if another key cancels the worker, and a worker that is cancelled before its first step
    runs no `finally` block.
    """

    def __init__(self, owner: Widget, work: Callable[[], Awaitable[None]], group: str) -> None:
        self._begun = asyncio.Event()
        self._ended = asyncio.Event()
        self._work = work
        self._worker = owner.run_worker(self._run(), group=group)

    @property
    def is_running(self) -> bool:
        return not self._ended.is_set()

    async def stop(self) -> None:
        """Cancel the coroutine, and wait until it has ended."""
        await self._begun.wait()
        self._worker.cancel()
        await self._ended.wait()

    async def _run(self) -> None:
        self._begun.set()
        try:
            await self._work()
        finally:
            self._ended.set()
