"""A value inside the JSON schema of a client, with its position for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec

_INDEX = re.compile("0|[1-9][0-9]{0,8}")


class SchemaProblem(ValueError):
    """The schema is malformed, or has a keyword that a grammar cannot express; the message has its JSON pointer."""


class Place(msgspec.Struct, frozen=True):
    """A value inside a schema, and its JSON pointer.

    The methods raise SchemaProblem if the value has another type.
    """

    value: Any
    pointer: str

    def has(self, name: str) -> bool:
        """True if the value is an object with a member of this name, or an array that has this index."""
        if isinstance(self.value, list):
            return _INDEX.fullmatch(name) is not None and int(name) < len(self.value)
        return isinstance(self.value, dict) and name in self.value

    def child(self, name: str) -> Place:
        """The value with this name in an object or with this index in an array. `has(name)` must be true."""
        value = self.value[int(name) if isinstance(self.value, list) else name]
        return Place(value, f"{self.pointer}/{name.replace('~', '~0').replace('/', '~1')}")

    def children(self) -> Iterator[Place]:
        """The values of an object or an array."""
        names = map(str, range(len(self.value))) if isinstance(self.value, list) else self.value
        return map(self.child, names)

    def array(self) -> list[Place]:
        """The items of an array."""
        self.require(isinstance(self.value, list), "must be an array")
        return list(self.children())

    def object(self) -> dict[str, Place]:
        """The members of an object."""
        self.require(isinstance(self.value, dict), "must be an object")
        return {name: self.child(name) for name in self.value}

    def text(self) -> str:
        if not isinstance(self.value, str):
            self.refuse("must be a string")
        return self.value

    def names(self) -> list[str]:
        """The strings of an array of strings."""
        value = self.value
        self.require(
            isinstance(value, list) and all(isinstance(name, str) for name in value), "must be an array of names"
        )
        return list(value)

    def require(self, condition: bool, problem: str) -> None:
        if not condition:
            self.refuse(problem)

    def refuse(self, problem: str) -> NoReturn:
        raise SchemaProblem(f"{self.pointer}: {problem}")
