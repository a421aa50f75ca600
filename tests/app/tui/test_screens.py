"""Widths and words of the chat: wide code, notices, the line of keys, and the values in the settings."""

from __future__ import annotations

import pytest
from textual.widgets import Input, Markdown

from localllm.app.tui.chat.footer import Footer, keys
from localllm.app.tui.chat.status import StatusLine
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.segments import fit

from .conftest import OpenChat
from .fake_client import LARGE, PIRATE_ENTRY, POET, FakeClient

SIZES = [(80, 24), (100, 30), (160, 45), (40, 12)]
WORDS = [f"word{number}" for number in range(30)]
WIDE = f"```python\nvalue = call({', '.join(WORDS)})\n```\n\n```\n{'x' * 150}END\n```\n\n{' '.join(WORDS)}\n"
TABLE = "| a | b | c |\n|---|---|---|\n| " + " | ".join(f"{' '.join(WORDS)}" for _ in range(3)) + " |\n"


@pytest.mark.parametrize("size", SIZES)
async def test_wide_code_is_wrapped(chat: OpenChat, size: tuple[int, int]) -> None:
    async with chat(FakeClient([WIDE]), size=(size[0], 200)) as c:
        await c.send("go")
        shown = c.shown()
        assert all(shown.count(word + ",") == 1 for word in WORDS[:-1])  # in the code
        assert "END" in shown
        assert shown.count("x") >= 150


@pytest.mark.parametrize("size", SIZES)
async def test_text_has_at_most_100_columns(chat: OpenChat, size: tuple[int, int]) -> None:
    async with chat(FakeClient([WIDE + "\n" + TABLE]), size=size) as c:
        assert c.screen.query_one("#welcome").region.width <= 100
        await c.send(" ".join(WORDS))
        for view in c.views():
            assert view.content_region.width == min(100, size[0] - 6), view
        assert all(document.region.width <= 100 for document in c.screen.query(Markdown))


@pytest.mark.parametrize("size", SIZES)
async def test_notices_do_not_cover_the_prompt(chat: OpenChat, size: tuple[int, int]) -> None:
    async with chat(size=size, notifications=True) as c:
        await c.type("a\n" * 12)
        for number in range(6):
            c.screen.say(f"{number} " + "a long notice about something " * 10)
        await c.until(lambda: "notice" in c.shown())
        lines = c.shown().split("\n")
        assert not any("notice" in line for line in lines[c.prompt.region.y :])
        assert c.screen.query_one(StatusLine).region.bottom <= size[1]


@pytest.mark.parametrize(("width", "shown"), [(160, "Ctrl+R again"), (80, "F5 adapters"), (40, "F2 models")])
async def test_keys_adapt_to_the_width(chat: OpenChat, width: int, shown: str) -> None:
    async with chat(size=(width, 24)) as c:
        line = str(c.screen.query_one(Footer).render())
        assert line.startswith("F1 help · F2 models")
        assert shown in line
        assert len(line) <= width - 4


async def test_keys_are_those_that_work_now(chat: OpenChat) -> None:
    async with chat(FakeClient(["Fine."])) as c:
        footer = c.screen.query_one(Footer)
        await c.type("/mo")
        assert str(footer.render()).startswith("Tab completes")
        await c.pilot.press("escape")
        assert str(footer.render()).startswith("F1 help")
        c.prompt.put("")
        await c.send("hi")
        await c.pilot.press("up")
        await c.pilot.pause()
        assert "c copy" in str(footer.render())
        await c.pilot.press("up", "e")
        await c.pilot.pause()
        assert str(footer.render()).startswith("Enter sends the edited message · Esc cancels")


def test_running_answer_can_be_stopped_in_every_width() -> None:
    segments = keys(is_answering=True, is_message=False, has_hints=False, purpose="")
    assert all(fit(segments, width).startswith("Esc stop") for width in range(8, 200))


async def test_settings_show_the_values_that_apply(chat: OpenChat) -> None:
    async with chat() as c:
        await c.pilot.press("f4")
        fields = {line.id: line.placeholder for line in c.app.screen.query(Input)}
        assert fields["temperature"] == "default (0.6)"
        assert fields["top_k"] == "default (20)"
        assert fields["presence_penalty"] == "default (0)"
        assert fields["max_tokens"] == "default (rest)"
        for placeholder in fields.values():
            assert placeholder in c.shown()
        assert "guide · context 2,048 tokens · weights bfloat16, quant none · on cpu" in c.shown()


async def test_palette_finds_models_adapters_and_chats(chat: OpenChat) -> None:
    client = FakeClient(["Snakes are fine."])
    client.loaded_adapters = [PIRATE_ENTRY]
    client.folders = [POET]
    async with chat(client) as c:
        await c.send("Tell me about snakes.")
        await c.send("/new")

        async def choose(typed: str) -> None:
            await c.pilot.press("ctrl+p", *typed)
            await c.until(lambda: c.app.screen.query_one("CommandList").option_count > 0)
            await c.pilot.pause(0.5)
            await c.press("enter")
            assert c.app.screen is c.screen

        await choose("qwen3-4b")
        assert c.screen.conversation.model == LARGE.id
        await choose("model guide")
        assert c.screen.conversation.model == "guide"
        await choose("pirate")
        assert c.screen.conversation.adapter == "pirate"
        await choose("poet")
        assert c.screen.conversation.adapter == "poet"
        await choose("snakes")
        assert [message.content for message in c.path] == ["Tell me about snakes.", "Snakes are fine."]


async def test_palette_shows_names_as_text(chat: OpenChat) -> None:
    conversation = Conversation("guide", title="[red]x[/red]")
    conversation.add("user", "y", parent=None)
    async with chat() as c:
        await c.screen.recorder.save(conversation)
        await c.pilot.press("ctrl+p", *"red")
        await c.until(lambda: "[red]x[/red]" in c.shown())
