"""The dialog that lists the models, with a filter."""

from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.fuzzy import Matcher
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ..client import ModelEntry
from ..errors import AppError
from ..sizes import size
from .connection import Connection
from .text import visible


class ModelScreen(ModalScreen[str | None]):
    """Lists the models. Returns the id of the selected model, or None if the user cancels."""

    BINDINGS = [
        ("escape", "dismiss(None)", "Close"),
        ("down", "move('down')", "Next"),
        ("up", "move('up')", "Previous"),
    ]

    def __init__(self, connection: Connection, current: str) -> None:
        super().__init__()
        self._connection = connection
        self._current = current

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog wide"):
            yield Static("Models on this machine", classes="dialog-title")
            line = Input(placeholder="type to filter")
            line.cursor_blink = False
            yield line
            yield OptionList(markup=False)
            yield Static("", id="notice", markup=False)
            yield Static("Enter selects · Esc closes · more models: localllm pull org/repo", classes="keys")

    def on_mount(self) -> None:
        self._fill("")
        self._load_entries()

    @work
    async def _load_entries(self) -> None:
        try:
            await self._connection.refresh()
        except AppError as error:
            self.query_one("#notice", Static).update(f"{error.message} {error.hint}".strip())
        self._fill(self.query_one(Input).value)

    def _fill(self, query: str) -> None:
        models = self.query_one(OptionList)
        models.clear_options()
        matcher = Matcher(query)
        entries = self._matching(matcher) if query else self._connection.entries
        for entry in entries:
            name = visible(entry.id)
            title = matcher.highlight(name) if query else Content(name)
            models.add_option(Option(Content.assemble(title, "\n  ", self._facts(entry)), entry.id))
        ids = [entry.id for entry in entries]
        if not query and self._current in ids:
            models.highlighted = ids.index(self._current)
        elif ids:
            models.highlighted = 0

    def _matching(self, matcher: Matcher) -> list[ModelEntry]:
        """The models that match, best first."""
        entries = [entry for entry in self._connection.entries if matcher.match(entry.id) > 0]
        return sorted(entries, key=lambda entry: matcher.match(entry.id), reverse=True)

    def _facts(self, entry: ModelEntry) -> Content:
        facts = []
        if running := self._connection.running(entry.id):
            facts.append(f"loaded, {running.backend}")
        elif entry.loaded:
            facts.append("loaded")
        if entry.bundled:
            facts.append("built-in, tiny")
        if entry.size:
            facts.append(size(entry.size))
        if entry.context:
            facts.append(f"{entry.context:,} tokens")
        return Content.styled(" · ".join(facts), "dim")

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        self._fill(event.value)

    @on(Input.Submitted)
    def _dismiss_highlighted(self) -> None:
        models = self.query_one(OptionList)
        if models.highlighted is not None:
            self.dismiss(models.get_option_at_index(models.highlighted).id)

    @on(OptionList.OptionSelected)
    def _dismiss_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    def action_move(self, direction: str) -> None:
        models = self.query_one(OptionList)
        if direction == "down":
            models.action_cursor_down()
        else:
            models.action_cursor_up()
