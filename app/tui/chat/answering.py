"""One answer that runs in the list of messages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.message import Message as Event

from ..connection import Connection
from ..conversation import Conversation, Message
from ..dialog import Work
from .messages import Messages


class Answering:
    """A running answer. Posts its message from the list of messages."""

    class Ended(Event):
        """The answer has ended: it is complete, stopped or failed."""

        def __init__(self, answer: Message) -> None:
            super().__init__()
            self.answer = answer

    def __init__(
        self,
        messages: Messages,
        connection: Connection,
        conversation: Conversation,
        answer: Message,
        clock: Callable[[], float],
    ) -> None:
        self._messages = messages
        self._connection = connection
        self._conversation = conversation
        self._answer = answer
        self._clock = clock
        self._work = Work(messages, self._run, group="answer")

    @property
    def is_answering(self) -> bool:
        return self._work.is_running

    async def stop(self) -> None:
        """Stop the answer, which keeps the text that it has so far."""
        await self._work.stop()

    async def _run(self) -> None:
        messages, conversation, answer = self._messages, self._conversation, self._answer
        drawing = asyncio.ensure_future(messages.show(conversation))
        try:
            await asyncio.shield(drawing)
            if view := messages.view(answer):
                await view.answer(self._connection, conversation, conversation.parameters, self._clock)
        finally:
            answer.finish = answer.finish or "stopped"
            await drawing  # Esc may arrive before the answer has its view
            if view := messages.view(answer):
                await view.end()
            messages.post_message(self.Ended(answer))
