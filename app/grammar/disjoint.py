"""Finds JSON schemas that no value can match at the same time. `oneOf` of such schemas equals `anyOf`, which a grammar
can express."""

from __future__ import annotations

from typing import Any

from ..chat.calls.values import constants

# The types of JSON values; an integer is a number.
_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})

Texts = frozenset[str]  # the strings that a schema allows by const or enum; empty if it also allows other values


def are_disjoint(one: object, other: object) -> bool:
    """True if it is certain that no value can match both schemas. One of three facts must prove it:

    - The schemas have no type in common.
    - Both allow only listed strings (const or enum), and no string is in both lists.
    - Both allow only objects, and a property that both require allows only listed strings, none of them in both.

    References are not followed.
    """
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    types = _types(one)
    if not types & _types(other) or _differ(_texts(one), _texts(other)):
        return True
    tags, others = _tags(one), _tags(other)
    only_objects = types == _types(other) == {"object"}
    return only_objects and any(_differ(tags[name], others[name]) for name in tags.keys() & others.keys())


def _differ(texts: Texts, others: Texts) -> bool:
    return bool(texts and others) and texts.isdisjoint(others)


def _types(schema: dict[str, Any]) -> frozenset[str]:
    """The types that the schema allows (integer becomes number); all types if the keyword `type` is missing."""
    value = schema.get("type", [*_TYPES])
    names = _strings([value] if isinstance(value, str) else value)
    return frozenset(name.replace("integer", "number") for name in names)


def _texts(schema: object) -> Texts:
    """The texts of const or enum; empty if the schema has neither, or if one of their values is not a string."""
    if not isinstance(schema, dict):
        return frozenset()
    return _strings(constants(schema))


def _tags(schema: dict[str, Any]) -> dict[str, Texts]:
    """For each property in `required` and in `properties`: the strings that its const or enum allows."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _texts(properties[name]) for name in properties.keys() & _strings(schema.get("required"))}


def _strings(values: object) -> frozenset[str]:
    """The strings of a list; empty if `values` is not a list, or if one item is not a string."""
    if isinstance(values, list) and all(isinstance(value, str) for value in values):
        return frozenset(values)
    return frozenset()
