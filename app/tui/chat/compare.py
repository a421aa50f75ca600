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
from ..text import one_line, visible
from .answer import Channel
from .answer import run as run_answer
from .message import MessageView
from .rate import Rate
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

    def __init__(self, answer: Message, clock: Callable[[], float]) -> None:
        super().__init__()
        self.answer = answer
        self._rate = Rate(clock)
        self._follows = False

    def compose(self) -> ComposeResult:
        with AnswerText():
            view = MessageView(self.answer, (1, 1))
            view.can_focus = False
            yield view
        yield Static("waiting", classes="figures", markup=False)

    def append(self, channel: Channel, text: str) -> None:
        """Show an addition to the answer, and its rate."""
        view = self.query_one(MessageView)
        view.append(channel, text)
        self._follow()
        is_new = self._rate.add()
        if self._rate.additions == 1:
            view.refresh_notes(view.place)
            self._show("answering")
        elif is_new:
            self._show(f"{self._rate.value:.1f} tok/s")

    async def end(self) -> None:
        """Show the rest of the answer, and its final figures."""
        await self.query_one(MessageView).end()
        self._show(figures(self.answer))

    def _follow(self) -> None:
        """Follow the newest text from now on if the answer is longer than the column."""
        text = self.query_one(AnswerText)
        if text.max_scroll_y > 0 and not self._follows:
            self._follows = True
            text.anchor()

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
        self._columns = [Column(answer, clock) for answer in pair]
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
            await asyncio.gather(*map(self._answer, self._columns))
        finally:
            self.query_one(".keys", Static).update(ENDED)

    async def _answer(self, column: Column) -> None:
        answer = column.answer
        parameters = self._conversation.parameters | {"adapter": answer.adapter}
        try:
            await run_answer(self._connection, self._conversation, answer, column.append, parameters)
        finally:
            answer.finish = answer.finish or "stopped"
            await column.end()

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
    texts = [f"{count} token{'' if count == 1 else 's'}"] if count else []
    if answer.tokens_per_second:
        texts.append(f"{answer.tokens_per_second:.1f} tok/s")
    if answer.ttft:
        texts.append(f"first {seconds(answer.ttft)}")
    return " · ".join(texts) or answer.finish
