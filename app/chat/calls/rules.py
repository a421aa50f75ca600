"""The rules of tool calls as a grammar, in the syntax of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .reading import ARGUMENT_KEYS, OTHER_KEYS
from .records import CallFormat, Field, Literal
from .values import MAX_CHAIN, allows, constants, dumps, entries_json, listed_types, type_of, types_of
from .writing import Notation, literal, notation_of

_KEY = r"[^\s<>\"'=:,(){}\[\]]{1,128}"
_TEXT = "(?s:.*)"
_FREE_ARGUMENTS = {
    "type": ["object", "array", "string", "null"]
}  # the types of arguments that the reader of calls reports
_SPACES = re.compile(r"(\s+)")
_ROOT_KEYWORDS = {"$ref", "type", "$defs", "x-guidance"}
_OBJECT_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$defs", "x-guidance"}


class SchemaRefused(ValueError):
    """A schema has a keyword that the format cannot enforce. The message names it, and the JSON path of the schema."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"{where}: the tool-call format of this model cannot enforce {problem}")
        self.where = where


@dataclass(frozen=True)
class ToolSchema:
    """The name of a tool, and the schema of its arguments with all its definitions; None: any arguments."""

    name: str
    schema: dict[str, Any] | None
    where: str  # JSON path of the schema, for errors
    is_strict: bool  # keywords that the format cannot enforce are refused; otherwise the value is free

    @property
    def definitions(self) -> Mapping[str, Any]:
        """The definitions, by their references."""
        named = (self.schema or {}).get("$defs", {})
        return {f"#/$defs/{name}": definition for name, definition in named.items()}


class Rules:
    """Collects rules. The model may spell their texts with any tokens."""

    def __init__(
        self, form: CallFormat, pieces: Callable[[str], list[str | int]], json_options: Any, *, exact: bool = True
    ) -> None:
        """`pieces` divides a text of the format into control tokens and other text. `exact`: calls have the white space
        of the format; otherwise all spellings that the reader of calls accepts."""
        self._form = form
        self._pieces = pieces
        self._options = json_options
        self._exact = exact
        self._definitions: dict[tuple[str, str], str] = {}  # rules, by the name of the tool and the reference
        self.lines: list[str] = ['%llguidance {"no_forcing": true}', r"SPACE: /[ \t\r\n]{1,32}/", "TAIL: /(?s:.+)/"]

    def group(self, tools: Sequence[ToolSchema], *, parallel: bool) -> str:
        """The name of the rule of one or more groups of calls."""
        form = self._form
        call = self._calls(tools)
        if not parallel or (form.at_start and form.separator is None):
            return self._rule(self._sequence(form.begin, call, form.end))
        if form.separator is not None:
            return self._rule(self._sequence(form.begin, call, f"({self._next_calls(tools)})*", form.end))
        one = self._rule(self._sequence(form.begin, call, form.end))
        return self._rule(f"{one} ({self._sequence(form.gap, one)})*")

    def rest(self, tools: Sequence[ToolSchema], *, parallel: bool) -> str:
        """The name of the rule of a group after its `begin`. The token that ends it may have more text."""
        form = self._form
        call = self._calls(tools)
        more = f"({self._next_calls(tools)})*" if parallel and form.separator is not None else ""
        return self._rule(f"SPACE? {self._sequence(call, more, form.end)} TAIL?")

    def rest_of_call(self, tool: ToolSchema) -> str:
        """The name of the rule of a call from its arguments on. The token that ends it may have more text."""
        index = self._form.parts.index(Field(self._form.arguments))
        arguments, *rest = (self._part(tool, part) for part in self._form.parts[index:])
        return self._rule(f"SPACE? {arguments} SPACE? {' '.join(rest)} TAIL?")

    def _calls(self, tools: Sequence[ToolSchema]) -> str:
        if self._form.is_object and not self._exact:
            return self._rule(" | ".join(self._objects(tools)))
        return self._rule(" | ".join(self._call(tool, self._form.parts) for tool in tools))

    def _next_calls(self, tools: Sequence[ToolSchema]) -> str:
        """A separator and a call. They share a lexeme, because the end of a group may begin with the separator: its
        lexeme would then hide a separate lexeme of the separator."""
        separator = self._form.separator or ""
        first, *others = self._form.parts
        if not isinstance(first, Literal) or (self._form.is_object and not self._exact):
            return self._sequence(separator, self._calls(tools))
        parts = (Literal(separator + first.text), *others)
        return self._rule(" | ".join(self._call(tool, parts) for tool in tools))

    def _objects(self, tools: Sequence[ToolSchema]) -> list[str]:
        """Calls that are JSON objects. Each rule is a schema: a hand-written lexeme would hide those of other rules."""
        keys = dict(re.findall(r'"(\w+)": "?\$(\w+)', self._form.call))  # key -> its field, in the order of the format
        name, arguments = (next(key for key in keys if keys[key] == field) for field in ("name", "arguments"))
        before: dict[str, Any] = {key: True for key in OTHER_KEYS if key not in keys}
        members = before | dict.fromkeys(keys, True)
        free = [tool.name for tool in tools if tool.schema is None]
        rules = []
        if free:
            values: dict[str, Any] = {name: {"enum": free}, arguments: _FREE_ARGUMENTS}
            others = dict.fromkeys(sorted(ARGUMENT_KEYS - {arguments}), _FREE_ARGUMENTS)
            rules.append(self._object(members | values | others, [name], {}))
        for tool in tools:
            if tool.schema is not None:
                root = {key: value for key, value in tool.schema.items() if key not in ("$defs", "x-guidance")}
                values = {name: {"const": tool.name}, arguments: root}
                rules.append(self._object(members | values, [name, arguments], tool.schema))
        return rules

    def _object(self, properties: Mapping[str, Any], required: Sequence[str], root: Mapping[str, Any]) -> str:
        closed = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return self._json(closed | {"$defs": root.get("$defs", {})})

    def _call(self, tool: ToolSchema, parts: Sequence[Literal | Field]) -> str:
        return " ".join(self._part(tool, part) for part in parts)

    def _part(self, tool: ToolSchema, part: Literal | Field) -> str:
        match part:
            case Literal(text) if not text.strip() and not self._form.parameter:
                return self._exact_text(text)
            case Literal(text):
                return self._text(text)
            case Field("name"):
                return json.dumps(tool.name)
            case Field("index"):
                return "/[0-9]{1,3}/"
            case Field("id"):
                return "/[a-zA-Z0-9]{9}/"
            case Field("arguments"):
                return self._json(_FREE_ARGUMENTS if tool.schema is None else tool.schema)
            case Field("parameters"):
                return self._parameters(tool)
        return self._entries(tool)

    def _rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _terminal(self, body: str, *, lazy: bool = False) -> str:
        name = f"t{len(self.lines)}" if lazy else f"T{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {body}" if lazy else f"{name}: {body}")
        return name

    def _defined(self, schema: Mapping[str, Any], tool: ToolSchema, name: str, build: Callable[[Any], str]) -> str:
        """The rule of a schema that is a reference: one rule for each target, which may refer to itself. `build`: the
        expression of the target."""
        _check_keywords(schema, {"$ref"}, name, tool)
        reference = schema["$ref"]
        key = (tool.name, reference)
        if key not in self._definitions:
            place = len(self.lines)
            rule = self._definitions[key] = self._rule('""')
            try:
                self.lines[place] = f"{rule}: {build(tool.definitions[reference])}"
            except SchemaRefused:
                del self._definitions[key]
                raise
        return self._definitions[key]

    def _json(self, schema: Mapping[str, Any] | bool) -> str:
        value = {} if schema is True else schema
        if isinstance(value, Mapping):
            value = {**value, "x-guidance": self._options}
        return self._rule(f"%json {json.dumps(value)}")

    def _sequence(self, *items: str) -> str:
        """Texts of the format and names of rules, one after the other."""
        return " ".join(item if _is_rule(item) else self._text(item) for item in items if item)

    def _text(self, text: str) -> str:
        """A text of the format. Unless calls are exact, white space may differ where the reader accepts it."""
        if self._exact:
            return self._exact_text(text)
        words = _SPACES.split(text)  # spaces at odd indices
        for index in range(1, len(words), 2):
            before, after = words[index - 1], words[index + 1]
            is_needed = before and after and not (before[-1] in ">]" and after[0] in "<[{")
            words[index] = "SPACE" if is_needed else "SPACE?"
        words[::2] = map(self._exact_text, words[::2])
        return " ".join(words)

    def _exact_text(self, text: str) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in self._pieces(text))

    def _until(self, pattern: str, tail: str) -> str:
        """A text that matches a pattern, and the text of the format after it, which the first text does not have."""
        marker = tail.strip()
        first, *_ = self._pieces(marker)
        after = self._text(tail[tail.index(marker) + len(marker) :])
        if isinstance(first, int):  # a lexeme ends at a control token, and has the white space before it
            return f"{self._terminal(f'/{pattern}/')}? {self._exact_text(marker)} {after}"
        start = tail[: tail.index(marker)] + first
        lexeme = self._terminal(f"/{pattern}{_escaped(start)}/", lazy=True)
        return f"{lexeme} {self._exact_text(marker[len(first) :])} {after}"

    def _parameters(self, tool: ToolSchema) -> str:
        """The parameters in the order of the schema. The required ones must be present."""
        if tool.schema is None:
            return f"({self._rule(self._any_parameter())})*"
        known, required = _known(tool.schema, tool)
        if not known and tool.schema.get("additionalProperties") is not False:
            return f"({self._rule(self._any_parameter())})*"
        rules = []
        for name, schema in known.items():
            rule = self._rule(self._parameter(name, schema, tool))
            rules.append(rule if name in required else f"{rule}?")
        return " ".join(rules)

    def _any_parameter(self) -> str:
        parts = self._form.parameter_parts
        fields = {"key": f"/{_KEY}/", "raw": '("true" | "false")', "type": "/[a-z]{1,10}/"}
        before = _text_of(parts[-3])
        return f"{self._head(fields)} {self._text(before)} {self._until(_TEXT, _text_of(parts[-1]))}"

    def _head(self, fields: Mapping[str, str]) -> str:
        """The parts of a parameter before the literal text that precedes its value."""
        parts = self._form.parameter_parts[:-3]
        return " ".join(self._text(part.text) if isinstance(part, Literal) else fields[part.name] for part in parts)

    def _parameter(self, name: str, schema: Any, tool: ToolSchema) -> str:
        root = tool.schema or {}
        tail = _text_of(self._form.parameter_parts[-1])
        types = types_of(schema, root)
        is_text = types == {"string"}
        kind = "string" if is_text else next(iter(sorted(types)), "object").replace("integer", "number")
        fields = {"key": quoted(name), "raw": '"true"' if is_text else '"false"', "type": json.dumps(kind)}
        has_kind = any(isinstance(part, Field) and part.name in ("raw", "type") for part in self._form.parameter_parts)
        if has_kind and not is_text:
            value = f"{self._json(_with_definitions(schema, root))} {self._text(tail)}"
        else:
            value = _or_free(tool, lambda: self._value(schema, tail, tool, name), lambda: self._until(_TEXT, tail))
        before = self._exact_text(_text_of(self._form.parameter_parts[-3]))  # more white space is part of the value
        return f"{self._head(fields)} {before} {value}"

    def _value(self, schema: Any, tail: str, tool: ToolSchema, name: str) -> str:
        """The value of a parameter whose type is not written, and the text after it."""
        root = tool.schema or {}
        if not isinstance(schema, dict):
            return self._until(_TEXT, tail)
        if "$ref" in schema:
            return self._defined(schema, tool, name, lambda target: self._value(target, tail, tool, name))
        options = _options(schema, name, tool)
        if options:
            return f"({' | '.join(self._value(option, tail, tool, name) for option in options)})"
        values = _constants(schema, name, tool)
        if values is not None:
            return self._choice(values, tail)
        types = types_of(schema, root)
        if types and "string" not in types:
            return f"{self._json(_with_definitions(schema, root))} {self._text(tail)}"
        return self._until(_pattern_of(schema, name, tool), tail)

    def _choice(self, values: Sequence[Any], tail: str) -> str:
        """One of the values, and the text after it."""
        texts = (value if isinstance(value, str) else dumps(value) for value in values)
        end = tail.rstrip()
        return f"({' | '.join(map(quoted, texts))}) {self._exact_text(end)} {self._text(tail[len(end) :])}"

    def _entries(self, tool: ToolSchema) -> str:
        """Arguments as entries in the notation of the format."""
        notation = notation_of(self._form)
        if tool.schema is None:
            return self._any_entries(notation, self._any_value(notation))
        return self._members(tool.schema, tool, notation)

    def _members(self, schema: Mapping[str, Any], tool: ToolSchema, notation: Notation, *, nested: bool = False) -> str:
        """The members of an object, without its brackets: in the order of the schema, with the required ones."""
        known, required = _known(schema, tool)
        if not known and schema.get("additionalProperties") is not False:
            return self._any_entries(notation, self._any_value(notation), nested=nested)
        equals = notation.colon if nested else notation.equals
        items = []
        for name, value in known.items():
            key = notation.key(name) if nested else name
            enforced = partial(self._notated, value, tool, notation, name)
            text = _or_free(tool, enforced, partial(self._any_value, notation))
            body = f"{quoted(key + equals)} {text}"
            items.append((self._rule(body), name in required))
        return self._optional_sequence(items, self._text(notation.comma))

    def _optional_sequence(self, items: Sequence[tuple[str, bool]], comma: str) -> str:
        """Items in order, with commas between those that are there. Each item has a flag: it must be there."""
        first = after = '""'
        for rule, is_required in reversed(items):
            skip_first, skip_after = ("", "") if is_required else (f" | {first}", f" | {after}")
            first = self._rule(f"{rule} {after}{skip_first}")
            after = self._rule(f"{comma} {rule} {after}{skip_after}")
        return first

    def _any_entries(self, notation: Notation, value: str, *, nested: bool = False) -> str:
        key = f"/{_KEY}/"
        if nested:
            key = notation.any_key or key
        entry = self._rule(f"{key} {self._text(notation.colon if nested else notation.equals)} {value}")
        return f"({entry} ({self._text(notation.comma)} {entry})*)?"

    def _any_value(self, notation: Notation) -> str:
        """The name of the rule of any value."""
        name = f"any_{len(self.lines)}"
        self.lines.append("")
        place = len(self.lines) - 1
        scalars = [self._string({}, notation, "", None), self._json({"type": "number"})]
        scalars += [json.dumps(word) for word in notation.words.values()]
        comma = self._text(notation.comma)
        entries = self._any_entries(notation, name, nested=True)
        values = [*scalars, f'"[" ({name} ({comma} {name})*)? "]"', f'"{{" {entries} "}}"']
        self.lines[place] = f"{name}: {' | '.join(values)}"
        return name

    def _notated(self, schema: Any, tool: ToolSchema, notation: Notation, name: str) -> str:
        """A value of a schema in a notation."""
        root = tool.schema or {}
        if not isinstance(schema, dict) or not types_of(schema, root):
            return self._any_value(notation)
        if "$ref" in schema:
            return self._defined(schema, tool, name, lambda target: self._notated(target, tool, notation, name))
        options = _options(schema, name, tool)
        if options:
            return f"({' | '.join(self._notated(option, tool, notation, name) for option in options)})"
        values = _constants(schema, name, tool)
        if values is not None:
            return f"({' | '.join(self._constant(value, tool, notation, name) for value in values)})"
        kinds = sorted(types_of(schema, root))
        return f"({' | '.join(self._typed(kind, schema, tool, notation, name) for kind in kinds)})"

    def _constant(self, value: object, tool: ToolSchema, notation: Notation, name: str) -> str:
        """A value of a schema. Its texts are spelled without control tokens, but the quotes may be control tokens."""
        if notation.quote == '"':
            return quoted(literal(value, notation))
        text = literal(value, notation)
        if entries_json(text, notation.quote) != dumps(value):
            raise SchemaRefused(tool.where, f"a text with {notation.quote} in {name}")
        quote = f" {self._exact_text(notation.quote)} "
        return quote.join(map(quoted, text.split(notation.quote)))

    def _typed(self, kind: str, schema: dict[str, Any], tool: ToolSchema, notation: Notation, name: str) -> str:
        match kind:
            case "string":
                return self._string(schema, notation, name, tool)
            case "boolean":
                return f"({json.dumps(notation.words[True])} | {json.dumps(notation.words[False])})"
            case "null":
                return json.dumps(notation.words[None])
            case "array":
                _check_keywords(schema, {"type", "items"}, name, tool)
                item = self._rule(self._notated(schema.get("items", True), tool, notation, name))
                return f'"[" ({item} ({self._text(notation.comma)} {item})*)? "]"'
            case "object":
                return f'"{{" {self._members(schema, tool, notation, nested=True)} "}}"'
        return self._json(_with_definitions(schema, tool.schema or {}))

    def _string(self, schema: dict[str, Any], notation: Notation, name: str, tool: ToolSchema | None) -> str:
        if notation.quote == '"':
            return self._json({**schema, "type": "string"})
        pattern = _pattern_of(schema, name, tool) if tool else _TEXT
        return f"{self._text(notation.quote)} {self._until(pattern, notation.quote)}"


def _or_free(tool: ToolSchema, enforced: Callable[[], str], free: Callable[[], str]) -> str:
    """The rule of a value that follows its schema. If the format cannot enforce the schema and the tool is not strict,
    the rule of any value."""
    try:
        return enforced()
    except SchemaRefused:
        if tool.is_strict:
            raise
        return free()


def _is_rule(item: str) -> bool:
    return re.fullmatch(r"r\d+|\(.*\)\*", item, re.DOTALL) is not None


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _escaped(text: str) -> str:
    """A text as a regular expression of Rust between slashes."""
    return "".join(char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):X}}}" for char in text)


def _text_of(part: Literal | Field) -> str:
    assert isinstance(part, Literal)
    return part.text


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    return {"$defs": root.get("$defs", {}), **(schema if isinstance(schema, dict) else {})}


def _known(schema: Mapping[str, Any], tool: ToolSchema) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The properties of an object and the required ones; none if the format cannot enforce the schema and need not."""
    try:
        return _properties(schema, tool)
    except SchemaRefused:
        if tool.is_strict:
            raise
        return {}, frozenset()


def _properties(schema: Mapping[str, Any], tool: ToolSchema) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The properties of an object and the required ones. Raises SchemaRefused for other constraints."""
    for _ in range(MAX_CHAIN):
        if "$ref" not in schema:
            break
        _check_keywords(schema, _ROOT_KEYWORDS, "the object", tool)
        schema = tool.definitions[schema["$ref"]]
        if not isinstance(schema, dict):
            return {}, frozenset()
    _check_keywords(schema, _OBJECT_KEYWORDS, "the object", tool)
    known = schema.get("properties", {})
    required = frozenset(schema.get("required", ()))
    unknown = required - known.keys()
    if unknown:
        raise SchemaRefused(tool.where, f"the required property {min(unknown)!r}, which has no schema")
    return known, required


def _check_keywords(schema: Mapping[str, Any], allowed: set[str], name: str, tool: ToolSchema) -> None:
    others = schema.keys() - allowed
    if others:
        raise SchemaRefused(tool.where, f"the keyword {min(others)!r} of {name}")


def _options(schema: Mapping[str, Any], name: str, tool: ToolSchema) -> Sequence[Any]:
    """The schemas in `anyOf`. Raises SchemaRefused for another keyword that excludes values of theirs."""
    options: Sequence[Any] = schema.get("anyOf", ())
    if options:
        _check_keywords(schema, {"anyOf", "type"}, name, tool)
        _check_type(schema, [types_of(option, tool.schema) for option in options], name, tool)
    return options


def _constants(schema: Mapping[str, Any], name: str, tool: ToolSchema) -> Sequence[Any] | None:
    """The values in `const` or `enum`; None: there are none. Raises SchemaRefused for another keyword that excludes
    some of them."""
    values: Sequence[Any] | None = constants(schema)
    if values is not None:
        _check_keywords(schema, {"const" if "const" in schema else "enum", "type"}, name, tool)
        _check_type(schema, [frozenset({type_of(value)}) for value in values], name, tool)
    return values


def _check_type(schema: Mapping[str, Any], choices: Sequence[frozenset[str]], name: str, tool: ToolSchema) -> None:
    """Raises SchemaRefused if `type` excludes a type of a choice, or if the types of a choice are unknown (an empty
    set)."""
    listed = listed_types(schema)
    if listed and not all(types and all(allows(listed, kind) for kind in types) for types in choices):
        raise SchemaRefused(tool.where, f"the keyword 'type' of {name}, which excludes some of its choices")


def _pattern_of(schema: Mapping[str, Any], name: str, tool: ToolSchema | None) -> str:
    """The regular expression of a text with the constraints of a schema."""
    if tool is None:
        return _TEXT
    _check_keywords(schema, {"type", "minLength", "maxLength", "pattern"}, name, tool)
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if "pattern" not in schema:
        return f"(?s:.{{{low},{high}}})" if low or high != "" else _TEXT
    if low or high != "":
        raise SchemaRefused(tool.where, f"the pattern of {name} together with its length")
    pattern: str = schema["pattern"]
    if not (pattern.startswith("^") and pattern.endswith("$") and "|" not in pattern and "^" not in pattern[1:]):
        raise SchemaRefused(tool.where, f"the pattern of {name}: it must begin with ^ and end with $, without | and ^")
    return pattern[1:-1]
