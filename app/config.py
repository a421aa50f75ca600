"""Every setting: its type, its default and its description.

A flag overrides the environment variable LOCALLLM_<NAME>, which overrides the file config.toml (one key per setting).
An unknown setting, a wrong type and a value out of range are errors that name the setting. Developer options are
environment variables only, LOCALLLM_DEV_<NAME>: see `Developer`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import msgspec.inspect
from msgspec import Meta

from ..engine.options import CacheDtype, CacheLayout, RopeScaling
from ..kernels.gpu_limits import VARIABLES as GPU_VARIABLES
from ..kernels.gpu_limits import LimitRefused, read_limits
from . import origins, paths
from .errors import ConfigError
from .store.names import settings_names

PREFIX = "LOCALLLM_"
DEVELOPER_PREFIX = "LOCALLLM_DEV_"
DEFAULT_PORT = 11811

# Variables that start with LOCALLLM_ but are not settings: app/paths.py reads the first two, the kernels the others.
PATH_VARIABLES = frozenset({"LOCALLLM_CONFIG", "LOCALLLM_RUNTIME_DIR"})
KERNEL_VARIABLES = frozenset({"LOCALLLM_CPU_LIBRARY", "LOCALLLM_CPU_LANE", "LOCALLLM_CUDA_LIBRARY", *GPU_VARIABLES})
# Settings that decide how a model is loaded. The daemon reads them once, when it starts.
LOADING = tuple(
    "backend dtype cache_dtype cache_layout quant context cache_mib cache_share max_rows graphs threads gpu_layers "
    "rope_scaling rope_scale rope_base adapter_slots adapter_rank lora_backend".split()
)
# Setting with a list of names → the function that raises ValueError for a text that is no such name.
NAMES: dict[str, Callable[[str], str]] = {"allowed_hosts": origins.host_name, "allowed_origins": origins.origin}
CLIENT_ONLY = frozenset({"model"})  # settings that only the commands read, not the daemon
# Title of a group in `localllm serve --help` -> its settings.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Loading models": tuple("backend dtype quant context threads graphs preload idle_unload".split()),
    "KV cache and batches": tuple("cache_dtype cache_mib cache_share max_rows".split()),
    "GGUF models": tuple("gpu_layers cache_layout rope_scaling rope_scale rope_base".split()),
    "LoRA adapters": tuple("adapter_slots adapter_rank lora_backend".split()),
    "Network and access": tuple("host port api_key allowed_hosts allowed_origins".split()),
    "Requests": tuple("max_body_mib max_queue step_timeout drain".split()),
}

Count = Annotated[int, Meta(ge=1)]
Group = TypeVar("Group", bound=msgspec.Struct)


class Developer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for the development of localllm, read from environment variables only."""

    compiler: Annotated[
        Literal["inductor", "eager"],
        Meta(
            description="Compiler of graphs = split: inductor fuses kernels, eager skips compilation and starts faster."
        ),
    ] = "inductor"
    attention: Annotated[
        str,
        Meta(description="Attention implementation: auto, ours (built in) or flashinfer (NVIDIA GPUs only)."),
    ] = "auto"
    self_test: Annotated[
        Literal["on", "off"],
        Meta(
            description="Test the GPU kernels once, at the first start (about 10 s). A kernel that fails is replaced "
            "by a slower implementation."
        ),
    ] = "on"
    queues: Annotated[
        Literal["one", "measured"],
        Meta(
            description="GPU queues of captured steps; measured: a second queue computes shared experts where this "
            "gains time."
        ),
    ] = "measured"
    reference_ops: Annotated[
        tuple[str, ...],
        Meta(
            description="Ops to compute with their plain torch references: names of ops or op families, or all; "
            "localllm doctor --ops lists them."
        ),
    ] = ()


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
            description="Number format of the KV cache; fp8 (GPU only) halves its memory. The other formats are for "
            "GGUF models."
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
    cache_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.95,
            description="Fraction of the memory left after loading to use for the KV cache; 0: automatic.",
        ),
    ] = 0.0
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
            description="Maximum number of LoRA adapters in one step. More adapters may be loaded; 0: no adapters.",
        ),
    ] = 8
    adapter_rank: Annotated[int, Meta(ge=1, le=1024, description="Maximum rank of a LoRA adapter.")] = 16
    lora_backend: Annotated[
        str,
        Meta(
            description="Kernels that compute LoRA adapters. auto: the fastest on this device; torch_native: torch's "
            "products, one adapter after the other; triton: Triton kernels, one request per tile; csgmv: Triton "
            "kernels, tiles that join the requests of an adapter; cpp: C++ kernels (NVIDIA GPUs: decode steps). The "
            "load of a model refuses a value that its device does not support."
        ),
    ] = "auto"
    host: Annotated[
        str, Meta(description="Address of the daemon; an address other than loopback requires an API key.")
    ] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port of the daemon; 0: any free port.")] = DEFAULT_PORT
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
    max_body_mib: Annotated[Count, Meta(description="Maximum size of a request body in MiB.")] = 16
    max_queue: Annotated[
        Count, Meta(description="Maximum number of unfinished requests per model; further requests get status 429.")
    ] = 256
    step_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum duration of a step (one call of the model) in seconds. A model that exceeds it is "
            "restarted. 0: 120 on NVIDIA, 600 for GGUF models on GPUs, 3600 on CPU, otherwise no limit.",
        ),
    ] = 0.0
    drain: Annotated[
        float, Meta(ge=0, description="Time in seconds that running answers have to finish when the daemon stops.")
    ] = 5.0
    preload: Annotated[tuple[str, ...], Meta(description="Models that the daemon loads when it starts.")] = ()
    developer: Developer = Developer()
    flags: tuple[str, ...] = ()  # names of the settings with a flag of localllm serve
    own: tuple[str, ...] = ()  # names of the settings that one model or one load has; the others hold for all models


def loading(settings: Settings) -> dict[str, Any]:
    """The settings that decide how a model is loaded, as JSON values. Developer options start with dev_."""
    values = msgspec.json.decode(msgspec.json.encode(settings))  # JSON has lists instead of tuples
    developer = {f"dev_{name}": value for name, value in values["developer"].items()}
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
    described = {setting.name: setting for setting in describe()}
    for name in values:
        if name not in LOADING:
            similar = difflib.get_close_matches(name, LOADING, n=1)
            hint = f"did you mean {similar[0]}?" if similar else f"a model has the settings {', '.join(LOADING)}"
            raise ConfigError(f"unknown setting {name!r} in {source}", hint=hint)
    _read(Settings, ((source, name, value) for name, value in values.items()), described)


def value_of(name: str, text: str) -> Any:
    """The value of a setting from a command line; None without a text. Raises ConfigError, also for an unknown name."""
    described = {setting.name: setting for setting in describe()}
    if name not in described:
        raise _unknown(name, "the command", described)
    return _from_text(described[name], text, name) if text else None


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting, for flags, `localllm config` and the docs."""

    name: str
    default: object
    choices: tuple[str, ...]  # allowed values; empty: any value of the default's type
    sentence: str
    prefix: str = PREFIX

    @property
    def env(self) -> str:
        return self.prefix + self.name.upper()

    @property
    def meaning(self) -> str:
        """The description of the setting and its choices."""
        if not self.choices:
            return self.sentence
        return f"{self.sentence} One of: {', '.join(self.choices)}."

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def describe() -> list[Setting]:
    """Every setting, in the order of `Settings`, without developer options."""
    return _descriptions(Settings, PREFIX)


def describe_developer() -> list[Setting]:
    """Every developer option, in the order of `Developer`."""
    return _descriptions(Developer, DEVELOPER_PREFIX)


def _descriptions(group: type, prefix: str) -> list[Setting]:
    info = msgspec.inspect.type_info(group)
    assert isinstance(info, msgspec.inspect.StructType)
    settings = []
    for field in info.fields:
        if field.name not in INTERNAL:
            settings.append(_describe(field, prefix))
    return settings


def _describe(field: msgspec.inspect.Field, prefix: str) -> Setting:
    kind = field.type
    sentence = ""
    while isinstance(kind, msgspec.inspect.Metadata):
        sentence = (kind.extra_json_schema or {}).get("description", sentence)
        kind = kind.type
    choices: tuple[str, ...] = ()
    if isinstance(kind, msgspec.inspect.LiteralType):
        choices = tuple(map(str, kind.values))
    return Setting(field.name, field.default, choices, sentence, prefix)


def load(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """Read the file, the environment and `overrides` (flags; None: unset). Raises ConfigError."""
    return explain(overrides, env, file)[0]


def explain(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """The settings, and the source of each value that is not a default: a file, a variable or a flag."""
    described = {setting.name: setting for setting in describe()}
    values = _sources(overrides or {}, env, file or paths.config_file(), described)
    settings, origin = _read(Settings, values, described)
    _check_names(settings, origin, described)
    variables = {setting.name: setting for setting in describe_developer()}
    developer, _ = _read(Developer, _from_variables(env, DEVELOPER_PREFIX, variables), variables)
    _check_gpu_limits(env)
    flags = tuple(name for name, value in (overrides or {}).items() if value is not None)
    return msgspec.structs.replace(settings, developer=developer, flags=flags), origin


def check_file(file: Path, values: Mapping[str, object]) -> None:
    """Raises ConfigError for an unknown setting, or a wrong value, in a settings file."""
    described = {setting.name: setting for setting in describe()}
    settings, origin = _read(Settings, ((str(file), name, value) for name, value in values.items()), described)
    _check_names(settings, origin, described)


def _check_names(settings: Settings, origin: Mapping[str, str], described: Mapping[str, Setting]) -> None:
    """Raises ConfigError for a name in a list of names that no request can have."""
    for setting, check in NAMES.items():
        for name in getattr(settings, setting):
            try:
                check(name)
            except ValueError as error:
                raise ConfigError(
                    f"{setting} in {origin[setting]}: {name[:200]!r}: {error}", hint=described[setting].meaning
                ) from None


def _check_gpu_limits(env: Mapping[str, str]) -> None:
    """Raises ConfigError for an invalid limit of the GPU, which the kernels read."""
    try:
        read_limits(env)
    except LimitRefused as error:
        raise ConfigError(str(error), hint="docs/develop/add-a-kernel.md has the variables that imitate a GPU") from None


def _read(
    group: type[Group], sources: Iterable[tuple[str, str, object]], described: Mapping[str, Setting]
) -> tuple[Group, dict[str, str]]:
    """The settings object from triples (source, setting, value), and the source of each value. A later value wins."""
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    for source, name, value in sources:
        if name not in described:
            raise _unknown(name, source, described)
        values[name] = value
        origin[name] = source
    try:
        return msgspec.convert(values, group), origin
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        raise ConfigError(f"{name} in {origin[name]}: {reason}", hint=described[name].meaning) from None


def _sources(
    overrides: Mapping[str, object], env: Mapping[str, str], file: Path, described: Mapping[str, Setting]
) -> Iterator[tuple[str, str, object]]:
    """(source, setting, value) of every value in the file, the environment and the flags, in this order."""
    for name, value in read_file(file).items():
        yield str(file), name, value
    variables = {name: text for name, text in env.items() if not name.startswith(DEVELOPER_PREFIX)}
    yield from _from_variables(variables, PREFIX, described)
    for name, value in overrides.items():
        if value is not None:
            yield f"--{name.replace('_', '-')}", name, value


def _from_variables(
    env: Mapping[str, str], prefix: str, described: Mapping[str, Setting]
) -> Iterator[tuple[str, str, object]]:
    """(variable, setting, value) of every variable with the prefix."""
    variables = [name for name in env if name.startswith(prefix)]
    for variable in variables:
        if variable in PATH_VARIABLES | KERNEL_VARIABLES:
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in described:
            raise _unknown(name, variable, described)
        yield variable, name, _from_text(described[name], env[variable], variable)


def _unknown(name: str, source: str, described: Mapping[str, Setting]) -> ConfigError:
    if name in Developer.__struct_fields__:
        return ConfigError(
            f"{name!r} in {source} is not a setting but a developer option",
            hint=f"set the environment variable {DEVELOPER_PREFIX}{name.upper()}",
        )
    similar = difflib.get_close_matches(name, described, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"the settings are {', '.join(described)}"
    return ConfigError(f"unknown setting {name!r} in {source}", hint=hint)


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
    try:
        return type(default)(text)
    except ValueError:
        raise ConfigError(f"{source}: expected a number, got {text[:200]!r}", hint=setting.meaning) from None
