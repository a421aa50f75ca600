"""Every setting: its type, its default and a sentence. Environment beats file, a flag beats both.

File: config.toml in the configuration folder, one key per setting. Environment: LOCALLLM_<NAME>.
Unknown keys, wrong types and values out of range are refused by name.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, get_type_hints

import msgspec
from msgspec import Meta

from . import paths
from .errors import ConfigError

PREFIX = "LOCALLLM_"
DEFAULT_PORT = 11811

Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a person may set."""

    model: Annotated[str, Meta(description="Model that chat and run use when none is named.")] = "guide"
    backend: Annotated[str, Meta(description="Backend to use; auto picks the first that works here.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"], Meta(description="Number format of weights and KV on load.")
    ] = "auto"
    context: Annotated[int, Meta(ge=0, description="Context window in tokens; 0 is the model's own, if it fits.")] = 0
    cache_mib: Annotated[int, Meta(ge=0, description="Memory for the KV cache in MiB; 0 sizes it itself.")] = 0
    max_rows: Annotated[Count, Meta(description="Requests computed together in one step.")] = 64
    threads: Annotated[int, Meta(ge=0, description="CPU threads; 0 uses every physical core.")] = 0
    host: Annotated[str, Meta(description="Address the daemon binds; anything but loopback needs a key.")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port of the daemon; 0 picks a free one.")] = DEFAULT_PORT
    api_key: Annotated[str, Meta(description="Key that TCP clients must send; empty asks for none on loopback.")] = ""
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="More names the Host header may carry, beside loopback ones.")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Web origins that may call the daemon; none by default.")
    ] = ()
    idle_unload: Annotated[
        float, Meta(ge=0, description="Seconds without a request after which a model is unloaded; 0 never.")
    ] = 900.0
    max_body_mib: Annotated[Count, Meta(description="Largest request body in MiB.")] = 16
    max_queue: Annotated[Count, Meta(description="Requests one model may hold before new ones get 429.")] = 256
    drain: Annotated[float, Meta(ge=0, description="Seconds a stopping daemon lets running answers finish.")] = 5.0


def load(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """Read file, environment and overrides (flags; None means not given). Raises ConfigError."""
    file = file or paths.config_file()
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    known = get_type_hints(Settings)
    if file.exists():
        try:
            table = tomllib.loads(file.read_text("utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
            raise ConfigError(f"{file}: {error}", hint="mend the file, or remove it to use the defaults") from None
        for name, value in table.items():
            values[name], origin[name] = value, str(file)
    for name in known:
        text = env.get(PREFIX + name.upper())
        if text is not None:
            values[name], origin[name] = _from_text(name, text), PREFIX + name.upper()
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name], origin[name] = value, f"--{name.replace('_', '-')}"
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ConfigError(
            f"unknown setting {unknown[0]!r} in {origin[unknown[0]]}", hint=f"known settings: {', '.join(known)}"
        )
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        where = next((origin[n] for n in values if f"$.{n}" in str(error)), str(file))
        raise ConfigError(f"{where}: {error}") from None


def _from_text(name: str, text: str) -> object:
    default = getattr(Settings(), name)
    if isinstance(default, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(default, str):
        return text
    try:
        return type(default)(text)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name.upper()}: expected a number, got {text!r}") from None
