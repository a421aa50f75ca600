"""The chat screen: questions, answers, branches and commands."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from textual.widgets import Input, Markdown, OptionList, Static, TextArea

from localllm.app.client import Client, ReasoningPiece, ToolCall
from localllm.app.config import Settings
from localllm.app.errors import InvalidRequest, StorageFailed
from localllm.app.tui import run
from localllm.app.tui.ask import AskScreen
from localllm.app.tui.chat.hints import Hints
from localllm.app.tui.conversation import Conversation
from localllm.app.tui.help import HelpScreen
from localllm.app.tui.history.screen import Conversations, HistoryScreen
from localllm.app.tui.models.screen import ModelScreen
from localllm.app.tui.parameters import PARAMETERS
from localllm.app.tui.settings import SettingsScreen

from .conftest import OpenChat
from .fake_client import LARGE, FakeClient

CODE = ["Here:\n\n```python\nx = 1\n```\n\nand\n\n```\ny = 2\n```\n"]


def test_fake_client_has_the_methods_of_the_client() -> None:
    for name, real in inspect.getmembers(Client, inspect.isroutine):
        if not name.startswith("_"):
            fake = inspect.signature(getattr(FakeClient, name))
            names = [parameter for parameter in inspect.signature(real).parameters if parameter not in ("self", "cls")]
            assert [parameter for parameter in fake.parameters if parameter != "self"] == names, name


async def test_header_has_the_name_of_a_file(chat: OpenChat) -> None:
    """A path would be cut before the name."""
    async with chat(FakeClient(), Conversation("/home/ann/models/llama/my model-Q8_0.gguf")) as c:
        assert c.text_of("#model") == "my model-Q8_0.gguf"


async def test_adapter_changes_between_two_questions(chat: OpenChat) -> None:
    async with chat(FakeClient()) as c:
        for adapter in ("pirate", "poet=0.5", "none"):
            await c.send(f"/set adapter {adapter}")
            await c.send("Hi")
        assert [request.get("adapter") for request in c.client.requests] == ["pirate", "poet=0.5", None]


async def test_question_and_answer(chat: OpenChat) -> None:
    async with chat(FakeClient(["Hel", "lo **you**."])) as c:
        assert "tiny built-in model" in c.shown()
        assert "F2 suggests larger models" in c.shown()
        await c.send("Hi [bold]there[/bold]")
        assert [message.content for message in c.path] == ["Hi [bold]there[/bold]", "Hello **you**."]
        assert c.client.requests == [
            {"model": "guide", "messages": [{"role": "user", "content": "Hi [bold]there[/bold]"}]}
        ]
        shown = c.shown()
        assert "Hi [bold]there[/bold]" in shown
        assert "Hello you." in shown
        assert c.prompt.text == ""
        for figure in ("ready", "tokens/s", "first token after 120 ms", "22 of 2,048 tokens used"):
            assert figure in shown


async def test_request_has_all_earlier_turns(chat: OpenChat) -> None:
    async with chat(FakeClient(["One."], ["Two."]), Conversation("guide", "Be brief.", {"temperature": 0.5})) as c:
        await c.send("first")
        await c.send("second")
        request = c.client.requests[1]
        assert [m["content"] for m in request["messages"]] == ["Be brief.", "first", "One.", "second"]
        assert request["temperature"] == 0.5


async def test_blank_prompts_are_not_sent_and_newlines_are_kept(chat: OpenChat) -> None:
    async with chat() as c:
        await c.pilot.press("enter", "space", "enter")
        assert c.client.requests == []
        await c.pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        await c.send("")
        assert c.path[0].content == " a\nb\nc"


async def test_esc_stops_the_answer_and_keeps_its_text(chat: OpenChat) -> None:
    never = asyncio.Event()
    async with chat(FakeClient(["half an ans", never], ["whole"])) as c:
        await c.enter("go")
        await c.until(lambda: c.path[-1].content == "half an ans")
        await c.enter("another")  # rejected while an answer runs, but kept in the prompt box
        assert c.prompt.text == "another"
        assert "Esc stops it" in c.notices()
        await c.press("escape")
        assert c.client.cancelled == 1
        assert (c.path[-1].content, c.path[-1].finish) == ("half an ans", "stopped")
        assert "stopped" in c.shown()
        assert c.saved.load(c.screen.conversation.id).messages[-1].finish == "stopped"
        await c.press("enter")
        assert [m["content"] for m in c.client.requests[1]["messages"]] == ["go", "half an ans", "another"]


async def test_regenerate_keeps_the_earlier_answer(chat: OpenChat) -> None:
    async with chat(FakeClient(["First."], ["Second."])) as c:
        await c.send("go")
        await c.press("ctrl+r")
        assert c.path[-1].content == "Second."
        assert "‹2/2›" in c.shown()
        assert len(c.client.requests[1]["messages"]) == 1
        await c.press("alt+left")
        assert c.path[-1].content == "First."
        assert "‹1/2›" in c.shown()
        assert "First." in c.shown()
        await c.press("alt+right")
        assert c.path[-1].content == "Second."


async def test_edited_question_creates_a_branch(chat: OpenChat) -> None:
    async with chat(FakeClient(["A1"], ["A2"], ["B1"])) as c:
        await c.send("first")
        await c.send("second")
        await c.pilot.press("up", "up", "up", "up")  # moves to the messages, then to the first message
        assert c.app.focused is c.views()[0]
        await c.pilot.press("e")
        assert c.prompt.text == "first"
        assert c.prompt.has_class("special")
        await c.send(" again")
        assert [message.content for message in c.path] == ["first again", "B1"]
        assert c.client.requests[2]["messages"] == [{"role": "user", "content": "first again"}]
        await c.press("up", "up", "left")
        assert [message.content for message in c.path] == ["first", "A1", "second", "A2"]


async def test_esc_cancels_editing(chat: OpenChat) -> None:
    async with chat() as c:
        await c.send("first")
        await c.send("/edit")
        assert c.prompt.text == "first"
        await c.pilot.press("escape")
        assert c.prompt.text == ""
        assert not c.prompt.has_class("special")
        await c.send("second")
        assert [message.content for message in c.path][::2] == ["first", "second"]


async def test_copy(chat: OpenChat) -> None:
    async with chat(FakeClient(CODE)) as c:
        await c.send("go")
        for typed, copied in (("/copy", CODE[0]), ("/copy code", "y = 2"), ("/copy code 1", "x = 1")):
            await c.send(typed)
            assert c.app.clipboard == copied
        await c.send("/copy all")
        assert c.app.clipboard.startswith("# go\n\n## You\n\ngo")
        await c.send("/copy code 3")
        assert "no code block 3" in c.notices()
        c.prompt.put("")
        await c.press("up", "k")
        assert c.app.clipboard == "y = 2"
        await c.pilot.press("up", "c")
        assert c.app.clipboard == "go"


async def test_set_and_system_commands(chat: OpenChat) -> None:
    async with chat() as c:
        await c.send("/set temperature 0.2")
        await c.send("/set stop END")
        await c.send("/set seed 5")
        await c.send("/set seed")
        await c.send("/system Speak like a sailor.")
        await c.send("hi")
        request = c.client.requests[0]
        assert request["messages"][0] == {"role": "system", "content": "Speak like a sailor."}
        assert {name: request[name] for name in request if name not in ("model", "messages")} == {
            "temperature": 0.2,
            "stop": ["END"],
        }
        await c.send("/set temperature 1000")
        assert "0 to 2" in c.notices()
        assert c.prompt.text == "/set temperature 1000"
        c.prompt.put("")
        await c.send("/system none")
        await c.send("/clear")
        assert c.path == []
        assert c.screen.conversation.parameters == {}


async def test_unknown_command_is_rejected_and_stays_in_the_prompt_box(chat: OpenChat) -> None:
    async with chat() as c:
        await c.send("/regenn")
        assert "/regen" in c.notices()
        assert c.prompt.text == "/regenn"
        assert c.client.requests == []
        c.prompt.put("")
        await c.send("//regenn is a word")
        assert c.path[0].content == "/regenn is a word"


async def test_hints_complete(chat: OpenChat) -> None:
    async with chat() as c:
        await c.type("/se")
        hints = c.screen.query_one(Hints)
        assert hints.display
        assert hints.option_count == 2
        await c.pilot.press("down", "tab")
        assert c.prompt.text == "/set "
        await c.type("te")
        await c.pilot.press("tab")
        assert c.prompt.text == "/set temperature "
        await c.pilot.press("escape")
        assert not hints.display
        c.prompt.put("plain")
        await c.pilot.pause()
        assert not hints.display


async def test_settings_screen(chat: OpenChat) -> None:
    async with chat(None, Conversation("guide", "Old.", {"top_k": 5})) as c:
        await c.pilot.press("f4")
        await c.pilot.pause()
        screen = c.app.screen
        assert isinstance(screen, SettingsScreen)
        assert screen.query_one(TextArea).text == "Old."
        assert screen.query_one("#top_k", Input).value == "5"
        screen.query_one("#top_p", Input).value = "2"
        await c.pilot.press("ctrl+s")
        assert c.app.screen is screen
        assert "top_p" in c.text_of("#notice")
        screen.query_one("#top_p", Input).value = "0.9"
        screen.query_one("#top_k", Input).value = ""
        screen.query_one(TextArea).text = "New."
        await c.press("ctrl+s")
        assert (c.screen.conversation.system, c.screen.conversation.parameters) == ("New.", {"top_p": 0.9})


async def test_settings_screen_describes_the_focused_parameter(chat: OpenChat) -> None:
    async with chat() as c:
        await c.pilot.press("f4")
        await c.pilot.pause()
        c.app.screen.query_one("#seed", Input).focus()
        await c.pilot.pause()
        assert c.text_of("#notice") == f"seed: {PARAMETERS['seed'].sentence}"
        c.app.screen.query_one("#seed", Input).value = "x"
        c.app.screen.query_one("#top_k", Input).focus()
        await c.pilot.pause()
        assert c.text_of("#notice") == f"top_k: {PARAMETERS['top_k'].sentence}"


async def test_model_picker(chat: OpenChat) -> None:
    async with chat() as c:
        await c.press("f2")
        assert isinstance(c.app.screen, ModelScreen)
        for words in ("loaded, cpu · built-in, tiny · 23.7 MiB", "7.5 GiB · 40,960 tokens", "SmolLM2"):
            assert words in c.shown()
        await c.pilot.press("q", "w", "4")
        assert c.app.screen.query_one(OptionList).option_count == 2  # the model, and the search of the hub
        await c.press("enter")
        assert c.screen.conversation.model == LARGE.id
        assert "tiny built-in model" not in c.shown()
        await c.send("hi")
        assert c.client.requests[0]["model"] == LARGE.id


async def test_model_command_with_an_unknown_name(chat: OpenChat) -> None:
    async with chat() as c:
        await c.send("/model nobody/nothing")
        assert "no model 'nobody/nothing'" in c.notices()
        assert c.screen.conversation.model == "guide"
        await c.send("still here?")
        assert c.path[-1].finish == "stop"


async def test_history_resume_search_rename_delete_undo(chat: OpenChat) -> None:
    async with chat(FakeClient(["Pythons are snakes."], ["No."], ["Third."])) as c:
        await c.send("Tell me about snakes")
        first = c.screen.conversation
        await c.send("/new")
        await c.send("Something else")
        second = c.screen.conversation
        await c.send("/history pythons")
        screen = c.app.screen
        assert isinstance(screen, HistoryScreen)
        assert "Tell me about snakes" in c.shown()
        assert "Pythons are snakes." in c.shown()
        assert screen.query_one(Conversations).option_count == 1
        await c.pilot.press("ctrl+r")
        await c.pilot.pause()
        assert isinstance(c.app.screen, AskScreen)
        c.app.screen.query_one(Input).value = "Serpents"
        await c.press("enter")
        assert "Serpents" in c.shown()
        await c.press("ctrl+d")
        assert screen.query_one(Conversations).option_count == 0
        assert "Ctrl+U restores it" in c.shown()
        await c.press("ctrl+u")
        await c.press("enter")
        assert c.screen.conversation.id == first.id
        assert c.screen.conversation.title == "Serpents"
        assert "snakes." in c.shown()
        await c.send("and more")
        assert [m["content"] for m in c.client.requests[-1]["messages"]] == [
            "Tell me about snakes",
            "Pythons are snakes.",
            "and more",
        ]
        await c.press("f3")
        await c.press("ctrl+d")  # the open conversation is the newest
        assert "is open" in c.text_of("#notice")
        assert len(c.saved.list()) == 2
        assert second.id in [entry.id for entry in c.saved.list()]


async def test_export_and_title(chat: OpenChat, tmp_path) -> None:
    async with chat() as c:
        await c.send("hi")
        await c.send("/title Good day")
        await c.send("/export")
        assert "Hello." in (tmp_path / "good-day.md").read_text()
        await c.send("/export json talk.json")
        assert (tmp_path / "talk.json").exists()
        await c.send("/export")
        assert "already exists" in c.notices()


async def test_reasoning_is_shown_and_folded(chat: OpenChat) -> None:
    hold = asyncio.Event()
    async with chat(FakeClient([ReasoningPiece("let me see"), hold, "42"])) as c:
        await c.enter("go")
        await c.until(lambda: "let me see" in c.shown())
        hold.set()
        await c.settle()
        assert "Reasoning, 3 words" in c.shown()
        assert "let me see" not in c.shown()
        await c.pilot.press("up", "enter")
        await c.pilot.pause()
        assert "let me see" in c.shown()
        assert c.client.requests[0]["messages"] == [{"role": "user", "content": "go"}]


async def test_help_theme_palette(chat: OpenChat) -> None:
    async with chat() as c:
        await c.pilot.press("f1")
        await c.pilot.pause()
        assert isinstance(c.app.screen, HelpScreen)
        assert "Ctrl+R" in c.shown()
        await c.pilot.press("escape")
        await c.send("/theme light")
        assert c.app.theme == "localllm-light"
        await c.send("/theme pink")
        assert "Unknown theme 'pink'" in c.notices()
        c.prompt.put("")
        await c.pilot.press("ctrl+p")
        await c.pilot.press(*"settings")
        await c.until(lambda: c.app.screen.query_one("CommandList").option_count == 1)
        assert "System prompt and sampling" in c.shown()
        await c.pilot.press("enter")
        await c.until(lambda: isinstance(c.app.screen, SettingsScreen))


async def test_links_are_copied_not_opened(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat(FakeClient(["[safe](https://evil.example/x)"])) as c:
        opened: list[str] = []
        monkeypatch.setattr(c.app, "open_url", opened.append)
        await c.send("go")
        document = c.screen.query_one(Markdown)
        document.post_message(Markdown.LinkClicked(document, "https://evil.example/x"))
        await c.pilot.pause()
        assert opened == []
        assert c.app.clipboard == "https://evil.example/x"
        assert "evil.example" in c.notices()


async def test_quit_stops_and_saves(chat: OpenChat) -> None:
    async with chat(FakeClient(["half", asyncio.Event()])) as c:
        await c.enter("go")
        await c.until(lambda: c.path[-1].content == "half")
        await c.pilot.press("ctrl+q")
        await c.until(lambda: not c.app.is_running)
        assert c.app.return_value == 0
    assert c.client.cancelled == 1
    assert c.client.closed
    assert c.saved.load(c.screen.conversation.id).messages[-1].content == "half"


async def test_ctrl_c_stops_the_answer_then_quits(chat: OpenChat) -> None:
    async with chat(FakeClient(["half", asyncio.Event()])) as c:
        await c.enter("go")
        await c.until(lambda: c.path[-1].content == "half")
        await c.press("ctrl+c")
        assert c.path[-1].finish == "stopped"
        await c.pilot.press("ctrl+c")
        assert "Ctrl+C again" in c.notices()
        await c.pilot.press("ctrl+c")
        await c.until(lambda: not c.app.is_running)
    assert c.app.return_value == 0


def test_run_refuses_bad_parameters() -> None:
    with pytest.raises(InvalidRequest, match="top_p"):
        run(Settings(), "guide", parameters={"top_p": 7.0})


async def test_welcome_of_a_large_model_has_no_notice(chat: OpenChat) -> None:
    async with chat(None, Conversation(LARGE.id)) as c:
        assert "tiny" not in c.shown()
        assert LARGE.id in c.shown()
        assert c.screen.query_one("#badge", Static).display is False


async def test_errors_of_commands_name_the_missing_part(chat: OpenChat) -> None:
    async with chat() as c:
        for typed, notices_text in (
            ("/copy", "no answer to copy"),
            ("/edit", "no message to edit"),
            ("/stop", "No answer is running"),
            ("/title", "The title is missing"),
            ("/export", "nothing to export"),
            ("/regen", "no question yet"),
            ("/set", "No parameter is set"),
            ("/set colour red", "Unknown parameter 'colour'"),
        ):
            await c.send(typed)
            assert notices_text in c.notices(), typed
            c.prompt.put("")
        await c.send("hi")
        await c.send("/copy everything")
        assert "Unknown argument of /copy: 'everything'" in c.notices()


async def test_stop_command_while_an_answer_runs(chat: OpenChat) -> None:
    async with chat(FakeClient(["half", asyncio.Event()])) as c:
        await c.enter("go")
        await c.until(lambda: c.path[-1].content == "half")
        await c.send("/stop")
        assert c.path[-1].finish == "stopped"


async def test_tool_call_is_shown_as_a_code_block(chat: OpenChat) -> None:
    async with chat(FakeClient([ToolCall(id="1", name="weather", arguments='{"city": "Ulm"}')])) as c:
        await c.send("go")
        assert '"weather"' in c.shown()


async def test_history_screen_reports_a_storage_error(chat: OpenChat, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StorageFailed("Cannot use the history file: attempt to write a readonly database.")

    async with chat() as c:
        await c.send("first")
        await c.send("/new")
        for name in ("delete", "restore", "rename"):
            monkeypatch.setattr(c.store, name, refuse)
        await c.press("f3")
        await c.press("ctrl+d")
        assert "readonly" in c.text_of("#notice")
        await c.press("ctrl+u")
        assert "nothing to restore" in c.text_of("#notice")
        await c.pilot.press("ctrl+r")
        await c.pilot.pause()
        await c.press("x", "enter")
        assert "readonly" in c.text_of("#notice")
        assert [entry.title for entry in c.saved.list()] == ["first"]
