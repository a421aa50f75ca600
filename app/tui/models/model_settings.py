"""The dialog with the settings of one model, which apply to every load of it."""

from __future__ import annotations

from collections.abc import Mapping

from textual import on
from textual.app import ComposeResult
from textual.containers import Grid, Horizontal, VerticalScroll
from textual.widgets import Input, Static

from ... import config
from ...errors import ConfigError
from ..dialog import Dialog
from ..text import explain, one_line

SETTINGS = {setting.name: setting for setting in config.describe() if setting.name in config.LOADING}


class ModelSettingsScreen(Dialog[dict[str, str] | None]):
    """Edits the settings of a model. An empty field stands for the setting of the daemon.

    Returns the changes (setting -> text; empty: remove it), or None if the user cancels.
    """

    BINDINGS = [("escape", "dismiss(None)", "Cancel"), ("ctrl+s", "save", "Save")]

    def __init__(self, model: str, values: Mapping[str, object]) -> None:
        """`values`: the settings that the model has now."""
        super().__init__()
        self._model = model
        self._texts = {name: str(value) for name, value in values.items()}

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog wide", can_focus=False):
            yield Static(f"Settings of {one_line(self._model)}", classes="dialog-title", markup=False)
            with Grid(id="parameters"):
                for name in SETTINGS:
                    with Horizontal(classes="parameter"):
                        yield Static(name, classes="label")
                        line = Input(self._texts.get(name, ""), placeholder="default", id=name, compact=True)
                        line.cursor_blink = False
                        yield line
            yield Static("", id="notice", markup=False)
            yield Static("Ctrl+S saves · Esc cancels · Tab next field", classes="keys")

    def on_mount(self) -> None:
        self.query_one("#quant", Input).focus()

    @on(Input.Submitted)
    def action_save(self) -> None:
        changes = {}
        for name in SETTINGS:
            line = self.query_one(f"#{name}", Input)
            text = line.value.strip()
            if error := self._error(name, text):
                self._say(error)
                line.focus()
                return
            if text != self._texts.get(name, ""):
                changes[name] = text
        self.dismiss(changes)

    def on_descendant_focus(self) -> None:
        if isinstance(self.focused, Input):
            self._explain(self.focused)

    @on(Input.Changed)
    def _check(self, event: Input.Changed) -> None:
        if event.input is self.focused:
            self._explain(event.input)

    def _explain(self, line: Input) -> None:
        """Show the description of a field, or the error of its value."""
        name = line.id or ""
        self._say(self._error(name, line.value.strip()) or f"{name}: {SETTINGS[name].meaning}")

    def _error(self, name: str, text: str) -> str:
        """Why a text is not a value of a setting; empty if it is one, or if the text is empty."""
        if not text:
            return ""
        try:
            config.check_model_settings(self._model, {name: config.value_of(name, text)})
        except ConfigError as error:
            return explain(error)
        return ""

    def _say(self, words: str) -> None:
        self.query_one("#notice", Static).update(words)
