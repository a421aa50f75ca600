"""The history screen: search, resume, rename, delete and undo."""

from __future__ import annotations

import time

from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import Input, OptionList
from textual.widgets.option_list import Option

from ..ask import AskScreen
from ..conversation import Conversation
from ..dialog import Dialog, ask
from ..filtered import FilteredList, FilterLine
from ..text import one_line
from .recorder import Recorder
from .store import Entry

KEYS = "Enter opens · type to search · Ctrl+D delete · Ctrl+U undo · Ctrl+R rename · Esc closes"


class Conversations(FilteredList):
    """The list of conversations."""

    BINDINGS = [("delete", "screen.delete", "Delete")]


class HistoryScreen(Dialog[str | None]):
    """Lists earlier conversations. Returns the id of the one to resume, or None."""

    BINDINGS = [
        ("escape,f3", "dismiss(None)", "Close"),
        Binding("ctrl+d", "delete", "Delete", priority=True),
        Binding("ctrl+u", "undo", "Undo", priority=True),
        Binding("ctrl+r", "rename", "Rename", priority=True),
    ]

    def __init__(self, recorder: Recorder, current: Conversation, words: str = "") -> None:
        super().__init__()
        self._recorder = recorder
        self._current = current
        self._words = words
        self._entries: list[Entry] = []
        self._deleted: list[str] = []

    def compose(self) -> ComposeResult:
        line = FilterLine(self._words, placeholder="search all messages")
        yield self.frame("Earlier conversations", line, Conversations(markup=False), keys=KEYS)

    def on_mount(self) -> None:
        self._fill(self._words)

    @work(exclusive=True, group="fill", exit_on_error=False)
    async def _fill(self, words: str, highlighted: int = 0, notice: str = "") -> None:
        """Search and fill the list. Shows `notice`, or the reason why the list is empty."""
        self._entries = await self._recorder.list(words)
        conversations = self.query_one(Conversations)
        conversations.set_options([Option(self._row(entry), entry.id) for entry in self._entries])
        empty = "No message or title contains all of these words." if words else "No conversations yet."
        if self._entries:
            conversations.highlighted = min(highlighted, len(self._entries) - 1)
            empty = ""
        self.say(notice or empty)

    def _fill_again(self, notice: str = "") -> None:
        """Search again. The highlight stays at its place."""
        self._fill(self.query_one(FilterLine).value, self.query_one(Conversations).highlighted or 0, notice)

    def _row(self, entry: Entry) -> Content:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.updated))
        title = one_line(entry.title or "untitled", 48)
        row = Content.assemble((when, "dim"), "  ", title, (f"  {one_line(entry.model, 24)} · {entry.messages}", "dim"))
        if not entry.excerpt:
            return row
        indentation = " " * (len(when) + 2)
        return Content.assemble(row, "\n", (indentation + entry.excerpt, "dim italic"))

    @on(Input.Changed)
    def _search(self, event: Input.Changed) -> None:
        self._fill(event.value)

    @on(Input.Submitted)
    def _open_first(self) -> None:
        if (entry := self._highlighted()) is not None:
            self.dismiss(entry.id)

    @on(OptionList.OptionSelected)
    def _open(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option_id)

    @work(exit_on_error=False)
    async def action_delete(self) -> None:
        if (entry := self._highlighted()) is None:
            return
        if entry.id == self._current.id:
            self.say("This conversation is open. Close it with /new, then delete it.")
            return
        await self._recorder.delete(entry.id)
        if entry.id not in self._deleted:
            self._deleted.append(entry.id)
        self._fill_again(f"Deleted “{one_line(entry.title, 30)}”. Ctrl+U restores it for one day.")

    @work(exit_on_error=False)
    async def action_undo(self) -> None:
        if not self._deleted:
            self.say("There is nothing to restore.")
            return
        await self._recorder.restore(self._deleted[-1])
        self._deleted.pop()
        self._fill(self.query_one(FilterLine).value, notice="Restored.")

    @work(exit_on_error=False)
    async def action_rename(self) -> None:
        if (entry := self._highlighted()) is None:
            return
        title = await ask(self, AskScreen("New title", entry.title))
        if not title:
            return
        await self._recorder.rename(entry.id, one_line(title))
        if entry.id == self._current.id:
            self._current.title = one_line(title)
        self._fill_again()

    def _highlighted(self) -> Entry | None:
        index = self.query_one(Conversations).highlighted
        return None if index is None or index >= len(self._entries) else self._entries[index]
