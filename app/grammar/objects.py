"""Decides whether a JSON schema can describe an object, as the arguments of a tool must."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .place import Place, SchemaProblem
from .references import References

_ALL_OBJECTS: tuple[object, ...] = (True, {}, {"type": "object"})  # schemas that every object matches


def describes_objects(schema: dict[str, Any]) -> bool:
    """False if no object can match the schema, because of its types, its listed values or the schemas that it combines.

    Other keywords, and references without a target, are not examined.
    """
    return _Examination(schema).result


class _Examination:
    def __init__(self, schema: dict[str, Any]) -> None:
        self._references = References(schema)
        # By base URI and pointer. A schema that refers to itself describes no object by this reference.
        self._results: dict[tuple[str, str], bool] = {}
        self.result = self._describes(self._references.root)

    def _describes(self, place: Place) -> bool:
        if not isinstance(place.value, dict):
            return place.value is not False
        place = self._references.with_base(place)
        key = (place.base, place.pointer)
        if key not in self._results:
            self._results[key] = False
            self._results[key] = self._all_keywords_allow(place)
        return self._results[key]

    def _all_keywords_allow(self, place: Place) -> bool:
        keywords = ("$ref",) if self._references.ignores_siblings(place) else _KEYWORDS
        return all(_KEYWORDS[name](self, place.child(name)) for name in keywords if place.has(name))

    def _type(self, place: Place) -> bool:
        return place.value == "object" or (isinstance(place.value, list) and "object" in place.value)

    def _const(self, place: Place) -> bool:
        return isinstance(place.value, dict)

    def _enum(self, place: Place) -> bool:
        return not isinstance(place.value, list) or any(isinstance(value, dict) for value in place.value)

    def _not(self, place: Place) -> bool:
        return place.value not in _ALL_OBJECTS

    def _all_of(self, place: Place) -> bool:
        return self._combined(place, all)

    def _any_of(self, place: Place) -> bool:
        return self._combined(place, any)

    def _combined(self, place: Place, combine: Callable[[Iterable[bool]], bool]) -> bool:
        return not isinstance(place.value, list) or combine([self._describes(option) for option in place.children()])

    def _ref(self, place: Place) -> bool:
        try:
            target = self._references.resolve(place)
        except SchemaProblem:
            return True
        return self._describes(target)


_KEYWORDS: dict[str, Callable[[_Examination, Place], bool]] = {
    "type": _Examination._type,
    "const": _Examination._const,
    "enum": _Examination._enum,
    "not": _Examination._not,
    "allOf": _Examination._all_of,
    "anyOf": _Examination._any_of,
    "oneOf": _Examination._any_of,
    "$ref": _Examination._ref,
}
