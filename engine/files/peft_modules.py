"""The modules of a base model to which PEFT applies an adapter, by the fields of adapter_config.json.

The rules are those of PEFT: peft.tuners.tuners_utils.check_target_module_exists and peft.utils.other.get_pattern_key.
PEFT ignores factors of other modules, so they are refused here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from ..errors import ModelRefused
from .fields import Fields
from .module_patterns import ModulePattern, NamePattern, PatternProblem, Steps

ALL_LINEAR = "all-linear"  # value of target_modules: all linear layers except the output head
HEAD = "lm_head"
EMBEDDING = "embed_tokens"

_ANY_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")  # the first number in the name of a module, behind two other parts
_LIST_NAME = re.compile(r"[A-Za-z0-9_.]+")


class PeftModules:
    """The fields that select modules: target_modules, exclude_modules, layers_to_transform and layers_pattern."""

    def __init__(self, values: Mapping[str, Any], config: Fields, steps: Steps) -> None:
        """Raises ModelRefused with the field."""
        self._config = config
        self._targets = _selector(values, config, "target_modules", steps)
        self._excluded = _selector(values, config, "exclude_modules", steps)
        self._layers = _layers(values, config)
        self._lists = _layer_lists(values, config)
        if not isinstance(self._targets, frozenset):
            for field in ("layers_to_transform", "layers_pattern"):
                config.forbid(field, "target_modules is not a list")
        elif self._lists and values.get("layers_to_transform") is None:
            raise config.refuse("layers_to_transform", "numbers of layers, because layers_pattern is present")

    def check(self, module: str) -> None:
        """Raises ModelRefused with the field if PEFT does not apply factors of this module."""
        if self._excluded and _selects(self._config, "exclude_modules", self._excluded, module):
            raise self._config.refuse("exclude_modules", f"without {module}, which has LoRA factors in the file")
        if not self._targets or not _selects(self._config, "target_modules", self._targets, module):
            raise self._config.refuse("target_modules", f"a value with {module}, which has LoRA factors in the file")
        is_full_name = isinstance(self._targets, frozenset) and module in self._targets
        if self._layers and not is_full_name and self._layer_of(module) not in self._layers:
            raise self._config.refuse("layers_to_transform", f"a list with the layer of {module}, which has factors")

    def _layer_of(self, module: str) -> int | None:
        if not self._lists:
            number = _ANY_LAYER.match(module)
            return int(number[1]) if number else None
        for name in self._lists:
            number = re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module)
            if number:
                return int(number[1])
        return None


class PatternTable:
    """rank_pattern or alpha_pattern: regular expressions -> the value of the modules that they match."""

    def __init__(
        self, values: Mapping[str, Any], config: Fields, key: str, low: float, high: float, steps: Steps
    ) -> None:
        """The values must be in low…high. Raises ModelRefused with the field."""
        table = config.table(key)
        self._config = config
        self._key = key
        self._values: list[tuple[NamePattern, float]] = []
        for text in values.get(key) or {}:  # also a key with null, for which PEFT has no default
            value = table.number(text, low, high)
            try:
                self._values.append((NamePattern(text, steps), value))
            except PatternProblem as problem:
                raise _refusal(config, key, problem) from problem

    def value(self, module: str, default: float) -> float:
        """The value of the first expression that matches the module, or `default`."""
        try:
            return next((value for pattern, value in self._values if pattern.match(module)), default)
        except PatternProblem as problem:
            raise _refusal(self._config, self._key, problem) from problem


_Selector = ModulePattern | frozenset[str] | str | None  # str: ALL_LINEAR


def _selector(values: Mapping[str, Any], config: Fields, key: str, steps: Steps) -> _Selector:
    """A list of module names, a regular expression, or ALL_LINEAR; None if the field is absent or empty."""
    if not values.get(key):
        return None
    text = values[key]
    if not isinstance(text, str):
        return frozenset(config.texts(key))
    if key == "target_modules" and text.lower() == ALL_LINEAR:
        return ALL_LINEAR
    try:
        return ModulePattern(text, steps)
    except PatternProblem as problem:
        raise _refusal(config, key, problem) from problem


def _selects(config: Fields, key: str, selector: ModulePattern | frozenset[str] | str, module: str) -> bool:
    if isinstance(selector, frozenset):
        return _is_named(module, selector)
    if isinstance(selector, str):
        return not _is_named(module, (HEAD, EMBEDDING))
    try:
        return selector.fullmatch(module)
    except PatternProblem as problem:
        raise _refusal(config, key, problem) from problem


def _is_named(module: str, names: Collection[str]) -> bool:
    """Whether one of the names is the module's name or the end of it."""
    parts = module.split(".")
    return any(".".join(parts[first:]) in names for first in range(len(parts)))


def _layers(values: Mapping[str, Any], config: Fields) -> frozenset[int]:
    """layers_to_transform: the numbers of the layers with factors; empty: all layers."""
    layers = values.get("layers_to_transform")
    if layers is None:
        return frozenset()
    if type(layers) is int:
        layers = [layers]
    if type(layers) is not list or {*map(type, layers)} - {int}:
        raise config.refuse("layers_to_transform", "an integer or a list of integers")
    return frozenset(layers)


def _layer_lists(values: Mapping[str, Any], config: Fields) -> tuple[str, ...]:
    """layers_pattern: the names of the lists of layers; empty: any list. PEFT reads each as a regular expression."""
    if not values.get("layers_pattern"):
        return ()
    text = values["layers_pattern"]
    names = (text,) if isinstance(text, str) else config.texts("layers_pattern")
    for name in names:
        if not _LIST_NAME.fullmatch(name):
            raise config.refuse("layers_pattern", "the name of the list of layers, or a list of such names")
    return names


def _refusal(config: Fields, key: str, problem: PatternProblem) -> ModelRefused:
    return config.refuse(key, f"an expression that can be read ({problem})")
