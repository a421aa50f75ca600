"""Schemas that no value fits at once: oneOf of these means what anyOf means, which a grammar can express."""

from __future__ import annotations

from typing import Any


def are_disjoint(one: object, other: object) -> bool:
    """Whether the types of two schemas tell, their constant texts, or a required property that both constrain to texts.

    False where nothing of this tells. References are not followed.
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
    """The types that fit; integers count as numbers. All where the schema names none."""
    named = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    names = [named] if isinstance(named, str) else named
    return {"number" if name == "integer" else name for name in names if isinstance(name, str)}


def _required(schema: dict[str, Any]) -> set[str]:
    """Properties that every object that fits has, and that the schema constrains."""
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict):
        return set()
    return {name for name in required if isinstance(name, str) and name in properties}


def _apart(one: object, other: object) -> bool:
    """Both name the texts that fit, and none of them in common."""
    texts = _texts(one), _texts(other)
    return bool(texts[0]) and bool(texts[1]) and not texts[0] & texts[1]


def _texts(schema: object) -> set[str]:
    """The only values that fit; empty where the schema does not name them, or not only texts."""
    if not isinstance(schema, dict):
        return set()
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return set()
    return set(values)
