"""The rewritten schema: bounds, multiples, references, and the place of a problem in a refusal."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from localllm.app.grammar import formats
from localllm.app.grammar.place import SchemaProblem
from localllm.app.grammar.schema import rewrite

NUMBER = {"type": "number"}
WHOLE = {"type": "integer"}
OBJECT = {"type": "object"}
NULL = {"type": "null"}
NEXT = 1.00000000000001  # the next number after 1 with 15 digits


@pytest.mark.parametrize(
    ("base", "keywords", "expected"),
    [
        (NUMBER, {"minimum": 1.5}, {"minimum": 1.5}),
        (WHOLE, {"minimum": 1.5}, {"minimum": 2}),
        (WHOLE, {"maximum": 1.5}, {"maximum": 1}),
        (WHOLE, {"minimum": -1.5}, {"minimum": -1}),
        (WHOLE, {"maximum": -1.5}, {"maximum": -2}),
        (WHOLE, {"exclusiveMinimum": 1}, {"minimum": 2}),
        (WHOLE, {"exclusiveMinimum": 1.5}, {"minimum": 2}),
        (WHOLE, {"exclusiveMaximum": 1}, {"maximum": 0}),
        (WHOLE, {"exclusiveMaximum": -0.5}, {"maximum": -1}),
        (NUMBER, {"exclusiveMinimum": 0}, {"minimum": 1e-15}),
        (NUMBER, {"exclusiveMaximum": 0}, {"maximum": -1e-15}),
        (NUMBER, {"exclusiveMinimum": 1}, {"minimum": NEXT}),
        (NUMBER, {"exclusiveMaximum": -1}, {"maximum": -NEXT}),
        (NUMBER, {"exclusiveMinimum": 9}, {"minimum": 9.00000000000001}),
        (NUMBER, {"exclusiveMinimum": 0.05}, {"minimum": 0.0500000000000001}),
        (NUMBER, {"exclusiveMinimum": 2**50}, {"minimum": 2**50 + 1}),
        (NUMBER, {"exclusiveMaximum": -(2**50)}, {"maximum": -(2**50) - 1}),
        (NUMBER, {"exclusiveMinimum": -1}, {"exclusiveMinimum": -1}),
        (NUMBER, {"exclusiveMaximum": 1}, {"exclusiveMaximum": 1}),
        (WHOLE, {"minimum": 5, "exclusiveMinimum": 3}, {"minimum": 5}),
        (WHOLE, {"minimum": 3, "exclusiveMinimum": 5}, {"minimum": 6}),
        (WHOLE, {"maximum": 5, "exclusiveMaximum": 3}, {"maximum": 2}),
        (WHOLE, {"maximum": 3, "exclusiveMaximum": 5}, {"maximum": 3}),
        (WHOLE, {"minimum": 1 - 2**53, "maximum": 2**53 - 1}, {"minimum": 1 - 2**53, "maximum": 2**53 - 1}),
        (WHOLE, {"minimum": -(2**63), "maximum": 2**63 - 1}, {}),
        (WHOLE, {"minimum": 0, "maximum": 2**64 - 1}, {"minimum": 0}),
        (WHOLE, {"minimum": 5, "exclusiveMinimum": -(2**53)}, {"minimum": 5}),
        (WHOLE, {"multipleOf": 3, "maximum": 1e300}, {"multipleOf": 3}),
        (NUMBER, {"minimum": -3.4028234663852886e38, "exclusiveMaximum": 1.7976931348623157e308}, {}),
        ({"type": "string"}, {"minimum": 3}, {}),
        (WHOLE, {"multipleOf": 3, "minimum": 1}, {"multipleOf": 3, "minimum": 3}),
        (WHOLE, {"multipleOf": 3, "maximum": 10}, {"multipleOf": 3, "maximum": 9}),
        (WHOLE, {"multipleOf": 3, "minimum": 3, "maximum": 9}, {"multipleOf": 3, "minimum": 3, "maximum": 9}),
        (WHOLE, {"multipleOf": 1.5, "minimum": 1}, {"multipleOf": 1.5, "minimum": 3}),
        (NUMBER, {"multipleOf": 0.5, "minimum": 0.7}, {"multipleOf": 0.5, "minimum": 1}),
        (NUMBER, {"multipleOf": 0.5, "exclusiveMinimum": 1}, {"multipleOf": 0.5, "minimum": 1.5}),
        (NUMBER, {"multipleOf": 0.5, "exclusiveMinimum": -1}, {"multipleOf": 0.5, "minimum": -0.5}),
        (NUMBER, {"multipleOf": 0.5, "exclusiveMaximum": 1}, {"multipleOf": 0.5, "maximum": 0.5}),
        (NUMBER, {"multipleOf": 0.5, "exclusiveMaximum": -1}, {"multipleOf": 0.5, "maximum": -1.5}),
        (NUMBER, {"multipleOf": 2**16 - 1}, {"multipleOf": 2**16 - 1}),
        (NUMBER, {"multipleOf": 1e-9}, {"multipleOf": 1e-9}),
        ({"type": "string"}, {"minLength": 0, "maxLength": 2.0}, {"minLength": 0, "maxLength": 2}),
        (OBJECT, {"minProperties": 1}, {"minProperties": 1}),
        (OBJECT, {"minProperties": 2, "required": ["a"]}, {"minProperties": 2, "required": ["a"]}),
        ({}, {"const": "\t\n\r\b\f"}, {"const": "\t\n\r\b\f"}),
        ({}, {"const": True}, {"const": True}),
        ({}, {"items": [NULL], "additionalItems": False}, {"prefixItems": [NULL], "items": False}),
        ({}, {"additionalItems": False}, {}),
        (WHOLE, {"format": "zzz"}, {}),
        ({}, {"format": "uuid"}, {"format": "uuid"}),
        ({}, {"oneOf": [NULL, WHOLE]}, {"anyOf": [NULL, WHOLE]}),
        ({}, {"oneOf": [NUMBER, WHOLE]}, {"oneOf": [NUMBER, WHOLE]}),
        ({}, {"oneOf": [NULL, WHOLE], "anyOf": [{}]}, {"oneOf": [NULL, WHOLE], "anyOf": [{}]}),
        ({}, {"not": False, "uniqueItems": False, "propertyNames": True, "then": {"not": {}}}, {}),
        ({}, {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c"}, {}),
    ],
)
def test_rewrite_replaces_keywords(base: dict[str, Any], keywords: dict[str, Any], expected: dict[str, Any]) -> None:
    for strict in (False, True):
        result = rewrite(base | keywords, strict=strict)
        assert result == base | expected


ANNOTATIONS = (
    "binary password path file-path directory-path json-string regex uri-reference iri iri-reference idn-email "
    "idn-hostname uri-template ipv4network ipv6network ipv4interface ipvanyaddress color decimal int32 int64 uint64 "
    "float double phone multi-host-uri ulid zzz"
).split()


@pytest.mark.parametrize("name", ANNOTATIONS)
@pytest.mark.parametrize("base", [{"type": "string"}, {}, {"type": ["string", "null"]}])
def test_an_unknown_format_is_an_annotation(name: str, base: dict[str, Any]) -> None:
    assert rewrite(base | {"format": name, "minLength": 1}) == base | {"minLength": 1}
    inside = {"properties": {"a": base | {"format": name}}}
    assert rewrite(inside) == {"properties": {"a": base}}
    with pytest.raises(SchemaProblem, match=f"^#/properties/a/format: unknown format: {name};"):
        rewrite(inside, strict=True)


@pytest.mark.parametrize("name", sorted(formats.BUILT_IN | formats.PATTERNS.keys()))
def test_known_formats_stay_enforced(name: str) -> None:
    schema = {"type": "string", "format": name}
    result = rewrite(schema)
    assert result == rewrite(schema, strict=True) != {"type": "string"}


@pytest.mark.parametrize("name", ["int32", "int64", "double", "zzz"])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_a_format_of_numbers_is_an_annotation(name: str, kind: str) -> None:
    for strict in (False, True):
        assert rewrite({"type": kind, "format": name}, strict=strict) == {"type": kind}


@pytest.mark.parametrize("value", [3, None, ["date"], {"a": 1}])
def test_a_format_is_a_name(value: object) -> None:
    with pytest.raises(SchemaProblem, match=r"^#/format: unknown format"):
        rewrite({"format": value})


def draft(number: int) -> dict[str, str]:
    return {"$schema": f"http://json-schema.org/draft-0{number}/schema#"}


@pytest.mark.parametrize(
    ("schema", "pointer", "problem"),
    [
        (WHOLE | {"maximum": -(2**63)}, "#/maximum", "exactly"),
        (WHOLE | {"minimum": 2**53 + 1}, "#/minimum", "exactly"),
        (NUMBER | {"minimum": 1e300}, "#/minimum", "exactly"),
        (NUMBER | {"minimum": 0.1234567890123456}, "#/minimum", "more than 15 digits"),
        (NUMBER | {"exclusiveMinimum": 2**53 - 1, "multipleOf": 0.1}, "#/exclusiveMinimum", "more than 15 digits"),
        (NUMBER | {"minimum": 1e-16}, "#/minimum", "closer to 0"),
        (NUMBER | {"exclusiveMinimum": True}, "#/exclusiveMinimum", "must be a number"),
        (NUMBER | {"minimum": "1"}, "#/minimum", "must be a number"),
        (NUMBER | {"minimum": True}, "#/minimum", "must be a number"),
        (NUMBER | {"minimum": float("inf")}, "#/minimum", "must be a number"),
        (NUMBER | {"multipleOf": 0}, "#/multipleOf", "greater than 0"),
        (NUMBER | {"multipleOf": 2**16}, "#/multipleOf", "less than 65536"),
        (NUMBER | {"multipleOf": 0.07}, "#/multipleOf", "too many digits"),
        ({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]}, "#/allOf/1/multipleOf", "2 decimal places"),
        ({"minLength": 2.5}, "#/minLength", "an integer"),
        ({"minLength": -1}, "#/minLength", "an integer"),
        ({"maxItems": True}, "#/maxItems", "must be a number"),
        *(({"const": char}, "#/const", f"U+{ord(char):04X}") for char in "\0\x07\x0b\x0e\x1f\x7f\ud800\udfff"),
        ({"enum": ["a", ["\0"]]}, "#/enum/1/0", "U+0000"),
        ({"const": {"a/b~": "\0"}}, "#/const/a~1b~0", "U+0000"),
        ({"const": 2**63}, "#/const", "exactly"),
        ({"const": {"a": 0.24391087688713198}}, "#/const/a", "exactly"),
        ({"enum": "a"}, "#/enum", "must be an array"),
        (OBJECT | {"minProperties": 2}, "#/minProperties", "the same name twice"),
        (OBJECT | {"minProperties": 3, "required": ["a", "a"]}, "#/minProperties", "the same name twice"),
        ({"type": "strin"}, "#/type", "unknown type"),
        ({"type": []}, "#/type", "unknown type"),
        ({"type": ["null", 3]}, "#/type", "unknown type"),
        ({"oneOf": [NULL, {"type": 3}]}, "#/oneOf/1/type", "unknown type"),
        ({"required": "a"}, "#/required", "array of names"),
        ({"required": [1]}, "#/required", "array of names"),
        ({"properties": []}, "#/properties", "must be an object"),
        ({"prefixItems": {}}, "#/prefixItems", "must be an array"),
        ({"allOf": {}}, "#/allOf", "must be an array"),
        ({"properties": {"a/b": 3}}, "#/properties/a~1b", "an object or a boolean"),
        ({"pattern": 3}, "#/pattern", "must be a string"),
        ({"patternProperties": {"[": {}}}, "#/patternProperties/[", "unexpected end"),
        ({"format": "zzz"}, "#/format", "unknown format: zzz"),
        ({"format": 3}, "#/format", "unknown format: 3"),
        ({"not": {}}, "#", '"not"'),
        ({"uniqueItems": True}, "#", '"uniqueItems"'),
        ({"if": {}, "then": {"type": "null"}}, "#", '"if"'),
        ({"items": {"contains": {}}}, "#/items", '"contains"'),
        ({"dependencies": {"a": ["b"]}}, "#", '"dependencies"'),
        ({"items": {"$recursiveRef": "#"}}, "#/items", '"$recursiveRef"'),
        ({"$ref": "#/title", "title": "x"}, "#/title", "an object or a boolean"),
        ({"$ref": 3}, "#/$ref", "must be a string"),
        ({"$ref": "http://x/y"}, "#/$ref", "are not loaded"),
        ({"$ref": "#nope"}, "#/$ref", "anchors are not supported"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "b"}}}, "#/$ref", "nested $id"),
        (draft(4) | {"$ref": "#/definitions/a", "definitions": {"a": {"id": "b"}}}, "#/$ref", "nested $id"),
        ({"$ref": "#/allOf/1", "allOf": [NULL]}, "#/$ref", "#/allOf has no '1'"),
        ({"$ref": "#/allOf/01", "allOf": [NULL, NULL]}, "#/$ref", "has no '01'"),
        ({"$ref": "#/allOf/-1", "allOf": [NULL]}, "#/$ref", "has no '-1'"),
        ({"items": {"$ref": "#/a/b"}, "a": 3}, "#/items/$ref", "#/a has no 'b'"),
    ],
)
def test_a_refusal_has_the_pointer_of_the_problem(schema: dict[str, Any], pointer: str, problem: str) -> None:
    with pytest.raises(SchemaProblem, match=re.escape(problem)) as error:
        rewrite(schema, strict=True)
    assert str(error.value).startswith(f"{pointer}: ")


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a", "$defs": {"a": NULL}},
        {"$ref": "#/$defs/a~1b~0c%20d", "$defs": {"a/b~c d": NULL}},
        {"$ref": "#/$defs/$id", "$defs": {"$id": NULL}, "$id": "http://h/d"},
        draft(7) | {"$ref": "#/definitions/a", "definitions": {"a": NULL | {"$anchor": "x", "id": "y"}}},
    ],
)
def test_a_reference_resolves_to_its_definition(schema: dict[str, Any]) -> None:
    assert rewrite(schema) == {"$ref": "#/$defs/0", "$defs": {"0": NULL}}


CLIENTS: dict[str, dict[str, Any]] = {
    "pydantic": OBJECT
    | {
        "$defs": {
            "Cat": OBJECT | {"properties": {"kind": {"const": "cat", "type": "string"}}, "required": ["kind"]},
            "Dog": OBJECT | {"properties": {"kind": {"const": "dog", "type": "string"}}, "required": ["kind"]},
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            },
            "price": NUMBER | {"exclusiveMinimum": 0, "maximum": 1e6, "multipleOf": 0.01, "title": "Price"},
            "pair": {"maxItems": 2, "minItems": 2, "prefixItems": [WHOLE, {"type": "string"}], "type": "array"},
        },
    },
    "zod 3": draft(7)
    | {
        "$ref": "#/definitions/X",
        "definitions": {"X": {"properties": {"a": WHOLE, "b": {"$ref": "#/definitions/X/properties/a"}}}},
    },
    "zod 4": {"properties": {"n": WHOLE | {"minimum": 1 - 2**53, "maximum": 2**53 - 1}}}
    | {"additionalProperties": NUMBER, "propertyNames": {"type": "string"}},
    "schemars": draft(7)
    | {
        "properties": {"n": WHOLE | {"format": "uint64", "minimum": 0.0}, "o": {"$ref": "#/definitions/E"}},
        "definitions": {
            "E": {"oneOf": [{"type": "string", "enum": ["A"]}, OBJECT | {"required": ["C"], "properties": {"C": NULL}}]}
        },
    },
    "TypeBox": {"$id": "Node", "type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "Node"}}}},
}


@pytest.mark.parametrize("name", CLIENTS)
def test_schemas_as_clients_write_them(name: str) -> None:
    for strict in (False, True):
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(rewrite(CLIENTS[name], strict=strict)))
        assert not LLMatcher(LLTokenizer("byte"), grammar).is_error()


def test_equal_references_share_a_definition_that_may_refer_to_itself() -> None:
    result = rewrite(
        {"items": {"$ref": "#"}, "additionalProperties": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#"}}}
    )
    root = {"items": {"$ref": "#/$defs/0"}, "additionalProperties": {"$ref": "#/$defs/1"}}
    assert result == root | {"$defs": {"0": root, "1": {"$ref": "#/$defs/0"}}}
