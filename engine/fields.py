"""A foreign JSON object, read field by field: nothing in it is trusted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from .errors import ModelRefused


class Fields:
    """A JSON object whose values are asked for by type and range; null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._values if key in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def null(self, key: str) -> bool:
        """Whether the key is there, and says null: for the few fields where that differs from an absent one."""
        return key in self._values and self._values[key] is None

    def updated(self, other: Fields) -> Fields:
        """Both objects' fields; those of `other` win."""
        there = {key: other._values[key] for key in other}
        return Fields({**self._values, **there}, other._where if there else self._where)

    def refuse(self, key: str, expected: str) -> ModelRefused:
        found = repr(self._values[key])[:100] if key in self else "nothing"
        return ModelRefused(f"{self._where}: {key} should be {expected}, found {found}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(key, f"a whole number in {low}…{high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        # Compared before it becomes a float: a whole number of a thousand digits would overflow. NaN fails too.
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
        """False where there is none."""
        value = self._values.get(key)
        if value is None:
            return False
        if not isinstance(value, (str, bool)) or value not in known:
            raise self.refuse(key, f"one of {', '.join(str(each) for each in known)}")
        return value

    def table(self, key: str) -> Fields:
        """The object at key; an empty one where there is none."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.refuse(key, "an object")
        return Fields(value or {}, f"{self._where}: {key}")

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.refuse(key, f"a list of {count} numbers")
        one_by_one = Fields({str(index): item for index, item in enumerate(value)}, f"{self._where}: {key}")
        return tuple(one_by_one.number(str(index), 1e-6, 1e6) for index in range(count))

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "a list of strings")
        return tuple(value)

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """One token id or a list of them; () where there is none."""
        value = self._values.get(key)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < vocab_size for item in listed):
            raise self.refuse(key, f"token ids below the vocabulary's {vocab_size}")
        return tuple(listed)
