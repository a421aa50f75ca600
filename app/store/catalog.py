"""The catalog: short names of models that localllm can run. The user's catalog.toml adds and replaces entries."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .. import paths
from ..errors import ConfigError, InvalidRequest
from . import preferences
from .names import GUIDE, MAIN, HubName, Name, ShortName, is_path, parse

GB = 10**9


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry, as in the file. The sizes are approximate."""

    repository: str  # org/repo, ms:org/repo or org/repo:QUANT
    revision: str = MAIN
    licence: str = ""
    size: Annotated[float, Meta(ge=0)] = 0.0  # GB to download; 0: unknown
    memory: Annotated[float, Meta(ge=0)] = 0.0  # GB to run the weights as they are, with a short context; 0: unknown
    formats: tuple[Literal["safetensors", "gguf"], ...] = ("safetensors",)
    gated: bool = False  # the hub gives access to accounts that accepted the licence
    description: str = ""

    @property
    def target(self) -> HubName:
        """The repository and its revision. Raises InvalidRequest for a malformed repository or revision."""
        name = parse(self.repository)
        if not isinstance(name, HubName):
            raise InvalidRequest(f"{self.repository!r} is not a repository (org/repo)", param="model")
        if self.revision == MAIN:
            return name
        with_revision = parse(str(replace(name, revision=self.revision)))
        assert isinstance(with_revision, HubName)
        return with_revision


def entries() -> Mapping[str, Entry]:
    """Short name -> entry, the user's entries first. Raises ConfigError for a malformed file of the user."""
    user = paths.user_catalog_file()
    try:
        status = user.stat()
    except OSError:
        return _read(paths.catalog_file())
    own_entries = _read(user, status.st_mtime_ns, status.st_size, status.st_ino)
    return {
        **own_entries,
        **{name: entry for name, entry in _read(paths.catalog_file()).items() if name not in own_entries},
    }


@lru_cache(maxsize=8)
def _read(file: Path, *version: int) -> Mapping[str, Entry]:
    """The entries of one version of a file."""
    try:
        values = msgspec.convert(tomllib.loads(file.read_text("utf-8")), dict[str, Entry])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{file}: {error}", hint="fix the file, or delete it") from None
    for name, entry in values.items():
        _check(file, name, entry)
    return MappingProxyType({name.lower(): entry for name, entry in values.items()})


def _check(file: Path, name: str, entry: Entry) -> None:
    try:
        short = parse(name)
        entry.target  # noqa: B018 - raises for a malformed repository
    except InvalidRequest as error:
        raise ConfigError(f"{file}: {name!r}: {error.message}", hint="fix the entry, or delete it") from None
    if not isinstance(short, ShortName) or short.revision or short.family == GUIDE:
        raise ConfigError(f"{file}: {name!r} is not a short name", hint="a short name has the form family:tag")


def find(name: str) -> Entry | None:
    """The entry of a short name. Upper and lower case are equal."""
    return entries().get(name.lower())


def tags(family: str) -> list[str]:
    """The short names of a family, such as qwen3:0.6b and qwen3:4b for qwen3."""
    prefix = f"{family.lower()}:"
    return [name for name in entries() if name.startswith(prefix)]


def expand(name: Name) -> Name | None:
    """The name behind an alias or an entry of the catalog; None for another short name. Other names stay.

    An alias precedes the catalog.
    """
    if not isinstance(name, ShortName) or str(name) == GUIDE:
        return name
    target = preferences.read().aliases.get(str(name))
    if target is None:
        entry = find(str(name))
        return entry.target if entry else None
    other = parse(target)
    if isinstance(other, ShortName):  # an alias of an alias is not followed
        entry = find(str(other))
        return entry.target if entry else other
    return other


def check_alias(alias: str) -> str:
    """The alias, if it is a short name and not in use otherwise. Raises InvalidRequest."""
    name = parse(alias)
    if not isinstance(name, ShortName) or name.revision or name.family == GUIDE or is_path(alias):
        raise InvalidRequest(
            f"{alias[:200]!r} cannot be an alias", hint="an alias has the form NAME or NAME:TAG", param="alias"
        )
    if find(alias):
        raise InvalidRequest(f"{alias!r} is a short name of the catalog", hint="choose another alias", param="alias")
    return alias
