"""The help screen: keys and commands."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from .commands import COMMANDS, Command
from .dialog import Dialog
from .text import phrase

KEYS = (
    ("Enter", "Send"),
    ("Shift+Enter, Ctrl+J", "New line; Ctrl+J works in every terminal"),
    ("Esc", "Stop the answer; close a dialog"),
    ("Ctrl+R", "Generate another answer; keep the earlier one"),
    ("Alt+Left, Alt+Right", "Previous or next alternative of the last message"),
    ("Up, prompt empty", "Go to the messages; Esc returns. On a message:"),
    ("  Up, Down", "Previous, next message"),
    ("  e, r", "Edit your message; generate another answer"),
    ("  c, k", "Copy the message; copy its code block"),
    ("  Left, Right", "Previous, next alternative"),
    ("  Enter", "Expand a long message or the reasoning"),
    ("F1  F2  F3  F4  F5", "Help, models, history, settings, adapters"),
    ("Ctrl+N", "New conversation"),
    ("Ctrl+P", "Find a command, a model, an adapter or a chat"),
    ("Tab", "Complete a command"),
    ("Ctrl+C", "Copy the selection; stop the answer; twice: quit"),
    ("Ctrl+Q", "Quit"),
)
MODEL_KEYS = (
    ("Type letters", "Filter the models; without a match, Enter searches the hub"),
    ("Type org/repo, or a path", "Inspect a repository; add a folder of this machine"),
    ("Enter", "Use a model; inspect a model that is not on this machine"),
    ("Ctrl+O", "Details: can this machine run it, how fast, files, hashes"),
    ("Ctrl+D", "Download; pause or continue a download"),
    ("Ctrl+X", "Delete a model or an adapter; cancel a download"),
    ("Ctrl+K", "Check the files of a model"),
    ("Ctrl+S, Ctrl+A", "Settings of a model, such as quant and context; alias"),
    ("Ctrl+F", "Add a folder"),
    ("Ctrl+U", "Delete unused files and unfinished downloads"),
    ("Ctrl+L", "Install llama.cpp, which GGUF models need"),
)
HISTORY_KEYS = (
    ("Type letters", "Search all messages"),
    ("Ctrl+D, Ctrl+U", "Delete a chat; undo this within one day"),
    ("Ctrl+R", "Rename a chat"),
)


class HelpScreen(Dialog[None]):
    BINDINGS = [("escape,f1,q", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        texts = (
            _table(KEYS),
            Content.styled("\nF2, the models", "bold $primary"),
            _table(MODEL_KEYS),
            Content.styled("\nF3, the history", "bold $primary"),
            _table(HISTORY_KEYS),
            Content(""),
            _table([_row(command) for command in COMMANDS]),
            Content("\nThe built-in guide is a tiny model. F2 suggests larger models that fit this machine."),
        )
        yield self.frame("Keys and commands", VerticalScroll(*map(Static, texts)), keys="Esc closes")


def _row(command: Command) -> tuple[str, str]:
    also = phrase(" Also {}.", ", ".join(f"/{alias}" for alias in command.aliases))
    return f"/{command.name} {command.arguments}", command.sentence + also


def _table(rows: Sequence[tuple[str, str]]) -> Content:
    left = max(len(key) for key, _ in rows) + 2
    return Content("\n").join(Content.assemble((key.ljust(left), "bold"), text) for key, text in rows)
