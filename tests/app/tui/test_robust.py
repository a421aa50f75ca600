"""Errors and hostile text: the chat continues and loses nothing."""

from __future__ import annotations

import asyncio
import random
import sqlite3

import pytest
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownFence

from localllm.app.client import ModelEntry
from localllm.app.errors import ContextTooLong, DaemonUnreachable, StorageFailed, WorkerDied
from localllm.app.sizes import size
from localllm.app.tui.chat.messages import WINDOW
from localllm.app.tui.chat.streaming import StreamingMarkdown, split
from localllm.app.tui.conversation import Conversation

from . import conftest
from .conftest import OpenChat
from .fake_client import FakeClient

HOSTILE = "\x1b[2J\x1b]52;c;aGFja2Vk\x07\x9b31m\u202eevil\u2028[red]markup[/red] <script>x</script> \ud800"


async def test_control_sequences_in_an_answer_are_removed(chat: OpenChat) -> None:
    async with chat(FakeClient(list(HOSTILE))) as c:
        await c.send("go")
        shown = c.shown()
        assert not any((ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160 for letter in shown)
        for words in ("[2J", "⟨U+202E⟩evil", "[red]markup[/red]", "<script>x</script>"):
            assert words in shown
        await c.send("/copy")
        assert "\x1b" not in c.app.clipboard
        assert "\x9b" not in c.app.clipboard
        assert c.saved.load(c.screen.conversation.id).messages[1].content == c.path[1].content
        assert "\x1b" not in c.path[1].content


async def test_a_wait_for_the_screen_has_a_limit(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "HANG_SECONDS", 0.1)
    async with chat() as c:
        with pytest.raises(AssertionError, match="the condition did not become true"):
            await c.until(lambda: False)


async def test_control_sequences_in_names_and_errors_are_removed(chat: OpenChat) -> None:
    name = "evil\x1b[31m/[bold]model[/bold]"
    client = FakeClient([WorkerDied("died \x1b]0;x\x07[b]hard[/b]")], models=[ModelEntry(id=name)])
    async with chat(client, Conversation(name)) as c:
        await c.send("go \x1b[31mred")
        await c.press("f2")
        assert "evil[31m/[bold]model[/bold]" in c.shown()
        await c.pilot.press("escape")
        assert "\x1b" not in c.shown()
        assert "[b]hard[/b]" in c.shown()


async def test_paste_of_a_megabyte_is_folded(chat: OpenChat) -> None:
    text = "".join(f"line {number} of a long file\n" for number in range(40_000))
    async with chat() as c:
        await c.type("Sum up: ")
        await c.paste(text.replace("\n", "\r"))  # the form in which terminals send line breaks
        await c.type(" Thanks.")
        assert c.prompt.text == f"Sum up: [paste 1: 40,001 lines, {size(len(text))}] Thanks."
        await c.send("")
        assert c.client.requests[0]["messages"][0]["content"] == f"Sum up: {text} Thanks."
        assert "more characters" in c.shown()
        await c.send("/edit")
        assert c.prompt.text.startswith("[paste 1: ")


async def test_small_pastes_are_typed_and_cleaned(chat: OpenChat) -> None:
    async with chat() as c:
        await c.paste("a\x1b[31m\r\nb\rc")
        assert c.prompt.text == "a[31m\nb\nc"


async def test_typed_paste_placeholder_is_plain_text(chat: OpenChat) -> None:
    async with chat() as c:
        await c.send("see [paste 1: none] and [paste 0: x]")
        assert c.path[0].content == "see [paste 1: none] and [paste 0: x]"


async def test_context_overflow_shows_both_numbers_and_a_remedy(chat: OpenChat) -> None:
    error = ContextTooLong("the prompt is too long", n_prompt_tokens=3000, n_ctx=2048)
    async with chat(FakeClient([error], ["Fine."])) as c:
        await c.send("long")
        for words in ("n prompt tokens 3000", "n ctx 2048", "/new", "/edit", "Later requests omit this message"):
            assert words in " ".join(c.shown().split()), words
        await c.send("short")
        assert [m["content"] for m in c.client.requests[1]["messages"]] == ["short"]


async def test_answer_of_a_dead_worker_keeps_its_text_and_offers_a_retry(chat: OpenChat) -> None:
    async with chat(FakeClient(["half", WorkerDied("the engine process ended")], ["whole"])) as c:
        await c.send("go")
        assert (c.path[-1].content, c.path[-1].finish) == ("half", "failed")
        assert "half" in c.shown()
        assert "The engine process ended." in c.shown()
        assert "Ctrl+R tries again" in c.shown()
        await c.press("ctrl+r")
        assert c.path[-1].content == "whole"


async def test_ui_reconnects_to_a_lost_daemon(chat: OpenChat) -> None:
    async with chat(FakeClient(["half", DaemonUnreachable("the daemon is gone")], ["whole"])) as c:
        await c.send("go")
        assert "not connected" in c.shown()
        assert c.client.connects == 1
        await c.press("ctrl+r")
        assert c.client.connects == 2
        assert c.path[-1].content == "whole"
        assert "not connected" not in c.shown()


async def test_ui_starts_the_daemon_again_between_two_questions(chat: OpenChat) -> None:
    async with chat(FakeClient()) as c:
        await c.send("one")
        c.client.over, c.client.in_memory = True, []
        await c.send("two")
        assert c.client.connects == 2
        assert [loaded.id for loaded in c.client.in_memory] == ["guide"]
        assert (c.path[-1].content, c.path[-1].finish) == ("Hello.", "stop")


async def test_ui_reports_that_no_daemon_can_start(chat: OpenChat) -> None:
    client = FakeClient()
    client.connect_error = DaemonUnreachable("it does not start", hint="look into the log")
    async with chat(client) as c:
        assert "it does not start" in c.notices().lower()
        assert "not connected" in c.shown()
        await c.send("hi")
        assert c.path[-1].finish == "failed"
        assert "look into the log" in c.shown()
        client.connect_error = None
        await c.press("ctrl+r")
        assert c.path[-1].content == "Hello."


async def test_question_can_be_sent_before_the_daemon_is_ready(chat: OpenChat) -> None:
    hold = asyncio.Event()

    class Late(FakeClient):
        async def connect(self, settings: object, **more: object) -> FakeClient:  # type: ignore[override]
            await hold.wait()
            return await super().connect(settings)

    client = Late()
    async with chat(client, settled=False) as c:
        await c.enter("early bird")
        assert "…" in c.shown()
        assert client.requests == []
        hold.set()
        await c.settle()
        assert c.path[-1].content == "Hello."


async def test_stream_without_a_final_event_is_an_error(chat: OpenChat) -> None:
    class Broken(FakeClient):
        async def chat(self, *arguments, **more):
            async for event in super().chat(*arguments, **more):
                yield event
                return

    async with chat(Broken(["half", " more"])) as c:
        await c.send("go")
        assert c.path[-1].finish == "failed"
        assert "ended unexpectedly" in c.shown()


async def test_chat_continues_if_the_history_disk_is_full(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat(FakeClient(["One."], ["Two."], ["Three."])) as c:
        plain = c.store.save

        def full(*_: object) -> None:
            raise StorageFailed(
                "Cannot use the history file: database or disk is full.", hint="The chat continues without saving."
            )

        monkeypatch.setattr(c.store, "save", full)
        await c.send("a")
        await c.send("b")
        assert [message.content for message in c.path] == ["a", "One.", "b", "Two."]
        assert c.notices().count("disk is full") == 1
        assert "not saved" in c.shown()
        monkeypatch.setattr(c.store, "save", plain)
        await c.send("c")
        assert "not saved" not in c.shown()
        assert len(c.saved.load(c.screen.conversation.id).messages) == 6  # every message is saved


async def test_chat_continues_with_a_damaged_history_file(chat: OpenChat, tmp_path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "history.sqlite3").write_bytes(b"damaged" * 1000)
    async with chat() as c:
        await c.send("hi")
        assert c.path[-1].content == "Hello."
        assert "not a database" in c.notices()
        await c.press("f3")
        assert "not a database" in c.shown()


@pytest.mark.parametrize("size", [(80, 24), (40, 12), (20, 8), (200, 60)])
async def test_every_screen_opens_in_every_terminal_size(chat: OpenChat, size: tuple[int, int]) -> None:
    async with chat(FakeClient(["# Title\n\n- a\n- b\n\n```\ncode\n```\n"]), size=size) as c:
        await c.send("hi")
        assert c.prompt.region.height >= 3
        assert c.prompt.region.bottom <= size[1]
        for key in ("f1", "f2", "f3", "f4", "ctrl+p"):
            await c.pilot.press(key)
            await c.pilot.pause()
            assert len(c.app.screen_stack) == 3, key
            await c.press("escape")
        await c.send("again")
        assert len(c.client.requests) == 2


async def test_many_resizes_during_an_answer(chat: OpenChat) -> None:
    sizes = random.Random(3)
    async with chat(FakeClient([f"word{number} " for number in range(300)])) as c:
        await c.enter("go")
        for _ in range(25):
            await c.pilot.resize_terminal(sizes.randint(1, 150), sizes.randint(1, 50))
        await c.pilot.resize_terminal(80, 24)
        await c.settle()
        assert "word299" in c.shown()
        assert len(c.path[-1].content.split()) == 300


def items(count: int) -> str:
    return "".join(f"- item {number}\n" for number in range(count))


def code(count: int) -> str:
    return "```python\n" + "".join(f"x{number} = {number}\n" for number in range(count)) + "```\n"


@pytest.mark.parametrize(
    ("source", "head", "tail", "block"),
    [
        ("a\n\nb\n\nc\n", "a\n\nb\n\n", "c\n", ""),
        ("- a\n- b\n- c", "- a\n", "- b\n- c", "list"),
        ("1. a\n\n2. b\nc", "1. a\n\n", "2. b\nc", ""),
        ("```py\na\nb\nc", "```py\na\n```", "```py\nb\nc", "code"),
        ("~~~~\na\n~~~\nb\nc", "~~~~\na\n~~~\n~~~~", "~~~~\nb\nc", "code"),
        ("x\n\n```\na\n```\n\ny\nz", "x\n\n```\na\n```\n\n", "y\nz", ""),
    ],
)
def test_split_cuts_at_the_last_invisible_line(source: str, head: str, tail: str, block: str) -> None:
    cut = split(source)
    assert cut is not None
    assert (cut.head, cut.tail, cut.block) == (head, tail, block)


@pytest.mark.parametrize(
    "source", ["one paragraph\nof many\nlines\n", "- a\n  ```\n  x\n  y\n", "> a\n> b\n> c\n", "| a |\n|---|\n| b |\n"]
)
def test_split_returns_none_without_an_invisible_cut(source: str) -> None:
    assert split(source) is None


@pytest.mark.parametrize(
    "source",
    [items(100), code(100), f"# A\n\n{items(30)}\ntext\n\n{code(50)}\nmore\n\n{items(20)}", "word " * 3000],
    ids=["list", "code", "mixed", "paragraph"],
)
async def test_streamed_answer_looks_like_the_resumed_answer(chat: OpenChat, source: str) -> None:
    """The screen shows the same blocks after streaming in chunks and after a layout of the complete text."""
    random.seed(1)
    chunks = []
    offset = 0
    while offset < len(source):
        length = random.randint(1, 200)
        chunks.append(source[offset : offset + length])
        offset += length
    async with chat(FakeClient(chunks), size=(80, 400)) as c:
        await c.send("go")
        answer = c.screen.query_one(StreamingMarkdown)
        streamed = c.shown()
        assert "".join(document.source for document in answer.query(Markdown)) == source
        id = c.screen.conversation.id
        await c.screen.begin(Conversation("guide"))
        await c.screen.begin(await c.screen.recorder.load(id))
        await c.settle()
        resumed = c.screen.query_one(StreamingMarkdown)
        assert len(resumed.query(Markdown)) == 1
        assert c.shown().replace(" ", "") == streamed.replace(" ", "")
        assert len(c.screen.query("MarkdownBullet")) == source.count("- item")
        assert len(c.screen.query(MarkdownFence)) == source.count("```python")


async def test_long_conversation_opens_with_its_last_messages(chat: OpenChat) -> None:
    conversation = Conversation("guide")
    for number in range(40):
        question = conversation.add("user", f"question {number}", parent=conversation.leaf)
        conversation.add("assistant", f"answer {number}", parent=question.index).finish = "stop"
    async with chat(None, Conversation("guide")) as c:
        await c.screen.begin(conversation)
        await c.settle()
        assert len(c.views()) == WINDOW
        assert "answer 39" in c.shown()
        c.screen.query_one("#earlier").focus()
        await c.press("enter")
        assert [view.message.index for view in c.views()] == list(range(80 - 2 * WINDOW, 80))


async def test_history_file_is_intact_after_a_failed_answer(chat: OpenChat) -> None:
    async with chat(FakeClient(["One."], [WorkerDied("gone")])) as c:
        await c.send("a")
        await c.send("b")
        file = c.store.file
    database = sqlite3.connect(file)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert database.execute("SELECT count(*) FROM message").fetchone() == (4,)
    database.close()
