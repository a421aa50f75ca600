"""Settings of all models. A model whose backend does not support one is loaded without it, and a warning says so.

A setting of one model, or a flag of one load, is never left out: the backend refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ..engine.errors import ContextRefused, SettingRefused
from ..engine.files.model_files import ModelFiles
from ..engine.options import LoadOptions
from . import AUTO, Choice, choose, load

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Applied(Generic[Result]):
    """The result of a load, and the settings of all models that it does not have."""

    result: Result
    unapplied: tuple[str, ...]  # names of settings
    warnings: tuple[str, ...]  # one for each of these settings, for the user


def accepted_backend(name: str, files: ModelFiles, shared: Collection[str]) -> str:
    """`name`; AUTO if it is the setting `backend` of all models, and that backend does not read the files."""
    if name == AUTO or "backend" not in shared:
        return name
    accepts = getattr(load(name), "accepts", None)  # a backend without a runner has only `probe`
    return AUTO if accepts is not None and accepts(files) else name


def choose_for(name: str, files: ModelFiles, shared: Collection[str]) -> Applied[Choice]:
    """The backend `name`, or another one if `accepted_backend` says so. Raises the errors of `choose`."""
    accepted = accepted_backend(name, files, shared)
    choice = choose(accepted, files)
    if accepted == name:
        return Applied(choice, (), ())
    reason = f"it cannot run this model, which runs on {choice.backend.name}"
    warning = _warning(files.name, "backend", name, reason, choice.backend.name)
    return Applied(choice, ("backend",), (warning,))


def without_refused(
    call: Callable[[LoadOptions], Result], name: str, options: LoadOptions, shared: Collection[str]
) -> Applied[Result]:
    """Run `call` with options that the backend accepts.

    Options in `shared`, the settings of all models, are replaced if the backend refuses them. `name`: of the model.
    Raises the errors of `call`.
    """
    warnings: dict[str, str] = {}
    while True:
        try:
            return Applied(call(options), tuple(warnings), tuple(warnings.values()))
        except (SettingRefused, ContextRefused) as error:
            setting = error.setting
            if setting not in shared or setting in warnings:
                if setting:
                    error.hint = f"{error.hint}; localllm config {name} shows the settings of this model"
                raise
            value = getattr(LoadOptions(), setting) if error.instead is None else error.instead
            automatic = -1 if setting == "gpu_layers" else 0  # the setting for the option None
            shown = automatic if value is None else value
            warnings[setting] = _warning(name, setting, getattr(options, setting), str(error), shown)
            changes: dict[str, Any] = {setting: value}
            options = replace(options, **changes)


def _warning(model: str, setting: str, value: object, reason: str, instead: object) -> str:
    return (
        f"the setting {setting} = {value} does not apply to {model}: {reason}; its own setting ends this warning: "
        f"localllm config {model} {setting}={instead}"
    )
