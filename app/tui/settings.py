"""The settings dialog: system prompt and sampling parameters, validated."""

from __future__ import annotations

from typing import Any, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static, TextArea

from ..errors import InvalidRequest
from .parameters import PARAMETERS, format_value, parse
from .text import clean


class NewSettings(NamedTuple):
    """The values that the user has saved in the settings dialog."""

    system: str
    parameters: dict[str, Any]


class SettingsScreen(ModalScreen[NewSettings | None]):
    """Edits the system prompt and the parameters. An empty field stands for the default of the model.

    Returns the new values, or None if the user cancels.
    """

    BINDINGS = [("escape", "dismiss(None)", "Cancel"), ("ctrl+s", "save", "Save")]

    def __init__(self, system: str, parameters: dict[str, Any]) -> None:
        super().__init__()
        self._system = system
        self._parameters = parameters

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog wide", can_focus=False):
            yield Static("System prompt", classes="dialog-title")
            system = TextArea(self._system, show_line_numbers=False, highlight_cursor_line=False, compact=True)
            system.cursor_blink = False
            yield system
            yield Static("Sampling parameters", classes="dialog-title")
            with Grid(id="parameters"):
                for name in PARAMETERS:
                    with Horizontal(classes="parameter"):
                        yield Static(name, classes="label")
                        value = format_value(self._parameters[name]) if name in self._parameters else ""
                        line = Input(value, placeholder="default", id=name, compact=True)
                        line.cursor_blink = False
                        yield line
            yield Static("", id="notice", markup=False)
            yield Static("Ctrl+S saves · Esc cancels · Tab next field", classes="keys")

    @on(Input.Submitted)
    def action_save(self) -> None:
        parameters = {}
        for name in PARAMETERS:
            line = self.query_one(f"#{name}", Input)
            try:
                value = parse(name, line.value)
            except InvalidRequest as error:
                self.query_one("#notice", Static).update(error.message)
                line.focus()
                return
            if value is not None:
                parameters[name] = value
        self.dismiss(NewSettings(clean(self.query_one(TextArea).text), parameters))

    @on(Input.Blurred)
    def _check(self, event: Input.Blurred) -> None:
        self._explain(event.input)

    def on_descendant_focus(self) -> None:
        if isinstance(self.focused, Input):
            self._explain(self.focused)

    def _explain(self, line: Input) -> None:
        """Show the description of the focused field, or the error of its value."""
        target = PARAMETERS[line.id or ""]
        try:
            parse(target.name, line.value)
            text = f"{target.name}: {target.sentence}"
        except InvalidRequest as error:
            text = error.message
        self.query_one("#notice", Static).update(text)
