"""The comparison screen: two answers to one question side by side, each with its own adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Static

from ..connection import Connection
from ..conversation import Conversation, Message
from ..dialog import ClosesOnce, Work
from ..text import joined, one_line, phrase, visible
from .message import MessageView
from .status import seconds

RUNNING = "←/→ choose · Enter goes on with it · Esc stops both"
ENDED = "←/→ choose · Enter goes on with it · c copies it · Esc goes on with the first"


class AnswerText(VerticalScroll):
    """The text of one answer. The text of the chosen answer has the focus, and scrolls."""

    BINDINGS = [
        Binding("left,1,shift+tab", "screen.choose(0)", "First"),
        Binding("right,2,tab", "screen.choose(1)", "Second"),
    ]


class Column(Vertical):
    """One answer and its figures."""

    def __init__(self, answer: Message) -> None:
        super().__init__()
        self.answer = answer

    def compose(self) -> ComposeResult:
        with AnswerText():
            view = MessageView(self.answer, (1, 1))
            view.can_focus = False
            yield view
        yield Static("waiting", classes="figures", markup=False)

    async def run(self, connection: Connection, conversation: Conversation, clock: Callable[[], float]) -> None:
        """Request the answer, and show it with its final figures."""
        parameters = conversation.parameters | {"adapter": self.answer.adapter}
        try:
            await self.query_one(MessageView).answer(connection, conversation, parameters, clock)
        finally:
            self._show(figures(self.answer))

    def on_message_view_streamed(self, event: MessageView.Streamed) -> None:
        event.stop()
        if not self.answer.finish:
            self._show(f"{event.rate:.1f} tok/s" if event.rate else "answering")
        text = self.query_one(AnswerText)
        if text.max_scroll_y > 0 and not text.is_anchored:
            text.anchor()  # follows new text of an answer that is longer than the column

    def _show(self, text: str) -> None:
        self.query_one(".figures", Static).update(text)


class CompareScreen(ClosesOnce[Message]):
    """Streams two answers at the same time. Returns the answer with which the conversation goes on."""

    BINDINGS = [
        Binding("enter", "pick", "Go on with it"),
        Binding("escape", "back", "Stop"),
        Binding("c", "copy", "Copy"),
    ]

    def __init__(
        self,
        connection: Connection,
        conversation: Conversation,
        pair: tuple[Message, Message],
        clock: Callable[[], float],
    ) -> None:
        """`pair`: two unfinished answers to the same question."""
        super().__init__()
        self._connection = connection
        self._conversation = conversation
        self._clock = clock
        self._columns = [Column(answer) for answer in pair]
        self._chosen = self._columns[0]
        self._work: Work | None = None

    def compose(self) -> ComposeResult:
        question = self._conversation.messages[self._chosen.answer.parent or 0]
        yield Static(one_line(question.content, 200), id="question", markup=False)
        with Horizontal(id="columns"):
            yield from self._columns
        yield Static(RUNNING, classes="keys", markup=False)

    def on_mount(self) -> None:
        self.action_choose(0)
        self._work = Work(self, self._answer_both, group="answer")

    @property
    def is_answering(self) -> bool:
        return self._work is None or self._work.is_running

    async def stop(self) -> None:
        """Stop both answers; each keeps the text that it has so far."""
        if self._work is not None:
            await self._work.stop()

    async def _answer_both(self) -> None:
        try:
            await asyncio.gather(
                *(column.run(self._connection, self._conversation, self._clock) for column in self._columns)
            )
        finally:
            self.query_one(".keys", Static).update(ENDED)

    def action_choose(self, index: int) -> None:
        self._chosen = self._columns[index]
        for column in self._columns:
            column.set_class(column is self._chosen, "chosen")
        self._chosen.query_one(AnswerText).focus()

    async def action_pick(self) -> None:
        """Close the screen with the chosen answer. The other answer is stopped if it runs."""
        await self.stop()
        self.dismiss(self._chosen.answer)

    async def action_back(self) -> None:
        """Stop the answers; if none runs, close the screen with the first one."""
        if self.is_answering:
            await self.stop()
        else:
            self.dismiss(self._columns[0].answer)

    def action_copy(self) -> None:
        self.app.copy_to_clipboard(visible(self._chosen.answer.content))
        self.app.notify("The answer was copied to the clipboard.")


def figures(answer: Message) -> str:
    """The figures of an answer that has ended."""
    count = answer.completion_tokens
    texts = [
        phrase("{} token" if count == 1 else "{} tokens", count),
        phrase("{:.1f} tok/s", answer.tokens_per_second),
        phrase("first {}", answer.ttft and seconds(answer.ttft)),
    ]
    return joined(texts) or answer.finish
