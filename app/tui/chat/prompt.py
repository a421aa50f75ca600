"""The prompt box. Enter sends the text. A placeholder stands for a large paste."""

from __future__ import annotations

import re

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from ...sizes import size
from ..text import clean, is_long

_MARK = re.compile(r"\[paste (\d+): [^\]]*\]")

NEW_LINE_KEYS = ("shift+enter", "ctrl+j", "alt+enter")


class Prompt(TextArea):
    class Submitted(Message):
        """The user sends `text`. Pastes replace their placeholders in it."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class HintMoved(Message):
        """The user moves the highlight of the completions up or down."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class HintAccepted(Message):
        """The user accepts the highlighted completion with Tab."""

    class Left(Message):
        """The user presses Up in an empty box to move to the messages."""

    def __init__(self) -> None:
        super().__init__(
            placeholder="Ask something, or / for commands",
            show_line_numbers=False,
            highlight_cursor_line=False,
            tab_behavior="focus",
            compact=True,
        )
        self.cursor_blink = False
        self.has_hints = False  # the completions are visible; they use the keys up, down and tab
        self._pastes: list[str] = []

    def put(self, text: str) -> None:
        """Replace the text. A placeholder stands for a long text."""
        self._pastes = []
        self.text = self._fold_paste(text)
        self.move_cursor(self.document.end)

    def full_text(self) -> str:
        """The text, with each placeholder replaced by its paste."""
        return _MARK.sub(self._paste_text, self.text)

    async def _on_key(self, event: events.Key) -> None:
        messages = self._key_messages()
        if event.key == "enter":
            self.post_message(self.Submitted(self.full_text()))
        elif event.key in NEW_LINE_KEYS:
            self.insert("\n")
        elif event.key in messages:
            self.post_message(messages[event.key])
        else:
            return
        event.stop()
        event.prevent_default()

    def _key_messages(self) -> dict[str, Message]:
        """Key → the event that it posts: keys for the completions if they are visible, otherwise Up in an empty box."""
        if self.has_hints:
            return {"up": self.HintMoved(-1), "down": self.HintMoved(1), "tab": self.HintAccepted()}
        return {} if self.text else {"up": self.Left()}

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        # Terminals send the line breaks of a paste as carriage returns.
        text = clean(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        self.replace(self._fold_paste(text), *self.selection, maintain_selection_offset=False)

    def _fold_paste(self, text: str) -> str:
        if not is_long(text):
            return text
        self._pastes.append(text)
        return f"[paste {len(self._pastes)}: {text.count(chr(10)) + 1:,} lines, {size(len(text.encode()))}]"

    def _paste_text(self, mark: re.Match[str]) -> str:
        number = int(mark[1])
        return self._pastes[number - 1] if 1 <= number <= len(self._pastes) else mark[0]
