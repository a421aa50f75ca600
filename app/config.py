"""Every setting: its type, its default and a sentence. Environment beats file, a flag beats both.

File: config.toml in the configuration folder, one key per setting. Environment: LOCALLLM_<NAME>.
Unknown keys, wrong types and values out of range are refused by name.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import msgspec.inspect
from msgspec import Meta

from . import paths
from .errors import ConfigError

PREFIX = "LOCALLLM_"
DEFAULT_PORT = 11811

PLACES = frozenset({"LOCALLLM_CONFIG", "LOCALLLM_RUNTIME_DIR"})  # variables that are paths, see paths.py
# For work on kernels, see docs/add-a-kernel.md.
KERNELS = frozenset("LOCALLLM_CPU_LIBRARY LOCALLLM_CPU_LANE LOCALLLM_CUDA_LIBRARY LOCALLLM_METAL_KERNELS".split())
# How the daemon loads models: a running one keeps to those that it was started with.
LOADING = tuple(
    "backend dtype cache_dtype quant context cache_mib cache_share max_rows graphs compiler attention threads "
    "reference_ops self_test".split()
)
CLIENT_ONLY = frozenset({"model"})  # read by commands; the daemon has no use for it

Count = Annotated[int, Meta(ge=1)]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a person may set."""

    model: Annotated[str, Meta(description="Model that chat and bench use when none is named.")] = "guide"
    backend: Annotated[str, Meta(description="Backend to use; auto picks the first that works here.")] = "auto"
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(description="Number format of computing, and of the KV cache."),
    ] = "auto"
    cache_dtype: Annotated[
        Literal["auto", "fp8"], Meta(description="Number format of the KV cache; fp8 holds twice as much, on a GPU.")
    ] = "auto"
    quant: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        Meta(description="Make the weights smaller on load: faster, not quite exact."),
    ] = "none"
    context: Annotated[int, Meta(ge=0, description="Context window in tokens; 0 is the model's own, if it fits.")] = 0
    cache_mib: Annotated[int, Meta(ge=0, description="Memory for the KV cache in MiB; 0 sizes it itself.")] = 0
    cache_share: Annotated[
        float,
        Meta(
            ge=0,
            le=0.95,
            description="Share of the memory free after loading that the KV cache may take; 0: sized itself.",
        ),
    ] = 0.0
    max_rows: Annotated[Count, Meta(description="Requests computed together in one step.")] = 64
    graphs: Annotated[
        Literal["auto", "full", "split", "breakable", "off"],
        Meta(
            description="Steps a GPU replays from a recording: full is those of one token, breakable prompts too, "
            "split prompts that were compiled before."
        ),
    ] = "auto"
    compiler: Annotated[
        Literal["inductor", "eager"],
        Meta(description="Of the prompts of split graphs: torch's, which fuses, or none, which starts sooner."),
    ] = "inductor"
    attention: Annotated[
        Literal["auto", "ours", "flashinfer"],
        Meta(description="Whose attention computes; flashinfer is for NVIDIA GPUs, and must be installed."),
    ] = "auto"
    self_test: Annotated[
        Literal["on", "off"],
        Meta(
            description="Test a GPU's kernels at the first start (about 10 s, once), and leave what is wrong to slower "
            "ones."
        ),
    ] = "on"
    threads: Annotated[int, Meta(ge=0, description="CPU threads; 0 uses every physical core.")] = 0
    reference_ops: Annotated[
        tuple[str, ...],
        Meta(description="Ops, families of them, or all, to compute by their plain references; see doctor --ops."),
    ] = ()
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
    step_timeout: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a step counts as hung; 0 is 120 on NVIDIA, 3600 on CPU, else never.",
        ),
    ] = 0.0
    drain: Annotated[float, Meta(ge=0, description="Seconds a stopping daemon lets running answers finish.")] = 5.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting as documents, flags and `localllm config` show it."""

    name: str
    default: object
    choices: tuple[str, ...]  # empty: anything of the default's type
    sentence: str

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def meaning(self) -> str:
        """The sentence, and the choices where there are some."""
        return self.sentence + (f" One of: {', '.join(self.choices)}." if self.choices else "")

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def describe() -> list[Setting]:
    """Every setting, in the order of Settings."""
    fields = msgspec.inspect.type_info(Settings)
    assert isinstance(fields, msgspec.inspect.StructType)
    return [_describe(field) for field in fields.fields]


def _describe(field: msgspec.inspect.Field) -> Setting:
    kind, sentence = field.type, ""
    while isinstance(kind, msgspec.inspect.Metadata):
        sentence = (kind.extra_json_schema or {}).get("description", sentence)
        kind = kind.type
    choices = tuple(str(value) for value in kind.values) if isinstance(kind, msgspec.inspect.LiteralType) else ()
    return Setting(field.name, field.default, choices, sentence)


def load(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> Settings:
    """Read file, environment and overrides (flags; None means not given). Raises ConfigError."""
    return explain(overrides, env, file)[0]


def explain(
    overrides: Mapping[str, object] | None = None, env: Mapping[str, str] = os.environ, file: Path | None = None
) -> tuple[Settings, dict[str, str]]:
    """The settings, and where each that is not a default comes from: a file, a variable or a flag."""
    file = file or paths.config_file()
    values: dict[str, object] = {}
    origin: dict[str, str] = {}
    known = {setting.name: setting for setting in describe()}
    for name, value in _from_file(file).items():
        values[name], origin[name] = value, str(file)
    for variable, text in env.items():
        if variable.startswith(PREFIX) and variable not in PLACES | KERNELS:
            name = variable.removeprefix(PREFIX).lower()
            values[name] = _from_text(known[name], text) if name in known else text
            origin[name] = variable
    for name, value in (overrides or {}).items():
        if value is not None:
            values[name], origin[name] = value, f"--{name.replace('_', '-')}"
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(known)}"
            raise ConfigError(f"unknown setting {name!r} in {origin[name]}", hint=hint)
    try:
        return msgspec.convert(values, Settings), origin
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$.")
        name = re.split(r"\W", at)[0]
        raise ConfigError(f"{name} in {origin[name]}: {reason}", hint=known[name].meaning) from None


def _from_file(file: Path) -> dict[str, object]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{file}: {error}", hint="mend the file, or remove it to use the defaults") from None


def _from_text(setting: Setting, text: str) -> object:
    default = setting.default
    if isinstance(default, tuple):
        return [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(default, str):
        return text
    try:
        return int(text) if isinstance(default, int) else float(text)
    except ValueError:
        raise ConfigError(f"{setting.env}: expected a number, got {text!r}", hint=setting.meaning) from None
