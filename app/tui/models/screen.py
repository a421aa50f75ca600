"""The model screen: the keys of the list of models, and their actions."""

from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.widgets import Input, OptionList
from textual.worker import Worker

from ..connection import Connection
from ..dialog import Dialog
from . import actions
from .browser import Browser, ModelChoice
from .keys import BINDINGS


class ModelScreen(Dialog[ModelChoice | None]):
    """Lists the models. Returns the choice, or None if the user cancels."""

    BINDINGS = [("escape", "back", "Close"), ("f2", "dismiss(None)", "Close"), *BINDINGS]

    def __init__(self, connection: Connection, current: str) -> None:
        """`current`: id of the model of the conversation."""
        super().__init__()
        self.browser = Browser(connection, current)
        self._request: Worker[None] | None = None  # runs the action of the last key

    def compose(self) -> ComposeResult:
        yield self.browser

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _enter(self) -> None:
        self.action_run("enter")

    def action_run(self, name: str) -> None:
        self._request = self._run(name)

    @work(group="action", exit_on_error=False)
    async def _run(self, name: str) -> None:
        """Run the action of a key on the highlighted row."""
        await actions.run(self.browser, name)

    def action_back(self) -> None:
        """Handle Esc: cancel the running action, clear the filter, or close the screen."""
        if self._request is not None and self._request.is_running:
            self._request.cancel()
            self._request = None  # a worker that is cancelled before its first step counts as running for ever
            self.say("Cancelled.")
        elif self.browser.typed:
            self.browser.clear_filter()
        else:
            self.dismiss(None)

    @on(Browser.Chosen)
    def _use(self, event: Browser.Chosen) -> None:
        self.dismiss(event.choice)
