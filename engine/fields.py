"""Validated access to the fields of an untrusted JSON object."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .errors import ModelRefused


class Fields:
    """A JSON object with typed and range-checked access. A null value counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._values if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def null(self, key: str) -> bool:
        """True if the key is present with a null value, for fields where null differs from absent."""
        return key in self._values and self._values[key] is None

    def updated(self, other: Fields) -> Fields:
        """The fields of both objects; `other` overrides."""
        overrides = {key: other._values[key] for key in other}
        return Fields({**self._values, **overrides}, other._where if overrides else self._where)

    def refuse(self, key: str, expected: str) -> ModelRefused:
        """The error for a wrong value."""
        value = repr(self._values[key])[:100] if key in self else "nothing"
        return ModelRefused(f"{self._where}: {key} must be {expected}, not {value}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"an integer in {low}…{high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        # Compared before conversion to float, which could overflow. NaN fails as well.
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"a number in {low:g}…{high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.refuse(key, "a string")
        return value

    def one_of(self, key: str, known: Collection[str | bool]) -> str | bool:
        """The value, or False if the field is absent."""
        value = self._values.get(key)
        if value is None:
            return False
        if not isinstance(value, (str, bool)) or value not in known:
            raise self.refuse(key, f"one of {', '.join(str(choice) for choice in known)}")
        return value

    def table(self, key: str) -> Fields:
        """The object at `key`, or an empty one."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value or {}, f"{self._where}: {key}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(key, f"a list of {count} numbers")
        items = Fields({str(index): item for index, item in enumerate(value)}, f"{self._where}: {key}")
        return tuple(items.number(str(index), 1e-6, 1e6) for index in range(count))

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "a list of strings")
        return tuple(value)

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of ids; () if the field is absent."""
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in listed):
            raise self.refuse(key, f"token ids below the vocabulary size {vocab_size}")
        return tuple(listed)
