"""The list of the model screen: rows under headings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from textual.content import Content
from textual.fuzzy import Matcher
from textual.widgets.option_list import Option

from ...client import LoadedModel, Machine
from ..filtered import FilteredList, marked
from ..text import one_line
from .facts import advice, bar, facts
from .rows import HEADINGS, Row, fuzzy

MAX_NAME = 120  # characters


class ModelList(FilteredList):
    """The rows of the model screen. A heading is an option that cannot be highlighted."""

    BINDINGS = [("delete", "screen.run('delete')", "Delete")]

    def __init__(self, current: str) -> None:
        """`current`: id of the model of the conversation."""
        super().__init__(markup=False)
        self._current = current
        self._options_shown: list[tuple[str, Content]] = []
        self._rows: list[Row | None] = []  # one for each option; None: a heading

    @property
    def row(self) -> Row | None:
        """The highlighted row."""
        if self.highlighted is None or self.highlighted >= len(self._rows):
            return None
        return self._rows[self.highlighted]

    def show(
        self,
        rows: Sequence[Row],
        machine: Machine,
        loaded: Sequence[LoadedModel],
        *,
        filter: str = "",
        highlighted: str = "",
    ) -> None:
        """Show rows. Without a filter, each section has a heading.

        `highlighted`: key of the row to highlight; empty: the highlight stays on its row.
        """
        running = {model.id: model for model in loaded}
        matcher = fuzzy(filter) if filter else None
        if not highlighted and self.row is not None:
            highlighted = self.row.key
        self._rows = []
        shown: list[tuple[str, Content]] = []
        for heading, section in groupby(rows, lambda row: "" if filter else _heading(row)):
            if heading:
                self._rows.append(None)
                shown.append((heading, Content.styled(heading, "bold")))
            for row in section:
                self._rows.append(row)
                shown.append((row.key, self._text(row, machine, running.get(row.key), matcher)))
        self._replace(shown)
        self._highlight(highlighted)

    def _replace(self, shown: list[tuple[str, Content]]) -> None:
        """Replace the options. Only texts change if the rows stay the same, so that the list does not scroll."""
        before = self._options_shown
        self._options_shown = shown
        if [key for key, _ in before] == [key for key, _ in shown]:
            for index, (_, text) in enumerate(shown):
                if text != before[index][1]:
                    self.replace_option_prompt_at_index(index, text)
            return
        self.set_options([Option(text, disabled=self._rows[index] is None) for index, (_, text) in enumerate(shown)])

    def _highlight(self, key: str) -> None:
        """Highlight the row with a key or a name, or the first row if there is none."""
        listed = [(index, row) for index, row in enumerate(self._rows) if row is not None]
        matches = [index for index, row in listed if key in (row.key, row.name)]
        if listed:
            self.highlighted = matches[0] if matches else listed[0][0]

    def _text(self, row: Row, machine: Machine, running: LoadedModel | None, matcher: Matcher | None) -> Content:
        details = facts(row, machine, running)
        if row.folder is not None:
            arrow = "    ↳ " if row.base else "  "
            return Content.assemble(arrow, one_line(row.folder.id, MAX_NAME), "  ", (details, "dim"))
        mark = "● " if row.key == self._current else "  "
        texts = ((details, "dim"), (bar(row.job), ""), (advice(row), "dim"))
        lines = [Content.styled(f"    {text}", style) for text, style in texts if text]
        return Content("\n").join([Content.assemble(mark, _title(row, matcher)), *lines])


def _heading(row: Row) -> str:
    """The heading of the section of a row. An adapter is in the section of its base model."""
    return HEADINGS.get("model" if row.base else row.kind, "")


def _title(row: Row, matcher: Matcher | None) -> Content:
    if row.kind == "search":
        return Content(f"search the hub for “{one_line(row.key.removeprefix('search '))}”")
    name = one_line(row.key, MAX_NAME)
    return Content(name) if matcher is None else marked(name, matcher)
