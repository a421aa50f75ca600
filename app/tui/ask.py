"""Dialogs with one question."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, Static

from .dialog import Dialog
from .text import one_line

MAX_QUESTION = 300  # characters


class AskScreen(Dialog[str | None]):
    """Asks for one line. Returns the line, or None if the user cancels or enters nothing.

    `allows_empty`: an empty line is an answer.
    """

    BINDINGS = [("escape", "dismiss(None)", "Cancel")]

    def __init__(self, question: str, value: str = "", *, allows_empty: bool = False) -> None:
        super().__init__()
        self._question = question
        self._value = value
        self._allows_empty = allows_empty

    def compose(self) -> ComposeResult:
        line = Input(self._value)
        line.cursor_blink = False
        question = one_line(self._question, MAX_QUESTION)
        yield self.frame(question, line, keys="Enter confirms · Esc cancels", is_wide=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value.strip()
        self.dismiss(text if text or self._allows_empty else None)


class ConfirmScreen(Dialog[bool]):
    """Asks a question. Returns True for yes."""

    BINDINGS = [("y", "dismiss(True)", "Yes"), ("n,escape", "dismiss(False)", "No")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(one_line(self._question, MAX_QUESTION), markup=False)
            yield Static("y yes · n no", classes="keys")
