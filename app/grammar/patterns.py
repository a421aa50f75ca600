"""Translates the regular expressions of clients from ECMA-262, which JSON Schema prescribes, to Rust's syntax.

llguidance uses Rust's syntax. The same text may have another meaning there, without an error: `\\d` matches the digits
of every script, `[a&&b]` is an intersection, and `(?P<stop>…)` is a look-ahead. The output writes every character
except ASCII letters and digits as `\\u{…}`, so that no character of a client has a special meaning.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from typing import NoReturn

# Ranges of code points.
Ranges = list[tuple[int, int]]

_DIGITS: Ranges = [(0x30, 0x39)]
_WORD: Ranges = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_LINE_ENDS: Ranges = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_BLANKS = [0xA0, 0x1680, 0x202F, 0x205F, 0x3000, 0xFEFF]
_SPACE: Ranges = [(0x09, 0x0D), (0x20, 0x20), (0x2000, 0x200A), (0x2028, 0x2029), *((code, code) for code in _BLANKS)]
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_LETTERS = ((0x41, 0x5A, 32), (0x61, 0x7A, -32))  # first letter, last letter, distance to the other case

_PLAIN = frozenset(string.ascii_letters + string.digits)  # characters without a special meaning in Rust's syntax

_COUNT = re.compile(r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\}")
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\?(?:P?<(?P<name>[A-Za-z_]\w*)>|(?P<flags>[is]*)(?P<end>[:)]))")
_PROPERTY = re.compile(r"\{[A-Za-z_0-9=]+\}")
_UNICODE_DIGITS = re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")
_LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})")

# The characters that must follow the letter of an escape, and a function from these characters to a code point.
_Code = tuple[re.Pattern[str], Callable[[str], int]]
_CODES: dict[str, _Code] = {
    "0": (re.compile("(?![0-9])"), lambda _: 0),
    "c": (re.compile("[A-Za-z]"), lambda letter: ord(letter) % 32),
    "x": (re.compile("[0-9A-Fa-f]{2}"), lambda digits: int(digits, 16)),
}
_NO_CODE: _Code = (re.compile("(?!)"), ord)


class PatternProblem(ValueError):
    """The pattern is malformed, or has a construct that a grammar cannot express. The message names the problem."""


def translate(pattern: str) -> str:
    """The pattern in Rust's syntax, in ASCII; it matches the same strings. Raises PatternProblem."""
    return _Translation(pattern).text


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0  # index of the next character
        self._flags = ""
        self._outer_flags: list[str] = []  # the flags outside of each open group, outermost group first
        output = []
        while self._position < len(pattern):
            output.append(self._next())
        self._require(not self._outer_flags, "a group is not closed: (")
        self.text = "".join(output)

    def _refuse(self, problem: str) -> NoReturn:
        raise PatternProblem(f"the pattern {self._pattern[:100]!r}: {problem}")

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            self._refuse(problem)

    def _take(self) -> str:
        self._require(self._position < len(self._pattern), "unexpected end")
        self._position += 1
        return self._pattern[self._position - 1]

    def _follows(self, *texts: str) -> bool:
        """True if the rest of the pattern starts with one of the texts."""
        return self._pattern.startswith(texts, self._position)

    def _skip(self, text: str) -> bool:
        """Skip `text` if the rest of the pattern starts with it. True if it was skipped."""
        follows = self._follows(text)
        if follows:
            self._position += len(text)
        return follows

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._position)
        if match:
            self._position = match.end()
        return match

    def _expect(self, expression: re.Pattern[str], problem: str) -> str:
        match = self._match(expression)
        if match is None:
            self._refuse(problem)
        return match[0]

    def _next(self) -> str:
        """Translate the next assertion, alternation, start of a group, or item with its quantifier."""
        char = self._take()
        if char in "|^$":
            return char
        if char == "(":
            return self._open_group()
        translate_item = _ITEMS.get(char)
        item = translate_item(self) if translate_item else self._character(ord(char))
        return item + self._quantifier()

    def _open_group(self) -> str:
        outer = self._flags
        if self._follows("?"):
            group = self._match(_GROUP)
            if group is None:
                self._refuse_group()
            flags = group["flags"] or ""
            if group["end"] == ")":
                return self._set_flags(flags)
            self._flags += flags
        self._outer_flags.append(outer)
        return "(?:"

    def _refuse_group(self) -> NoReturn:
        kind = self._pattern[self._position : self._position + 3]
        if kind[1:2] in "=!<":
            self._refuse("look-around (?=…), (?!…), (?<=…) or (?<!…) is not supported")
        self._refuse(f"({kind}…) is not supported; supported flags: i, s")

    def _set_flags(self, flags: str) -> str:
        at_start = self._pattern[: self._position] == f"(?{flags})"
        self._require(at_start, f"the flags (?{flags}) are allowed only at the start")
        self._flags = flags
        return ""

    def _close_group(self) -> str:
        self._require(bool(self._outer_flags), "unmatched )")
        self._flags = self._outer_flags.pop()
        return ")"

    def _quantifier(self) -> str:
        """The quantifier after an item, or "". A lazy mark is dropped: lazy and greedy match the same strings."""
        match = self._match(_QUANTIFIER)
        if match:
            self._skip("?")
            return match[0]
        self._require(not self._follows("{,"), "{,n} has no lower bound: write {0,n}")
        return ""

    def _refuse_repeat(self) -> NoReturn:
        self._refuse(f"nothing to repeat before {self._pattern[self._position - 1]}")

    def _brace(self) -> str:
        count = _COUNT.match(self._pattern, self._position - 1)
        self._require(count is None, "nothing to repeat or no lower bound: {…}")
        return _literal(ord("{"))

    def _dot(self) -> str:
        return "(?s:.)" if "s" in self._flags else _class(_LINE_ENDS, negated=True)

    def _character(self, code: int) -> str:
        return _class(self._cases([(code, code)])) if "i" in self._flags else _literal(code)

    def _cases(self, ranges: Ranges) -> Ranges:
        """The ranges; with the flag i, also the other case of their letters."""
        result = list(ranges)
        if "i" in self._flags:
            for first, last in ranges:
                result += self._other_case(first, last)
        return result

    def _other_case(self, first: int, last: int) -> Ranges:
        """The other case of each ASCII letter in a range; of a single non-ASCII character, its other case."""
        others: Ranges = []
        for low, high, shift in _LETTERS:
            if first <= high and last >= low:
                others.append((max(first, low) + shift, min(last, high) + shift))
        if last <= 0x7F:
            return others
        self._require(first == last, "a non-ASCII range cannot ignore case")
        return [(ord(other), ord(other)) for other in _other_cases(chr(first))]

    def _escape(self) -> str:
        """Translate an escape outside of a set, after its backslash."""
        self._require(not self._follows("b", "B"), "look-around \\b is not supported")
        code_or_class = self._escaped()
        return self._character(code_or_class) if isinstance(code_or_class, int) else code_or_class

    def _escaped(self) -> int | str:
        """Translate an escape after its backslash: a code point, or a class in Rust's syntax."""
        char = self._take()
        if char.lower() in _CLASSES:
            return _class(_CLASSES[char.lower()], negated=char.isupper())
        if char in "pP":
            return self._property(char)
        if char == "u":
            return self._unicode_escape()
        return _CONTROLS[char] if char in _CONTROLS else self._code_point(char)

    def _property(self, char: str) -> str:
        name = self._expect(_PROPERTY, f"\\{char} needs a property name in braces, for example \\p{{L}}")
        return f"\\{char}{name}"

    def _code_point(self, char: str) -> int:
        """The code point of an escape that starts with `char`."""
        expression, to_code = _CODES.get(char, _NO_CODE)
        match = self._match(expression)
        if match:
            return to_code(match[0])
        self._require(char not in "123456789k", f"a backreference \\{char} is not supported")
        self._require(not char.isalnum(), f"unknown escape \\{char} (not in ECMA-262)")
        return ord(char)

    def _unicode_escape(self) -> int:
        digits = self._expect(_UNICODE_DIGITS, "\\u needs four hexadecimal digits")
        code = int(digits.strip("{}"), 16)
        if 0xD800 <= code < 0xDC00 and (low := self._match(_LOW_SURROGATE)):
            return 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        is_character = code < 0xD800 or 0xE000 <= code <= 0x10FFFF
        self._require(is_character, f"\\u{digits} is not a character")
        return code

    def _set(self) -> str:
        """Translate a set of characters, after its opening bracket."""
        negated = self._skip("^")
        self._require(not self._follows("]"), "an empty set [] or [^]; for the character write \\]")
        ranges: Ranges = []
        classes: list[str] = []
        while not self._skip("]"):
            member = self._member()
            if isinstance(member, str):
                classes.append(member)
            elif self._follows("-") and not self._follows("-]"):
                self._add_range(member, ranges, classes)
            else:
                ranges.append((member, member))
        return _class(self._cases(ranges), negated=negated, classes=classes)

    def _add_range(self, first: int, ranges: Ranges, classes: list[str]) -> None:
        """Add the range that starts with `first`. Its hyphen is the next character."""
        hyphen = ord(self._take())
        last = self._member()
        if isinstance(last, str):  # [a-\d] has the members a, - and \d
            ranges += [(first, first), (hyphen, hyphen)]
            classes.append(last)
            return
        self._require(first <= last, "a range ends before its start")
        ranges.append((first, last))

    def _member(self) -> int | str:
        """Translate the next character or class of a set."""
        char = self._take()
        if char != "\\":
            return ord(char)
        if self._skip("b"):
            return 0x08
        self._require(not self._follows("B"), "unknown escape \\B in a set (not in ECMA-262)")
        return self._escaped()


# The first character of an item → the method that translates it. Any other character stands for itself.
_ITEMS: dict[str, Callable[[_Translation], str]] = {
    ")": _Translation._close_group,
    "*": _Translation._refuse_repeat,
    "+": _Translation._refuse_repeat,
    "?": _Translation._refuse_repeat,
    "{": _Translation._brace,
    ".": _Translation._dot,
    "[": _Translation._set,
    "\\": _Translation._escape,
}


def _other_cases(char: str) -> set[str]:
    return {other for other in (char.lower(), char.upper()) if len(other) == 1} - {char}


def _literal(code: int) -> str:
    return chr(code) if chr(code) in _PLAIN else f"\\u{{{code:X}}}"


def _class(ranges: Ranges, *, negated: bool = False, classes: Sequence[str] = ()) -> str:
    members = [_literal(first) if first == last else f"{_literal(first)}-{_literal(last)}" for first, last in ranges]
    start = "[^" if negated else "["
    return start + "".join([*members, *classes]) + "]"
