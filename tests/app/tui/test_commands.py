"""Slash commands: parsing, similar names and hints."""

from __future__ import annotations

import pytest

from localllm.app.errors import InvalidRequest
from localllm.app.tui.chat.dispatch import _COMMANDS
from localllm.app.tui.commands import COMMANDS, Call, hints, parse


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("/help", Call("help", "")),
        ("/?", Call("help", "")),
        ("/SET temperature 0.5 ", Call("set", "temperature 0.5")),
        ("/exit", Call("quit", "")),
        ("hello", None),
        ("//etc/passwd", None),
        ("/etc\nis a folder", None),
        (" /help", None),
    ],
)
def test_parse_converts_typed_text(text: str, call: Call | None) -> None:
    assert parse(text) == call


@pytest.mark.parametrize(("text", "near"), [("/hlep", "/help"), ("/modle x", "/model"), ("/usr/bin", "//")])
def test_unknown_command_gets_similar_names_as_hint(text: str, near: str) -> None:
    with pytest.raises(InvalidRequest, match="Unknown command") as refused:
        parse(text)
    assert near in refused.value.hint


def test_hints_complete_commands_and_arguments() -> None:
    assert [text for text, _ in hints("/s")] == ["/settings", "/set ", "/system ", "/stop"]
    assert [text for text, _ in hints("/set te")] == ["/set temperature ", "/set adapter "]
    assert hints("/set temperature 0")[0][1] == "a number from 0 to 2"
    assert [text for text, _ in hints("/model q", {"model": ["guide", "Qwen/Q"]})] == ["/model Qwen/Q"]
    assert [text for text, _ in hints("/exi")] == ["/quit"]
    assert hints("hello") == hints("//x") == hints("/zzz") == hints("/a\nb") == []


def test_every_command_has_an_action() -> None:
    assert {command.name for command in COMMANDS} == {*_COMMANDS, "copy"}
    names = [name for command in COMMANDS for name in (command.name, *command.aliases)]
    assert len(names) == len(set(names))
