"""Writes calls in a format: as an example, and as the rules of a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .records import CallFormat, Literal, Part
from .values import dumps, type_of

EXAMPLE_ID = "abcdefgh1"


def example(form: CallFormat, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as the model writes them."""
    texts = [_call(form, index, name, arguments) for index, (name, arguments) in enumerate(calls)]
    if form.separator is not None:
        return f"{form.begin}{form.separator.join(texts)}{form.end}"
    return form.gap.join(f"{form.begin}{text}{form.end}" for text in texts)


def _call(form: CallFormat, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    fields = {
        "name": name,
        "index": str(index),
        "id": EXAMPLE_ID,
        "arguments": dumps(arguments),
    }
    if form.arguments in ("keywords", "entries"):
        notation = notation_of(form)
        entries = (f"{key}{notation.equals}{literal(value, notation)}" for key, value in arguments.items())
        fields[form.arguments] = notation.comma.join(entries)
    if form.arguments == "parameters":
        fields["parameters"] = "".join(_parameter(form, key, value) for key, value in arguments.items())
    return _filled(form.parts, fields)


def _parameter(form: CallFormat, key: str, value: object) -> str:
    is_text = isinstance(value, str)
    fields = {
        "key": key,
        "value": str(value) if is_text else dumps(value),
        "raw": "true" if is_text else "false",
        "type": type_of(value).replace("integer", "number"),
    }
    return _filled(form.parameter_parts, fields)


def _filled(parts: Sequence[Part], fields: Mapping[str, str]) -> str:
    return "".join(part.text if isinstance(part, Literal) else fields[part.name] for part in parts)


@dataclass(frozen=True)
class Notation:
    """The notation of values in a format that is not JSON."""

    words: Mapping[bool | None, str]  # true, false and null
    key: Callable[[str], str]
    text: Callable[[str], str]
    quote: str  # before and after a text
    colon: str  # between key and value of an object
    equals: str  # between name and value of an argument
    comma: str
    any_key: str = ""  # a key as an expression of a grammar; empty: without quotes


_PYTHON = Notation({True: "True", False: "False", None: "None"}, dumps, dumps, '"', ": ", "=", ", ", r'/"[^"\\\\]*"/')


def notation_of(form: CallFormat) -> Notation:
    """The notation of $keywords or $entries."""
    if form.arguments == "keywords":
        return _PYTHON
    words = {True: "true", False: "false", None: "null"}
    return Notation(words, str, lambda text: form.quote + text + form.quote, form.quote, ":", ":", ",")


def literal(value: object, notation: Notation) -> str:
    """A JSON value in a notation."""
    if value is None or isinstance(value, bool):
        return notation.words[value]
    if isinstance(value, str):
        return notation.text(value)
    if isinstance(value, list):
        return f"[{notation.comma.join(literal(item, notation) for item in value)}]"
    if isinstance(value, dict):
        items = (f"{notation.key(key)}{notation.colon}{literal(item, notation)}" for key, item in value.items())
        return "{" + notation.comma.join(items) + "}"
    return dumps(value)
