"""Rewrites the JSON schema of a client so that llguidance enforces the meaning that JSON Schema defines.

The result contains the targets of all its references; each reference is `#/$defs/<number>`. Keywords that constrain
nothing are removed. A keyword that llguidance interprets differently is replaced by an equal form, or refused by name
if there is no equal form. A schema that is not strict may have unknown formats, which JSON Schema defines as
annotations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from . import formats, patterns
from .disjoint import are_disjoint
from .numbers import BOUNDS, bounds, check_multiples, exact, size
from .place import Place
from .references import References

# Maximum number of subschemas in the result. Each different spelling of a reference adds a copy of its definition.
MAX_REWRITTEN = 20_000

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
APPLICATORS = ("const", "enum", "allOf", "anyOf", "oneOf", "$ref")

# Keyword (of any draft) that a grammar cannot express → its values that constrain nothing. Other values are refused.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "not": (False,),
    "if": (),
    "then": (True, {}),
    "else": (True, {}),
    "contains": (),
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "disallow": ([],),
    "divisibleBy": (),
    "extends": ([], {}),
}

_UNWRITABLE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # characters that a grammar cannot write


def rewrite(schema: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
    """A schema with which llguidance enforces the meaning of `schema`. Raises SchemaProblem.

    `strict`: refuse unknown formats.
    """
    return _Rewriter(schema, strict).result


@dataclass(frozen=True)
class _Keyword:
    """A keyword of a schema."""

    name: str
    place: Place  # place of the value of the keyword
    schema: Place
    types: frozenset[str]  # the types that the schema allows


class _Rewriter:
    """Rewrites one schema. A method for a keyword returns the keywords that replace it."""

    def __init__(self, schema: dict[str, Any], strict: bool) -> None:
        self._strict = strict
        self._references = References(schema)
        self._names: dict[str, str] = {}  # name of a definition, by the pointer of its schema
        self._pending: list[tuple[str, Place]] = []
        self._nodes = 0
        self._multiples: list[Place] = []
        self.result = self._object(self._references.root)
        definitions = {}
        while self._pending:
            name, place = self._pending.pop()
            definitions[name] = self._schema(place)
        if definitions:
            self.result["$defs"] = definitions
        check_multiples(self._multiples)

    def _schema(self, place: Place) -> dict[str, Any] | bool:
        self._nodes += 1
        place.require(
            self._nodes <= MAX_REWRITTEN, f"the schema with its references has more than {MAX_REWRITTEN} subschemas"
        )
        if isinstance(place.value, bool):
            return place.value
        place.require(isinstance(place.value, dict), "a schema must be an object or a boolean")
        return self._object(place)

    def _object(self, place: Place) -> dict[str, Any]:
        # Keywords that are not applicators stay together: llguidance evaluates each group of keywords between two
        # applicators separately, and additionalProperties must be in the same group as patternProperties.
        before: dict[str, Any] = {}
        simple: dict[str, Any] = {}
        after: dict[str, Any] = {}
        types = _types(place)
        for name in place.value:
            rewrite_keyword = KEYWORDS.get(name)
            if rewrite_keyword is None:
                continue
            group = simple
            if name in APPLICATORS:
                group = after if simple else before
            group.update(rewrite_keyword(self, _Keyword(name, place.child(name), place, types)))
        rewritten = before | simple | after
        if "type" in place.value:
            rewritten = {"type": place.value["type"]} | rewritten
        if "format" in place.value and "string" in types:
            _add_patterns(rewritten, formats.PATTERNS.get(place.value["format"], ()))
        return rewritten

    def _schemas(self, places: Iterable[Place]) -> list[dict[str, Any] | bool]:
        return [self._schema(place) for place in places]

    def _ref(self, keyword: _Keyword) -> dict[str, Any]:
        target = self._references.resolve(keyword.place)
        if target.pointer not in self._names:
            self._names[target.pointer] = str(len(self._names))
            self._pending.append((self._names[target.pointer], target))
        return {"$ref": f"#/$defs/{self._names[target.pointer]}"}

    def _const(self, keyword: _Keyword) -> dict[str, Any]:
        _check_literal(keyword.place)
        return {keyword.name: keyword.place.value}

    def _enum(self, keyword: _Keyword) -> dict[str, Any]:
        for place in keyword.place.array():
            _check_literal(place)
        return {keyword.name: keyword.place.value}

    def _array_of_schemas(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: self._schemas(keyword.place.array())}

    def _one_of(self, keyword: _Keyword) -> dict[str, Any]:
        """Replace oneOf by anyOf if no value can match two options.

        llguidance does the same, but does not follow references.
        """
        options = keyword.place.array()
        targets = [self._references.follow(option) for option in options]
        is_disjoint = all(are_disjoint(one, other) for one, other in combinations(targets, 2))
        name = "anyOf" if is_disjoint and not keyword.schema.has("anyOf") else "oneOf"
        return {name: self._schemas(options)}

    def _unsupported(self, keyword: _Keyword) -> dict[str, Any]:
        """Remove a keyword whose value constrains nothing. Raises SchemaProblem for any other value."""
        without_condition = keyword.name in ("then", "else") and not keyword.schema.has("if")
        if not without_condition and keyword.place.value not in UNSUPPORTED[keyword.name]:
            keyword.schema.refuse(f'the keyword "{keyword.name}" is not supported')
        return {}

    def _bounds(self, keyword: _Keyword) -> dict[str, Any]:
        if keyword.types.isdisjoint({"integer", "number"}):
            return {}
        return bounds(keyword.schema, integers="number" not in keyword.types)

    def _size(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: size(keyword.place)}

    def _min_properties(self, keyword: _Keyword) -> dict[str, Any]:
        """Raises SchemaProblem if the minimum exceeds the number of required properties plus 1.

        A grammar cannot count the distinct names of optional properties.
        """
        minimum = size(keyword.place)
        required = keyword.schema.child("required").names() if keyword.schema.has("required") else []
        keyword.place.require(
            minimum <= len(set(required)) + 1,
            f"{minimum} properties cannot be enforced if more than one is not in required: "
            "a model may write the same name twice",
        )
        return {keyword.name: minimum}

    def _multiple_of(self, keyword: _Keyword) -> dict[str, Any]:
        self._multiples.append(keyword.place)
        return {keyword.name: keyword.place.value}

    def _pattern(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: _translate(keyword.place.text(), keyword.place)}

    def _format(self, keyword: _Keyword) -> dict[str, Any]:
        """Keep the keyword for a format that llguidance supports. For other formats, `_add_patterns` adds patterns; an
        unknown format is an annotation."""
        value = keyword.place.value
        if "string" not in keyword.types:
            return {}
        supported = sorted(formats.BUILT_IN | formats.PATTERNS.keys())
        is_accepted = value in supported or (isinstance(value, str) and not self._strict)
        keyword.place.require(is_accepted, f"unknown format: {str(value)[:80]}; supported: {', '.join(supported)}")
        return {"format": value} if value in formats.BUILT_IN else {}

    def _required(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: keyword.place.names()}

    def _properties(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: {name: self._schema(place) for name, place in keyword.place.object().items()}}

    def _pattern_properties(self, keyword: _Keyword) -> dict[str, Any]:
        properties = {}
        for pattern, place in keyword.place.object().items():
            schema = self._schema(place)
            properties[_translate(pattern, place)] = schema
        return {keyword.name: properties}

    def _items(self, keyword: _Keyword) -> dict[str, Any]:
        if isinstance(keyword.place.value, list):  # older drafts write prefixItems as items
            return {"prefixItems": self._schemas(keyword.place.array())}
        return self._one_schema(keyword)

    def _additional_items(self, keyword: _Keyword) -> dict[str, Any]:
        """The schema of the items after those of the array `items` (older drafts). Ignored without such an array."""
        if not isinstance(keyword.schema.value.get("items"), list):
            return {}
        return {"items": self._schema(keyword.place)}

    def _one_schema(self, keyword: _Keyword) -> dict[str, Any]:
        return {keyword.name: self._schema(keyword.place)}


# Keyword → the method that rewrites it. Keywords that are not here constrain nothing.
KEYWORDS: dict[str, Callable[[_Rewriter, _Keyword], dict[str, Any]]] = {
    **dict.fromkeys(UNSUPPORTED, _Rewriter._unsupported),
    **dict.fromkeys(BOUNDS, _Rewriter._bounds),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "maxProperties"), _Rewriter._size),
    **dict.fromkeys(("allOf", "anyOf", "prefixItems"), _Rewriter._array_of_schemas),
    "const": _Rewriter._const,
    "enum": _Rewriter._enum,
    "oneOf": _Rewriter._one_of,
    "$ref": _Rewriter._ref,
    "minProperties": _Rewriter._min_properties,
    "multipleOf": _Rewriter._multiple_of,
    "pattern": _Rewriter._pattern,
    "format": _Rewriter._format,
    "required": _Rewriter._required,
    "properties": _Rewriter._properties,
    "patternProperties": _Rewriter._pattern_properties,
    "items": _Rewriter._items,
    "additionalItems": _Rewriter._additional_items,
    "additionalProperties": _Rewriter._one_schema,
}


def _types(schema: Place) -> frozenset[str]:
    """The types in the keyword `type`; all types if the schema has none."""
    if not schema.has("type"):
        return frozenset(TYPES)
    place = schema.child("type")
    types = [place.value] if isinstance(place.value, str) else place.value
    is_known = isinstance(types, list) and types and all(name in TYPES for name in types)
    place.require(bool(is_known), f"unknown type: {place.value!r}; supported: {', '.join(TYPES)}")
    return frozenset(types)


def _add_patterns(rewritten: dict[str, Any], more: Sequence[str]) -> None:
    """Add the patterns of a format to the keywords of a schema."""
    if more:
        added = [{"pattern": patterns.translate(pattern)} for pattern in more]
        rewritten["allOf"] = [*rewritten.get("allOf", ()), *added]


def _check_literal(place: Place) -> None:
    """Raises SchemaProblem for a value of const or enum that the grammar cannot write, or would write as another
    value."""
    match place.value:
        case str(text):
            unwritable = _UNWRITABLE.search(text)
            if unwritable:
                place.refuse(f"the character U+{ord(unwritable[0]):04X} cannot be encoded")
        case list() | dict():
            for child in place.children():
                _check_literal(child)
        case None | bool():
            pass
        case _:
            exact(place)


def _translate(pattern: str, place: Place) -> str:
    try:
        return patterns.translate(pattern)
    except patterns.PatternProblem as error:
        place.refuse(str(error))
