"""Matches the regular expressions of adapter_config.json with names of modules, as Python's `re` does, in bounded time.

`re` tries one way after the other, which a hostile expression makes exponential. Here a set of positions in the name
goes through the parsed expression: bit n of an integer is the position before character n.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import MappingProxyType
from typing import Any, NoReturn

MAX_LENGTH = 10_000  # characters of an expression
MAX_STEPS = 5_000_000  # total steps of the matches of one configuration
_COMPILATION = 500  # steps that the compilation of an expression counts as
_PLAIN = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\\.){1,1000}\$?")

_CATEGORIES: Mapping[Any, Callable[[str], bool]] = MappingProxyType(
    {
        codes.CATEGORY_DIGIT: str.isdecimal,
        codes.CATEGORY_NOT_DIGIT: lambda char: not char.isdecimal(),
        codes.CATEGORY_SPACE: str.isspace,
        codes.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
        codes.CATEGORY_WORD: lambda char: _is_word(char),
        codes.CATEGORY_NOT_WORD: lambda char: not _is_word(char),
    }
)


class PatternProblem(ValueError):
    """The expression is malformed, has a construct that is not supported, or takes too long. The message says which."""


class Steps:
    """The steps that are left for all matches of one configuration."""

    def __init__(self, count: int = MAX_STEPS) -> None:
        self._left = count

    def take(self, count: int = 1) -> None:
        """Raises PatternProblem if no step is left."""
        self._left -= count
        if self._left < 0:
            raise PatternProblem("the regular expressions take too long")


class ModulePattern:
    """A regular expression. Back references, atomic groups and inline flags are not supported."""

    def __init__(self, text: str, steps: Steps) -> None:
        """Raises PatternProblem."""
        if len(text) > MAX_LENGTH:
            raise PatternProblem(f"the regular expression has more than {MAX_LENGTH} characters")
        try:
            self._items = parser.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternProblem(f"the regular expression {text!r:.100} is malformed: {error}") from error
        if self._items.state.flags & ~re.UNICODE:
            _refuse("inline flags")
        self._steps = steps
        self._ends("")

    def fullmatch(self, name: str) -> bool:
        """Like re.fullmatch. Raises PatternProblem."""
        return bool(self._ends(name) >> len(name))

    def match(self, name: str) -> bool:
        """Like re.match. Raises PatternProblem."""
        return bool(self._ends(name))

    def _ends(self, name: str) -> int:
        try:
            return _Walk(name, self._steps).sequence(self._items, 1)
        except RecursionError:
            raise PatternProblem("the regular expression has too many groups in groups") from None


class NamePattern:
    """A key of rank_pattern or alpha_pattern. A key with ^ matches a whole name, another key also the end of a name."""

    def __init__(self, key: str, steps: Steps) -> None:
        """Raises PatternProblem."""
        steps.take(_COMPILATION)
        text = rf"(.*\.)?({key})$"  # PEFT: peft.utils.other.get_pattern_key
        # Without operators of repetition, `re` takes a short time. An adapter may have a key for each module.
        self._match: Callable[[str], object]
        self._match = re.compile(text).match if _PLAIN.fullmatch(key) else ModulePattern(text, steps).match
        self._steps = steps

    def match(self, name: str) -> bool:
        """Raises PatternProblem."""
        self._steps.take()
        return bool(self._match(name))


class _Walk:
    """The walk of sets of positions in `name` through an expression."""

    def __init__(self, name: str, steps: Steps) -> None:
        self._name = name
        self._all = (1 << len(name) + 1) - 1
        self._steps = steps
        self._sets: dict[int, int] = {}  # id of a set of characters -> the positions before these characters

    def sequence(self, items: Sequence[tuple[Any, Any]], positions: int) -> int:
        """The positions after the items, from these positions before them."""
        for code, argument in items:
            self._steps.take()
            step = _ITEMS.get(code)
            if step is None:
                _refuse(str(code).lower().replace("_", " "))
            positions = step(self, argument, positions)
        return positions

    def one(self, argument: Any, positions: int, has: Callable[[Any, str], bool]) -> int:
        """One character for which `has(argument, character)` is true."""
        key = id(argument) if isinstance(argument, list) else hash((argument, has))
        if key not in self._sets:
            self._sets[key] = sum(1 << index for index, char in enumerate(self._name) if has(argument, char))
        return (positions & self._sets[key]) << 1

    def branch(self, argument: Any, positions: int) -> int:
        ends = 0
        for items in argument[1]:
            ends |= self.sequence(items, positions)
        return ends

    def group(self, argument: Any, positions: int) -> int:
        _, added, removed, items = argument
        if added or removed:
            _refuse("inline flags")
        return self.sequence(items, positions)

    def repeat(self, argument: Any, positions: int) -> int:
        least, most, items = argument
        # More repetitions than characters give nothing new: some of them are empty.
        least = min(least, len(self._name) + 1)
        most = min(most, len(self._name) + 1)
        for _ in range(least):
            positions = self.sequence(items, positions)
        ends = new = positions
        for _ in range(most - least):
            new = self.sequence(items, new) & ~ends
            if not new:
                break
            ends |= new
        return ends

    def look(self, argument: Any, positions: int) -> int:
        """The positions of a look-ahead or look-behind that matches."""
        direction, items = argument
        width = items.getwidth()[0] if direction < 0 else 0
        kept = 0
        for index in range(len(self._name) + 1):
            bit = 1 << index
            if positions & bit and index >= width:
                ends = self.sequence(items, bit >> width)
                kept |= bit if (ends & bit if direction < 0 else ends) else 0
        return kept

    def place(self, argument: Any, positions: int) -> int:
        return positions & sum(1 << index for index in range(len(self._name) + 1) if self._is_at(argument, index))

    def _is_at(self, place: Any, index: int) -> bool:
        if place in (codes.AT_BEGINNING, codes.AT_BEGINNING_STRING):
            return index == 0
        if place in (codes.AT_END, codes.AT_END_STRING):
            return self._name[index:] in (("", "\n") if place == codes.AT_END else ("",))
        sides = self._name[max(0, index - 1) : index], self._name[index : index + 1]
        is_boundary = _is_word(sides[0]) != _is_word(sides[1])
        return is_boundary == bool(place == codes.AT_BOUNDARY)


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def _is_in(items: Sequence[tuple[Any, Any]], char: str) -> bool:
    """Whether a class such as [a-z_] has the character."""
    negated = bool(items[0][0] == codes.NEGATE)
    return any(_has(code, argument, char) for code, argument in items) != negated


def _has(code: Any, argument: Any, char: str) -> bool:
    if code == codes.LITERAL:
        return bool(argument == ord(char))
    if code == codes.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    return bool(code == codes.CATEGORY) and _CATEGORIES[argument](char)


def _is_code(argument: int, char: str) -> bool:
    return ord(char) == argument


def _is_other_code(argument: int, char: str) -> bool:
    return ord(char) != argument


def _is_any(argument: None, char: str) -> bool:
    return char != "\n"


def _refuse(construct: str) -> NoReturn:
    raise PatternProblem(f"{construct} of regular expressions are not supported")


_Item = Callable[[_Walk, Any, int], int]
_ITEMS: Mapping[Any, _Item] = MappingProxyType(
    {
        codes.LITERAL: lambda walk, argument, positions: walk.one(argument, positions, _is_code),
        codes.NOT_LITERAL: lambda walk, argument, positions: walk.one(argument, positions, _is_other_code),
        codes.ANY: lambda walk, argument, positions: walk.one(argument, positions, _is_any),
        codes.IN: lambda walk, argument, positions: walk.one(argument, positions, _is_in),
        codes.BRANCH: _Walk.branch,
        codes.SUBPATTERN: _Walk.group,
        codes.MAX_REPEAT: _Walk.repeat,
        codes.MIN_REPEAT: _Walk.repeat,
        codes.ASSERT: _Walk.look,
        codes.ASSERT_NOT: lambda walk, argument, positions: positions & ~walk.look(argument, positions),
        codes.AT: _Walk.place,
        codes.FAILURE: lambda walk, argument, positions: 0,
    }
)
