"""The top line: the model and the title of the conversation."""

from __future__ import annotations

from pathlib import PurePath

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from ..text import one_line

TINY = "tiny built-in model"


class Header(Horizontal):
    def compose(self) -> ComposeResult:
        yield Static("localllm", id="brand")
        yield Static("", id="model", markup=False)
        yield Static(TINY, id="badge")
        yield Static("", id="title", markup=False)

    def show(self, model: str, bundled: bool, title: str) -> None:
        name = PurePath(model).name if model.startswith("/") else model
        self.query_one("#model", Static).update(one_line(name, 32))
        self.query_one("#badge").display = bundled
        self.query_one("#title", Static).update(one_line(title, 60))
