"""The detail screen of a model: provenance and files of a local model, the inspection of another one, and the fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from ..connection import Connection
from ..dialog import Dialog
from ..text import explain, one_line
from . import describe
from .assessment import Assessment, assess, refusal
from .describe import Line
from .rows import Row

Choice = Literal["use", "download"]
MODELS = ("model", "gguf")  # kinds of files that a backend loads
COMPUTING = "Computing the memory that it needs…"
MAX_TEXT = 500  # characters of one line


class DetailScreen(Dialog[Choice | None]):
    """Shows the facts about the model of a row. Returns the action that the user selects, or None."""

    BINDINGS = [("escape,i,q", "dismiss(None)", "Close"), ("enter", "choose", "Use or download")]

    def __init__(
        self, connection: Connection, row: Row, assessment: Assessment | None, keep: Callable[[Assessment], None]
    ) -> None:
        """`assessment` of a model that is not on this machine; None: the screen assesses it, and `keep` gets it."""
        super().__init__()
        self._assessment = assessment
        self._connection = connection
        self._row = row
        self._keep = keep
        self._is_inspected = False  # True if the lines of the inspection are shown
        self._refused = False  # True if no backend of this machine runs the model
        self._lines: list[Line] = []

    def compose(self) -> ComposeResult:
        yield self.frame(one_line(self._row.name, 80), VerticalScroll(Static("", id="facts", markup=False)))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self._show_keys()
        self._load()

    def _show_keys(self) -> None:
        self.show_keys(f"{self._enter()}↑ ↓ scroll · Esc closes")

    def _enter(self) -> str:
        if self._row.is_usable:
            return "Enter uses it · "
        is_impossible = self._row.folder is not None or self._row.downloads or self._refused
        return "" if is_impossible else "Enter downloads it · "

    def action_choose(self) -> None:
        if self._enter():
            self.dismiss("use" if self._row.is_usable else "download")

    @work(exit_on_error=False)
    async def _load(self) -> None:
        """Show the facts as they arrive. The fit is last: it takes seconds."""
        self.say("Reading the facts…")
        if self._row.is_usable or self._row.folder is not None:
            await self._show_local()
        else:
            await self._show_remote()

    async def _show_local(self) -> None:
        name = self._row.name
        facts = await self._connection.call(lambda client: client.show(name))
        self._add(describe.stored(facts))
        if self._row.folder is not None:
            self._add(describe.adapter(self._row.folder))
        if facts.kind in MODELS:
            self._add(describe.loaded(self._connection.running(name)))
            self._add(describe.titled("adapters", [folder.id for folder in self._row.adapters]))
        self._add(describe.files(facts))
        if facts.kind in MODELS:
            self.say(COMPUTING)
            self._add(describe.fitted(await self._connection.call(lambda client: client.fit(name))))
        self.say("")

    async def _show_remote(self) -> None:
        row, job, assessment = self._row, self._row.job, self._assessment
        if row.entry is not None:
            self._add([("problem", row.entry.problem or "")])
        if job is not None:
            self._add(
                [("download", f"failed: {job.error}. {job.hint}" if row.failed else ""), ("warning", job.warning)]
            )
        if assessment is not None and assessment.is_complete and assessment.error is None:
            self._show_assessment(assessment)
        else:
            await assess(self._connection, row.name, self._keep_and_show)

    def _keep_and_show(self, assessment: Assessment) -> None:
        self._keep(assessment)
        self._show_assessment(assessment)

    def _show_assessment(self, assessment: Assessment) -> None:
        """Show an inspection, and the fit if it is complete."""
        inspection = assessment.inspection
        if inspection is not None and not self._is_inspected:
            self._is_inspected = True
            self._add(describe.inspected(inspection))
            self._refused = self._row.entry is None and bool(refusal(inspection))
            self._show_keys()
        self._add(describe.fitted(assessment.fits))
        if assessment.error is not None:
            self.say(explain(assessment.error))
        else:
            self.say("" if assessment.is_complete else COMPUTING)

    def _add(self, lines: Sequence[Line]) -> None:
        self._lines += [line for line in lines if line[1]]
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for title, text in self._lines:
            table.add_row(Text(title, style="bold"), Text(one_line(text, MAX_TEXT)))
        self.query_one("#facts", Static).update(table)
