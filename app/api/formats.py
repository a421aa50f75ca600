"""Structured output: the forms in which clients ask for it, and their conversion for frames."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidRequest
from ..frames import ResponseFormat
from .body import WireBody, check_depth


class TextFormat(WireBody, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(WireBody, tag_field="type", tag="json_object"):
    schema: dict[str, Any] | None = None  # as in llama.cpp


class SchemaSpec(WireBody):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None  # refuse unknown formats and inexact bounds; the schema is always enforced


class JsonSchemaFormat(WireBody, tag_field="type", tag="json_schema"):
    json_schema: SchemaSpec | None = None
    schema: dict[str, Any] | None = None  # as in llama.cpp


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


def constraint(name: str, value: object) -> ResponseFormat:
    """The constraint of the field `name` with this value.

    Raises InvalidRequest for a schema that is missing, or nested too deep.
    """
    match value:
        case JsonObjectFormat(schema=None):
            return ResponseFormat(kind="json_object")
        case JsonObjectFormat(schema=dict() as schema):
            return _by_schema(schema, "response_format.schema")
        case JsonSchemaFormat(json_schema=SchemaSpec() as spec, schema=None):
            return _by_schema(spec.schema, "response_format.json_schema.schema", strict=bool(spec.strict))
        case JsonSchemaFormat(json_schema=None, schema=dict() as schema):
            return _by_schema(schema, "response_format.schema")
        case JsonSchemaFormat():
            raise InvalidRequest("response_format needs either json_schema or schema", param="response_format")
        case dict():
            return _by_schema(value, name)
        case str():
            return ResponseFormat(kind="regex", regex=value)
        case list():
            return ResponseFormat(kind="choice", choices=value)
    raise TypeError(f"{name} is a {type(value).__name__}")


def _by_schema(schema: dict[str, Any], param: str, *, strict: bool = False) -> ResponseFormat:
    check_depth(schema, param)
    return ResponseFormat(kind="json_schema", schema=schema, strict=strict)
