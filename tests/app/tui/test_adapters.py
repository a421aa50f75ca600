"""The adapter screen, the adapter of an answer, and two answers side by side."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from localllm.app.client import AdapterEntry
from localllm.app.errors import AdapterNotFound, AdapterUnusable
from localllm.app.tui.adapters import Adapters, AdapterScreen
from localllm.app.tui.chat.compare import Column, CompareScreen
from localllm.app.tui.chat.dock import Dock
from localllm.app.tui.chat.status import StatusLine
from localllm.app.tui.conversation import Conversation

from .conftest import Chat, OpenChat
from .fake_client import LARGE, OTHER, PIRATE, PIRATE_ENTRY, POET, FakeClient


def client(*script: list, loaded: tuple[str, ...] = ("pirate",)) -> FakeClient:
    """A client with three adapters on disk. `loaded`: the names of the loaded ones."""
    fake = FakeClient(*script)
    fake.folders = [PIRATE, OTHER, POET]
    for number, name in enumerate(loaded):
        path = next(folder.path for folder in fake.folders if folder.id.endswith(name))
        fake.loaded_adapters.append(
            AdapterEntry(id=number, name=name, model="guide", path=path, scale=0.0, pinned=False)
        )
    return fake


def status(c: Chat) -> str:
    return str(c.screen.query_one(StatusLine).content)


async def open_adapters(c: Chat) -> AdapterScreen:
    await c.press("f5")
    assert isinstance(c.app.screen, AdapterScreen)
    return c.app.screen


async def test_adapter_screen_lists_loaded_adapters_first_and_other_bases_last(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_adapters(c)
        shown = c.shown()
        names = [shown.index(name) for name in ("none", "pirate ×1", "org/poet", "org/qwen-lora")]
        assert names == sorted(names)
        assert "loaded · built in · rank 8 · 1.1 MiB" in shown
        assert "downloaded, not loaded · rank 16" in shown
        assert "made for Qwen/Qwen3-4B" in shown
        assert "made for someone/guide" not in shown  # the last part of the name is that of the model


async def test_selected_adapter_and_its_scale_are_sent_and_shown(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_adapters(c)
        await c.press("down", "left", "left", "left", "enter")
        assert "adapter pirate ×0.7" in status(c)
        await c.send("Hi")
        assert c.client.requests[0]["adapter"] == "pirate=0.7"
        assert "guide · pirate ×0.7" in c.shown()
        await open_adapters(c)
        assert "● pirate ×0.7" in c.shown()
        await c.press("up", "enter")
        await c.send("And now?")
        assert "adapter" not in c.client.requests[1]
        assert "adapter" not in status(c)
        assert [message.adapter for message in c.path] == ["", "pirate=0.7", "", ""]
        assert c.saved.load(c.screen.conversation.id).messages[1].adapter == "pirate=0.7"


async def test_adapter_that_is_not_loaded_is_loaded_before_its_use(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_adapters(c)
        await c.pilot.press("down", "down", "right")
        assert "Only a loaded adapter has a scale" in c.text_of("#notice")
        await c.press("enter")
        assert [entry.name for entry in c.client.loaded_adapters] == ["pirate", "poet"]
        await c.send("Hi")
        assert c.client.requests[0]["adapter"] == "poet"


async def test_warning_of_the_selected_adapter_is_shown(chat: OpenChat) -> None:
    fake = client(loaded=())
    fake.loaded_adapters = [structs.replace(PIRATE_ENTRY, warning="the adapter is for the base model org/other")]
    async with chat(fake) as c:
        await c.send("/adapter pirate")
        assert "is for the base model org/other" in c.notices()


async def test_scale_can_be_typed(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_adapters(c)
        await c.press("down", "s", "backspace", *"500", "enter")
        assert "The scale is a number from -100 to 100" in c.text_of("#notice")
        await c.press("s", "backspace", *"2.5", "enter")
        assert "pirate ×2.5" in c.shown()


async def test_adapter_screen_shows_why_a_folder_is_refused(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise AdapterUnusable("adapter x: rank 64, but the limit is 16", hint="raise the setting adapter_rank")

    async with chat(client()) as c:
        screen = await open_adapters(c)
        await c.press("l", *"/nowhere/x", "enter")
        assert "/nowhere/x does not exist" in c.text_of("#notice")
        monkeypatch.setattr(c.client, "load_adapter", refuse)
        await c.press("down", "down", "enter")
        assert c.app.screen is screen
        assert "rank 64, but the limit is 16. Raise the setting adapter_rank" in c.text_of("#notice")


async def test_adapter_screen_unloads(chat: OpenChat) -> None:
    async with chat(client()) as c:
        screen = await open_adapters(c)
        await c.press("u")
        assert "not loaded" in c.text_of("#notice")
        await c.press("down", "u")
        assert c.client.loaded_adapters == []
        assert "built in · rank 8" in c.shown()
        assert screen.query_one(Adapters).option_count == 4


async def test_adapter_command(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await c.send("/adapter pirate=2")
        assert c.screen.conversation.adapter == "pirate=2"
        await c.send("/adapter poet")
        assert [entry.name for entry in c.client.loaded_adapters] == ["pirate", "poet"]
        await c.send("/adapter nothing")
        assert "no adapter 'nothing'" in c.notices()
        assert "Loaded: pirate, poet" in c.notices()
        c.prompt.put("")
        await c.send("/adapter none")
        assert c.screen.conversation.adapter == ""
        await c.type("/adapter po")
        await c.pilot.press("tab")
        assert c.prompt.text == "/adapter poet"


async def test_unknown_adapter_of_a_resumed_conversation_has_a_hint(chat: OpenChat) -> None:
    error = AdapterNotFound("guide has no adapter 'gone'", hint="loaded adapters: none")
    async with chat(FakeClient([error]), Conversation("guide", "", {"adapter": "gone"})) as c:
        await c.send("Hi")
        assert "F5 lists and loads the adapters" in c.path[-1].error


async def test_default_adapter_of_the_daemon_is_shown(chat: OpenChat) -> None:
    fake = client(loaded=())
    fake.loaded_adapters = [AdapterEntry(id=0, name="pirate", model="guide", path=PIRATE.path, scale=0.5, pinned=False)]
    async with chat(fake) as c:
        assert "adapter pirate ×0.5 (default)" in status(c)


async def test_another_model_unsets_an_adapter_that_it_does_not_have(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await c.send("/adapter pirate=2")
        await c.send(f"/model {LARGE.id}")
        assert c.screen.conversation.adapter == ""
        assert "has no adapter pirate=2" in c.notices()


async def test_two_answers_stream_at_the_same_time_and_one_is_chosen(chat: OpenChat) -> None:
    hold = asyncio.Event()
    async with chat(client(["Base ", hold, "answer."], ["Arr, ", hold, "matey."])) as c:
        await c.send("/compare pirate=0.5")
        assert "two answers: base model | pirate ×0.5" in c.shown()
        await c.enter("Who are you?")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and "Arr," in c.shown() and "Base" in c.shown())
        assert c.screen.is_answering
        hold.set()
        await c.until(lambda: not c.screen.is_answering)
        await c.pilot.pause()
        shown = c.shown()
        for words in ("Who are you?", "Base answer.", "Arr, matey.", "guide · pirate ×0.5", "tok/s · first 120 ms"):
            assert words in shown
        assert [request["adapter"] for request in c.client.requests] == ["", "pirate=0.5"]
        assert [len(request["messages"]) for request in c.client.requests] == [1, 1]
        await c.press("right", "enter")
        assert c.app.screen is c.screen
        assert [message.content for message in c.path] == ["Who are you?", "Arr, matey."]
        assert "‹2/2›" in c.shown()
        assert "adapter pirate ×0.5" in status(c)
        await c.send("Go on.")
        assert c.client.requests[2]["adapter"] == "pirate=0.5"
        assert [m["content"] for m in c.client.requests[2]["messages"]] == ["Who are you?", "Arr, matey.", "Go on."]
        assert len(c.saved.load(c.screen.conversation.id).messages) == 5


async def test_esc_stops_both_answers_and_then_goes_on_with_the_first(chat: OpenChat) -> None:
    never = asyncio.Event()
    async with chat(client(["one", never], ["two", never])) as c:
        await c.send("/compare pirate")
        await c.enter("go")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and "two" in c.shown() and "one" in c.shown())
        await c.pilot.press("escape")
        await c.until(lambda: not c.screen.is_answering)
        assert c.client.cancelled == 2
        assert isinstance(c.app.screen, CompareScreen)
        await c.press("escape")
        assert [(message.content, message.finish) for message in c.path] == [("go", ""), ("one", "stopped")]
        assert c.screen.conversation.adapter == ""


async def test_choice_of_one_answer_stops_the_other(chat: OpenChat) -> None:
    never = asyncio.Event()
    async with chat(client(["one"], ["two", never])) as c:
        await c.send("/compare pirate")
        await c.enter("go")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and "one" in c.shown())
        await c.press("1", "enter")
        assert c.path[-1].content == "one"
        assert [message.finish for message in c.screen.conversation.messages[1:]] == ["stop", "stopped"]


async def test_quit_stops_and_saves_both_answers(chat: OpenChat) -> None:
    never = asyncio.Event()
    async with chat(client(["one", never], ["two", never])) as c:
        await c.send("/compare pirate")
        await c.enter("go")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and "two" in c.shown())
        await c.pilot.press("ctrl+q")
        await c.until(lambda: not c.app.is_running)
    assert [message.content for message in c.saved.load(c.screen.conversation.id).messages] == ["go", "one", "two"]


async def test_comparison_of_the_last_question(chat: OpenChat) -> None:
    async with chat(client(["first"], ["base"], ["arr"])) as c:
        await c.send("go")
        await c.send("/compare pirate")
        await c.pilot.press("ctrl+r")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and not c.screen.is_answering)
        await c.press("2", "enter")
        assert [message.content for message in c.path] == ["go", "arr"]
        assert "‹3/3›" in c.shown()


async def test_comparison_is_chosen_on_the_adapter_screen_and_esc_cancels_it(chat: OpenChat) -> None:
    async with chat(client()) as c:
        await open_adapters(c)
        await c.pilot.press("c")
        assert "current selection" in c.text_of("#notice")
        await c.press("down", "c")
        assert c.screen.query_one(Dock).other_adapter == "pirate"
        await c.pilot.press("escape")
        assert c.screen.query_one(Dock).other_adapter is None
        await c.send("/compare")
        assert "Compare the base model with" in c.shown()
        await c.press("down", "enter")
        assert c.screen.query_one(Dock).other_adapter == "pirate"
        await c.send("/compare pirate pirate")
        assert "same adapter" in c.notices()


async def test_error_of_one_answer_leaves_the_other(chat: OpenChat) -> None:
    error = AdapterUnusable("adapter pirate: its files have changed", hint="load the adapter again")
    async with chat(client(["fine"], [error]), size=(120, 30)) as c:
        await c.send("/compare pirate")
        await c.enter("go")
        await c.until(lambda: isinstance(c.app.screen, CompareScreen) and not c.screen.is_answering)
        await c.pilot.pause()
        assert "fine" in c.shown()
        assert "its files have changed" in c.shown()


async def test_answers_are_one_above_the_other_in_a_narrow_terminal(chat: OpenChat) -> None:
    async with chat(client(["fine"], ["arr"]), size=(40, 20)) as c:
        await c.send("/compare pirate")
        await c.send("go")
        first, second = c.app.screen.query(Column)
        assert (first.region.x, first.region.bottom) == (second.region.x, second.region.y)
