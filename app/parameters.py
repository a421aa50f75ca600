"""Types of parameters with their shell completion, and flags that several commands have.

Like the commands, a type imports its code when it is used, so that help is fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem


class WithSettings(click.Command):
    """A command with a flag for every setting of the daemon."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        from .commands.settings import flags

        return [*self.params, *flags(), self.get_help_option(ctx)]  # type: ignore[list-item]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the flags of the settings in groups, then the others."""
        from .config import GROUPS

        records = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        groups = {title: [records.pop(name) for name in names] for title, names in GROUPS.items()}
        for title, rows in {**groups, "Other options": list(records.values())}.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def existing_gguf(value: str) -> str:
    """The absolute path of a GGUF file that exists, also without a leading ./; all other texts stay."""
    is_file = value.lower().endswith(".gguf") and os.path.isfile(value)  # noqa: PTH113 - Path raises for a long text
    return os.path.abspath(value) if is_file else value  # noqa: PTH100


class Name(click.ParamType[str]):
    """A name. The shell completes `names`, without regard to case; a path completes itself if `takes_paths`."""

    name = "name"
    takes_paths = False

    def names(self) -> Iterable[str]:
        return ()

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from .errors import AppError

        if self.takes_paths and incomplete.startswith(("/", ".", "~")):
            return [CompletionItem(incomplete, type="file")]
        try:
            names = dict.fromkeys(self.names())
        except (AppError, OSError):  # a malformed file has no names
            return []
        return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


class Model(Name):
    """The name of a model, or a folder with a leading /, ./, ../ or ~, or a GGUF file. A path becomes absolute."""

    name = "model"
    takes_paths = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .store.names import is_path
        from .store.resolved import model as resolve

        value = existing_gguf(value)
        if is_path(value):
            return str(resolve(value, allow_path=True).path)
        if os.path.isdir(value):  # noqa: PTH112 - Path raises for a long text
            resolve(value)  # raises the error with the path as its hint, before the terminal UI starts
        return str(value)

    def names(self) -> Iterable[str]:
        """The models on this machine, with their aliases and their short names."""
        from .store import catalog, preferences
        from .store.local.snapshots import available

        ids = [model.id for model in available()]
        yield from ids
        yield from sorted(preferences.read().aliases)
        yield from (name for name, entry in catalog.entries().items() if str(entry.target) in ids)


class LoadedModel(Model):
    """The name or the path of a model that may be loaded. The files of a loaded model may be deleted."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .errors import ModelNotFound, WrongKind
        from .store.names import is_path

        try:
            return str(super().convert(value, param, ctx))
        except (ModelNotFound, WrongKind):
            if not is_path(existing_gguf(value)):
                return str(value)
            return os.path.abspath(os.path.expanduser(str(value)))  # noqa: PTH100, PTH111


class StoredModel(Model):
    """The name of a model, an adapter or an unfinished download on this machine, or the path of a folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .store.names import is_path

        value = existing_gguf(value)
        return os.path.abspath(os.path.expanduser(value)) if is_path(value) else str(value)  # noqa: PTH100, PTH111

    def names(self) -> Iterable[str]:
        from .store.local.snapshots import ids

        yield from super().names()
        yield from ids()


class AnyModel(StoredModel):
    """The name of a model or an adapter, on this machine or not, or a path."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return existing_gguf(value)

    def names(self) -> Iterable[str]:
        from .store.catalog import entries

        yield from super().names()
        yield from entries()


class RemoteModel(Name):
    """The name of a model to download: the shell completes short names, and repositories that are in the cache."""

    def names(self) -> Iterable[str]:
        from .store.catalog import entries
        from .store.local.snapshots import repo_folders
        from .store.names import LOCAL, repo_of_folder

        yield from entries()
        repositories = (repo_of_folder(folder) for folder in repo_folders())
        yield from (name for name in repositories if "/" in name and not name.startswith(f"{LOCAL}/"))


class AliasName(Name):
    """An alias."""

    name = "alias"

    def names(self) -> Iterable[str]:
        from .store import preferences

        return sorted(preferences.read().aliases)


class AdapterFiles(Name):
    """The name of an adapter on this machine, or the path of its folder or GGUF file."""

    name = "adapter"
    takes_paths = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return existing_gguf(value)

    def names(self) -> Iterable[str]:
        from .store.local.snapshots import adapters

        return [adapter.id for adapter in adapters()]


class LoadedAdapter(Name):
    """The name of an adapter for requests. The shell completes the default names of the adapters on this machine."""

    name = "adapter"

    def names(self) -> Iterable[str]:
        from .store.local.snapshots import adapters
        from .store.names import adapter_name

        return [adapter_name(adapter.id) for adapter in adapters()]


class Adapter(LoadedAdapter):
    """The selection of an adapter: NAME or NAME=SCALE."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from .client import adapter_selection

        adapter_selection(value)
        return str(value)


class BackendName(Name):
    """The name of a backend, or `auto`."""

    name = "backend"

    def names(self) -> tuple[str, ...]:
        from ..backends import AUTO, ORDER

        return (AUTO, *ORDER)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(click.Choice(self.names()).convert(value, param, ctx))


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

backend_flag = click.option(
    "--backend",
    type=BackendName(),
    metavar="NAME",
    help="Backend that runs the model; default: the first one that works. localllm doctor lists them.",
)
context_flag = click.option(
    "--context",
    type=click.IntRange(min=0),
    metavar="TOKENS",
    help="Context window in tokens; 0: the model's own limit, or less if memory is short.",
)
quant_flag = click.option(
    "--quant",
    type=click.Choice(["none", "int8", "int4", "fp8", "fp8_w8a8"]),
    help="Quantise the weights while loading: less memory and faster, slightly less accurate.",
)
ROPE_SCALINGS = ("auto", "none", "linear", "yarn")
LOAD = ("backend", "quant", "context", "rope_scaling", "rope_scale", "rope_base")  # fields of LoadFlags


def load_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a load to a command: those of `LOAD`."""
    flags: list[Decorator] = [
        backend_flag,
        quant_flag,
        context_flag,
        click.option(
            "--rope-scaling",
            type=click.Choice(ROPE_SCALINGS),
            help="RoPE scaling of a GGUF model, as in llama.cpp; default: that of the model's file.",
        ),
        click.option(
            "--rope-scale",
            type=click.FloatRange(min=0),
            metavar="FACTOR",
            help="Factor by which RoPE scaling extends the trained context of a GGUF model.",
        ),
        click.option(
            "--rope-base",
            type=click.FloatRange(min=0),
            metavar="BASE",
            help="Base of the RoPE frequencies of a GGUF model.",
        ),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command


def load_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Remove the flags of a load from `flags`, and return them by their names in LoadFlags."""
    return {name: flags.pop(name) for name in LOAD}


json_flag = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
default_model = click.argument("model", type=Model(), required=False)


def sampling_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the sampling flags to a command. Without a flag, the model's default applies."""
    flags: list[Decorator] = [
        click.option("--system", metavar="TEXT", help="System message: instructions that precede the conversation."),
        click.option("--temperature", type=float, help="Randomness; 0: always the most likely token."),
        click.option(
            "--top-p", type=float, help="Sample from the most likely tokens with this total probability, 0 to 1."
        ),
        click.option("--top-k", type=int, help="Sample from this many most likely tokens; 0: no limit."),
        click.option("--min-p", type=float, help="Exclude tokens below this fraction of the highest probability."),
        click.option("--max-tokens", type=int, help="Maximum length of the answer in tokens."),
        click.option("--seed", type=int, help="Random seed; the same seed gives the same answer."),
        click.option(
            "--stop", multiple=True, metavar="TEXT", help="End the answer before this text. The flag may be repeated."
        ),
        click.option(
            "--adapter",
            type=Adapter(),
            metavar="NAME[=SCALE]",
            help="LoRA adapter of the model, and its scale (default 1). See localllm adapters.",
        ),
    ]
    for flag in reversed(flags):
        command = flag(command)
    return command
