"""The user's aliases and settings of single models: the file models.toml beside config.toml, which localllm writes.

[aliases]
small = "Qwen/Qwen3-0.6B"

[settings."Qwen/Qwen3-0.6B"]
quant = "int4"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from .. import paths, toml_files
from ..errors import ConfigError

HEADER = "# Written by `localllm alias` and `localllm config MODEL`.\n"
Value = str | int | float


class Preferences(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contents of the file. `settings` is by model id; app/config.py validates its values."""

    aliases: dict[str, str] = {}
    settings: dict[str, dict[str, Value]] = {}


def read() -> Preferences:
    """The aliases and settings; empty without a file. Raises ConfigError for a malformed file."""
    file = paths.models_file()
    try:
        status = file.stat()
    except FileNotFoundError:
        return Preferences()
    except OSError as error:
        raise _unreadable(file, error) from None
    return _read(file, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=4)
def _read(file: Path, *version: int) -> Preferences:
    """The contents of one version of the file. They are cached, because the daemon needs them for every request."""
    try:
        return msgspec.convert(tomllib.loads(file.read_text("utf-8")), Preferences)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file}: {error}", hint="fix the file, or delete it to remove all aliases and model settings")


def set_alias(name: str, target: str | None) -> None:
    """Add or replace an alias; None removes the alias. Raises ConfigError, StorageFailed."""
    with toml_files.locked(paths.models_file()):
        previous = read()
        aliases = {other: value for other, value in previous.aliases.items() if other != name}
        if target is not None:
            aliases[name] = target
        _write(msgspec.structs.replace(previous, aliases=aliases))


def set_settings(model: str, values: Mapping[str, Value]) -> None:
    """Replace the settings of a model; no values remove its table. Raises ConfigError, StorageFailed."""
    with toml_files.locked(paths.models_file()):
        previous = read()
        settings = {other: table for other, table in previous.settings.items() if other != model}
        if values:
            settings[model] = dict(values)
        _write(msgspec.structs.replace(previous, settings=settings))


def _write(preferences: Preferences) -> None:
    """Replace the file atomically."""
    import tomlkit

    text = tomlkit.dumps(msgspec.to_builtins(preferences), sort_keys=True)
    toml_files.replace(paths.models_file(), f"{HEADER}\n{text}")
