"""Changes settings in config.toml, which people also write by hand: its other lines stay."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from . import config, toml_files
from .errors import ConfigError
from .toml_files import Value


def change(file: Path, changes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Set settings in the file; None removes a setting. Returns the values of the file.

    Raises ConfigError, and changes nothing, for an unknown setting or a wrong value; StorageFailed.
    """
    with toml_files.locked(file):
        values = config.read_file(file)
        for name, value in changes.items():
            if value is None:
                values.pop(name, None)
            else:
                values[name] = value
        config.check_file(file, values)
        text = file.read_text("utf-8") if file.exists() else ""
        for name, value in changes.items():
            text = _with_value(text, name, value)
        if tomllib.loads(text) != values:
            raise ConfigError(f"{file}: localllm cannot change this file", hint="change the file in an editor")
        toml_files.replace(file, text)
    return values


def _with_value(text: str, name: str, value: Value | None) -> str:
    """The text of the file with another value of a setting."""
    lines = text.splitlines(keepends=True)
    start, end = _place(lines, name)
    if start == len(lines) and lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    lines[start:end] = [] if value is None else [f"{name} = {toml_files.quoted(value)}\n"]
    return "".join(lines)


def _place(lines: list[str], name: str) -> tuple[int, int]:
    """(first line, end) of a setting, whose value may span lines; the end of the file for an absent setting."""
    key = re.compile(rf"""\s*(["']?){re.escape(name)}\1\s*=""")
    for start, line in enumerate(lines):
        if key.match(line):
            for end in range(start + 1, len(lines) + 1):
                if _is_complete("".join(lines[start:end])):
                    return start, end
    return len(lines), len(lines)


def _is_complete(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
