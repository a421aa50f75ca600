"""Changes settings in config.toml, which people also write by hand: its other lines and its comments stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import config, toml_files
from .toml_files import Value


def change(file: Path, changes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Set settings in the file; None removes a setting. Returns the values of the file.

    Raises ConfigError, and changes nothing, for an unknown setting or a wrong value; StorageFailed.
    """
    import tomlkit

    with toml_files.locked(file):
        config.read_file(file)
        document = tomlkit.parse(file.read_text("utf-8") if file.exists() else "")
        for name, value in changes.items():
            if value is None:
                document.pop(name, None)
            else:
                document[name] = value
        values = document.unwrap()
        config.check_file(file, values)
        toml_files.replace(file, tomlkit.dumps(document))
    return values
