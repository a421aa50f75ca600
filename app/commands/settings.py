"""The settings as flags, and `localllm config`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from .. import config as configuration
from .. import config_file, paths
from ..errors import ConfigError, InvalidRequest
from ..store import preferences
from ..store.changes import user_choices
from .console import print_json, say, table
from .session import UNSET

CHANGE = re.compile(r"\w+=")  # the start of NAME=VALUE; no model has such a name


def flags() -> list[click.Parameter]:
    """One option per setting of the daemon. app/config.py validates the values."""
    return [_flag(setting) for setting in configuration.describe() if setting.name not in configuration.CLIENT_ONLY]


def _flag(setting: configuration.Setting) -> click.Option:
    default = setting.default
    text = setting.sentence
    if default not in ("", ()):
        text += f" [default: {default}]"
    kind: Any = str
    if setting.choices:
        kind = click.Choice(setting.choices)
    elif isinstance(default, int | float):
        kind = click.BOOL if isinstance(default, bool) else type(default)
    return click.Option([setting.flag, setting.name], type=kind, multiple=isinstance(default, tuple), help=text)


def without_unset(overrides: dict[str, Any]) -> dict[str, Any]:
    """The flags that are set."""
    return {name: value for name, value in overrides.items() if value not in UNSET}


def config(model: str | None, changes: Sequence[str], as_json: bool) -> int:
    """Print the value and the source of each setting, change settings of all models, or print and change the settings
    of one model.

    `model`: may also be the first change.
    """
    if model is None:
        return _config_all(as_json)
    if CHANGE.match(model):
        return _change_all((model, *changes), as_json)
    return _config_model(model, changes, as_json)


def _change_all(changes: Sequence[str], as_json: bool) -> int:
    """Change config.toml, and print the changed settings with the values that apply."""
    parsed = _parsed(changes)
    file = paths.config_file()
    values = config_file.change(file, parsed)
    settings, origin = configuration.explain()
    described = {setting.name: setting for setting in configuration.describe()}
    if as_json:
        print_json({"file": str(file), "settings": _without_key(values)})
    else:
        shown = _without_key(msgspec.structs.asdict(settings))
        rows = [(name, _text(shown[name]), origin.get(name, "default")) for name in parsed if name in described]
        table(("SETTING", "VALUE", "SOURCE"), rows)
    for name in parsed:
        if origin.get(name, str(file)) != str(file):
            say(f"{origin[name]} overrides {name} in {file}")
    if parsed.keys() - configuration.CLIENT_ONLY:
        say("the daemon reads its settings when it starts: to apply them now, run localllm stop")
    return 0


def _parsed(changes: Sequence[str]) -> dict[str, Any]:
    """The changes NAME=VALUE. Raises InvalidRequest for another text, and the errors of `parse_changes`."""
    texts = {}
    for change in changes:
        setting, equals, text = change.partition("=")
        if not equals:
            raise InvalidRequest(f"{change!r} is not NAME=VALUE", hint="for example quant=int4; quant= removes it")
        texts[setting] = text
    return parse_changes(texts)


def parse_changes(texts: Mapping[str, str]) -> dict[str, Any]:
    """Setting -> value; None: remove it. Raises ConfigError for an unknown setting or a value of the wrong type."""
    if backend := texts.get("backend"):
        _check_backend(backend)
    return {setting: configuration.value_of(setting, text) for setting, text in texts.items()}


def _check_backend(name: str) -> None:
    from ...backends import AUTO, BackendUnavailable, load  # imports numpy

    try:
        if name != AUTO:
            load(name)
    except BackendUnavailable as error:
        raise ConfigError(str(error), hint=error.hint) from None


def _without_key(values: dict[str, Any]) -> dict[str, Any]:
    """The values with the API key hidden."""
    return values | {"api_key": "(set, hidden)"} if values.get("api_key") else values


def _config_model(name: str, changes: Sequence[str], as_json: bool) -> int:
    """Apply changes NAME=VALUE to the settings of a model (NAME= removes a setting), and print the settings."""
    result = user_choices.configure(name, _parsed(changes))
    if as_json:
        print_json(result)
    elif result.settings or result.inherited:
        rows = [(setting, str(value), "") for setting, value in sorted(result.settings.items())]
        rows += [(setting, str(value), "of its repository") for setting, value in sorted(result.inherited.items())]
        table(("SETTING", "VALUE", ""), rows)
    else:
        say(f"{result.model} has no settings of its own; for example: localllm config {result.model} context=8192")
    if changes:
        say(f"the settings apply when {result.model} is loaded next; localllm stop {result.model} unloads it")
    return 0


def _config_all(as_json: bool) -> int:
    """Print the value and the source of each setting. Never prints an API key."""
    settings, origin = configuration.explain()
    values = _without_key(msgspec.structs.asdict(settings))
    if as_json:
        print_json(_for_json(values, origin))
    else:
        _print(values, origin)
    return 0


def _for_json(values: dict[str, Any], origin: dict[str, str]) -> dict[str, Any]:
    entries = [
        {
            "name": setting.name,
            "value": values[setting.name],
            "default": setting.default,
            "from": origin.get(setting.name, "default"),
            "env": setting.env,
            "description": setting.sentence,
        }
        for setting in configuration.describe()
    ]
    models = {"models_file": str(paths.models_file()), "models": preferences.read().settings}
    return {"file": str(paths.config_file()), "settings": entries, **models}


def _print(values: dict[str, Any], origin: dict[str, str]) -> None:
    file = paths.config_file()
    described = configuration.describe()
    click.echo(f"Settings file: {file}{'' if file.exists() else ' (does not exist)'}")
    click.echo("A flag overrides a variable, which overrides the file.\n")
    rows = [(s.name, _text(values[s.name]), origin.get(s.name, "default"), s.env) for s in described]
    table(("SETTING", "VALUE", "SOURCE", "VARIABLE"), rows)
    if models := preferences.read().settings:
        click.echo(f"\nSettings of single models: {paths.models_file()}")
        lines = {model: " ".join(f"{name}={value}" for name, value in own.items()) for model, own in models.items()}
        table(("MODEL", "SETTINGS"), sorted(lines.items()))
    click.echo()
    for setting in described:
        click.echo(f"{setting.name}: {setting.sentence}")


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
