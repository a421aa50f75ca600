"""The settings as flags, and `localllm config`."""

from __future__ import annotations

import json
from typing import Any

import click
import msgspec

from .. import config as configuration
from .. import paths
from .console import table


def flags() -> list[click.Parameter]:
    """One option per setting of the daemon; the settings themselves judge what is given."""
    return [_flag(setting) for setting in configuration.describe() if setting.name not in configuration.CLIENT_ONLY]


def _flag(setting: configuration.Setting) -> click.Option:
    default = setting.default
    shown = "" if default in ("", ()) else f" [default: {default}]"
    kind = (
        click.Choice(setting.choices) if setting.choices else type(default) if isinstance(default, int | float) else str
    )
    return click.Option(
        [setting.flag, setting.name], type=kind, multiple=isinstance(default, tuple), help=setting.sentence + shown
    )


def given(overrides: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given: click hands over () for a repeatable flag that was not."""
    return {name: value for name, value in overrides.items() if value not in (None, ())}


def config(as_json: bool) -> int:
    """Print each setting's value and where it comes from; a key is never shown."""
    settings, origin = configuration.explain()
    values = msgspec.structs.asdict(settings)
    if settings.api_key:
        values["api_key"] = "(set, not shown)"
    file, described = paths.config_file(), configuration.describe()
    if as_json:
        entries = [
            {
                "name": setting.name,
                "value": values[setting.name],
                "default": setting.default,
                "from": origin.get(setting.name, "default"),
                "env": setting.env,
                "description": setting.sentence,
            }
            for setting in described
        ]
        click.echo(json.dumps({"file": str(file), "settings": entries}, indent=2))
        return 0
    click.echo(f"Settings file: {file}{'' if file.exists() else ' (not there yet)'}")
    click.echo("A variable beats the file, a flag beats both.\n")
    rows = [(s.name, _shown(values[s.name]), origin.get(s.name, "default"), s.env) for s in described]
    table(("SETTING", "VALUE", "FROM", "VARIABLE"), rows)
    click.echo()
    for setting in described:
        click.echo(f"{setting.name}: {setting.sentence}")
    return 0


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
