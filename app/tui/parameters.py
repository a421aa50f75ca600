"""Parameters of answers: names, ranges, descriptions, and the parser of typed values."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from ..client import RANGES, Range, adapter_selection
from ..errors import InvalidRequest

ADAPTER = "adapter"
UNSET = {"", "none", "default", "unset"}  # typed texts that remove a value


@dataclass(frozen=True)
class Parameter:
    """One parameter: a number in `limits`; without limits a list of texts, or the selection of an adapter."""

    name: str
    sentence: str
    limits: Range | None

    @property
    def kind(self) -> type[int] | type[float] | type[str] | type[list[str]]:
        if self.limits is not None:
            return self.limits.kind
        return str if self.name == ADAPTER else list

    @property
    def range(self) -> str:
        if self.limits is not None:
            return str(self.limits)
        if self.name == ADAPTER:
            return f"NAME or NAME=SCALE; SCALE is {RANGES['adapter_scale']}"
        return 'a text, or a JSON list such as ["END", "\\n\\n"]'


_SENTENCES = {
    "temperature": "Randomness; 0: always the most likely token.",
    "top_p": "Sample from the most likely tokens with this total probability.",
    "top_k": "Sample from this many most likely tokens; 0: no limit.",
    "min_p": "Exclude tokens below this fraction of the highest probability.",
    "max_tokens": "Maximum length of the answer in tokens; unset: the rest of the context.",
    "seed": "Random seed; the same seed gives the same answer.",
    "stop": "End the answer before any of these texts.",
    "presence_penalty": "Above 0: tokens that the answer already contains become less likely.",
    "frequency_penalty": "Above 0: a token becomes less likely each time that the answer uses it.",
    "repetition_penalty": "Above 1: tokens that the prompt or the answer already contains become less likely.",
    ADAPTER: "LoRA adapter of the model, and its scale (default 1).",
}
PARAMETERS = {name: Parameter(name, sentence, RANGES.get(name)) for name, sentence in _SENTENCES.items()}


def parameter(name: str) -> Parameter:
    """The parameter of this name. Raises InvalidRequest with similar names."""
    match = PARAMETERS.get(name.strip().lower().replace("-", "_"))
    if match is None:
        similar = difflib.get_close_matches(name, PARAMETERS, n=3) or list(PARAMETERS)
        raise InvalidRequest(f"Unknown parameter {name!r}.", hint=f"Try {', '.join(similar)}.", param=name)
    return match


def parse(name: str, text: str) -> Any:
    """The value of a typed text; None for an empty text (unset). Raises InvalidRequest."""
    target = parameter(name)
    text = text.strip()
    if text.lower() in UNSET:
        return None
    try:
        # The texts of `stop` are a JSON list, or one text.
        if target.kind is list:
            value = json.loads(text) if text.startswith("[") else text
        else:
            value = target.kind(text)
    except ValueError:
        raise _refusal(target, text) from None
    return None if value == [] else check(target.name, value)


def check(name: str, value: Any) -> Any:
    """Validate a value and convert it to the parameter's type. Raises InvalidRequest."""
    target = parameter(name)
    if target.name == ADAPTER:
        return _check_adapter(target, value)
    if target.limits is None:
        return _check_texts(target, value)
    is_valid = _is_number(value) and value in target.limits
    if not is_valid or target.limits.kind(value) != value:
        raise _refusal(target, value)
    return target.limits.kind(value)


def format_value(value: Any) -> str:
    """A value as text, in the form that `parse` accepts."""
    if isinstance(value, float):
        return f"{value:g}"
    if not isinstance(value, list):
        return str(value)
    if len(value) == 1 and not value[0].startswith("["):
        return str(value[0])
    return json.dumps(value, ensure_ascii=False)


def _check_texts(target: Parameter, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise _refusal(target, value)
    return list(texts)


def _check_adapter(target: Parameter, value: Any) -> str:
    try:
        adapter_selection(value)
    except (InvalidRequest, AttributeError):  # a wrong scale, or no text
        raise _refusal(target, value) from None
    return str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(target: Parameter, value: object) -> InvalidRequest:
    message = f"{target.name} must be {target.range}, not {str(value)[:40]!r}."
    return InvalidRequest(message, hint=target.sentence, param=target.name)
