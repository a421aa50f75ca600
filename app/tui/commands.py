"""Slash commands: one table that the prompt box, its hints, the palette and the help page read."""

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
    Command("model", "[name]", "Pick the model, or use the named one.", key="F2"),
    Command("history", "[words]", "Earlier conversations, searched.", ("resume",), key="F3"),
    Command("settings", "", "System prompt and sampling.", key="F4"),
    Command("set", "[name [value]]", "Set a sampling parameter; without a value, unset it."),
    Command("system", "[text]", "Set the system prompt; 'none' removes it."),
    Command("new", "", "Begin a new conversation.", key="Ctrl+N"),
    Command("clear", "", "Begin anew, with default system prompt and sampling."),
    Command("regen", "", "Answer again; the earlier answer stays reachable.", ("retry",), key="Ctrl+R"),
    Command("edit", "", "Change your last message and send it again."),
    Command("stop", "", "Stop the running answer.", key="Esc"),
    Command("copy", "[code [n] | all]", "Copy the last answer, a code block of it, or everything."),
    Command("title", "[text]", "Rename this conversation.", ("rename",)),
    Command("export", "[md|json] [file]", "Write this conversation to a file."),
    Command("theme", "[light|dark]", "Change the colours."),
    Command("help", "", "Keys and commands.", ("?",), key="F1"),
    Command("quit", "", "Leave localllm.", ("exit", "bye", "q"), key="Ctrl+Q"),
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
    """A command as typed: its main name and what follows."""

    name: str
    argument: str


def parse(text: str) -> Call | None:
    """The command a prompt stands for; None for text that goes to the model. Raises InvalidRequest when unknown.

    Only a single line that begins with one slash is a command; `//` sends a text that begins with a slash.
    """
    if not text.startswith("/") or text.startswith("//") or "\n" in text.strip():
        return None
    name, _, argument = text.strip()[1:].partition(" ")
    command = _BY_NAME.get(name.lower())
    if command is None:
        near = difflib.get_close_matches(name.lower(), _BY_NAME, n=3, cutoff=0.5)
        also = f"Did you mean {' or '.join('/' + other for other in near)}? " if near else "F1 lists them. "
        raise InvalidRequest(
            f"There is no command /{name[:40]}.", hint=also + "Begin with // to send a text that starts with a slash."
        )
    return Call(command.name, argument.strip())


def hints(text: str, models: Iterable[str] = ()) -> list[tuple[str, str]]:
    """What the typed text could become: pairs of (completed text, sentence); empty when it is no command."""
    if not text.startswith("/") or text.startswith("//") or "\n" in text:
        return []
    name, space, argument = text[1:].partition(" ")
    if not space:
        return [
            (f"/{command.name} " if command.arguments else f"/{command.name}", _described(command))
            for command in COMMANDS
            if any(known.startswith(name.lower()) for known in (command.name, *command.aliases))
        ]
    command = _BY_NAME.get(name.lower())
    if command is None:
        return []
    choices = tuple(models) if command.name == "model" else _CHOICES.get(command.name, ())
    ends = " " if command.name == "set" else ""
    found = [
        (f"/{name} {choice}{ends}", PARAMETERS[choice].sentence if command.name == "set" else "")
        for choice in choices
        if argument.lower() in choice.lower()
    ]
    if command.name == "set" and (known := PARAMETERS.get(argument.partition(" ")[0])) and " " in argument:
        return [(text, known.range)]
    return found or [(text, _described(command))]


def _described(command: Command) -> str:
    return f"{command.arguments}  {command.sentence}".strip() + (f"  ({command.key})" if command.key else "")
