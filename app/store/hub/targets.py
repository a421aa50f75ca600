"""The repository or the file at a hub that a name selects."""

from __future__ import annotations

from ...errors import InvalidRequest, ModelNotFound
from .. import catalog, suggestions
from ..local import snapshots
from ..names import GUIDE, LOCAL, FileAddress, HubName, LocalPath, ShortName, parse


def remote_name(text: str) -> HubName | FileAddress:
    """The repository or file to download for a name. Raises InvalidRequest, or ModelNotFound with similar names."""
    name = catalog.expand(parse(text))
    if isinstance(name, LocalPath):
        hint = "localllm import PATH adds a model folder"
        raise InvalidRequest(f"{text[:200]} is a path, not a download", hint=hint, param="model")
    if text == GUIDE:
        raise InvalidRequest("guide is built in", hint="localllm chat guide", param="model")
    if name is None or isinstance(name, ShortName):
        message = f"no model and no short name {text[:200]!r}"
        raise ModelNotFound(message, hint=suggestions.hint(text, snapshots.ids()), param="model")
    if isinstance(name, HubName) and name.repo.startswith(f"{LOCAL}/"):
        message = f"no hub has {name}: names with {LOCAL}/ belong to imported models"
        raise ModelNotFound(message, hint=suggestions.hint(text, snapshots.ids()), param="model")
    return name
