"""Arguments that a format does not write as JSON: texts, values of Python, and objects with bare keys."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_CHAIN = 16  # references in a chain
MAX_LITERAL = 2**16  # characters of a value of Python
_TYPE_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
_NAMES = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class Tools:
    """The names of the tools of a request, and the types of their parameters."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __iter__(self) -> Iterator[str]:
        return iter(self._schemas)

    def parameters(self, name: str) -> list[str]:
        """The names of the parameters of a tool, in order."""
        return list(properties(self._schemas.get(name, {})))

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that the schema of a parameter allows; empty: unknown."""
        schema = self._schemas.get(name, {})
        return types_of(properties(schema).get(key, {}), schema)


def properties(schema: Any) -> Mapping[str, Any]:
    """The properties of an object schema, after its reference."""
    schema = resolve(schema, schema)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def resolve(schema: Any, root: Any) -> Any:
    """The schema at the end of a chain of local references."""
    for _ in range(MAX_CHAIN):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        target = root
        for name in schema["$ref"].removeprefix("#").split("/")[1:]:
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        schema = target
    return schema


def types_of(schema: Any, root: Any, depth: int = 8) -> frozenset[str]:
    """The JSON types that a schema allows; empty: unknown."""
    schema = resolve(schema, root)
    if not isinstance(schema, dict) or not depth:
        return frozenset()
    known = listed_types(schema) or frozenset(map(type_of, constants(schema) or []))
    for keyword, combine in (("anyOf", _union), ("oneOf", _union), ("allOf", _intersection)):
        if not known and isinstance(schema.get(keyword), list):
            known = combine([types_of(option, root, depth - 1) for option in schema[keyword]])
    return known


def listed_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types in the keyword `type`; empty: none."""
    named = schema.get("type", [])
    names = [named] if isinstance(named, str) else named
    return frozenset(name for name in names if isinstance(name, str)) & TYPES


def constants(schema: Mapping[str, Any]) -> Any:
    """The values of `const` or `enum`; None: the schema has neither."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _union(options: Sequence[frozenset[str]]) -> frozenset[str]:
    """All types; empty if those of an option are unknown."""
    return frozenset().union(*options) if all(options) else frozenset()


def _intersection(options: Sequence[frozenset[str]]) -> frozenset[str]:
    """The types that all options with known types allow."""
    known = [types for types in options if types]
    return frozenset.intersection(*known) if known else frozenset()


def type_of(value: object) -> str:
    """The JSON type of a value, as json.loads returns it."""
    return _TYPE_NAMES.get(type(value), "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """A parameter as JSON. `types`: the types that its schema allows; empty: unknown.

    The text is JSON if it is JSON of an allowed type. Some templates write values of Python. Otherwise it is a text.
    """
    if types == {"string"}:
        return dumps(text)
    value = parsed(text)
    if value is not None and (not types or allows(types, type_of(value[0]))):
        return text.strip() if _is_json(text) else dumps(value[0])
    return dumps(text)


def keyword_json(text: str) -> str:
    """The value of a keyword of Python as JSON. Some templates write texts between quotes without escapes."""
    text = text.strip()
    value = parsed(text)
    if value is not None:
        return dumps(value[0])
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return dumps(text[1:-1] if is_quoted else text)


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def parsed(text: str) -> tuple[Any] | None:
    """The value of a JSON text or of a literal of Python; None if the text is neither."""
    text = text.strip()
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, allow_nan=False)  # 1e400 is no number of JSON's clients
        return (value,)
    except (ValueError, RecursionError):
        pass
    if text in _NAMES:
        return (_NAMES[text],)
    if len(text) > MAX_LITERAL:
        return None
    try:
        value = _plain(ast.parse(text, mode="eval").body)
        dumps(value).encode()
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return (value,)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _plain(node: ast.expr) -> Any:
    """The value of a Python literal of a type that JSON also has. Raises ValueError."""
    match node:
        case ast.Constant(value=None | bool() | int() | str() as value):
            return value
        case ast.Constant(value=float() as value) if value - value == 0:
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=ast.Constant(value=int() | float() as value)):
            return -value if isinstance(sign, ast.USub) else value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _plain(value) for key, value in zip(keys, values, strict=True)}
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key must be a text")


def allows(types: frozenset[str], name: str) -> bool:
    """Whether one of the types includes the type `name`."""
    return name in types or (name == "integer" and "number" in types)


def entries_json(text: str, quote: str) -> str | None:
    """The JSON of an object or list with bare keys and special quotes, such as `{key:<|"|>text<|"|>,list:[1,true]}`;
    None if the text has another form."""
    mark = re.escape(quote)
    bare = rf"(?P<bare>(?:(?!{mark})[^{{}}\[\],])+)"
    tokens = re.compile(rf"{mark}(?P<text>.*?){mark}|(?P<sign>[{{}}\[\],])|{bare}|(?P<rest>.)", re.DOTALL)
    written: list[str] = []
    brackets = ""  # those that are open
    for token in tokens.finditer(text):
        match token.lastgroup:
            case "text":
                written.append(dumps(token["text"]))
            case "sign":
                sign = token["sign"]
                brackets = brackets + sign if sign in "{[" else brackets[: len(brackets) - (sign in "}]")]
                written.append(sign)
            case "bare" if token["bare"].strip():
                written.append(_bare_json(token["bare"], is_key=brackets[-1:] == "{" and written[-1] in ("{", ",")))
            case "rest":  # a quote that is not closed
                return None
    try:
        return dumps(json.loads("".join(written)))
    except (ValueError, RecursionError):
        return None


def _bare_json(text: str, *, is_key: bool) -> str:
    """The JSON of text without quotes: a value, or `key:value`, or `key:` before a value, or `:value` after a key."""
    has_colon = is_key or text.lstrip().startswith(":")
    key, colon, word = text.partition(":") if has_colon else ("", "", text)
    value = parsed(word)
    name = dumps(key.strip().strip('"')) if is_key else ""
    return name + colon + (dumps(word.strip() if value is None else value[0]) if word.strip() else "")
