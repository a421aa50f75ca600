"""The settings dialog: system prompt and sampling parameters, validated."""

from __future__ import annotations

from typing import Any, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Input, Static, TextArea

from ..client import LoadedModel
from ..errors import InvalidRequest
from .dialog import Dialog
from .fields import Field, Fields
from .parameters import PARAMETERS, format_value, parse
from .text import clean, joined, one_line, phrase

# What applies if a parameter without a default of the model is not set.
IMPLIED = {
    "max_tokens": "rest",
    "seed": "any",
    "stop": "none",
    "presence_penalty": "0",
    "frequency_penalty": "0",
    "adapter": "none",
}


class NewSettings(NamedTuple):
    """The values that the user has saved in the settings dialog."""

    system: str
    parameters: dict[str, Any]


def model_text(model: str, running: LoadedModel | None, context: int) -> str:
    """The model, its context and the format of its weights."""
    texts = [one_line(model), phrase("context {:,} tokens", context)]
    if running is None:
        texts.append("not loaded")
    else:
        texts.append(f"weights {running.dtype}, quant {running.quant or 'none'}" if running.dtype else "")
        texts.append(phrase("on {}", running.backend))
    return f"{joined(texts)}\nF2, then Ctrl+S changes context and quant"


class SettingsScreen(Dialog[NewSettings | None]):
    """Edits the system prompt and the parameters. An empty field stands for the default of the model.

    Returns the new values, or None if the user cancels. The screen also shows the context and the weights of the model.
    """

    BINDINGS = [("escape,f4", "dismiss(None)", "Cancel"), ("ctrl+s", "save", "Save")]

    def __init__(
        self, system: str, parameters: dict[str, Any], model: str, running: LoadedModel | None, context: int
    ) -> None:
        """`running`: the loaded model, with its defaults; None: it is not loaded. `context`: 0 is unknown."""
        super().__init__()
        self._model = model_text(model, running, context)
        self._defaults = running.sampling if running is not None else {}
        self._system = system
        self._parameters = parameters

    def compose(self) -> ComposeResult:
        system = TextArea(self._system, show_line_numbers=False, highlight_cursor_line=False, compact=True)
        system.cursor_blink = False
        with VerticalScroll(classes="dialog wide", can_focus=False):
            yield Static(self._model, id="about", markup=False)
            yield Static("System prompt", classes="dialog-title")
            yield system
            yield Static("Sampling parameters", classes="dialog-title")
            yield Fields([self._field(name) for name in PARAMETERS], _error)
            yield Static("Ctrl+S saves · Esc cancels · Tab next field", classes="keys")

    def _field(self, name: str) -> Field:
        text = format_value(self._parameters[name]) if name in self._parameters else ""
        return Field(name, text, self._default(name), PARAMETERS[name].sentence)

    def _default(self, name: str) -> str:
        """The text of an empty field: the value that applies."""
        if name in self._defaults:
            return f"default ({self._defaults[name]:g})"
        return f"default ({IMPLIED[name]})" if name in IMPLIED else "default"

    @on(Input.Submitted)
    def action_save(self) -> None:
        texts = self.query_one(Fields).texts()
        if texts is not None:
            values = {name: parse(name, text) for name, text in texts.items()}
            parameters = {name: value for name, value in values.items() if value is not None}
            self.dismiss(NewSettings(clean(self.query_one(TextArea).text), parameters))


def _error(name: str, text: str) -> str:
    try:
        parse(name, text)
    except InvalidRequest as error:
        return error.message
    return ""
