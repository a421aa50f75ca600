"""The bottom of the chat screen: completions, prompt box, status line and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import TextArea

from .. import commands, selection
from ..conversation import Message
from .footer import Footer
from .hints import Hints
from .prompt import Prompt
from .status import StatusLine


class Dock(Vertical):
    """The prompt box with its completions, the status line and the footer.

    `edited_message`: the question that the next prompt replaces. `other_adapter`: the second adapter for the answers to
    the next prompt (empty: the base model). None: the next prompt is an ordinary question.
    """

    def __init__(self, arguments: Callable[[], Mapping[str, Iterable[str]]]) -> None:
        """`arguments` returns the arguments that a command can have now, by the name of the command."""
        super().__init__()
        self.edited_message: Message | None = None
        self.other_adapter: str | None = None
        self._arguments = arguments

    def compose(self) -> ComposeResult:
        yield Hints()
        yield Prompt()
        yield StatusLine()
        yield Footer()

    @property
    def purpose(self) -> str:
        """The action of Enter for a prompt with a special purpose; empty: an ordinary question."""
        if self.edited_message is not None:
            return "sends the edited message"
        return "asks both adapters" if self.other_adapter is not None else ""

    @property
    def has_hints(self) -> bool:
        return self._prompt.has_hints

    def edit(self, message: Message) -> None:
        """Put a question into the prompt box to edit it."""
        self.leave()
        self.edited_message = message
        self._prompt.put(message.content)
        self._announce("editing")

    def compare(self, first: str, other: str) -> None:
        """Use the next prompt for two answers, with the adapters `first` and `other`."""
        self.leave()
        self.other_adapter = other
        names = [selection.label(adapter) or "base model" for adapter in (first, other)]
        self._announce(f"two answers: {names[0]} | {names[1]}")

    def leave(self) -> bool:
        """Use the next prompt as an ordinary question again. Returns False if it is one already."""
        if self.edited_message is not None:
            self._prompt.put("")
        is_special = self.edited_message is not None or self.other_adapter is not None
        self.edited_message = None
        self.other_adapter = None
        self._prompt.border_title = None
        self._prompt.remove_class("special")
        return is_special

    def close_hints(self) -> bool:
        """Hide the completions. Returns False if they are hidden already."""
        hints = self.query_one(Hints)
        if not hints.display:
            return False
        hints.show([])
        self._prompt.has_hints = False
        return True

    @property
    def _prompt(self) -> Prompt:
        return self.query_one(Prompt)

    def _announce(self, title: str) -> None:
        self._prompt.border_title = title
        self._prompt.add_class("special")
        self._prompt.focus()

    @on(TextArea.Changed)
    def _typed(self) -> None:
        hints = self.query_one(Hints)
        hints.show(commands.hints(self._prompt.text, self._arguments()) if self.edited_message is None else [])
        self._prompt.has_hints = hints.display

    @on(Prompt.HintMoved)
    def _move_hint(self, event: Prompt.HintMoved) -> None:
        hints = self.query_one(Hints)
        if event.step > 0:
            hints.action_cursor_down()
        else:
            hints.action_cursor_up()

    @on(Prompt.HintAccepted)
    def _accept_hint(self) -> None:
        if (text := self.query_one(Hints).completion) is not None:
            self._prompt.put(text)
