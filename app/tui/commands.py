"""Slash commands: the table for the prompt box, its hints, the command palette and the help screen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import InvalidRequest
from .parameters import PARAMETERS


@dataclass(frozen=True)
class Command:
    name: str
    arguments: str
    sentence: str
    aliases: tuple[str, ...] = ()
    key: str = ""


COMMANDS = (
    Command("model", "[name]", "Select a model.", key="F2"),
    Command("history", "[words]", "Search and resume earlier conversations.", ("resume",), key="F3"),
    Command("settings", "", "System prompt and sampling parameters.", key="F4"),
    Command("set", "[name [value]]", "Set a sampling parameter; no value: unset it."),
    Command("system", "[text]", "Set the system prompt; none: remove it."),
    Command("new", "", "Start a new conversation.", key="Ctrl+N"),
    Command("clear", "", "Start a new conversation with default settings."),
    Command("regen", "", "Generate another answer; keep the earlier one.", ("retry",), key="Ctrl+R"),
    Command("edit", "", "Edit your last message and send it again."),
    Command("stop", "", "Stop the running answer.", key="Esc"),
    Command("copy", "[code [n] | all]", "Copy the last answer, a code block, or everything."),
    Command("title", "[text]", "Rename this conversation.", ("rename",)),
    Command("export", "[md|json] [file]", "Write this conversation to a file."),
    Command("theme", "[light|dark]", "Change the colours."),
    Command("help", "", "Keys and commands.", ("?",), key="F1"),
    Command("quit", "", "Quit localllm.", ("exit", "bye", "q"), key="Ctrl+Q"),
)
_BY_NAME = {name: command for command in COMMANDS for name in (command.name, *command.aliases)}
_CHOICES = {
    "set": tuple(PARAMETERS),
    "copy": ("code", "all"),
    "export": ("md", "json"),
    "theme": ("light", "dark"),
    "system": ("none",),
}


@dataclass(frozen=True)
class Call:
    """A typed command: its main name and its argument."""

    name: str
    argument: str


def parse(text: str) -> Call | None:
    """The command in a prompt; None if the text is for the model. Raises InvalidRequest for an unknown command.

    A command is one line that starts with one slash. A text that starts with `//` is sent with one slash.
    """
    if not text.startswith("/") or text.startswith("//") or "\n" in text.strip():
        return None
    name, _, argument = text.strip()[1:].partition(" ")
    command = _BY_NAME.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=3, cutoff=0.5)
        names = f"Did you mean {' or '.join('/' + other for other in near)}? " if near else "F1 lists all commands. "
        raise InvalidRequest(
            f"Unknown command /{name[:40]}.", hint=names + "To send a text that starts with a slash, start with //."
        )
    return Call(command.name, argument.strip())


def hints(text: str, models: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Completions of the typed text as (completed text, description); empty if it is not a command."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, space, argument = text[1:].partition(" ")
    if not space:
        return [
            (f"/{command.name} " if command.arguments else f"/{command.name}", _description(command))
            for command in COMMANDS
            if any(alias.startswith(name.lower()) for alias in (command.name, *command.aliases))
        ]
    command = _BY_NAME.get(name.lower())
    if command is None:
        return []
    choices = tuple(models) if command.name == "model" else _CHOICES.get(command.name, ())
    suffix = " " if command.name == "set" else ""
    completions = [
        (f"/{name} {choice}{suffix}", PARAMETERS[choice].sentence if command.name == "set" else "")
        for choice in choices
        if argument.lower() in choice.lower()
    ]
    if command.name == "set" and (known := PARAMETERS.get(argument.partition(" ")[0])) and " " in argument:
        return [(text, known.range)]
    return completions or [(text, _description(command))]


def _description(command: Command) -> str:
    return f"{command.arguments}  {command.sentence}".strip() + (f"  ({command.key})" if command.key else "")
