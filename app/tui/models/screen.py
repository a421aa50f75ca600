"""The model screen: finds, judges, downloads, pauses, deletes and selects models."""

from __future__ import annotations

from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from ...client import AdapterFolder, Catalog, Machine
from ...errors import AppError
from ...sizes import size
from ..connection import Connection
from ..text import one_line, visible
from . import actions
from .keys import keys
from .listing import ModelList
from .rows import ENDED, Row, matching, rows

POLL_SECONDS = 0.5  # seconds between updates of running downloads


class ModelScreen(ModalScreen[str | None]):
    """Lists the models. Returns the id of the selected model, or None if the user cancels."""

    BINDINGS = [("escape,f2", "dismiss(None)", "Close")]

    def __init__(self, connection: Connection, current: str) -> None:
        """`current`: id of the model of the conversation."""
        super().__init__()
        self.connection = connection
        self.current = current
        self._catalog = Catalog(machine=Machine(), offers=[])
        self._folders: list[AdapterFolder] = []
        self._active: set[str] = set()  # names of the downloads that ran at the last update

    @property
    def row(self) -> Row | None:
        """The highlighted row."""
        return self.query_one(ModelList).row

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("Models", classes="dialog-title", markup=False)
            line = Input(placeholder="filter, or org/repo to download")
            line.cursor_blink = False
            yield line
            yield ModelList(self.current)
            yield Static("", id="notice", markup=False)
            yield Static("", classes="keys", markup=False)

    def on_mount(self) -> None:
        self.fill(self.current)
        self.refresh_lists()
        self.set_interval(POLL_SECONDS, self._poll)

    # Section: lists of the daemon

    @work(exclusive=True, group="refresh")
    async def refresh_lists(self, highlighted: str = "") -> None:
        """Ask the daemon for all lists. The catalog is last: the first time, the daemon measures the machine for it."""
        try:
            await self.connection.refresh()
            self._folders = await self.connection.adapter_folders()
            await self.connection.refresh_downloads()
            self.watch_downloads(highlighted)
            self._catalog = await self.connection.catalog()
        except AppError as error:
            self.say_error(error)
        self._show_machine()
        self.fill(highlighted)

    def watch_downloads(self, highlighted: str = "") -> None:
        """Show the downloads, and update them while one runs."""
        self._active = {job.name for job in self.connection.downloads if job.state not in ENDED}
        self.fill(highlighted)

    def _poll(self) -> None:
        if self._active:
            self._update_downloads()

    @work(exclusive=True, group="poll")
    async def _update_downloads(self) -> None:
        """Show the progress of the downloads. A download that has ended changes the list of models."""
        before = self._active
        try:
            jobs = await self.connection.refresh_downloads()
        except AppError as error:
            self.say_error(error)
            return
        self.watch_downloads()
        complete = [job.model for job in jobs if job.name in before and job.state == "done"]
        if complete:
            self.say(f"{', '.join(complete)}: downloaded. Enter uses the highlighted model.")
        if before - self._active:
            self.refresh_lists(complete[0] if complete else "")

    def _show_machine(self) -> None:
        machine = self._catalog.machine
        if machine.memory:
            text = f"Models · {one_line(machine.device, 40)} ({machine.backend}), {size(machine.free)} free"
            self.query_one(".dialog-title", Static).update(text)

    # Section: the list

    def fill(self, highlighted: str = "") -> None:
        """Show the rows that match the filter. The highlight stays on its row, or goes to `highlighted`."""
        connection = self.connection
        listed = rows(connection.entries, self._catalog, connection.downloads, self._folders)
        typed = self.query_one(Input).value.strip()
        if typed:
            listed = matching(listed, typed)
        machine = self._catalog.machine
        self.query_one(ModelList).show(listed, machine, connection.loaded, filter=typed, highlighted=highlighted)
        self._show_keys()

    @on(Input.Changed)
    def _filter(self) -> None:
        self.query_one(ModelList).highlighted = None
        self.fill()

    @on(OptionList.OptionHighlighted)
    def _show_keys(self) -> None:
        self.query_one(".keys", Static).update(keys(self.row))

    def on_key(self, event: events.Key) -> None:
        if event.key == "down" and isinstance(self.focused, Input):
            event.stop()
            self.query_one(ModelList).focus()

    def action_filter(self) -> None:
        self.query_one(Input).focus()

    # Section: actions

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _use(self) -> None:
        self.action_run("use")

    @work
    async def action_run(self, name: str) -> None:
        """Run the action of a key on the highlighted row, and show its error."""
        try:
            await actions.run(self, name)
        except AppError as error:
            self.say_error(error)

    def say_error(self, error: AppError) -> None:
        self.say(f"{error.message[0].upper()}{error.message[1:]}. {error.hint}".strip())

    def say(self, words: str) -> None:
        self.query_one("#notice", Static).update(visible(words))
