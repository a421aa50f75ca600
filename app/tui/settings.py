"""The settings dialog: system prompt and sampling parameters, validated."""

from __future__ import annotations

from typing import Any, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.widgets import Input, Static, TextArea

from ..client import LoadedModel
from ..errors import InvalidRequest
from .dialog import Dialog
from .parameters import PARAMETERS, format_value, parse
from .text import clean, one_line

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
    texts = [one_line(model)]
    if context:
        texts.append(f"context {context:,} tokens")
    if running is None:
        texts.append("not loaded")
    else:
        texts.append(f"weights {running.dtype}, quant {running.quant or 'none'}" if running.dtype else "")
        texts.append(f"on {running.backend}" if running.backend else "")
    return f"{' · '.join(filter(None, texts))}\nF2, then Ctrl+S changes context and quant"


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
        with VerticalScroll(classes="dialog wide", can_focus=False):
            yield Static(self._model, id="about", markup=False)
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
                        line = Input(value, placeholder=self._default(name), id=name, compact=True)
                        line.cursor_blink = False
                        yield line
            yield Static("", id="notice", markup=False)
            yield Static("Ctrl+S saves · Esc cancels · Tab next field", classes="keys")

    def _default(self, name: str) -> str:
        """The text of an empty field: the value that applies."""
        if name in self._defaults:
            return f"default ({self._defaults[name]:g})"
        return f"default ({IMPLIED[name]})" if name in IMPLIED else "default"

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
