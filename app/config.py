"""Every setting: its type, its default and its description.

A flag overrides the environment variable LOCALLLM_<NAME>, which overrides the file config.toml (one key per setting).
An unknown setting, a wrong type and a value out of range are errors that name the setting. Developer options are
environment variables only, LOCALLLM_DEV_<NAME>: see app/developer.py.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Meta

from ..engine.options import CacheDtype, CacheLayout, RopeScaling
from ..kernels.compiled.library import CPU_VARIABLE, CUDA_VARIABLE, LibraryNotFound, read_variable
from ..kernels.gpu.limits import VARIABLES as GPU_VARIABLES
from ..kernels.gpu.limits import LimitRefused, read_limits
from . import origins, paths
from .developer import OF_THE_DAEMON, Developer
from .errors import ConfigError
from .store.names import settings_names

PREFIX = "LOCALLLM_"
DEVELOPER_PREFIX = "LOCALLLM_DEV_"
DEFAULT_PORT = 11811

# Variables that start with LOCALLLM_ but are not settings: app/paths.py reads the first two, the kernels the others.
OTHER_VARIABLES = frozenset(
    "LOCALLLM_CONFIG LOCALLLM_RUNTIME_DIR LOCALLLM_CPU_LIBRARY LOCALLLM_CPU_LANE LOCALLLM_CUDA_LIBRARY".split()
).union(GPU_VARIABLES)
# Settings that decide how a model is loaded. The daemon reads them once, when it starts.
LOADING = tuple(
    "backend dtype cache_dtype cache_layout quant context cache_mib max_rows graphs threads gpu_layers "
    "rope_scaling rope_scale rope_base adapter_slots adapter_rank".split()
)
# Setting with a list of names → the function that raises ValueError for a text that is no such name.
NAMES: dict[str, Callable[[str], str]] = {"allowed_hosts": origins.host_name, "allowed_origins": origins.origin}
CLIENT_ONLY = frozenset({"model"})  # settings that only the commands read, not the daemon
# Title of a group in `localllm serve --help` -> its settings.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Loading models": tuple("backend dtype quant context threads graphs preload idle_unload".split()),
    "KV cache and batches": tuple("cache_dtype cache_mib max_rows".split()),
    "GGUF models": tuple("gpu_layers cache_layout rope_scaling rope_scale rope_base".split()),
    "LoRA adapters": ("adapter_slots", "adapter_rank"),
    "Network and access": tuple(
        "host port ollama_port api_key allowed_hosts allowed_origins max_queue strict_fields".split()
    ),
}

SWITCH = {"true": True, "false": False}
Count = Annotated[int, Meta(ge=1)]
Group = TypeVar("Group", bound=msgspec.Struct)


INTERNAL = frozenset({"developer", "flags", "own"})  # fields of Settings that are not settings


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings, with their types, defaults and descriptions."""

    model: Annotated[str, Meta(description="Default model of localllm chat and localllm bench.")] = "guide"
    backend: Annotated[str, Meta(description="Backend that runs the models; auto: the first one that works.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(description="Number format of activations and of the KV cache."),
    ] = "auto"
    cache_dtype: Annotated[
        CacheDtype,
        Meta(
            description="Number format of the KV cache; fp8 (GPU only) and int8 (NPU only) halve its memory. The other "
            "formats are for GGUF models."
        ),
    ] = "auto"
    cache_layout: Annotated[
        CacheLayout,
        Meta(
            description="KV cache of GGUF models. shared: one cache, in which a common prefix is stored once; rows: a "
            "cache of context tokens for each request, faster if many long requests have no common prefix."
        ),
    ] = "shared"
    quant: Annotated[
        Literal["none", "int8", "int4", "fp8", "fp8_w8a8"],
        Meta(description="Quantise the weights while loading: less memory and faster, slightly less accurate."),
    ] = "none"
    context: Annotated[
        int, Meta(ge=0, description="Context window in tokens; 0: the model's own limit, or less if memory is short.")
    ] = 0
    cache_mib: Annotated[int, Meta(ge=0, description="Memory for the KV cache in MiB; 0: automatic.")] = 0
    max_rows: Annotated[
        Count, Meta(description="Maximum number of requests that a model computes in one step (batch size).")
    ] = 64
    graphs: Annotated[
        Literal["auto", "full", "split", "breakable", "off"],
        Meta(
            description="CUDA graphs: full captures decode steps; breakable also captures prefill, except attention; "
            "split is breakable with prefill compiled by torch; off disables graphs."
        ),
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, description="CPU threads; 0: one per physical core.")] = 0
    gpu_layers: Annotated[
        int, Meta(ge=-1, description="Layers of GGUF models that llama.cpp computes on GPUs; -1: as many as fit.")
    ] = -1
    rope_scaling: Annotated[
        RopeScaling,
        Meta(description="RoPE scaling of GGUF models, as in llama.cpp; auto: that of the model's file."),
    ] = "auto"
    rope_scale: Annotated[
        float,
        Meta(
            ge=0,
            le=1e6,
            description="Factor by which RoPE scaling extends the trained context of GGUF models; 0: the model's own.",
        ),
    ] = 0.0
    rope_base: Annotated[
        float, Meta(ge=0, le=1e15, description="Base of the RoPE frequencies of GGUF models; 0: the model's own.")
    ] = 0.0
    adapter_slots: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Number of LoRA adapters that answers can use at the same time; 0: no adapters. More adapters "
            "may be loaded.",
        ),
    ] = 8
    adapter_rank: Annotated[int, Meta(ge=1, le=1024, description="Maximum rank of a LoRA adapter.")] = 16
    host: Annotated[
        str, Meta(description="Address of the daemon; an address other than loopback requires an API key.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port of the daemon; 0: any free port.")] = DEFAULT_PORT
    ollama_port: Annotated[
        int,
        Meta(
            ge=0,
            le=65535,
            description="A second TCP port, on loopback, for Ollama's clients, which expect 11434; 0: none.",
        ),
    ] = 0
    api_key: Annotated[
        str, Meta(description="API key for TCP clients; empty: none on loopback, a generated key otherwise.")
    ] = ""
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="Additional host names, such as box.lan, that the daemon accepts in the Host header of a "
            "request; no ports and no patterns."
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="Web origins, such as https://example.org, whose pages may call the daemon; no patterns; "
            "empty: none."
        ),
    ] = ()
    idle_unload: Annotated[
        float, Meta(ge=0, description="Unload a model after this many seconds without a request; 0: never.")
    ] = 900.0
    max_queue: Annotated[
        Count, Meta(description="Maximum number of unfinished requests per model; further requests get status 429.")
    ] = 256
    strict_fields: Annotated[
        bool,
        Meta(
            description="Refuse fields of requests that cannot change the answer of a local model; false: accept them, "
            "and name them in the header x-localllm-ignored."
        ),
    ] = False
    preload: Annotated[tuple[str, ...], Meta(description="Models that the daemon loads when it starts.")] = ()
    developer: Developer = Developer()
    flags: tuple[str, ...] = ()  # names of the settings with a flag of localllm serve
    own: tuple[str, ...] = ()  # names of the settings that one model or one load has; the others hold for all models


PREFIXES: Mapping[type[msgspec.Struct], str] = {Settings: PREFIX, Developer: DEVELOPER_PREFIX}


def loading(settings: Settings) -> dict[str, Any]:
    """The settings that decide how a model is loaded, as JSON values. Developer options start with dev_."""
    values = msgspec.json.decode(msgspec.json.encode(settings))  # JSON has lists instead of tuples
    developer = {f"dev_{name}": value for name, value in values["developer"].items() if name not in OF_THE_DAEMON}
    return {name: values[name] for name in LOADING} | developer


def model_settings(tables: Mapping[str, Mapping[str, object]], model: str) -> dict[str, Any]:
    """The settings of one model in models.toml, validated.

    A revision and a GGUF model (`org/repo:QUANT`) also have the settings of their repository, if they have no other
    value. `tables`: model id -> setting -> value. Raises ConfigError that names the model, the setting and the reason.
    """
    values: dict[str, Any] = {}
    for name in settings_names(model):
        values |= tables.get(name, {})
    check_model_settings(model, values)
    return values


def check_model_settings(model: str, values: Mapping[str, object]) -> None:
    """Raises ConfigError for a setting that a model cannot have, or a wrong value."""
    source = f"the settings of {model}"
    for name in values:
        if name not in LOADING:
            similar = difflib.get_close_matches(name, LOADING, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"a model has the settings {', '.join(LOADING)}"
            raise ConfigError(f"unknown setting {name!r} in {source}", hint=hint)
    _read(Settings, ((source, name, value) for name, value in values.items()))


def value_of(name: str, text: str) -> Any:
    """The value of a setting from a command line; None without a text. Raises ConfigError, also for an unknown name."""
    setting = _setting(Settings, name, "the command")
    return _from_text(setting, text, name) if text else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting, for flags, `localllm config` and the docs."""

    name: str
    default: object
    choices: tuple[str, ...]  # allowed values; empty: any value of the default's type
    sentence: str
    env: str  # environment variable

    @property
    def meaning(self) -> str:
        """The description of the setting and its choices."""
        if not self.choices:
            return self.sentence
        return f"{self.sentence} One of: {', '.join(self.choices)}."

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def describe(group: type[msgspec.Struct] = Settings) -> list[Setting]:
    """Every setting, or every developer option, in the order of its class."""
    return list(_described(group).values())


@cache
def _described(group: type[msgspec.Struct]) -> dict[str, Setting]:
    info = msgspec.inspect.type_info(group)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: _describe(field, PREFIXES[group]) for field in info.fields if field.name not in INTERNAL}


def _describe(field: msgspec.inspect.Field, prefix: str) -> Setting:
    kind = field.type
    sentence = ""
    while isinstance(kind, msgspec.inspect.Metadata):
        sentence = (kind.extra_json_schema or {}).get("description", sentence)
        kind = kind.type
    choices: tuple[str, ...] = ()
    if isinstance(kind, msgspec.inspect.LiteralType):
        choices = tuple(map(str, kind.values))
    return Setting(field.name, field.default, choices, sentence, prefix + field.name.upper())


def load(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """Read the file, the environment and `overrides` (flags; None: unset). Raises ConfigError."""
    return explain(overrides, env, file)[0]


def explain(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """The settings, and the source of each value that is not a default: a file, a variable or a flag."""
    flags = {name: value for name, value in (overrides or {}).items() if value is not None}
    settings, origin = _read(Settings, _sources(flags, env, file or paths.config_file()))
    _check_names(settings, origin)
    developer, _ = _read(Developer, _from_variables(env, Developer))
    _check_kernel_variables(env)
    return msgspec.structs.replace(settings, developer=developer, flags=tuple(flags)), origin


def check_file(file: Path, values: Mapping[str, object]) -> None:
    """Raises ConfigError for an unknown setting, or a wrong value, in a settings file."""
    _check_names(*_read(Settings, ((str(file), name, value) for name, value in values.items())))


def _check_names(settings: Settings, origin: Mapping[str, str]) -> None:
    """Raises ConfigError for a name in a list of names that no request can have."""
    for setting, check in NAMES.items():
        for name in getattr(settings, setting):
            try:
                check(name)
            except ValueError as error:
                raise ConfigError(
                    f"{setting} in {origin[setting]}: {name[:200]!r}: {error}",
                    hint=_described(Settings)[setting].meaning,
                ) from None


def _check_kernel_variables(env: Mapping[str, str]) -> None:
    """Raises ConfigError for an invalid value of a variable that the kernels read."""
    try:
        read_limits(env)
        for variable in (CPU_VARIABLE, CUDA_VARIABLE):
            read_variable(variable, env)
    except (LimitRefused, LibraryNotFound) as error:
        raise ConfigError(str(error), hint="docs/develop/add-a-kernel.md describes these variables") from None


def _read(group: type[Group], sources: Iterable[tuple[str, str, object]]) -> tuple[Group, dict[str, str]]:
    """The settings object from triples (source, setting, value), and the source of each value. A later value wins."""
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, name, value in sources:
        values[_setting(group, name, source).name] = value
        origin[name] = source
    try:
        return msgspec.convert(values, group), origin
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        raise ConfigError(f"{name} in {origin[name]}: {reason}", hint=_described(group)[name].meaning) from None


def _sources(flags: Mapping[str, object], env: Mapping[str, str], file: Path) -> Iterator[tuple[str, str, object]]:
    """(source, setting, value) of every value in the file, the environment and the flags, in this order."""
    for name, value in read_file(file).items():
        yield str(file), name, value
    yield from _from_variables({name: env[name] for name in env if not name.startswith(DEVELOPER_PREFIX)}, Settings)
    for name, value in flags.items():
        yield f"--{name.replace('_', '-')}", name, value


def _from_variables(env: Mapping[str, str], group: type[msgspec.Struct]) -> Iterator[tuple[str, str, object]]:
    """(variable, setting, value) of every variable with the prefix of the group."""
    prefix = PREFIXES[group]
    for variable in env:
        if variable.startswith(prefix) and variable not in OTHER_VARIABLES:
            setting = _setting(group, variable.removeprefix(prefix).lower(), variable)
            yield variable, setting.name, _from_text(setting, env[variable], variable)


def _setting(group: type[msgspec.Struct], name: str, source: str) -> Setting:
    """The setting of this name. Raises ConfigError with a similar name, or with the variable of a developer option."""
    described = _described(group)
    if name in described:
        return described[name]
    if name in _described(Developer):
        raise ConfigError(
            f"{name!r} in {source} is not a setting but a developer option",
            hint=f"set the environment variable {DEVELOPER_PREFIX}{name.upper()}",
        )
    similar = difflib.get_close_matches(name, described, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"the settings are {', '.join(described)}"
    raise ConfigError(f"unknown setting {name!r} in {source}", hint=hint)


def read_file(file: Path) -> dict[str, Any]:
    """The values of a settings file by setting, not validated; empty without a file. Raises ConfigError."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file}: {error}", hint="fix the file, or delete it to use the defaults") from None


def _from_text(setting: Setting, text: str, source: str) -> object:
    """The value of a text. `source`: the variable or the setting that an error names."""
    default = setting.default
    if isinstance(default, tuple):
        return list(filter(None, map(str.strip, text.split(","))))
    if isinstance(default, str):
        return text
    assert isinstance(default, int | float)
    convert, expected = (
        (SWITCH.__getitem__, "true or false") if isinstance(default, bool) else (type(default), "a number")
    )
    try:
        return convert(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{source}: expected {expected}, got {text[:200]!r}", hint=setting.meaning) from None
