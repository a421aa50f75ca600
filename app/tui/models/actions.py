"""What the keys of the model screen do. Each action gets the screen and works on its highlighted row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from ...sizes import size
from ..ask import ConfirmScreen

if TYPE_CHECKING:
    from .rows import Row
    from .screen import ModelScreen

Action = Callable[["ModelScreen", "Row"], Awaitable[None]]


async def run(screen: ModelScreen, name: str) -> None:
    """Run the action of a key. Raises AppError."""
    row = screen.row
    if row is not None:
        await _ACTIONS[name](screen, row)


async def _use(screen: ModelScreen, row: Row) -> None:
    """Select a complete model on this machine; download another one."""
    if row.is_usable:
        screen.dismiss(row.key)
    else:
        await _download(screen, row)


async def _download(screen: ModelScreen, row: Row) -> None:
    if row.is_usable:
        screen.say("This model is on this machine already. Enter uses it.")
        return
    if row.downloads:
        screen.say("This download runs already; p pauses it.")
        return
    await screen.connection.download(row.key)
    screen.say(f"Downloading {row.key}. The download goes on if you close this screen or localllm.")
    screen.watch_downloads()


async def _pause(screen: ModelScreen, row: Row) -> None:
    is_paused = row.job is not None and row.job.state == "paused"
    await _change(screen, row, "resume" if is_paused else "pause")


async def _cancel(screen: ModelScreen, row: Row) -> None:
    await _change(screen, row, "cancel")


async def _change(screen: ModelScreen, row: Row, action: str) -> None:
    if not row.downloads:
        screen.say("The highlighted model is not being downloaded.")
        return
    await screen.connection.change_download(row.key, action)
    screen.say("")
    screen.fill()


async def _delete(screen: ModelScreen, row: Row) -> None:
    if row.entry is None:
        screen.say("The highlighted model is not on this machine.")
        return
    if row.entry.bundled or row.key == screen.current:
        reason = "built in" if row.entry.bundled else "in use"
        screen.say(f"{row.key} is {reason}, so it cannot be deleted here.")
        return
    question = f"Delete {row.key} and free {size(row.entry.size)}?"
    if not await screen.app.push_screen_wait(ConfirmScreen(question)):
        return
    await screen.connection.delete(row.key)
    screen.say(f"Deleted {row.key}.")
    screen.refresh_lists()


_ACTIONS: dict[str, Action] = {
    "use": _use,
    "download": _download,
    "pause": _pause,
    "cancel": _cancel,
    "delete": _delete,
}
