"""Translates the regular expressions of clients from ECMA-262, which JSON Schema prescribes, to Rust's syntax.

llguidance uses Rust's syntax. The same text may have another meaning there, without an error: `\\d` matches the digits
of every script, `[a&&b]` is an intersection, and `(?P<stop>…)` is a look-ahead. The output writes every character
except ASCII letters and digits as `\\u{…}`, so that no character of a client has a special meaning.
"""

from __future__ import annotations

import re
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

_QUANTIFIER = re.compile(r"(?:[*+?]|\{\d+(?:,\d*)?\})")
_GROUP = re.compile(r"\?(?:P?<(?P<name>[A-Za-z_]\w*)>|(?P<flags>[is]*)(?P<end>[:)]))")
_PROPERTY = re.compile(r"\{[A-Za-z_0-9=]+\}")


class PatternProblem(ValueError):
    """The pattern is malformed, or has a construct that a grammar cannot express; the message says which."""


def translate(pattern: str) -> str:
    """The pattern in Rust's syntax, in ASCII; it matches the same strings. Raises PatternProblem."""
    return _Translation(pattern).text


class _Translation:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0  # index of the next character
        self._outer: list[str] = []  # for each open group, the flags outside of it
        self._flags = ""
        parts = []
        while self._at < len(pattern):
            parts.append(self._next())
        if self._outer:
            self._refuse("a group is not closed: (")
        self.text = "".join(parts)

    def _refuse(self, problem: str) -> NoReturn:
        raise PatternProblem(f"the pattern {self._pattern[:100]!r}: {problem}")

    def _take(self) -> str:
        if self._at == len(self._pattern):
            self._refuse("unexpected end")
        self._at += 1
        return self._pattern[self._at - 1]

    def _match(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        match = expression.match(self._pattern, self._at)
        if match:
            self._at = match.end()
        return match

    def _next(self) -> str:
        start, char = self._at, self._take()
        match char:
            case "|":
                return char
            case "^" | "$":
                return char
            case "(":
                return self._open()
            case ")":
                if not self._outer:
                    self._refuse("unmatched )")
                self._flags = self._outer.pop()
                return ")" + self._quantifier()
            case "*" | "+" | "?":
                self._refuse(f"nothing to repeat before {char}")
            case "{":
                self._at = start
                if self._match(_QUANTIFIER) or self._match(re.compile(r"\{,\d+\}")):
                    self._refuse("nothing to repeat or no lower bound: {…}")
                self._at = start + 1
                return _literal(ord("{")) + self._quantifier()
            case ".":
                return ("(?s:.)" if "s" in self._flags else _class(_LINE_ENDS, negated=True)) + self._quantifier()
            case "[":
                return self._set() + self._quantifier()
            case "\\":
                return self._escape() + self._quantifier()
        return self._one(ord(char)) + self._quantifier()

    def _open(self) -> str:
        outer = self._flags
        if self._pattern.startswith("?", self._at):
            group = self._match(_GROUP)
            if group is None:
                kind = self._pattern[self._at : self._at + 3]
                if kind[1:2] in "=!<":
                    self._refuse("look-around (?=…), (?!…), (?<=…) or (?<!…) is not supported")
                self._refuse(f"({kind}…) is not supported; supported flags: i, s")
            flags = group["flags"] or ""
            if group["end"] == ")":
                if self._pattern[: self._at] != f"(?{flags})":
                    self._refuse(f"the flags (?{flags}) are allowed only at the start")
                self._flags = flags
                return ""
            self._flags = outer + flags
        self._outer.append(outer)
        return "(?:"

    def _quantifier(self) -> str:
        """The quantifier of the item before it, or "". Drops a lazy mark: lazy and greedy match the same strings."""
        match = self._match(_QUANTIFIER)
        if match is None:
            if self._pattern.startswith("{,", self._at):
                self._refuse("{,n} has no lower bound: write {0,n}")
            return ""
        if self._pattern.startswith("?", self._at):
            self._at += 1
        return match[0]

    def _one(self, code: int) -> str:
        return _class(self._cases([(code, code)])) if "i" in self._flags else _literal(code)

    def _cases(self, ranges: Ranges) -> Ranges:
        """The ranges and, with the flag i, the other case of each ASCII letter and of each single other character."""
        if "i" not in self._flags:
            return ranges
        more: Ranges = []
        for first, last in ranges:
            for low, high, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
                if first <= high and last >= low:
                    more.append((max(first, low) + shift, min(last, high) + shift))
            if last > 0x7F and first == last:
                more += [(ord(other), ord(other)) for other in _other_cases(chr(first))]
            elif last > 0x7F:
                self._refuse("a non-ASCII range cannot ignore case")
        return ranges + more

    def _escape(self) -> str:
        """An escape outside of a set."""
        if self._pattern[self._at : self._at + 1] in ("b", "B"):
            self._refuse("look-around \\b is not supported")
        parsed = self._escaped()
        if isinstance(parsed, int):
            return self._one(parsed)
        return parsed

    def _escaped(self) -> int | str:
        """An escape after its backslash: a code point, or a class in Rust's syntax."""
        char = self._take()
        if char.lower() in _CLASSES:
            return _class(_CLASSES[char.lower()], negated=char.isupper())
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "pP":
            name = self._match(_PROPERTY)
            if name is None:
                self._refuse(f"\\{char} needs a property name in braces, for example \\p{{L}}")
            return f"\\{char}{name[0]}"
        if char == "0" and not self._pattern[self._at : self._at + 1].isdigit():
            return 0
        if char == "c" and (letter := self._match(re.compile("[A-Za-z]"))):
            return ord(letter[0]) % 32
        if char == "x" and (digits := self._match(re.compile("[0-9A-Fa-f]{2}"))):
            return int(digits[0], 16)
        if char == "u":
            return self._unicode_escape()
        if char in "123456789" or char == "k":
            self._refuse(f"a backreference \\{char} is not supported")
        if char.isalnum():
            self._refuse(f"unknown escape \\{char} (not in ECMA-262)")
        return ord(char)

    def _unicode_escape(self) -> int:
        digits = self._match(re.compile(r"[0-9A-Fa-f]{4}|\{[0-9A-Fa-f]{1,6}\}"))
        if digits is None:
            self._refuse("\\u needs four hexadecimal digits")
        code = int(digits[0].strip("{}"), 16)
        if 0xD800 <= code < 0xDC00 and (low := self._match(re.compile(r"\\u([dD][c-fC-F][0-9A-Fa-f]{2})"))):
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            self._refuse(f"\\u{digits[0]} is not a character")
        return code

    def _set(self) -> str:
        """A set of characters, after its opening bracket."""
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        if self._pattern.startswith("]", self._at):
            self._refuse("an empty set [] or [^]; for the character write \\]")
        ranges: Ranges = []
        classes: list[str] = []
        while (item := self._member()) is not None:
            if isinstance(item, str):
                classes.append(item)
            elif self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at):
                self._at += 1
                last = self._member()
                if isinstance(last, str):  # [a-\d] has the members a, - and \d
                    ranges += [(item, item), (0x2D, 0x2D)]
                    classes.append(last)
                elif last is None or last < item:
                    self._refuse("a range ends before its start")
                else:
                    ranges.append((item, last))
            else:
                ranges.append((item, item))
        return _class(self._cases(ranges), negated=negated, classes=classes)

    def _member(self) -> int | str | None:
        """The next character or class of a set; None at the closing bracket."""
        char = self._take()
        if char == "]":
            return None
        if char != "\\":
            return ord(char)
        if self._pattern.startswith("b", self._at):
            self._at += 1
            return 0x08
        if self._pattern.startswith("B", self._at):
            self._refuse("unknown escape \\B in a set (not in ECMA-262)")
        return self._escaped()


def _other_cases(char: str) -> set[str]:
    return {other for other in (char.lower(), char.upper()) if len(other) == 1 and other != char}


def _literal(code: int) -> str:
    return chr(code) if code < 0x80 and chr(code).isalnum() else f"\\u{{{code:X}}}"


def _class(ranges: Ranges, *, negated: bool = False, classes: list[str] | None = None) -> str:
    members = [_literal(first) if first == last else f"{_literal(first)}-{_literal(last)}" for first, last in ranges]
    return f"[{'^' if negated else ''}{''.join(members)}{''.join(classes or [])}]"
