"""Runs the answers of the chat screen: one answer, or the two answers of a comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ...errors import AppError
from ..conversation import Conversation, Message
from ..dialog import Work
from .answer import Channel
from .answer import run as run_answer
from .compare import CompareScreen
from .messages import Messages
from .rate import Rate

if TYPE_CHECKING:
    from .screen import ChatScreen


class Answering:
    """The running answer of a chat screen. `rate` is its speed in tokens per second; 0: no answer runs."""

    def __init__(self, screen: ChatScreen, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._clock = clock
        self._work: Work | None = None
        self._comparison: CompareScreen | None = None
        self.rate = 0.0

    @property
    def is_running(self) -> bool:
        is_comparing = self._comparison is not None and self._comparison.is_answering
        return is_comparing or (self._work is not None and self._work.is_running)

    def start(self, question: Message, other_adapter: str | None) -> None:
        """Answer a question. `other_adapter`: show an answer with this adapter beside it (empty: the base model)."""
        conversation = self._screen.conversation
        answer = conversation.add("assistant", parent=question.index)
        if other_adapter is None:
            self._work = Work(self._screen, partial(self._run, conversation, answer), group="answer")
            return
        other = conversation.add("assistant", parent=question.index)
        other.adapter = other_adapter
        self._comparison = CompareScreen(self._screen.connection, conversation, (answer, other), self._clock)
        self._screen.run_worker(self._compare(conversation, self._comparison))

    def cancel(self) -> None:
        """Stop the answer of the chat screen; does not wait. A comparison has its own screen and keys."""
        if self._work is not None:
            self._screen.run_worker(self._work.stop())

    async def stop(self) -> None:
        """Stop the running answer, or both answers of a comparison, and save the text so far."""
        if self._comparison is not None:
            await self._comparison.stop()
        if self._work is not None:
            await self._work.stop()

    async def _compare(self, conversation: Conversation, comparison: CompareScreen) -> None:
        """Show two answers side by side. The conversation goes on with the one that the user chooses."""
        screen = self._screen

        async def go_on(answer: Message | None) -> None:
            assert answer is not None
            self._comparison = None
            conversation.show(answer)
            conversation.adapter = answer.adapter
            if conversation is screen.conversation:
                await screen.query_one(Messages).show(conversation)
                await screen.save()

        await screen.save()
        screen.app.push_screen(comparison, go_on)

    async def _run(self, conversation: Conversation, answer: Message) -> None:
        screen = self._screen
        messages = screen.query_one(Messages)
        drawing = asyncio.ensure_future(messages.show(conversation))
        try:
            await asyncio.shield(drawing)
            await screen.save()
            callback = self._text_callback(messages, answer)
            await run_answer(screen.connection, conversation, answer, callback, conversation.parameters)
        finally:
            answer.finish = answer.finish or "stopped"
            self.rate = 0.0
            await drawing  # Esc may arrive before the answer has its view
            if (view := messages.view(answer)) is not None:
                await view.end()
            await screen.save()
            self._work = None
            screen.update_figures()
        if answer.finish in ("stop", "length"):
            await self._refresh_figures()

    def _text_callback(self, messages: Messages, answer: Message) -> Callable[[Channel, str], None]:
        """A callback that shows each addition to an answer and updates its rate."""
        view = messages.view(answer)
        rate = Rate(self._clock)

        def show(channel: Channel, text: str) -> None:
            is_new = rate.add()
            if view is not None:
                view.append(channel, text)
                if rate.additions == 1:
                    view.refresh_notes(view.place)
            if is_new:
                self.rate = rate.value
                self._screen.update_status()

        return show

    async def _refresh_figures(self) -> None:
        """Update the figures of the status line. An error only changes the shown state: the answer is complete."""
        connection = self._screen.connection
        try:
            await connection.refresh()
        except AppError as error:
            connection.lost(error)
