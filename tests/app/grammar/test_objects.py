"""Schemas of tool arguments: those that can describe an object, and the others."""

from __future__ import annotations

from typing import Any

import pytest

from localllm.app.grammar.objects import describes_objects

TEXT = {"type": "string"}
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        OBJECT,
        {"properties": {"a": TEXT}},
        {"type": ["object", "null"]},
        {"anyOf": [TEXT, OBJECT]},
        {"oneOf": [TEXT, {"properties": {}}]},
        {"allOf": [OBJECT, {"required": ["a"]}]},
        {"anyOf": [TEXT, True]},
        {"const": {"a": 1}},
        {"enum": [1, {}]},
        {"not": TEXT},
        {"$ref": "#/$defs/A", "$defs": {"A": OBJECT}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}}},
        {"anyOf": [{"$ref": "#"}, OBJECT]},
        {"$ref": "http://elsewhere/x"},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$ref": "#/definitions/A", "type": "string"}
        | {"definitions": {"A": OBJECT}},
    ],
)
def test_schema_that_describes_objects(schema: dict[str, Any]) -> None:
    assert describes_objects(schema)


@pytest.mark.parametrize(
    "schema",
    [
        TEXT,
        {"type": "array", "items": OBJECT},
        {"type": ["string", "null"]},
        {"type": []},
        {"type": "objekt"},
        {"type": None},
        {"anyOf": [TEXT]},
        {"anyOf": []},
        {"anyOf": [TEXT, False]},
        {"oneOf": [TEXT, {"type": "array"}]},
        {"allOf": [OBJECT, TEXT]},
        {"type": "object", "anyOf": [TEXT, {"type": "null"}]},
        {"const": 3},
        {"enum": ["a", 1, None]},
        {"not": {}},
        {"not": OBJECT},
        {"$ref": "#/$defs/A", "$defs": {"A": TEXT}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/B"}]}, "B": {"enum": [1]}}},
        {"$ref": "#/$defs/A", "type": "object", "$defs": {"A": TEXT}},
        {"anyOf": [{"$ref": "#"}, TEXT]},
    ],
)
def test_schema_that_describes_no_object(schema: dict[str, Any]) -> None:
    assert not describes_objects(schema)
