"""Slash commands: one table for the prompt box, the hints, the command palette and the help screen."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import InvalidRequest
from .parameters import PARAMETERS
from .text import phrase


@dataclass(frozen=True)
class Command:
    name: str
    arguments: str
    sentence: str
    aliases: tuple[str, ...] = ()
    key: str = ""
    choices: tuple[str, ...] = ()  # arguments that it always can have

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def completion(self) -> str:
        """The text of the command in the prompt box. It ends with a space if the command takes arguments."""
        return f"/{self.name}{phrase(' ', self.arguments)}"

    @property
    def description(self) -> str:
        return f"{self.arguments}  {self.sentence}".strip() + phrase("  ({})", self.key)


COMMANDS = (
    Command("model", "[name]", "Find, download, select or delete a model.", key="F2"),
    Command("adapter", "[name[=scale] | none]", "Select a LoRA adapter.", key="F5"),
    Command("compare", "[adapter [adapter]]", "Ask the next prompt of two adapters side by side."),
    Command("history", "[words]", "Search and resume earlier conversations.", ("resume",), key="F3"),
    Command("settings", "", "System prompt and sampling parameters.", key="F4"),
    Command("set", "[name [value]]", "Set a sampling parameter; no value: unset it."),
    Command("system", "[text]", "Set the system prompt; none: remove it.", choices=("none",)),
    Command("new", "", "Start a new conversation.", key="Ctrl+N"),
    Command("clear", "", "Start a new conversation with default settings."),
    Command("regen", "", "Generate another answer; keep the earlier one.", ("retry",), key="Ctrl+R"),
    Command("edit", "", "Edit your last message and send it again."),
    Command("stop", "", "Stop the running answer.", key="Esc"),
    Command("copy", "[code [n] | all]", "Copy the last answer, a code block, or everything.", choices=("code", "all")),
    Command("title", "[text]", "Rename this conversation.", ("rename",)),
    Command("export", "[md|json] [file]", "Write this conversation to a file.", choices=("md", "json")),
    Command("theme", "[light|dark]", "Change the colours.", choices=("light", "dark")),
    Command("help", "", "Keys and commands.", ("?",), key="F1"),
    Command("quit", "", "Quit localllm.", ("exit", "bye", "q"), key="Ctrl+Q"),
)
_BY_NAME = {name: command for command in COMMANDS for name in command.names}


@dataclass(frozen=True)
class Call:
    """A typed command: the main name of the command, and the argument."""

    name: str
    argument: str


def parse(text: str) -> Call | None:
    """The command in a prompt; None if the text is for the model. Raises InvalidRequest for an unknown command.

    A command is one line that starts with one slash. A text that starts with `//` is sent with one slash.
    """
    if not _is_command(text.rstrip()):
        return None
    name, _, argument = text.strip()[1:].partition(" ")
    command = _BY_NAME.get(name.lower())
    if command is None:
        hint = f"{_similar(name)} To send a text that starts with a slash, start with //."
        raise InvalidRequest(f"Unknown command /{name[:40]}.", hint=hint)
    return Call(command.name, argument.strip())


def hints(text: str, arguments: Mapping[str, Iterable[str]] = MappingProxyType({})) -> list[tuple[str, str]]:
    """Completions of the typed text as (completed text, description); empty if it is not a command.

    `arguments`: name of a command -> the arguments that it can have now.
    """
    name, space, argument = text[1:].partition(" ")
    command = _BY_NAME.get(name.lower())
    if not _is_command(text) or (space and command is None):
        return []
    if command is None or not space:
        return _name_hints(name.lower())
    if command.name == "set":
        completions = _parameter_hints(f"/{name}", argument)
    else:
        # Only /compare has two arguments of this kind; those of the others may contain spaces.
        before, separator, last = argument.rpartition(" " if command.name == "compare" else "\n")
        choices = _matching(arguments.get(command.name) or command.choices, last)
        completions = [(f"/{name} {before}{separator}{choice}", "") for choice in choices]
    return completions or [(text, command.description)]


def _is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//") and "\n" not in text


def _similar(name: str) -> str:
    matches = difflib.get_close_matches(name.lower(), _BY_NAME, n=3, cutoff=0.5)
    if not matches:
        return "F1 lists all commands."
    return f"Did you mean {' or '.join('/' + match for match in matches)}?"


def _name_hints(prefix: str) -> list[tuple[str, str]]:
    """The commands with a name or an alias that starts with `prefix`."""
    matches = [command for command in COMMANDS if any(name.startswith(prefix) for name in command.names)]
    return [(command.completion, command.description) for command in matches]


def _parameter_hints(command: str, argument: str) -> list[tuple[str, str]]:
    """The range of the parameter if its name is complete, otherwise the parameter names that contain `argument`."""
    name, space, _ = argument.partition(" ")
    if space and name in PARAMETERS:
        return [(f"{command} {argument}", PARAMETERS[name].range)]
    return [(f"{command} {match} ", PARAMETERS[match].sentence) for match in _matching(PARAMETERS, argument)]


def _matching(choices: Iterable[str], argument: str) -> list[str]:
    return [choice for choice in choices if argument.lower() in choice.lower()]
