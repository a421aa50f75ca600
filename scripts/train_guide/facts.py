"""Facts about the program: commands, flags, settings and error codes, read from its code by introspection."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

TRAINED_ON = Path(__file__).with_name("facts.json")  # the facts of the weights


@dataclass(frozen=True)
class Flag:
    name: str  # the long form, with its dashes, e.g. --model
    help: str


@dataclass(frozen=True)
class Command:
    name: str
    summary: str  # first paragraph of the help text
    usage: str  # the usage line, e.g. localllm run [OPTIONS] MODEL [PROMPT]
    flags: tuple[Flag, ...]


@dataclass(frozen=True)
class Setting:
    name: str
    sentence: str  # the description, with the supported values
    default: str
    env: str


@dataclass(frozen=True)
class Slash:
    """A command of the chat screen."""

    name: str  # with the slash, e.g. /help
    arguments: str
    sentence: str


@dataclass(frozen=True)
class Facts:
    commands: tuple[Command, ...]
    settings: tuple[Setting, ...]
    errors: tuple[str, ...]  # codes
    slashes: tuple[Slash, ...]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", "utf-8")

    @classmethod
    def load(cls, file: Path) -> Facts:
        table = json.loads(file.read_text("utf-8"))
        return cls(
            commands=tuple(
                Command(**{**command, "flags": tuple(Flag(**flag) for flag in command["flags"])})
                for command in table["commands"]
            ),
            settings=tuple(Setting(**setting) for setting in table["settings"]),
            errors=tuple(table["errors"]),
            slashes=tuple(Slash(**slash) for slash in table["slashes"]),
        )


def collect() -> Facts:
    """The facts about the installed localllm."""
    import click

    from localllm.app import cli, config, errors
    from localllm.app.tui.commands import COMMANDS

    commands = []
    for name, command in cli.cli.commands.items():
        context = click.Context(command, info_name=f"localllm {name}")
        flags = tuple(
            Flag(next(form for form in option.opts if form.startswith("--")), option.help or "")
            for option in command.get_params(context)
            if isinstance(option, click.Option) and not option.hidden and "--help" not in option.opts
        )
        summary = (command.help or "").split("\n\n")[0].replace("\n", " ").strip()
        usage = command.get_usage(context).removeprefix("Usage: ").replace("\n", " ")
        commands.append(Command(name, summary, " ".join(usage.split()), flags))
    settings = [
        Setting(setting.name, setting.meaning, _shown(setting.default), setting.env) for setting in config.describe()
    ]
    slashes = [Slash(f"/{slash.name}", slash.arguments, slash.sentence) for slash in COMMANDS]
    return Facts(tuple(commands), tuple(settings), tuple(sorted(errors.BY_CODE)), tuple(slashes))


def _shown(default: object) -> str:
    return json.dumps(list(default) if isinstance(default, tuple) else default)
