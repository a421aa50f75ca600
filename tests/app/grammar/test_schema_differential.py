"""Generated schemas, compared with `jsonschema`: the grammar of a strict schema allows only valid texts, and it allows
every valid value or the schema is refused by name."""

from __future__ import annotations

import base64
import calendar
import ipaddress
import json
import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from localllm.app.grammar.compiler import _JSON
from localllm.app.grammar.matcher import make_matcher
from localllm.app.grammar.patterns import translate
from localllm.app.grammar.place import SchemaProblem
from localllm.app.grammar.schema import rewrite

BYTES = LLTokenizer("byte")
WALK = 120  # after this many bytes, a random walk prefers bytes that end the text

# Patterns as clients write them → the same patterns in the syntax of Python.
PATTERNS = {
    r"^\d+$": r"^[0-9]+\Z",
    r"^\w{1,3}$": r"^[0-9A-Za-z_]{1,3}\Z",
    r"^[^\d]$": r"^[^0-9]\Z",
    r"\s": "[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    r"^\S*$": "^[^\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]*\\Z",
    r"^.$": "^[^\n\r\u2028\u2029]\\Z",
    r"a|^b": r"a|^b",
    r"^(a|bc)*$": r"^(a|bc)*\Z",
    r"[[a]": r"[\[a]",
    r"^[a&&b]+$": r"^[a&b]+\Z",
    r"^(?<word>é|[x-z])$": r"^(é|[x-z])\Z",
    r"^\u00e9\x61?$": r"^éa?\Z",
    r"b$": r"b\Z",
    "": "",
    r"^a{2,3}$": r"^a{2,3}\Z",
    r"^(?i:k|x)$": r"^[kKxX]\Z",
    r"/\/": "//",
    r"^[^]]$": "",  # refused
    r"^\bfoo": "",  # refused
    r"(?=a)": "",  # refused
}
NAMES = ["a", "b", "ab", "x1", "x2", "é", "$ref", "a/b", "~"]
NAME_PATTERNS = ["^x", r"\d$", "^a", "b"]
TEXTS = ["", "a", "ab", "b", "ba", "aa", "aaa", "1", "12", "٣", "é", "éa", "K", "k", "K", "\x85", "\u2028", "\r", "\n"]
TEXTS += [" ", "\ufeff", "x", "[", "a&b", "🙂", "a🙂", "//", "a\nb", 'a"\\', "cba", "É", "b\n"]
FORMATS: dict[str, list[str]] = {
    "date": [
        "2024-02-29",
        "2023-02-29",
        "1900-02-29",
        "2000-02-29",
        "2023-04-31",
        "2023-4-1",
        "0000-01-01",
        "٢٠٢٣-01-01",
    ],
    "time": ["16:00:60Z", "23:59:60Z", "16:00:59Z", "16:00:59", "24:00:00Z", "08:30:06.28+05:30", "08:30:06+24:00"],
    "date-time": ["2023-02-29T00:00:00Z", "2024-02-29T00:00:00+01:00", "2024-06-30T23:59:60Z", "2024-06-29T23:59:60Z"],
    "ipv4": ["1.2.3.4", "01.2.3.4", "256.1.1.1", "1.2.3", "1.2.3.4 "],
    "ipv6": ["::", "::1", "1::", "::1.2.3.4", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "1:2:3:4:5:6:7:8:9", "::01.2.3.4"],
    "uuid": [
        "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
        "2eb8aa08aa9811eab4aa73b441d16380",
        "2eb8aa08-aa98-11ea-b4aa-73b441d1638g",
    ],
    "email": ["a@b.c", "a@", "@b", "a..b@c", "a@b..c", f"{'x' * 65}@b", f"a@{'x' * 64}.c", "a@[1.2.3.4]", "a b@c"],
    "hostname": ["a.b", "a-.b", "-a", "a_b", "x" * 63, "x" * 64, ".".join(["x" * 63] * 4), "a.", "é.b"],
    "uri": ["http://a/b?c#d", "a:b", "//a", "http://a b", "http://[::1]:80/", "http://[::1", "%", "a:%zz"],
    "duration": ["P1D", "PT1H", "P1Y2D", "P", "PT", "P1W", "P1YT", "1D"],
    "uuid4": [
        "0b2e3a4c-5d6f-4a1b-8c2d-3e4f5a6b7c8d",
        "0B2E3A4C-5D6F-4A1B-BC2D-3E4F5A6B7C8D",
        "0b2e3a4c-5d6f-1a1b-8c2d-3e4f5a6b7c8d",
        "0b2e3a4c-5d6f-4a1b-7c2d-3e4f5a6b7c8d",
    ],
    "uuid7": ["01890a5d-ac96-774b-bcce-b302099a8057", "01890a5d-ac96-474b-bcce-b302099a8057"],
    "base64": ["QQ==", "QUI=", "QUJD", "QUJDRA==", "QQ=", "QQ", "Q", "-_-_", "+/+/", "QU JD", "===="],
    "byte": ["QQ==", "QQ", "-_-_"],
    "base64url": ["QQ==", "-_-_", "+/+/", "QQ"],
}
NUMBERS: list[int | float] = [0, 1, -1, 2, 3, 5, 7, 10, 15, 100, -12, 0.5, 0.1, 0.3, -0.5, 1.5, 2.25, 0.15, 99.9, 1e-7]
EDGES: list[int | float] = [2**53, 2**53 + 1, 2**53 - 1, -(2**53), 2**63, 1e300, 2**50]
VALUES: list[Any] = [None, True, False, *NUMBERS, *TEXTS[:12], [], {}, [1], ["a", 1], {"a": 1}, 1.0, 2.0]


def strict_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(rewrite(schema, strict=True)), defaults=_JSON)


# Validators.


def _is_date(text: str) -> bool:
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    year, month, day = map(int, text.split("-"))
    return year > 0 and 1 <= month <= 12 and 1 <= day <= calendar.monthrange(year, month)[1]


def _is_time(text: str) -> bool:
    match = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?([zZ]|([+-])(\d\d):(\d\d))", text, re.ASCII)
    if match is None:
        return False
    hour, minute, second = int(match[1]), int(match[2]), int(match[3])
    offset = (int(match[7]), int(match[8])) if match[6] else (0, 0)
    if hour > 23 or minute > 59 or offset[0] > 23 or offset[1] > 59:
        return False
    minutes = (60 * hour + minute - (60 * offset[0] + offset[1]) * (-1 if match[6] == "-" else 1)) % 1440
    return second < 60 or (second == 60 and minutes == 1439)


def _is_date_time(text: str) -> bool:
    leap = text[17:19] == "60"
    return (
        text[10:11] in ("T", "t")
        and _is_date(text[:10])
        and _is_time(text[11:])
        and (not leap or text[5:10] in ("06-30", "12-31"))
    )


def _is_hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(
        0 < len(label) <= 63 and re.fullmatch("[A-Za-z0-9-]+", label) and not {label[0], label[-1]} & {"-"}
        for label in labels
    )


def _is_address(text: str, kind: Any) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return text.isascii()


def _is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    atoms = local.split(".")
    bracketed = domain.startswith("[") and domain.endswith("]") and _is_address(domain[1:-1], ipaddress.IPv4Address)
    return (
        len(local) <= 64
        and all(re.fullmatch(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+", atom) for atom in atoms)
        and (bracketed or _is_hostname(domain))
    )


def _is_uri(text: str) -> bool:
    """Roughly RFC 3986: a scheme, allowed characters, complete percent escapes, brackets only around an address."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*", text):
        return False
    _, _, rest = text.partition(":")
    rest, _, fragment = rest.partition("#")
    if "#" in fragment:
        return False
    host = re.match(r"//(?:[^@/?\[\]]*@)?\[([^\]]*)\](?::\d*)?(?=[/?]|$)", rest)
    if host:
        rest = rest[host.end() :]
        if not host[1].startswith("v") and not _is_address(host[1], ipaddress.IPv6Address):
            return False
    return not {"[", "]"} & {*rest, *fragment}


def _is_uuid(text: str, version: int) -> bool:
    if not re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text):
        return False
    return uuid.UUID(text).variant == uuid.RFC_4122 and int(text[14], 16) == version


def _is_base64(text: str, letters: bytes) -> bool:
    try:
        raw = base64.b64decode(text.encode(), letters, validate=True)
    except ValueError:
        return False
    return len(base64.b64encode(raw)) == len(text) and not set(b"+/-_") - {*letters} & {*text.encode()}


_DURATION = re.compile(
    r"P(?:\d+W|(?=.)(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)?"
    r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))?)",
    re.ASCII,
)
VALIDATORS = {
    "date": _is_date,
    "time": _is_time,
    "date-time": _is_date_time,
    "ipv4": lambda text: _is_address(text, ipaddress.IPv4Address),
    "ipv6": lambda text: _is_address(text, ipaddress.IPv6Address) and "%" not in text,
    "uuid": lambda text: re.fullmatch("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text) and uuid.UUID(text),
    "email": _is_email,
    "hostname": _is_hostname,
    "uri": _is_uri,
    "duration": lambda text: _DURATION.fullmatch(text) is not None,
    "uuid4": lambda text: _is_uuid(text, 4),
    "uuid7": lambda text: _is_uuid(text, 7),
    "base64": lambda text: _is_base64(text, b"+/"),
    "byte": lambda text: _is_base64(text, b"+/"),
    "base64url": lambda text: _is_base64(text, b"-_"),
}


def _format_checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(())
    for name, is_valid in VALIDATORS.items():
        checker.checks(name)(lambda text, is_valid=is_valid: not isinstance(text, str) or bool(is_valid(text)))
    return checker


def _pattern(_validator: object, pattern: str, text: object, _schema: object) -> Iterator[jsonschema.ValidationError]:
    if isinstance(text, str) and not re.search(PATTERNS[pattern], text):
        yield jsonschema.ValidationError(f"{text!r} does not match {pattern!r}")


def _multiple(_validator: object, step: float, value: object, _schema: object) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, float) and abs(value) > 1e9):
        return  # the parser has rounded a larger number
    if (Fraction(str(value)) / Fraction(str(step))).denominator != 1:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")


# jsonschema evaluates `pattern` and `multipleOf` by the rules of Python. Patterns of names are equal in both syntaxes.
Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": _pattern, "multipleOf": _multiple}
)
FORMAT_CHECKER = _format_checker()


class Schemas:
    """Random schemas with up to three levels and with definitions that may refer to themselves."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def root(self) -> dict[str, Any]:
        schema = self.one(0)
        while isinstance(schema, bool):
            schema = self.one(0)
        if "$ref" in json.dumps(schema):
            schema["$defs"] = {"d~/%": self.one(1), "e": self.one(1)}
            schema["$defs"]["f"] = {"$anchor": "far", "type": self.chance.choice(["integer", "string"])}
        return schema

    def one(self, depth: int) -> dict[str, Any] | bool:
        chance = self.chance
        if depth and chance.random() < 0.08:
            return chance.random() < 0.7
        if depth < 3 and chance.random() < 0.35:
            return self._applied(depth)
        kind = chance.choice(["integer", "number", "string", "array", "object", "none", "const"])
        if depth > 2 and kind in ("array", "object"):
            kind = "string"
        match kind:
            case "none":
                return chance.choice([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {}])
            case "const":
                return self._literal()
        schema: dict[str, Any] = getattr(self, f"_{kind}")(depth)
        if chance.random() < 0.85:
            schema = {"type": kind} | schema
        return schema

    def _literal(self) -> dict[str, Any]:
        values = [*VALUES, *EDGES] if self.chance.random() < 0.2 else VALUES
        if self.chance.random() < 0.5:
            return {"const": self.chance.choice(values)}
        return {"enum": self.chance.sample(values, self.chance.randint(1, 4))}

    def _integer(self, _depth: int) -> dict[str, Any]:
        return self._number(_depth)

    def _number(self, _depth: int) -> dict[str, Any]:
        chance = self.chance
        schema: dict[str, Any] = {}
        numbers = [*NUMBERS, *EDGES] if chance.random() < 0.2 else NUMBERS
        for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = chance.choice(numbers)
            outwards = value if keyword.endswith("aximum") else -value
            if outwards < 2**53 and chance.random() < 0.3:  # a larger bound counts as no bound
                schema[keyword] = value
        if chance.random() < 0.25:
            schema["multipleOf"] = chance.choice([1, 2, 3, 0.1, 0.5, 0.01, 2.5, 70000, 1.1, 0.07])
        return schema

    def _string(self, _depth: int) -> dict[str, Any]:
        chance = self.chance
        schema: dict[str, Any] = {}
        if chance.random() < 0.3:
            schema["minLength"] = chance.randint(0, 3)
        if chance.random() < 0.3:
            schema["maxLength"] = chance.randint(0, 4)
        if chance.random() < 0.4:
            schema["pattern"] = chance.choice([*PATTERNS])
        elif chance.random() < 0.4:
            schema = {"format": chance.choice([*FORMATS])}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        schema: dict[str, Any] = {}
        if chance.random() < 0.6:
            schema["items"] = self.one(depth + 1)
        if chance.random() < 0.4:
            schema["prefixItems"] = [self.one(depth + 1) for _ in range(chance.randint(1, 2))]
        if chance.random() < 0.3:
            schema["minItems"] = chance.randint(0, 2)
        if chance.random() < 0.3:
            schema["maxItems"] = chance.randint(0, 3)
        if chance.random() < 0.05:
            schema["additionalItems"] = False
        if chance.random() < 0.05:
            schema[chance.choice(["uniqueItems", "contains"])] = True
        return self._shuffled(schema)

    def _object(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        schema: dict[str, Any] = {}
        if chance.random() < 0.8:
            names = chance.sample(NAMES, chance.randint(1, 3))
            schema["properties"] = {name: self.one(depth + 1) for name in names}
        if chance.random() < 0.25:
            schema["patternProperties"] = {
                pattern: self.one(depth + 1) for pattern in chance.sample(NAME_PATTERNS, chance.randint(1, 2))
            }
        if chance.random() < 0.5:
            schema["additionalProperties"] = False if chance.random() < 0.5 else self.one(depth + 1)
        if chance.random() < 0.5:
            schema["required"] = chance.sample(NAMES, chance.randint(1, 2))
        if chance.random() < 0.2:
            schema["minProperties"] = chance.randint(0, 3)
        if chance.random() < 0.2:
            schema["maxProperties"] = chance.randint(0, 3)
        if chance.random() < 0.04:
            schema["dependentRequired"] = {"a": ["b"]}
        return self._shuffled(schema)

    def _shuffled(self, schema: dict[str, Any]) -> dict[str, Any]:
        keys = [*schema]
        self.chance.shuffle(keys)
        return {key: schema[key] for key in keys}

    def _applied(self, depth: int) -> dict[str, Any]:
        chance = self.chance
        kind = chance.choice(["allOf", "anyOf", "oneOf", "$ref", "$ref", "not", "if"])
        schema: dict[str, Any] = {}
        match kind:
            case "allOf" | "anyOf" | "oneOf":
                schema = {kind: [self.one(depth + 1) for _ in range(chance.randint(1, 3))]}
            case "$ref":
                schema = {"$ref": chance.choice(["#", "#/$defs/d~0~1%25", "#/$defs/e", "#far", "#/%24defs/e"])}
            case _ if chance.random() < 0.7:
                return self.one(depth)  # type: ignore[return-value]  # a boolean is a schema
            case _:
                schema = {kind: self.one(depth + 1)}
        if chance.random() < 0.4:
            other = self.one(3)
            if isinstance(other, dict):
                schema = self._shuffled(other | schema)
        return schema


def _target(reference: str, root: dict[str, Any]) -> Any:
    definitions = root["$defs"]
    if reference in ("#", "#far"):
        return root if reference == "#" else definitions["f"]
    return definitions["d~/%" if "d~" in reference else "e"]


def _is_endless(root: dict[str, Any]) -> bool:
    """True if a reference leads to itself without a step into the value."""

    def repeats(schema: Any, trail: tuple[int, ...]) -> bool:
        if not isinstance(schema, dict):
            return False
        if id(schema) in trail:
            return True
        trail = (*trail, id(schema))
        subschemas = [option for keyword in ("allOf", "anyOf", "oneOf") for option in schema.get(keyword, ())]
        subschemas += [schema.get(keyword) for keyword in ("not", "if")]
        if "$ref" in schema:
            subschemas.append(_target(schema["$ref"], root))
        return any(repeats(subschema, trail) for subschema in subschemas)

    return any(repeats(schema, ()) for schema in (root, *root.get("$defs", {}).values()))


class Instances:
    """Random values that mostly match a schema."""

    def __init__(self, chance: random.Random, root: dict[str, Any]) -> None:
        self.chance = chance
        self.root = root

    def one(self, schema: object, depth: int = 0) -> Any:
        chance = self.chance
        if not isinstance(schema, dict) or depth > 5 or chance.random() < 0.07:
            return chance.choice(VALUES)
        options: list[Any] = []
        for keyword in ("allOf", "anyOf", "oneOf"):
            options += [lambda sub=sub: self.one(sub, depth + 1) for sub in schema.get(keyword, ())]
        if "$ref" in schema:
            options.append(lambda: self.one(_target(schema["$ref"], self.root), depth + 1))
        if "const" in schema:
            options.append(lambda: schema["const"])
        if schema.get("enum"):
            options.append(lambda: chance.choice(schema["enum"]))
        kinds = schema.get("type", [])
        for kind in [kinds] if isinstance(kinds, str) else kinds:
            options.append(lambda kind=kind: self._of(kind, schema, depth))
        if not options:
            options.append(lambda: self._of(chance.choice(["number", "string", "array", "object"]), schema, depth))
        return chance.choice(options)()

    def _of(self, kind: str, schema: dict[str, Any], depth: int) -> Any:
        chance = self.chance
        match kind:
            case "null":
                return None
            case "boolean":
                return chance.random() < 0.5
            case "integer" | "number":
                bounds = [value for key, value in schema.items() if "imum" in key]
                base = chance.choice(bounds or NUMBERS)
                step = schema.get("multipleOf", chance.choice([0, 1, -1, 0.5, -0.5, 0.01]))
                choices: list[int | float] = [base, base + step if abs(base) < 1e15 else base, chance.choice(NUMBERS)]
                choices += [float(Fraction(str(step)) * chance.randint(-3, 30)), int(base) + chance.choice([-1, 0, 1])]
                value = chance.choice(choices)
                return int(value) if kind == "integer" and chance.random() < 0.9 else value
            case "string":
                return chance.choice(FORMATS[schema["format"]] if schema.get("format") in FORMATS else TEXTS)
            case "array":
                prefix = schema.get("prefixItems", [])
                size = chance.randint(0, max(3, schema.get("minItems", 0)))
                return [
                    self.one(prefix[index] if index < len(prefix) else schema.get("items"), depth + 1)
                    for index in range(size)
                ]
        names = {*schema.get("required", ())} if chance.random() < 0.9 else set()
        pool = [*schema.get("properties", ()), *NAMES]
        names |= {chance.choice(pool) for _ in range(chance.randint(0, 3))}
        value = {}
        for name in sorted(names):
            sub = schema.get("properties", {}).get(name)
            for pattern, other in schema.get("patternProperties", {}).items():
                if sub is None and re.search(pattern, name):
                    sub = other
            value[name] = self.one(schema.get("additionalProperties") if sub is None else sub, depth + 1)
        return value


class Reader:
    """Tests if a grammar allows a value in some spelling, with any order of names and any number of trailing zeros."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.text = ""

    def allows(self, value: object) -> bool:
        """If true, `text` is the allowed text."""
        self.matcher.reset()
        self.text = ""
        return self._value(value, self.matcher.is_accepting)

    def allows_text(self, text: str) -> bool:
        self.matcher.reset()
        return self._write(text, self.matcher.is_accepting)

    def _write(self, text: str, then: Callable[[], bool]) -> bool:
        ids = list(text.encode())
        consumed = self.matcher.try_consume_tokens(ids)
        before = self.text
        self.text += text
        if consumed == len(ids) and then():
            return True
        self.text = before
        self.matcher.rollback(consumed)
        return False

    def _value(self, value: object, then: Callable[[], bool]) -> bool:
        match value:
            case float():
                return any(self._write(text, then) for text in _spellings(value))
            case list():
                return self._write("[", lambda: self._items(value, "", then))
            case dict():
                return self._write("{", lambda: self._pairs(value, [*value], "", then))
        return self._write(json.dumps(value, ensure_ascii=False), then)

    def _items(self, values: list[object], comma: str, then: Callable[[], bool]) -> bool:
        if not values:
            return self._write("]", then)
        rest = values[1:]
        return self._write(comma, lambda: self._value(values[0], lambda: self._items(rest, ", ", then)))

    def _pairs(self, values: dict[str, object], names: list[str], comma: str, then: Callable[[], bool]) -> bool:
        if not names:
            return self._write("}", then)
        return any(self._pair(values, name, [other for other in names if other != name], comma, then) for name in names)

    def _pair(
        self, values: dict[str, object], name: str, rest: list[str], comma: str, then: Callable[[], bool]
    ) -> bool:
        key = f"{comma}{json.dumps(name, ensure_ascii=False)}: "
        return self._write(key, lambda: self._value(values[name], lambda: self._pairs(values, rest, ", ", then)))


def _spellings(value: float) -> Iterator[str]:
    text = format(Decimal(repr(value)), "f")
    yield text
    if "." in text:
        yield from (text + "0" * more for more in (1, 2, 3))
    if value == int(value):
        yield str(int(value))


def walk(matcher: LLMatcher, chance: random.Random) -> str:
    """A text of random allowed bytes; empty if it does not end."""
    matcher.reset()
    text = bytearray()
    for step in range(4 * WALK):
        if matcher.is_accepting() and (step > WALK or chance.random() < 0.3):
            return text.decode()
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = [byte for byte in np.nonzero(np.unpackbits(mask, bitorder="little"))[0].tolist() if byte < 256]
        if not allowed:
            return text.decode() if matcher.is_accepting() else ""
        closing = [byte for byte in allowed if byte in b'"}]0123456789']
        byte = chance.choice(closing if closing and (step > WALK or chance.random() < 0.5) else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return ""


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    mistakes: list[str] = field(default_factory=list)


def examine(schema: dict[str, Any], seed: int, report: Report, instances: int = 12, walks: int = 2) -> None:
    chance = random.Random(seed)
    validator = Validator(schema, format_checker=FORMAT_CHECKER)
    generator = Instances(chance, schema)
    values = [generator.one(schema) for _ in range(instances)]
    if _is_endless(schema):  # jsonschema would not end
        report.counts["endless"] += 1
        return
    valid = [validator.is_valid(value) for value in values]
    report.counts["schemas"] += 1
    about = f"seed {seed}: {json.dumps(schema, ensure_ascii=False)}"
    try:
        matcher, problem = make_matcher(BYTES, strict_grammar(schema))
    except SchemaProblem as error:
        problem = str(error)
    if problem:
        report.counts["refused"] += 1
        report.refusals[re.sub(r"#[^:]*:|[0-9.]+|'.*'", "…", problem)[:90]] += 1
        # A definition that no value matches is refused, also if it is optional.
        if "nsatisfiable" in problem and "while processing" not in problem and any(valid):
            value = values[valid.index(True)]
            report.mistakes.append(f"{about}\n  is refused as unsatisfiable, and {value!r} is valid: {problem}")
        return
    reader = Reader(matcher)
    for value, is_valid in zip(values, valid, strict=True):
        report.counts[f"{'valid' if is_valid else 'invalid'} values"] += 1
        accepted = reader.allows(value)
        if accepted != is_valid:
            report.mistakes.append(f"{about}\n  {'allows' if accepted else 'does not allow'} {reader.text or value}")
        elif accepted and isinstance(value, dict):
            text = reader.text
            for name in filter(None, value):  # another spelling is the same name
                alias = f'"\\u{ord(name[0]):04x}{name[1:]}"'
                for other in (text.replace(f'"{name}":', f"{alias}:"), f"{text[:-1]}, {alias}: [[[]]]}}"):
                    if reader.allows_text(other) and not validator.is_valid(json.loads(other)):
                        report.mistakes.append(f"{about}\n  allows {other}")
    for _ in range(walks):
        text = walk(matcher, chance)
        report.counts["texts" if text else "endless texts"] += 1
        if text and not validator.is_valid(json.loads(text)):
            report.mistakes.append(f"{about}\n  writes {text}")


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_allows_only_its_texts(name: str) -> None:
    schema = {"type": "string", "format": name}
    matcher, problem = make_matcher(BYTES, strict_grammar(schema))
    assert not problem
    for text in [*FORMATS[name], *FORMATS["email"], *FORMATS["hostname"], *TEXTS]:
        assert Reader(matcher).allows(text) == bool(VALIDATORS[name](text)), text


def _run(seeds: range) -> Report:
    report = Report()
    for seed in seeds:
        examine(Schemas(random.Random(seed)).root(), seed, report)
    return report


def _check(report: Report) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in sorted(report.counts.items()))
    print(f"\n{counts}")
    for reason, number in report.refusals.most_common(40):
        print(f"{number:6} {reason}")
    assert not report.mistakes, f"{len(report.mistakes)} mistakes\n" + "\n".join(report.mistakes[:12])


def test_grammars_of_some_generated_schemas_are_exact() -> None:
    report = _run(range(300))
    _check(report)
    assert report.counts["refused"] < report.counts["schemas"] * 0.6


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(20))
def test_grammars_of_many_generated_schemas_are_exact(batch: int) -> None:
    _check(_run(range(1000 + 1000 * batch, 2000 + 1000 * batch)))


class Patterns:
    """Random patterns of ECMA-262, each with an equal pattern in the syntax of Python."""

    ATOMS = (
        ("a", "a"), ("b", "b"), ("1", "1"), (".", "[^\n\r\u2028\u2029]"), (r"\d", "[0-9]"), (r"\D", "[^0-9]"),
        (r"\w", "[0-9A-Za-z_]"), (r"\W", "[^0-9A-Za-z_]"), ("[ab]", "[ab]"), ("[^a]", "[^a]"),
        (r"[^\d\-x]", "[^0-9x-]"),
        (r"[\w-]", "[0-9A-Za-z_-]"), ("[a-c1]", "[a-c1]"), (r"[\]^-]", r"[\]^-]"), ("é", "é"), (r"\u{1F642}", "🙂"),
        ("[[]", r"[\[]"), (r"\.", r"\."), (r"\/", "/"), ("-", "-"), ("]", r"\]"), ("}", r"\}"), (r"[\b]", "[\b]"),
        (r"\p{Lu}", "[A-ZÉ]"), ("(?i:k)", "[kK]"),
        ("(?i:(?:k)x)", "[kK][xX]"), ("[+--]", "[+,-]"), ("[a&&b]", "[ab&]"),
    )  # fmt: skip
    LETTERS = "ab1kKx_ .é🙂[]-^/}\n\r\u2028٣A&+,\x85"

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def one(self, depth: int = 0) -> tuple[str, str]:
        chance = self.chance
        kind = chance.random()
        if depth > 3 or kind < 0.35:
            return chance.choice(self.ATOMS)
        if kind < 0.65:
            return self._joined(depth, "")
        if kind < 0.8:
            ecma, python = self._joined(depth, "|")
            return f"(?:{ecma})", f"(?:{python})"
        ecma, python = self.one(depth + 1)
        times = chance.choice(["*", "+", "?", "{2}", "{1,2}", "{0,}", "??"])
        opening = chance.choice(["(?:", "(", "(?<n>"])
        return f"{opening}{ecma}){times}", f"(?:{python}){times}"

    def _joined(self, depth: int, between: str) -> tuple[str, str]:
        pairs = [self.one(depth + 1) for _ in range(self.chance.randint(1, 3))]
        return between.join(ecma for ecma, _ in pairs), between.join(python for _, python in pairs)

    def texts(self) -> list[str]:
        return ["".join(self.chance.choices(self.LETTERS, k=self.chance.randint(0, 4))) for _ in range(20)]


@pytest.mark.parametrize("count", [150, pytest.param(6000, marks=pytest.mark.slow)])
def test_grammars_of_generated_patterns_are_exact(count: int) -> None:
    counts: Counter[bool] = Counter()
    for seed in range(count):
        chance = random.Random(seed)
        generated = Patterns(chance)
        ecma, python = generated.one()
        matcher, problem = make_matcher(BYTES, LLMatcher.grammar_from_regex(translate(ecma)))
        assert not problem, (ecma, problem)
        reader = Reader(matcher)
        texts = [*generated.texts(), *(text for text in (walk(matcher, chance) for _ in range(3)) if len(text) < 40)]
        for text in texts:
            matches = re.fullmatch(python, text) is not None
            # For \\p, the pattern of Python knows only the letters of LETTERS; a walk may write others.
            is_comparable = set(text) <= set(Patterns.LETTERS) or "p{" not in ecma
            assert not is_comparable or reader.allows_text(text) == matches, (ecma, python, text)
            counts[matches] += 1
    assert min(counts[True], counts[False]) > count
