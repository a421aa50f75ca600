"""The dialog with the settings of one model, which apply to every load of it."""

from __future__ import annotations

from collections.abc import Mapping

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from ... import config
from ...errors import ConfigError
from ..dialog import Dialog
from ..fields import Field, Fields
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
        fields = [
            Field(name, self._texts.get(name, ""), "default", setting.meaning) for name, setting in SETTINGS.items()
        ]
        with VerticalScroll(classes="dialog wide", can_focus=False):
            yield Static(f"Settings of {one_line(self._model)}", classes="dialog-title", markup=False)
            yield Fields(fields, self._error)
            yield Static("Ctrl+S saves · Esc cancels · Tab next field", classes="keys")

    def on_mount(self) -> None:
        self.query_one("#quant", Input).focus()

    @on(Input.Submitted)
    def action_save(self) -> None:
        texts = self.query_one(Fields).texts()
        if texts is not None:
            self.dismiss({name: text for name, text in texts.items() if text != self._texts.get(name, "")})

    def _error(self, name: str, text: str) -> str:
        try:
            config.check_model_settings(self._model, {name: config.value_of(name, text)} if text else {})
        except ConfigError as error:
            return explain(error)
        return ""
