"""Changes aliases and the settings of single models, with the checks that the command line and the API share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import config, paths
from ...errors import InvalidRequest, ModelNotFound
from .. import catalog, preferences, resolved, suggestions
from ..local import snapshots
from ..local.finding import find
from ..names import HubName, is_path, parse, without_gguf
from ..records import ModelSettings
from ..selection import selects_gguf


def remove_alias(alias: str) -> None:
    """Raises ModelNotFound for a name that is no alias."""
    aliases = preferences.read().aliases
    if alias not in aliases:
        hint = f"the aliases are {', '.join(sorted(aliases))}" if aliases else "there are no aliases"
        raise ModelNotFound(f"{alias[:200]!r} is not an alias", hint=hint, param="alias")
    preferences.set_alias(alias, None)


def set_alias(alias: str, model: str) -> str:
    """Add or replace an alias. Returns its target. Raises InvalidRequest, ModelNotFound."""
    catalog.check_alias(alias)
    name = parse(model)
    if str(name) in preferences.read().aliases:
        raise InvalidRequest(f"{model} is itself an alias", hint="name its model", param="model")
    target = str(name)
    if isinstance(name, HubName) and name.file:
        target = model  # an address: the name of the repository does not select the file
    if is_path(model):
        target = str(Path(model).expanduser().absolute())
        resolved.stored(target)  # raises ModelNotFound for a folder without a model
    elif catalog.expand(name) is None and find(target) is None:  # a name that pull refuses
        hint = suggestions.hint(target, [ref.id for ref in snapshots.available()])
        raise ModelNotFound(f"model {target[:200]!r} is not on this machine", hint=hint, param="model")
    preferences.set_alias(alias, target)
    return target


def configure(name: str, changes: Mapping[str, Any]) -> ModelSettings:
    """Change settings of a model; None removes a setting. Raises ModelNotFound, ConfigError."""
    model = _owner(name)
    tables = preferences.read().settings
    merged = {**tables.get(model, {}), **changes}
    values = {setting: value for setting, value in merged.items() if value is not None}
    if changes:
        removed = {setting: getattr(config.Settings(), setting) for setting in changes if setting not in values}
        config.check_model_settings(model, values | removed)
        preferences.set_settings(model, values)
    complete = config.model_settings({**tables, model: values}, model)
    inherited = {setting: value for setting, value in complete.items() if setting not in values}
    return ModelSettings(model=model, file=str(paths.models_file()), settings=values, inherited=inherited)


def _owner(name: str) -> str:
    """The name that has the settings: the id of the model, or its repository if `name` selects none of its GGUF models.

    Raises ModelNotFound.
    """
    model = resolved.model(name, allow_path=True).id
    target = None if is_path(name) else catalog.expand(parse(name))
    selects_all = isinstance(target, HubName) and not selects_gguf(target)
    return without_gguf(model) if selects_all else model
