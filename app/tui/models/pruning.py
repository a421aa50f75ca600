"""The dialog that lists files that no model uses, and deletes them after a confirmation."""

from __future__ import annotations

from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from ...client import Pruning, UnusedFiles
from ...sizes import size
from ..connection import Connection
from ..dialog import Dialog
from ..text import one_line

MAX_ROWS = 200


class PruneScreen(Dialog[int | None]):
    """Shows the unused files. Returns the freed bytes, or None if nothing was deleted."""

    BINDINGS = [("escape,n", "dismiss(None)", "Close"), ("y", "delete", "Delete"), ("a", "everything", "All files")]

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._everything = False  # include files that changed in the last 24 hours
        self._unused: Pruning | None = None
        self._is_deleting = False

    def compose(self) -> ComposeResult:
        yield self.frame("Unused files", VerticalScroll(Static("", id="files", markup=False)))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self._find()

    def action_everything(self) -> None:
        if self._is_deleting:
            return
        self._everything = not self._everything
        self._find()

    @work(exclusive=True, exit_on_error=False)
    async def _find(self) -> None:
        """List the files. Deletes nothing."""
        self._unused = None
        self.say("Looking for unused files…")
        everything = self._everything
        self._unused = pruning = await self._connection.call(lambda client: client.prune(everything=everything))
        rows = [_text(files) for files in pruning.unused[:MAX_ROWS]]
        if len(pruning.unused) > MAX_ROWS:
            rows.append(f"and {len(pruning.unused) - MAX_ROWS} more")
        self.query_one("#files", Static).update("\n".join(rows))
        self.say(self._question(pruning))
        self.show_keys(self._keys(pruning))

    def _question(self, pruning: Pruning) -> str:
        if pruning.unused:
            return f"Delete {len(pruning.unused)} unused files and free {size(pruning.bytes)}?"
        return "Every file is used." if self._everything else "Every file older than 24 hours is used."

    def _keys(self, pruning: Pruning) -> str:
        answer = "y deletes them · n keeps them" if pruning.unused else "Esc closes"
        toggle = "without the last 24 hours" if self._everything else "with files of the last 24 hours"
        return f"{answer} · a {toggle}"

    @work(group="delete", exit_on_error=False)
    async def action_delete(self) -> None:
        if self._is_deleting or self._unused is None or not self._unused.unused:
            return
        self._is_deleting = True
        self.say("Deleting…")
        everything = self._everything
        try:
            result = await self._connection.call(lambda client: client.prune(dry_run=False, everything=everything))
            self.dismiss(result.freed)
        finally:
            self._is_deleting = False


def _text(files: UnusedFiles) -> str:
    kind = "file that no model uses"
    if files.kind == "partial":
        kind = "unfinished download, can be continued" if files.resumable else "unfinished download"
    return f"{size(files.disk_bytes):>10}  {one_line(files.repo, 50)}  {kind}"
