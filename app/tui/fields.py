"""Labelled fields in two columns. The notice below them describes the field with the focus, or shows the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, Vertical
from textual.widgets import Input, Static


class Field(NamedTuple):
    """A field, the text in it, the text of an empty field, and its description."""

    name: str
    text: str
    placeholder: str
    sentence: str


class Fields(Vertical):
    """The fields of a dialog. The id of an input is the name of its field."""

    def __init__(self, fields: Sequence[Field], error: Callable[[str, str], str]) -> None:
        """`error(name, text)`: why the text is no value of the field; empty if it is one."""
        super().__init__()
        self._fields = {field.name: field for field in fields}
        self._error = error

    def compose(self) -> ComposeResult:
        with Grid(id="parameters"):
            for field in self._fields.values():
                line = Input(field.text, placeholder=field.placeholder, id=field.name, compact=True)
                line.cursor_blink = False
                yield Horizontal(Static(field.name, classes="label"), line, classes="parameter")
        yield Static("", id="notice", markup=False)

    def texts(self) -> dict[str, str] | None:
        """The texts of all fields. None if a text is invalid: the field then has the focus."""
        for line in self.query(Input):
            if self._error_of(line):
                line.focus()
                self._explain(line)
                return None
        return {line.id or "": line.value.strip() for line in self.query(Input)}

    def on_descendant_focus(self) -> None:
        if isinstance(line := self.screen.focused, Input):
            self._explain(line)

    @on(Input.Changed)
    def _check(self, event: Input.Changed) -> None:
        if event.input.has_focus:
            self._explain(event.input)

    def _error_of(self, line: Input) -> str:
        return self._error(line.id or "", line.value.strip())

    def _explain(self, line: Input) -> None:
        field = self._fields[line.id or ""]
        self.query_one("#notice", Static).update(self._error_of(line) or f"{field.name}: {field.sentence}")
