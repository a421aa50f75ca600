"""Fixtures: the terminal UI with a fake client, fixed clocks and a temporary folder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import Static

from localllm.app.config import Settings
from localllm.app.tui.app import ChatApp
from localllm.app.tui.chat.message import MessageView
from localllm.app.tui.chat.prompt import Prompt
from localllm.app.tui.chat.screen import ChatScreen
from localllm.app.tui.conversation import Conversation, Message
from localllm.app.tui.history.store import Store

from ...waiting import HANG_SECONDS
from .fake_client import FakeClient

MORNING = 1_790_000_000.0  # 2026-09-21 14:13 UTC


async def wait_until(pilot: Pilot[int], condition: Callable[[], object], says: Callable[[], object] = str) -> None:
    """Wait until a condition is true. Fails after HANG_SECONDS with the text of `says`.

    pytest-timeout is no limit: it raises in the task that runs at that moment. If that is a task of the application,
    the test would wait forever.
    """
    try:
        async with asyncio.timeout(HANG_SECONDS):
            while not condition():
                await pilot.pause(0.01)
    except TimeoutError:
        raise AssertionError(f"the condition did not become true: {says()}") from None


@dataclass
class Chat:
    """The application under a pilot, with its client and its history file."""

    pilot: Pilot[int]
    app: ChatApp
    client: FakeClient
    store: Store  # of the application; only its history thread may use it

    @property
    def saved(self) -> Store:
        """The history file, opened a second time."""
        return Store(self.store.file, now=lambda: MORNING)

    @property
    def screen(self) -> ChatScreen:
        return self.app._chat

    @property
    def prompt(self) -> Prompt:
        return self.screen.query_one(Prompt)

    @property
    def path(self) -> list[Message]:
        return self.screen.conversation.path()

    async def settle(self) -> None:
        """Wait until no task of the application runs."""
        await self.until(lambda: not any(worker.is_running for worker in self.app.workers))
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        """Press keys, and wait until no task of the application runs."""
        await self.pilot.press(*keys)
        await self.settle()

    async def type(self, text: str) -> None:
        self.prompt.focus()
        await self.pilot.pause()
        self.prompt.insert(text)
        await self.pilot.pause()

    async def send(self, text: str) -> None:
        """Type a text, send it, and wait for the end of the answer."""
        await self.enter(text)
        await self.settle()

    async def enter(self, text: str) -> None:
        await self.type(text)
        await self.pilot.press("enter")
        await self.pilot.pause()

    async def paste(self, text: str) -> None:
        self.prompt.post_message(events.Paste(text))
        await self.pilot.pause()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is true, as wait_until does."""
        await wait_until(self.pilot, condition)

    def shown(self) -> str:
        """The text of the screen."""
        return "\n".join(
            "".join(segment.text for segment in line) for line in self.app.screen._compositor.render_strips()
        )

    def views(self) -> list[MessageView]:
        return list(self.screen.query(MessageView))

    def text_of(self, selector: str) -> str:
        return str(self.app.screen.query_one(selector, Static).content)

    def notices(self) -> str:
        return "\n".join(notice.message for notice in self.app._notifications)


OpenChat = Callable[..., AbstractAsyncContextManager[Chat]]


@pytest.fixture(autouse=True)
def fixed_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    for name in ("COLORFGBG", "NO_COLOR", "TEXTUAL_ANIMATIONS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data" / "history.sqlite3", now=count(MORNING).__next__)


@pytest.fixture
def make_app(tmp_path: Path, store: Store) -> Callable[..., ChatApp]:
    def make(client: FakeClient, conversation: Conversation | None = None, **changed: Any) -> ChatApp:
        options = {"connect": client.connect, "store": store, "clock": lambda: 1.0, "folder": tmp_path} | changed
        return ChatApp(Settings(), conversation or Conversation("guide"), **options)

    return make


@pytest.fixture
def chat(make_app: Callable[..., ChatApp], store: Store) -> OpenChat:
    @asynccontextmanager
    async def start(
        client: FakeClient | None = None,
        conversation: Conversation | None = None,
        size: tuple[int, int] = (80, 24),
        settled: bool = True,
        notifications: bool = False,
        **changed: Any,
    ) -> AsyncIterator[Chat]:
        client = client or FakeClient()
        app = make_app(client, conversation, **changed)
        async with app.run_test(size=size, notifications=notifications) as pilot:
            opened = Chat(pilot, app, client, changed.get("store", store))
            if settled:
                await opened.settle()
            yield opened

    return start
