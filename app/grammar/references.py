"""Finds the targets of the references in a JSON schema: `#`, its `$id`, and JSON pointers such as `#/$defs/a`."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import unquote

from .place import Place

_MAX_CHAIN = 16  # maximum number of references in a chain


class References:
    """Finds targets by JSON pointer. Anchors, and schemas with an address, are refused by name."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.root = Place(schema, "#")
        identifier = "id" if "/draft-04/" in str(schema.get("$schema", "")) else "$id"
        self._name = schema.get(identifier)
        parts = [value for keyword, value in schema.items() if keyword != identifier]
        self._has_addresses = f'"{identifier}": "' in json.dumps(parts)  # references inside begin at another root

    def resolve(self, reference: Place) -> Place:
        """The target of a reference. Raises SchemaProblem. `reference`: the place of the value of `$ref`."""
        text = reference.text()
        pointer = "#" if text == self._name else unquote(text, errors="replace")
        reference.require(
            pointer == "#" or pointer.startswith("#/"),
            f"{text[:200]!r} is no JSON pointer inside the schema, such as #/$defs/name; "
            "anchors are not supported, and remote schemas are not loaded",
        )
        reference.require(not self._has_addresses, "references beside a nested $id are not supported")
        target = self.root
        for token in pointer.split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            reference.require(
                target.has(name), f"{text[:200]!r} is an unknown path: {target.pointer} has no {name[:80]!r}"
            )
            target = target.child(name)
        return target

    def follow(self, place: Place) -> object:
        """The schema at the end of a chain of references; a value that matches `place` also matches it."""
        for _ in range(_MAX_CHAIN):
            if not isinstance(place.value, dict) or not isinstance(place.value.get("$ref"), str):
                break
            place = self.resolve(place.child("$ref"))
        return place.value
