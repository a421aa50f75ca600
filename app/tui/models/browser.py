"""The lists of the model screen: models, downloads and results of the hub, with a filter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Input, OptionList, Static
from textual.worker import Worker

from ...client import need_llamacpp
from ...errors import AppError
from ...sizes import size
from ..connection import Connection
from ..dialog import MAX_NOTICE, Result, ask
from ..filtered import FilterLine
from ..text import explain, joined, one_line
from .assessment import Assessment, assess, verdict
from .keys import keys
from .listing import ModelList
from .rows import ENDED, HubResults, Lists, Row, matching, rows

POLL_SECONDS = 0.5  # seconds between updates of running downloads
INSPECT_SECONDS = 0.6  # time for which a result of the hub is highlighted before it is inspected
MAX_RESULTS = 20


@dataclass(frozen=True)
class ModelChoice:
    """The model that the user selects, and the adapter; empty: none is selected."""

    model: str
    adapter: str = ""


class Browser(Vertical):
    """The list of models, with a title, a filter, a notice and the keys of the highlighted row."""

    class Chosen(Message):
        """The user has selected a model."""

        def __init__(self, choice: ModelChoice) -> None:
            super().__init__()
            self.choice = choice

    def __init__(self, connection: Connection, current: str) -> None:
        """`current`: id of the model of the conversation."""
        super().__init__(classes="dialog wide")
        self.connection = connection
        self.current = current
        self.assessments: dict[str, Assessment] = {}
        self._lists = Lists()
        self._active: set[str] = set()  # names of the downloads that ran at the last update
        self._results = HubResults()
        self._inspected = ""  # name of the result that is inspected now
        self._inspection: Timer | None = None
        self._update: Worker[None] | None = None  # updates the list of downloads

    @property
    def row(self) -> Row | None:
        """The highlighted row."""
        return self.query_one(ModelList).row

    @property
    def typed(self) -> str:
        return self.query_one(FilterLine).value.strip()

    def compose(self) -> ComposeResult:
        yield Static("Models", classes="dialog-title", markup=False)
        yield FilterLine(placeholder="type to filter, to search the hub, an org/repo, or a folder")
        yield ModelList(self.current)
        yield Static("", id="missing", markup=False)
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
        connection = self.connection
        try:
            await connection.refresh()
            folders = await connection.adapter_folders()
            aliases = await connection.call(lambda client: client.aliases())
            self._lists = replace(self._lists, folders=folders, aliases=aliases)
            await connection.refresh_downloads()
            self.watch_downloads(highlighted)
            if not self._lists.catalog.machine.memory:
                self._show_title("measuring this machine…")
            self._lists = replace(self._lists, catalog=await connection.catalog())
        except AppError as error:
            self.say(explain(error))
        self._show_machine()
        self.fill(highlighted)

    def watch_downloads(self, highlighted: str = "", *, started: str = "") -> None:
        """Show the downloads, and update them while one runs.

        `started`: name of a download that has just started. The next update reports its end, even if it has ended.
        """
        self._active = {job.name for job in self.connection.downloads if job.state not in ENDED}
        if started:
            self._active.add(started)
        self.fill(highlighted)

    def _poll(self) -> None:
        is_updating = self._update is not None and self._update.is_running
        if self._active and not is_updating:
            self._update = self._update_downloads()

    @work(group="poll")
    async def _update_downloads(self) -> None:
        """Show the progress of the downloads. A download that has ended changes the list of models."""
        before = self._active
        try:
            jobs = await self.connection.refresh_downloads()
        except AppError as error:
            self.say(explain(error))
            return
        self.watch_downloads()
        for job in jobs:
            if job.name in before and job.state == "failed":
                self.say(f"{job.name}: {job.error}. {job.hint}")
        complete = [job.model for job in jobs if job.name in before and job.state == "done"]
        if complete:
            self.say(f"{', '.join(complete)}: downloaded. Enter uses the highlighted model.")
        if before - self._active:
            self.refresh_lists(complete[0] if complete else "")

    def _show_machine(self) -> None:
        machine = self._lists.catalog.machine
        text = f"{one_line(machine.device, 40)} ({machine.backend}), {size(machine.free)} free"
        self._show_title(text if machine.memory else "")

    def _show_title(self, text: str) -> None:
        self.query_one(".dialog-title", Static).update(joined(["Models", text]))

    # Section: the list

    def fill(self, highlighted: str = "") -> None:
        """Show the rows that match the filter. The highlight stays on its row, or goes to `highlighted`."""
        connection = self.connection
        lists = replace(self._lists, entries=connection.entries, jobs=connection.downloads)
        listed = rows(lists)
        typed = self.typed
        if typed:
            verdicts = {self._inspected: "inspecting…"}  # until the inspection arrives
            verdicts |= {name: verdict(assessment) for name, assessment in self.assessments.items()}
            listed = matching(listed, typed, self._results, verdicts)
        machine = lists.catalog.machine
        self.query_one(ModelList).show(listed, machine, connection.loaded, filter=typed, highlighted=highlighted)
        self._show_missing()
        self._show_keys()

    def _show_missing(self) -> None:
        """Say how many models need llama.cpp: one line, instead of one for each of them."""
        line = need_llamacpp(entry.install for entry in self.connection.entries)
        missing = self.query_one("#missing", Static)
        missing.display = bool(line)
        missing.update(f"{line} · Ctrl+L installs it")

    @on(Input.Changed)
    def _filter(self) -> None:
        self.query_one(ModelList).highlighted = None
        self.fill()

    def clear_filter(self) -> None:
        self.query_one(FilterLine).value = ""

    @on(OptionList.OptionHighlighted)
    def _highlighted(self) -> None:
        self._show_keys()
        if self._inspection is not None:
            self._inspection.stop()
        self._inspection = self.set_timer(INSPECT_SECONDS, self._inspect)

    def _show_keys(self) -> None:
        self.query_one(".keys", Static).update(keys(self.row))

    # Section: the hub

    async def search(self) -> None:
        """Search the hub for the typed words, and show the results. Raises AppError."""
        text = self.typed
        self.say(f"Searching the hub for “{text}”… Esc cancels.")
        result = await self.connection.call(lambda client: client.search(text, limit=MAX_RESULTS))
        if result.error:
            self.say(f"{result.error[0].upper()}{result.error[1:]}.")
            return
        self._results = HubResults(text, result.hub)
        if not result.hub:
            self.say(f"The hub has no text model with the words “{text}”.")
            self.fill()
            return
        self.say("")
        if self.typed == text:  # otherwise the user types the next words
            self.query_one(ModelList).focus()
            self.fill(result.hub[0].id)

    @work(group="inspect")
    async def _inspect(self) -> None:
        """Inspect the highlighted result of the hub: its row then says whether this machine runs it.

        A running inspection continues when the highlight moves; the result that is highlighted at its end is next.
        """
        if self._inspected:
            return
        while name := self._next_inspection():
            self._inspected = name
            self.fill()
            try:
                await assess(self.connection, name, partial(self.keep_assessment, name))
            finally:
                self._inspected = ""

    def _next_inspection(self) -> str:
        """The name of the highlighted result of the hub; empty if there is none, or if it was inspected."""
        row = self.row
        if row is None or row.kind != "result" or not self.screen.is_current:
            return ""
        assessment = self.assessments.get(row.name)
        return "" if assessment is not None and assessment.is_complete else row.name

    def keep_assessment(self, name: str, assessment: Assessment) -> None:
        """Show the verdict on a model in its row."""
        self.assessments[name] = assessment
        self.fill()

    # Section: the user

    def use(self, row: Row) -> None:
        """Use a model, or an adapter with its base model."""
        adapter = row.name if row.folder is not None else ""
        self.post_message(self.Chosen(ModelChoice(row.base or row.key, adapter)))

    async def ask(self, dialog: Screen[Result]) -> Result:
        """The result of a dialog over the model screen."""
        return await ask(self.screen, dialog)

    def say(self, words: str) -> None:
        self.query_one("#notice", Static).update(one_line(words, MAX_NOTICE))
