"""Warns about stale facts of guide, which the program has changed, in its weights, its tables and its examination.

    python -m scripts.train_guide.stale

A stale fact is not an error: a command, a flag or a setting may change at any time, and the weights are trained again
only for a measured gain. Names in the tables under topics/ and in the examination can be corrected without training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from localllm.app import config
from localllm.app.developer import Developer
from localllm.app.tui.commands import COMMANDS
from localllm.backends import cuda

from . import corpus, evaluate, intents
from .facts import TRAINED_ON, Facts, collect

ROOT = Path(__file__).resolve().parents[2]
ROUTES = frozenset({"/health", "/metrics"})  # routes of the API with the same form as slash commands
DEFAULT = "the default of "

# Phrases that an answer repeats from a file: file, intent, phrases.
REPEATED = (
    ("README.md", "install", ("make chat", "Linux", "Python 3.11 or newer")),
    ("README.md", "install-time", ("about 3 minutes the first time", "some 300 MB")),
    ("README.md", "compiler", ("C++20 compiler", "make build")),
    ("README.md", "root", ("stays inside the folder `.venv`",)),
    ("README.md", "command-not-found", ("source .venv/bin/activate",)),
    ("README.md", "connect-app", ("http://127.0.0.1:11811/v1",)),
    ("Makefile", "setup-failed", ("make PYTHON=python3.12", "apt install python3-venv")),
)


@dataclass(frozen=True)
class Names:
    """The names that a text about the program may use."""

    flags: dict[str, frozenset[str]]  # command → its flags
    slashes: frozenset[str]  # slash commands and routes
    variables: frozenset[str]  # environment variables
    removed: frozenset[str]  # settings that the program had when the weights were trained

    @classmethod
    def of(cls, facts: Facts, trained: Facts) -> Names:
        aliases = {f"/{alias}" for command in COMMANDS for alias in command.aliases}
        return cls(
            {command.name: frozenset({"--help", *(flag.name for flag in command.flags)}) for command in facts.commands},
            frozenset({slash.name for slash in facts.slashes} | aliases | ROUTES),
            frozenset({setting.env for setting in [*facts.settings, *config.describe(Developer)]})
            | config.OTHER_VARIABLES
            | {"LOCALLLM_NAME"},
            frozenset({setting.name for setting in trained.settings} - {setting.name for setting in facts.settings}),
        )

    def missing(self, code: str) -> list[str]:
        """Names in `code` that the program does not have. A flag must belong to the command before it."""
        command = re.search(r"\blocalllm ([a-z]+)", code)
        if command and command[1] not in self.flags:
            return [f"localllm {command[1]}"]
        all_flags = frozenset({"--version"}).union(*self.flags.values())
        flags = self.flags[command[1]] if command else all_flags
        slashes = set(re.findall(r"^/[a-z]+(?= |$)", code))
        return [
            *sorted(set(re.findall(r"(?<![\w-])--[a-z-]+", code)) - flags),
            *sorted(set(re.findall(r"LOCALLLM_[A-Z_]+\b", code)) - self.variables),
            *sorted(slashes - self.slashes),
            *sorted({re.split(r"\W", code)[0]} & self.removed),
        ]


def of_weights(trained: Facts, live: Facts) -> list[str]:
    """Differences between the facts of the training and the facts about the program."""
    before = _entries(trained)
    after = _entries(live)
    differences = [name for name in before.keys() & after.keys() if before[name] != after[name]]
    defaults = sorted(name for name in differences if name.startswith(DEFAULT))
    texts = sorted(set(differences).difference(defaults))
    return [
        *(
            f"weights: {name} was removed"
            for name in sorted(before.keys() - after.keys())
            if not name.startswith(DEFAULT)
        ),
        *(f"weights: {name} is new" for name in sorted(after.keys() - before.keys()) if not name.startswith(DEFAULT)),
        *(f"weights: {name} changed" for name in defaults),
        *([f"weights: {len(texts)} descriptions changed, such as {texts[0]}"] if texts else []),
    ]


def of_tables(trained: Facts, live: Facts) -> list[str]:
    """Names in the answers of the tables that the program does not have; commands and errors without an answer."""
    names = Names.of(live, trained)
    warnings = []
    commands: set[str] = set()
    questions: set[str] = set()
    for intent in intents.load().values():
        texts = [*intent.answers, f"`{intent.command}`"]
        codes = [code for text in texts for code in re.findall(r"`([^`]+)`", text)]
        warnings += [f"topics: {intent.name} names {name}" for code in codes for name in names.missing(code)]
        commands.update(re.findall(r"localllm ([a-z]+)", " ".join(texts)))
        questions.update(re.findall(r"[a-z_]+", " ".join(intent.what)))
    warnings += [f"topics: no answer names localllm {name}" for name in names.flags if name not in commands]
    return warnings + [f"topics: no question about the error {code}" for code in live.errors if code not in questions]


def of_phrases(root: Path) -> list[str]:
    """Answers whose phrases and numbers differ from the files and the settings of the program."""
    table = intents.load()
    warnings = []
    for file, name, phrases in REPEATED:
        text = (root / file).read_text("utf-8")
        warnings += [f"topics: {name} repeats {phrase!r}, not in {file}" for phrase in phrases if phrase not in text]
    return warnings + [
        f"topics: {name} lacks {phrase!r}"
        for name, phrase in [*_numbers(), *((name, phrase) for _, name, phrases in REPEATED for phrase in phrases)]
        if phrase not in table[name].answers[0]
    ]


def of_examination(live: Facts) -> list[str]:
    """Names in the keys of questions that the program does not have: a right answer would count as wrong."""
    names = Names.of(live, live)  # a key may have a plain word that is the name of a removed setting
    keys = {
        key for file in (corpus.HELDOUT, corpus.DEVELOPMENT) for question in evaluate.load(file) for key in question.key
    }
    return [f"examination: the key {key!r} names {name}" for key in sorted(keys) for name in names.missing(key)]


def _entries(facts: Facts) -> dict[str, str]:
    """All facts: name → description."""
    entries = {f"localllm {command.name}": f"{command.summary} {command.usage}" for command in facts.commands}
    for command in facts.commands:
        entries.update({f"localllm {command.name} {flag.name}": flag.help for flag in command.flags})
    for setting in facts.settings:
        entries[f"setting {setting.name}"] = setting.sentence
        entries[f"{DEFAULT}{setting.name}"] = setting.default
    entries.update({slash.name: f"{slash.arguments} {slash.sentence}" for slash in facts.slashes})
    return entries | {f"error {code}": "" for code in facts.errors}


def _numbers() -> list[tuple[str, str]]:
    """Pairs of an intent, and a default or limit as its answer must contain it."""
    settings = config.Settings()
    return [
        ("port", str(config.DEFAULT_PORT)),
        ("queue", f"`max_rows` ({settings.max_rows})"),
        ("queue", f"`max_queue` ({settings.max_queue})"),
        ("idle-unload", f"{settings.idle_unload:.0f} by default"),
        ("body-limit", f"{settings.developer.max_body_mib} MiB"),
        ("cuda", f"compute capability {'.'.join(map(str, cuda.MIN_CAPABILITY))} or newer"),
    ]


def main() -> None:
    trained = Facts.load(TRAINED_ON)
    live = collect()
    warnings = [
        *of_weights(trained, live),
        *of_tables(trained, live),
        *of_phrases(ROOT),
        *of_examination(live),
    ]
    for warning in dict.fromkeys(warnings):
        print(f"warning: guide is stale: {warning}")
    if warnings:
        print("correct topics/ and the examination; scripts/train_guide/run.py trains the weights again")


if __name__ == "__main__":
    main()
