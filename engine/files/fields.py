"""Validated access to the fields of an untrusted JSON object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ..errors import ModelRefused


class Fields:
    """A JSON object with typed and range-checked access. A null value counts as absent.

    Methods that read a field raise ModelRefused for a wrong value, and for an absent field without a default.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        *,
        hint: str = "",
        ignored: Collection[str] = (),
        warnings: list[str] | None = None,
    ) -> None:
        """`where` and `hint` are for error messages. The keys in `ignored` count as absent. `warnings`: see warn."""
        self.warnings: list[str] = [] if warnings is None else warnings
        self._values = values
        self._where = where
        self._hint = hint
        self._ignored = ignored

    def __contains__(self, key: str) -> bool:
        return self._get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, key: str) -> object:
        """The value, not validated; None if the field is absent."""
        return self._get(key)

    def null(self, key: str) -> bool:
        """True if the key is present with a null value, for fields where null differs from absent."""
        return key in self._values and key not in self._ignored and self._values[key] is None

    def either(self, key: str, older: str) -> str:
        """`key`, or `older` if only that field is present: a later release of the format renamed the field."""
        if key not in self and older in self:
            return older
        return key

    def updated(self, other: Fields) -> Fields:
        """An object with the fields of both objects. A field of `other` overrides the same field of this object."""
        if not other:
            return self
        overrides = {key: other._values[key] for key in other}
        return Fields({**self._values, **overrides}, other._where, hint=self._hint, warnings=self.warnings)

    def refuse(self, key: str, expected: str) -> ModelRefused:
        """The error for a wrong value of the field `key`; `expected` completes "must be …"."""
        value = "nothing"
        if key in self:
            value = repr(self._values[key])[:100]
        return ModelRefused(f"{self._where}: {key} must be {expected}, not {value}", self._hint)

    def warn(self, key: str, effect: str) -> None:
        """Add a warning about the value of the field `key` to those of this object and the objects that contain it.
        `effect` completes "the value is …"."""
        self.warnings.append(f"{self._where}: {key} {self._values.get(key)!r:.100} is {effect}")

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        def valid(value: Any) -> bool:
            return type(value) is int and low <= value <= high

        value: int = self._read(key, valid, f"an integer in {low}…{high}", default)
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        def valid(value: Any) -> bool:
            # Compare before the conversion to float, which overflows for large integers. NaN fails the comparison too.
            return type(value) in (int, float) and low <= value <= high

        return float(self._read(key, valid, f"a number in {low:g}…{high:g}", default))

    def flag(self, key: str, default: bool) -> bool:
        value: bool = self._read(key, lambda value: type(value) is bool, "true or false", default)
        return value

    def flag_or_null(self, key: str, default: bool) -> bool:
        """Like `flag`, for a field whose null value means false."""
        return not self.null(key) and self.flag(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        value: str = self._read(key, lambda value: type(value) is str, "a string", default)
        return value

    def choice(self, key: str, allowed: Collection[str], default: str, expected: str = "") -> str:
        """A string out of `allowed`; `expected` describes these for the error message."""
        value = self.text(key, default)
        if value not in allowed:
            raise self.refuse(key, expected or " or ".join(allowed))
        return value

    def text_or_flag(self, key: str, allowed: Collection[str | bool]) -> str | bool:
        """A string or boolean out of `allowed`; False if the field is absent."""

        def valid(value: Any) -> bool:
            return type(value) in (str, bool) and value in allowed

        value: str | bool = self._read(key, valid, f"one of {', '.join(map(str, allowed))}", False)
        return value

    def forbid(self, key: str, reason: str) -> None:
        """Raises ModelRefused if the field is present."""
        if key in self:
            raise self.refuse(key, f"absent ({reason})")

    def table(self, key: str) -> Fields:
        """The object at `key`, or an empty one."""
        values = self._read(key, lambda value: isinstance(value, dict), "an object", {})
        return Fields(values, f"{self._where}: {key}", hint=self._hint, warnings=self.warnings)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """`count` positive numbers."""
        values = self._read(
            key, lambda value: type(value) is list and len(value) == count, f"a list of {count} numbers"
        )
        items = Fields(dict(zip(map(str, range(count)), values, strict=True)), f"{self._where}: {key}", hint=self._hint)
        return tuple(items.number(index, 1e-6, 1e6) for index in items._values)

    def texts(self, key: str) -> tuple[str, ...]:
        def valid(value: Any) -> bool:
            return type(value) is list and {*map(type, value)} <= {str}

        return tuple(self._read(key, valid, "a list of strings"))

    def indices(self, key: str) -> frozenset[int]:
        """A list of non-negative integers, without their order; empty if the field is absent."""

        def valid(value: Any) -> bool:
            return type(value) is list and all(type(item) is int and item >= 0 for item in value)

        return frozenset(self._read(key, valid, "a list of non-negative integers", []))

    def ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """The token ids in one id or in a list of ids; () if the field is absent. Warns of any other value: it ends no
        answer, because no token has it."""
        value = self._get(key)
        items = value if type(value) is list else [] if value is None else [value]
        numbers = [item for item in items if type(item) in (int, float) and 0 <= item < vocab_size]
        ids = [int(number) for number in numbers if number % 1 == 0]
        if len(ids) < len(items):
            self.warn(key, f"ignored where it is no token id below the vocabulary size {vocab_size}")
        return tuple(ids)

    def _get(self, key: str) -> Any:
        if key in self._ignored:
            return None
        return self._values.get(key)

    def _read(self, key: str, valid: Callable[[Any], bool], expected: str, default: Any = None) -> Any:
        """The value of the field `key`, validated. If the field is absent, the result is `default`, which is not
        validated. If `default` is also None, `valid` gets None."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not valid(value):
            raise self.refuse(key, expected)
        return value
