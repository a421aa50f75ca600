"""Asynchronous access to the history, on a separate thread, so that a slow disk does not block the UI."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from ..conversation import Conversation
from .store import Entry, Store

Result = TypeVar("Result")


class Recorder:
    """The history, on its own thread. Methods raise StorageFailed.

    After a failed `save`, the next `save` also writes the messages of the failed one.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="history")
        self._final_counts: dict[str, int] = {}  # conversation id -> number of messages that are written and final

    async def save(self, conversation: Conversation) -> None:
        """Write the messages that are not in the file, and again an answer that was unfinished at the last call."""
        if not conversation.messages:
            return
        done = self._final_counts.get(conversation.id, 0)
        messages = [replace(message) for message in conversation.messages[done:]]
        await self._run(self._store.save, replace(conversation, messages=[]), messages)
        final = [message for message in messages if message.role == "user" or message.finish]
        self._final_counts[conversation.id] = done + len(final)

    async def load(self, id: str) -> Conversation:
        conversation = await self._run(self._store.load, id)
        self._final_counts[id] = len(conversation.messages)
        return conversation

    async def list(self, words: str = "") -> list[Entry]:
        return await self._run(self._store.list, words)

    async def rename(self, id: str, title: str) -> None:
        await self._run(self._store.rename, id, title)

    async def delete(self, id: str) -> None:
        await self._run(self._store.delete, id)

    async def restore(self, id: str) -> None:
        await self._run(self._store.restore, id)

    async def close(self) -> None:
        await self._run(self._store.close)
        self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)
