"""Finds schemas that no value can match at the same time. oneOf of such schemas is equal to anyOf, which a grammar can
express."""

from __future__ import annotations

from typing import Any


def are_disjoint(one: object, other: object) -> bool:
    """True if no value can match both schemas: they have no type in common, or no constant text, or a property that
    both require has no constant text in common. False if none of these proves it. Does not follow references.
    """
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one is False or other is False
    types = _types(one), _types(other)
    if not types[0] & types[1]:
        return True
    if _apart(one, other):
        return True
    if any(kinds != {"object"} for kinds in types):
        return False
    return any(_apart(one["properties"][name], other["properties"][name]) for name in _required(one) & _required(other))


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that the schema allows, integer as number; all types if it names none."""
    named = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = [named] if isinstance(named, str) else named
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _required(schema: dict[str, Any]) -> set[str]:
    """Names that are in `required` and in `properties`."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _apart(one: object, other: object) -> bool:
    """True if both schemas list their constant texts and the lists have no text in common."""
    texts = _texts(one), _texts(other)
    return bool(texts[0]) and bool(texts[1]) and not texts[0] & texts[1]


def _texts(schema: object) -> set[str]:
    """The texts of const or enum; empty if there is neither, or if one value is not a string."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return set()
    return set(values)
