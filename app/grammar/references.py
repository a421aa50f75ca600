"""Finds the targets of the references in a JSON schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from msgspec.structs import replace

from .place import Place

_OLD_DRAFT = re.compile(r"/draft-0[467]/")  # these drafts ignore the keywords beside $ref
_MAX_CHAIN = 16  # maximum number of references in a chain

# Keywords with several subschemas, and the type of their container. The values of `enum` and `const` are no schemas.
_CONTAINERS: tuple[tuple[str, type], ...] = (
    *((keyword, dict) for keyword in ("properties", "patternProperties", "$defs", "definitions")),
    *((keyword, list) for keyword in ("allOf", "anyOf", "oneOf", "prefixItems", "items")),
)
_SINGLE = ("items", "additionalItems", "additionalProperties")  # keywords with one subschema


class References:
    """Finds targets by URI, anchor and JSON pointer. Does not load remote schemas."""

    def __init__(self, schema: dict[str, Any]) -> None:
        draft = str(schema.get("$schema", ""))
        self._old_draft = bool(_OLD_DRAFT.search(draft))
        self._id_keyword = "id" if "/draft-04/" in draft else "$id"
        self.root = Place(schema, "", "#")
        self._resources = {"": self.root}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._bases: dict[int, str] = {}  # base URI by id() of a schema object
        self._add(self.root)

    def with_base(self, place: Place) -> Place:
        """The same schema with its base URI, which its `$id` or the `$id` of a schema around it defines."""
        return replace(place, base=self._bases.get(id(place.value), place.base))

    def ignores_siblings(self, place: Place) -> bool:
        """True if the draft ignores all keywords of this schema except `$ref`."""
        return self._old_draft and place.has("$ref")

    def resolve(self, reference: Place) -> Place:
        """The target of a reference. Raises SchemaProblem.

        `reference`: the place of the value of `$ref`.
        """
        text = reference.text()
        address, _, fragment = text.partition("#")
        uri = _join(reference.base, address)
        target = self._resources.get(uri)
        if target is None:
            reference.refuse(f"{text[:200]!r} is outside the schema; remote schemas are not loaded")
        fragment = unquote(fragment, errors="replace")
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((uri, fragment))
            if target is None:
                reference.refuse(f"{text[:200]!r} is an unknown anchor")
            return target
        for token in fragment.split("/")[1:]:
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
            place = self.resolve(self.with_base(place).child("$ref"))
        return place.value

    def _add(self, place: Place) -> None:
        """Register the identifiers of a schema and its subschemas. Of two equal identifiers, the first one is used."""
        if not isinstance(place.value, dict):
            return
        place = self._identified(place)
        self._bases[id(place.value)] = place.base
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = place.value.get(keyword)
            if isinstance(anchor, str):
                self._anchors.setdefault((place.base, anchor), place)
        for subschema in _subschemas(place):
            self._add(subschema)

    def _identified(self, place: Place) -> Place:
        """Register the `$id` of a schema. Returns the schema with the base URI of this `$id`."""
        name = place.value.get(self._id_keyword)
        if not isinstance(name, str) or self.ignores_siblings(place):
            return place
        uri, _, anchor = name.partition("#")
        if uri:
            place = replace(place, base=_join(place.base, uri))
            self._resources.setdefault(place.base, place)
        if anchor:  # old drafts write an anchor as $id: "#anchor"
            self._anchors.setdefault((place.base, anchor), place)
        return place


def _join(base: str, reference: str) -> str:
    return urljoin(base, reference) or reference


def _subschemas(place: Place) -> Iterator[Place]:
    """The direct subschemas of a schema."""
    for keyword, container in _CONTAINERS:
        if isinstance(place.value.get(keyword), container):
            yield from place.child(keyword).children()
    for keyword in _SINGLE:
        if isinstance(place.value.get(keyword), dict):
            yield place.child(keyword)
