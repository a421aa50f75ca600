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
_ASCII = 0x7F

_PLAIN = frozenset(string.ascii_letters + string.digits)  # characters without a special meaning in Rust's syntax

_COUNT = re.compile(r"\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\}")
_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]+(?:,[0-9]*)?\}")
_GROUP = re.compile(r"\?(?:P?<[A-Za-z_]\w*>|(?P<flag>i?)(?P<end>[:)]))")
_PROPERTY = re.compile(r"\{[A-Za-z_0-9=]+\}")
_UNICODE_DIGITS = re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}")
_BYTE = re.compile(r"[0-9A-Fa-f]{2}")


class PatternProblem(ValueError):
    """The pattern is malformed, or has a construct that a grammar cannot express. The message names the problem."""


def translate(pattern: str) -> str:
    """The pattern in Rust's syntax, in ASCII; it matches the same strings. Raises PatternProblem."""
    return _Translation(pattern).text


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._position = 0  # index of the next character
        self._ignores_case = False
        self._outside: list[bool] = []  # _ignores_case outside of each open group, outermost group first
        output = []
        while self._position < len(pattern):
            output.append(self._next())
        self._require(not self._outside, "a group is not closed: (")
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
        outside = self._ignores_case
        if self._follows("?"):
            group = self._match(_GROUP)
            if group is None:
                self._refuse_group()
            if group["end"] == ")":
                self._require(self._position == len("(?i)"), "the flag (?i) is allowed only at the start")
                self._ignores_case = True
                return ""
            self._ignores_case |= group["flag"] == "i"
        self._outside.append(outside)
        return "(?:"

    def _refuse_group(self) -> NoReturn:
        kind = self._pattern[self._position : self._position + 3]
        if kind[1:2] in "=!<":
            self._refuse("look-around (?=…), (?!…), (?<=…) or (?<!…) is not supported")
        self._refuse(f"({kind}…) is not supported; supported flag: i")

    def _close_group(self) -> str:
        self._require(bool(self._outside), "unmatched )")
        self._ignores_case = self._outside.pop()
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
        return _class(_LINE_ENDS, negated=True)

    def _character(self, code: int) -> str:
        return _class(self._cases([(code, code)])) if self._ignores_case else _literal(code)

    def _cases(self, ranges: Ranges) -> Ranges:
        """The ranges; with the flag i, also the other case of their letters."""
        if not self._ignores_case:
            return ranges
        self._require(all(last <= _ASCII for _, last in ranges), "the flag i is supported for ASCII only")
        others = [
            (max(first, low) + shift, min(last, high) + shift)
            for first, last in ranges
            for low, high, shift in _LETTERS
            if first <= high and last >= low
        ]
        return ranges + others

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
        if char == "x":
            return int(self._expect(_BYTE, "\\x needs two hexadecimal digits"), 16)
        self._require(char not in "123456789k", f"a backreference \\{char} is not supported")
        self._require(not char.isalnum(), f"the escape \\{char} is not supported")
        return ord(char)

    def _unicode_escape(self) -> int:
        digits = self._expect(_UNICODE_DIGITS, "\\u needs four hexadecimal digits")
        code = int(digits.strip("{}"), 16)
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


def _literal(code: int) -> str:
    return chr(code) if chr(code) in _PLAIN else f"\\u{{{code:X}}}"


def _class(ranges: Ranges, *, negated: bool = False, classes: Sequence[str] = ()) -> str:
    members = [_literal(first) if first == last else f"{_literal(first)}-{_literal(last)}" for first, last in ranges]
    start = "[^" if negated else "["
    return start + "".join([*members, *classes]) + "]"
