"""The model screen: finds, judges, downloads, pauses, deletes and selects models."""

from __future__ import annotations

from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.fuzzy import Matcher
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ..client import AdapterFolder, Catalog, Machine
from ..errors import AppError
from ..sizes import size
from .ask import ConfirmScreen
from .connection import Connection
from .model_rows import Row, bar, facts, rows
from .text import one_line, visible

POLL_SECONDS = 0.5  # seconds between updates of running downloads
TYPING_KEYS = "Enter uses or downloads it · ↓ list: pause, cancel, delete · Esc closes"
LIST_KEYS = "Enter uses or downloads · p pause · c cancel · x delete · / filter · Esc"


class Models(OptionList):
    """The list of models, with single-letter keys."""

    BINDINGS = [
        Binding("d", "screen.download", "Download"),
        Binding("p", "screen.pause", "Pause or resume"),
        Binding("c", "screen.cancel", "Cancel"),
        Binding("x,delete", "screen.delete", "Delete"),
        Binding("slash", "screen.filter", "Filter"),
    ]


class ModelScreen(ModalScreen[str | None]):
    """Lists the models. Returns the id of the selected model, or None if the user cancels."""

    BINDINGS = [("escape,f2", "dismiss(None)", "Close")]

    def __init__(self, connection: Connection, current: str) -> None:
        super().__init__()
        self._connection = connection
        self._current = current
        self._catalog = Catalog(machine=Machine(), offers=[])
        self._folders: list[AdapterFolder] = []
        self._rows: list[Row] = []
        self._active: set[str] = set()  # names of the downloads that ran at the last update

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("Models", classes="dialog-title", markup=False)
            line = Input(placeholder="filter, or org/repo to download")
            line.cursor_blink = False
            yield line
            yield Models(markup=False)
            yield Static("", id="notice", markup=False)
            yield Static(TYPING_KEYS, classes="keys")

    def on_mount(self) -> None:
        self._fill(self._current)
        self._refresh()
        self.set_interval(POLL_SECONDS, self._poll)

    @work(exclusive=True, group="refresh")
    async def _refresh(self, highlighted: str = "") -> None:
        """Ask the daemon for all lists. The catalog is last: the first time, the daemon measures the machine for it."""
        try:
            await self._connection.refresh()
            self._folders = await self._connection.adapter_folders()
            await self._connection.refresh_downloads()
            self._active = self._active_downloads()
            self._fill(highlighted)
            self._catalog = await self._connection.catalog()
        except AppError as error:
            self._say_error(error)
        self._show_machine()
        self._fill(highlighted)

    def _poll(self) -> None:
        if self._active:
            self._update_downloads()

    @work(exclusive=True, group="poll")
    async def _update_downloads(self) -> None:
        """Show the progress of the downloads. A download that has ended changes the list of models."""
        before = self._active
        try:
            jobs = await self._connection.refresh_downloads()
        except AppError as error:
            self._say_error(error)
            return
        self._active = self._active_downloads()
        complete = [job.model for job in jobs if job.name in before and job.state == "done"]
        if complete:
            self._say(f"{', '.join(complete)}: downloaded. Enter uses the highlighted model.")
        if before - self._active:
            self._refresh(complete[0] if complete else "")
        else:
            self._fill()

    def _active_downloads(self) -> set[str]:
        return {job.name for job in self._connection.downloads if job.state not in ("done", "failed", "cancelled")}

    def _show_machine(self) -> None:
        machine = self._catalog.machine
        if machine.memory:
            text = f"Models · {one_line(machine.device, 40)} ({machine.backend}), {size(machine.free)} free"
            self.query_one(".dialog-title", Static).update(text)

    def _fill(self, highlighted: str = "") -> None:
        """Show the rows that match the filter. The highlight stays on its row, or goes to `highlighted`."""
        models = self.query_one(Models)
        row = self._highlighted()
        kept = highlighted or (row.key if row else "")
        query = self.query_one(Input).value.strip()
        matcher = Matcher(query)
        listed = rows(self._connection.entries, self._catalog, self._connection.downloads, self._folders)
        self._rows = self._matching(listed, query, matcher) if query else listed
        models.clear_options()
        models.add_options([Option(self._text(row, matcher if query else None)) for row in self._rows])
        keys = [row.key for row in self._rows]
        if keys:
            models.highlighted = keys.index(kept) if kept in keys else 0

    def _matching(self, listed: list[Row], query: str, matcher: Matcher) -> list[Row]:
        """The rows that match, best first. A name that no row has can be downloaded."""
        matches = sorted(
            (row for row in listed if matcher.match(row.key) > 0), key=lambda row: matcher.match(row.key), reverse=True
        )
        if "/" in query and all(row.key.lower() != query.lower() for row in matches):
            matches.append(Row(query))
        return matches

    def _text(self, row: Row, matcher: Matcher | None) -> Content:
        name = visible(row.key)
        title = matcher.highlight(name) if matcher else Content(name)
        mark = "● " if row.key == self._current else "  "
        lines = [Content.assemble(mark, title), Content.styled(f"    {self._facts(row)}", "dim")]
        if row.job is not None and (progress := bar(row.job)):
            lines.append(Content(f"    {progress}"))
        if row.adapters:
            names = ", ".join(one_line(adapter, 30) for adapter in row.adapters[:4])
            lines.append(Content.styled(f"    adapters (F5): {names}", "dim"))
        return Content("\n").join(lines)

    def _facts(self, row: Row) -> str:
        return facts(row, self._catalog.machine, self._connection.running(row.key))

    def _highlighted(self) -> Row | None:
        index = self.query_one(Models).highlighted
        if index is None or index >= len(self._rows):
            return None
        return self._rows[index]

    @on(Input.Changed)
    def _filter(self) -> None:
        self.query_one(Models).highlighted = None
        self._fill()

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _use(self) -> None:
        """Select a complete model on this machine; download another one."""
        row = self._highlighted()
        if row is None:
            return
        if row.is_usable:
            self.dismiss(row.key)
        else:
            self.action_download()

    def on_key(self, event: events.Key) -> None:
        if event.key == "down" and isinstance(self.focused, Input):
            event.stop()
            self.query_one(Models).focus()

    def on_descendant_focus(self) -> None:
        self.query_one(".keys", Static).update(TYPING_KEYS if isinstance(self.focused, Input) else LIST_KEYS)

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    @work
    async def action_download(self) -> None:
        row = self._highlighted()
        if row is None:
            return
        if row.is_usable:
            self._say("This model is on this machine already. Enter uses it.")
            return
        if row.downloads:
            self._say("This download runs already; p pauses it.")
            return
        try:
            await self._connection.download(row.key)
        except AppError as error:
            self._say_error(error)
            return
        self._say(f"Downloading {row.key}. The download goes on if you close this screen or localllm.")
        self._active = self._active_downloads()
        self._fill()

    def action_pause(self) -> None:
        row = self._highlighted()
        is_paused = row is not None and row.job is not None and row.job.state == "paused"
        self._change("resume" if is_paused else "pause")

    def action_cancel(self) -> None:
        self._change("cancel")

    @work
    async def _change(self, action: str) -> None:
        row = self._highlighted()
        if row is None or not row.downloads:
            self._say("The highlighted model is not being downloaded.")
            return
        try:
            await self._connection.change_download(row.key, action)
            self._say("")
        except AppError as error:
            self._say_error(error)
        self._fill()

    @work
    async def action_delete(self) -> None:
        row = self._highlighted()
        if row is None or row.entry is None:
            self._say("The highlighted model is not on this machine.")
            return
        if row.entry.bundled or row.key == self._current:
            reason = "built in" if row.entry.bundled else "in use"
            self._say(f"{row.key} is {reason}, so it cannot be deleted here.")
            return
        question = f"Delete {row.key} and free {size(row.entry.size)}?"
        if not await self.app.push_screen_wait(ConfirmScreen(question)):
            return
        try:
            await self._connection.delete(row.key)
        except AppError as error:
            self._say_error(error)
            return
        self._say(f"Deleted {row.key}.")
        self._refresh()

    def _say_error(self, error: AppError) -> None:
        self._say(f"{error.message[0].upper()}{error.message[1:]}. {error.hint}".strip())

    def _say(self, words: str) -> None:
        self.query_one("#notice", Static).update(visible(words))
