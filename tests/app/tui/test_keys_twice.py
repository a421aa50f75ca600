"""Every key of every screen, pressed twice before the screen reacts; also while a model loads and an answer streams.

A terminal sends the second key before the first one has changed the screen, so both keys reach the same widget. The
application must not end, no screen may close twice or open twice, and the chat must answer afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from textual import events
from textual.binding import BindingsMap
from textual.geometry import Offset
from textual.widgets import OptionList

from localllm.app.client import ChatEvent, Job, LoadedModel, ModelEntry
from localllm.app.tui.chat.messages import Messages
from localllm.app.tui.conversation import Conversation

from .conftest import Chat, OpenChat
from .fake_client import GUIDE, HUGE, LARGE, MACHINE, PIRATE, PIRATE_ENTRY, POET, QWEN, SMALL, UNUSED, FakeClient

Scene = Callable[[Chat], Awaitable[None]]
STATES = ("idle", "loading", "answering")
NEEDY = ModelEntry(id="org/gguf:Q8_0", gguf=True, problem="llama.cpp is missing", install="make build GGUF=1")
BROKEN = ModelEntry(id="org/broken", problem="files are missing; localllm pull org/broken continues it")
MORE_KEYS = ("enter", "escape", "tab", "up", "down", "space", "a", "f2")
PAUSE = 0.01


class SlowClient(FakeClient):
    """While `is_free` is not set, a model loads and an answer streams without end."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.entries = [GUIDE, LARGE, SMALL, BROKEN, NEEDY]
        self.in_memory = []
        self.folders = [PIRATE, POET]
        self.loaded_adapters = [PIRATE_ENTRY]
        self.machine = MACHINE
        self.offers = [HUGE, QWEN]
        self.jobs = {"org/half": Job(name="org/half", state="downloading", total=100, received=50)}
        self.unused = [UNUSED]
        self.model_settings = {}
        self.alias_names = {}
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.gate = self.is_free

    async def load(self, model: str, **options: Any) -> LoadedModel:  # type: ignore[override]
        await self.is_free.wait()
        return await super().load(model, **options)

    async def chat(self, model: str, messages: list[dict[str, Any]], **parameters: Any) -> AsyncIterator[ChatEvent]:
        async for event in super().chat(model, messages, **parameters):
            yield event
            await self.is_free.wait()


def keys(*names: str) -> Scene:
    """Presses keys, each after the screen has reacted to the one before."""

    async def press(c: Chat) -> None:
        for name in names:
            await c.pilot.press(name)
            await c.pilot.pause(PAUSE)

    return press


async def prompt_of(c: Chat, text: str) -> None:
    c.prompt.put(text)
    await c.pilot.pause(PAUSE)


async def message(c: Chat) -> None:
    c.views()[-1].focus()
    await c.pilot.pause()


async def editing(c: Chat) -> None:
    c.screen.edit(c.path[0])
    await c.pilot.pause()


async def comparing(c: Chat) -> None:
    await c.screen.stop()
    c.screen.compare_with("pirate")
    await prompt_of(c, "Compare.")
    await keys("enter")(c)


async def history(c: Chat) -> None:
    for id in ("first", "second"):
        other = Conversation("guide", id=id, title=id)
        other.add("user", id, parent=None)
        await c.screen.recorder.save(other)
    await keys("f3", "down")(c)


SCENES: dict[str, Scene] = {
    "chat": keys(),
    "prompt": lambda c: prompt_of(c, "Hi."),
    "completions": lambda c: prompt_of(c, "/mod"),
    "message": message,
    "editing": editing,
    "comparing": comparing,
    "help": keys("f1"),
    "models": keys("f2", "down"),
    "models, filter": keys("f2"),
    "models, another": keys("f2", *"smol", "down"),
    "models, download": keys("f2", *"half", "down"),
    "models, broken": keys("f2", *"broken", "down"),
    "models, search": keys("f2", *"mistral", "enter", "down"),
    "details": keys("f2", *"smol", "ctrl+o"),
    "details of an offer": keys("f2", *"1.7b", "down", "enter"),
    "settings of a model": keys("f2", *"smol", "ctrl+s"),
    "alias": keys("f2", *"smol", "ctrl+a"),
    "delete": keys("f2", *"smol", "ctrl+x"),
    "verify": keys("f2", *"smol", "ctrl+k"),
    "unused files": keys("f2", "ctrl+u"),
    "add a folder": keys("f2", "ctrl+f"),
    "install": keys("f2", "ctrl+l"),
    "installing": keys("f2", "ctrl+l", "y"),
    "history": history,
    "settings": keys("f4"),
    "settings, field": keys("f4", "tab"),
    "adapters": keys("f5", "down"),
    "adapters, not loaded": keys("f5", "down", "down"),
    "scale": keys("f5", "down", "s"),
    "folder of an adapter": keys("f5", "l"),
    "palette": keys("ctrl+p", *"the"),
    "themes": keys("ctrl+p", *"theme", "enter"),
}


class Sweep:
    """Presses keys twice in one scene and one state. `pressed` counts the keys."""

    def __init__(self, open_chat: OpenChat, scene: str, state: str) -> None:
        self.open_chat = open_chat
        self.scene = scene
        self.state = state
        self.pressed = 0
        self.clicks = 0
        self.faults: list[str] = []

    async def run(self, *, all_keys: bool) -> None:
        todo = await self.keys(all_keys)
        while todo:
            try:
                await self.some(todo)
            except Exception as error:
                self.faults.append(f"{self.key}: {type(error).__name__} {str(error)[:300]}")

    async def keys(self, all_keys: bool) -> list[str]:
        client = SlowClient()
        async with self.open_chat(client, size=(100, 30)) as c:
            await c.until(lambda: c.app.screen is c.screen and c.prompt.has_focus)
            await self.enter(c, client)
            todo = self.keys_of(c, all_keys)
            await self.leave(c, client)
        return todo

    async def some(self, todo: list[str]) -> None:
        """Press keys until none is left, or until a key ends the application."""
        client = SlowClient()
        async with self.open_chat(client, size=(100, 30)) as c:
            await c.until(lambda: c.app.screen is c.screen and c.prompt.has_focus)
            while todo:
                self.key = todo.pop()
                await self.enter(c, client)
                self.press(c, self.key)
                await c.pilot.pause(PAUSE)
                if c.app._exit:
                    assert c.app.return_code == 0
                    return
                await self.leave(c, client)
            await c.send("Are you there?")
            assert c.path[-1].content == "Hello."

    def keys_of(self, c: Chat, all_keys: bool) -> list[str]:
        """The keys with a binding, of our widgets only or of all; the double clicks on rows come last."""
        ours = set()
        for node in c.app.screen.active_bindings.values():
            for kind in type(node.node).__mro__:
                if kind.__module__.startswith("localllm."):
                    ours |= {str(key) for key, _ in BindingsMap(kind.__dict__.get("BINDINGS"))}
        found = [key for key in c.app.screen.active_bindings if all_keys or key in ours]
        rows = [f"click {index}" for index, _ in enumerate(self.rows(c))]
        return list(dict.fromkeys([*rows, *found, *MORE_KEYS]))

    def rows(self, c: Chat) -> list[Offset]:
        """A place on each row of the list."""
        for list_ in c.app.screen.query(OptionList):
            if list_.display and list_.region.height:
                x, top = list_.content_region.offset
                return [Offset(x + 4, y) for y in range(top, top + min(6, list_.content_region.height))]
        return []

    def press(self, c: Chat, key: str) -> None:
        """Queue both presses, or all events of a double click, before the application reacts."""
        if key.startswith("click"):
            rows, index = self.rows(c), int(key.split()[1])
            if index >= len(rows):  # the list is shorter now
                return
            x, y = rows[index]
            for kind in (events.MouseDown, events.MouseUp) * 2:
                c.app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, x, y))
            self.clicks += 1
            return
        for _ in range(2):
            c.app.post_message(events.Key(key, key if len(key) == 1 else None))
        self.pressed += 2

    async def enter(self, c: Chat, client: SlowClient) -> None:
        """Begin a conversation with two answers, then bring the application into the state and the scene."""
        client.reset()
        conversation = Conversation("guide")
        question = conversation.add("user", "Hello?", parent=None)
        for text in ("One.", "Two."):
            conversation.add("assistant", text, parent=question.index).finish = "stop"
        await c.screen.begin(conversation)
        await c.settle()
        client.is_free = client.gate = asyncio.Event()
        if self.state == "loading":
            c.screen.use_model(LARGE.id)
        elif self.state == "answering":
            c.screen.ask("Go on.")
        else:
            client.is_free.set()
        await c.pilot.pause(PAUSE)
        await SCENES[self.scene](c)

    async def leave(self, c: Chat, client: SlowClient) -> None:
        """Let the work end, close the dialogs, and check that the chat is whole."""
        client.is_free.set()
        await c.pilot.pause(PAUSE)
        for _ in range(8):
            if c.app.screen is c.screen and not c.screen.is_answering:
                break
            await c.pilot.press("escape")
            await c.pilot.pause(PAUSE)
        assert c.app._exception is None
        assert [type(screen).__name__ for screen in c.app.screen_stack] == ["Screen", "ChatScreen"]
        await c.settle()
        assert not c.screen.is_answering
        assert all(message.finish for message in c.screen.conversation.messages if message.role == "assistant")
        c.screen.query_one("Dock").leave()
        c.prompt.put("")
        assert len(c.screen.query(Messages)) == 1
        mounted = [id(view.message) for view in c.views()]
        assert mounted == [id(message) for message in c.path][-len(mounted) :]


async def sweep(open_chat: OpenChat, scene: str, state: str, *, all_keys: bool) -> None:
    done = Sweep(open_chat, scene, state)
    await done.run(all_keys=all_keys)
    print(f"{done.pressed} presses, {done.clicks} double clicks")
    assert not done.faults


@pytest.mark.parametrize(
    ("scene", "state"),
    [
        ("models, another", "loading"),
        ("comparing", "answering"),
        ("delete", "idle"),
    ],
)
async def test_every_key_twice(chat: OpenChat, scene: str, state: str) -> None:
    await sweep(chat, scene, state, all_keys=False)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scene", SCENES)
async def test_every_key_twice_on_every_screen(chat: OpenChat, scene: str, state: str) -> None:
    """Also the keys of Textual's own widgets."""
    await sweep(chat, scene, state, all_keys=True)


async def test_second_press_closes_a_screen_that_is_not_open_yet(chat: OpenChat) -> None:
    """The result of two presses does not depend on their speed."""
    async with chat() as c:
        for key in ("f4", "f4", "f3", "f3", "f1", "f1"):
            c.app.post_message(events.Key(key, None))
        await c.until(lambda: not c.app.message_queue_size)
        await c.settle()
        assert c.app.screen is c.screen
        await c.send("Are you there?")
        assert c.path[-1].content == "Hello."
