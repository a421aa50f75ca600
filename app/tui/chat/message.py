"""One message on the screen: a question as plain text, an answer as streaming Markdown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.message import Message as Event
from textual.widgets import Markdown, Static

from ..connection import Connection
from ..conversation import Conversation, Message
from ..text import fold, one_line, phrase, visible
from .answer import Channel, run
from .streaming import StreamingMarkdown

RATE_SECONDS = 0.25  # seconds between updates of the rate
MAX_CHARACTERS = 60_000  # characters of a question that the screen shows; copy and export use all of it
_ENDS = {"stopped": "stopped", "length": "stopped at the length limit", "tool_calls": "called a tool"}
_ENDS_WITHOUT_TEXT = _ENDS | {
    "": "…",
    "stop": "empty answer",
    "stopped": "stopped before the first token; later requests omit this message",
}


class Rate:
    """Tokens per second of an answer, from its first addition on. One addition is about one token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._additions = 0
        self._start = 0.0
        self._updated = 0.0

    def add(self) -> float | None:
        """Count an addition. Returns the rate if it has changed: 0 at the first addition."""
        now = self._clock()
        self._additions += 1
        if self._additions == 1:
            self._start = self._updated = now
            return 0.0
        if now - self._updated <= RATE_SECONDS:
            return None
        self._updated = now
        return (self._additions - 1) / (now - self._start)


class MessageView(Vertical, can_focus=True):
    """A message on the screen. A key pressed on the focused message posts `Requested`."""

    BINDINGS = [
        Binding("e", "ask('edit')", "Edit"),
        Binding("r", "ask('regenerate')", "Again"),
        Binding("c", "ask('copy')", "Copy"),
        Binding("k", "ask('copy_code')", "Copy code"),
        Binding("left", "ask('earlier')", "Earlier"),
        Binding("right", "ask('later')", "Later"),
        Binding("up", "ask('up')", "Up"),
        Binding("down", "ask('down')", "Down"),
        Binding("enter,space", "expand", "Expand"),
    ]

    class Requested(Event):
        """The user has pressed a key on a message. `action` names the action of the key."""

        def __init__(self, message: Message, action: str) -> None:
            super().__init__()
            self.message = message
            self.action = action

    class Streamed(Event):
        """The rate of the running answer has changed, in tokens per second; 0: its first text has arrived."""

        def __init__(self, rate: float) -> None:
            super().__init__()
            self.rate = rate

    def __init__(self, message: Message, place: tuple[int, int]) -> None:
        """`place` is (n, m): the message is alternative n of m."""
        super().__init__(classes=message.role)
        self.message = message
        self.place = place
        self._expanded = False

    def compose(self) -> ComposeResult:
        yield Static(self._author(), classes="who", markup=False)
        yield Static("", classes="reasoning", markup=False)
        if self.message.role == "user":
            yield Static(self._question(), classes="question", markup=False)
        else:
            yield StreamingMarkdown(visible(self.message.content))
        yield Static("", classes="note", markup=False)

    def on_mount(self) -> None:
        self.refresh_notes(self.place)

    async def answer(
        self,
        connection: Connection,
        conversation: Conversation,
        parameters: dict[str, Any],
        clock: Callable[[], float],
    ) -> None:
        """Request the answer that this view shows, and show its text as it arrives. Always sets `finish`."""
        try:
            await run(connection, conversation, self.message, partial(self._append, Rate(clock)), parameters)
        finally:
            self.message.finish = self.message.finish or "stopped"
            await self.end()

    def _append(self, rate: Rate, channel: Channel, text: str) -> None:
        if channel == "text":
            self.query_one(StreamingMarkdown).write(visible(text))
        else:
            self._show_reasoning()
        value = rate.add()
        if value == 0:
            self.refresh_notes(self.place)
        if value is not None:
            self.post_message(self.Streamed(value))

    async def end(self) -> None:
        """Show the rest of the text, and the note about the end of the answer."""
        await self.query_one(StreamingMarkdown).end()
        self.refresh_notes(self.place)

    def refresh_notes(self, place: tuple[int, int]) -> None:
        """Update the number of alternatives, and the note below the message (why it ended, or its error)."""
        self.place = place
        self.query_one(".who", Static).update(self._author())
        note = self.query_one(".note", Static)
        text = self._note()
        note.update(text)
        note.display = bool(text)
        self.set_class(self.message.finish == "failed", "failed")
        self._show_reasoning()

    def action_ask(self, action: str) -> None:
        self.post_message(self.Requested(self.message, action))

    def action_expand(self) -> None:
        self._expanded = not self._expanded
        if self.message.role == "user":
            self.query_one(".question", Static).update(self._question())
        self._show_reasoning()

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Show and copy the target of a link, but do not open it: the text of a link may hide the target."""
        event.stop()
        self.app.copy_to_clipboard(event.href)
        self.app.notify(visible(event.href)[:300], title="Link copied", markup=False)

    def _author(self) -> str:
        place, count = self.place
        name = "You" if self.message.role == "user" else one_line(self.message.author, 60)
        return f"{name}  ‹{place}/{count}›" if count > 1 else name

    def _question(self) -> str:
        head, omitted = fold(self.message.content)
        if omitted and not self._expanded:
            return f"{visible(head)}\n… {omitted:,} more characters (Enter on this message expands it)"
        rest = max(0, len(self.message.content) - MAX_CHARACTERS)
        more = phrase("\n… {:,} more characters: use copy or /export", rest)
        return visible(self.message.content[:MAX_CHARACTERS]) + more

    def _show_reasoning(self) -> None:
        reasoning = self.query_one(".reasoning", Static)
        text = self.message.reasoning
        reasoning.display = bool(text)
        if self._expanded:
            words = visible(text[:MAX_CHARACTERS])
        elif self.message.finish or self.message.content:
            words = f"Reasoning, {len(text.split()):,} words (Enter on this message expands it)"
        else:
            words = visible("\n".join(text[-600:].split("\n")[-4:]))
        reasoning.update(words)

    def _note(self) -> str:
        message = self.message
        if message.role == "user":
            return ""
        if message.finish == "failed":
            omitted = "" if message.content else " Later requests omit this message."
            return f"{message.error}\nCtrl+R tries again.{omitted}"
        notes = _ENDS if message.content else _ENDS_WITHOUT_TEXT
        return notes.get(message.finish, "")
