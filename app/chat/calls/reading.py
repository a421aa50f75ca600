"""Reads the calls of one format and streams their arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from ...frames import ToolCallPiece
from .records import CallFormat, Field, Literal
from .source import Nesting, NotACall, Source, Steps, words_of
from .values import Tools, dumps, entries_json, json_of, keyword_json
from .writing import example

NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_ID = re.compile(r"[^\s<\[\]|\"']{1,128}")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEYWORD = re.compile(r"\s*([^\s=(){}\[\],\"']{1,256})\s*=(?!=)")
_NAME_KEYS = frozenset({"name", "tool_name", "function_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args", "params", "kwargs", "input", "tool_input"})
OTHER_KEYS = ("id", "tool_call_id", "call_id", "type", "index")
_PYTHON_QUOTES = ('"""', "'''", '"', "'")

# Called before the first call of a group, without a name, and when a call is known, with its name. The third argument
# is the text that follows so far.
Watch = Callable[[CallFormat, str, str], None]


@dataclass
class Calls:
    """Collects the parts of the calls of an answer. `new_id` makes the id of a call from its number and its name."""

    new_id: Callable[[int, str], str]
    count: int = 0  # number of calls so far
    parts: list[ToolCallPiece] = field(default_factory=list)
    _ids: set[str] = field(default_factory=set)
    _is_empty: bool = True  # the last call has no arguments yet

    def open(self, name: str, identifier: str = "") -> None:
        """Begin a call."""
        if not identifier or identifier in self._ids:
            identifier = self.new_id(self.count, name)
        self._ids.add(identifier)
        self.parts.append(ToolCallPiece(index=self.count, id=identifier, name=name))
        self.count += 1
        self._is_empty = True

    def write(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        if not text:
            return
        self._is_empty = False
        index = self.count - 1
        if not self.parts or self.parts[-1].index != index:
            self.parts.append(ToolCallPiece(index=index))
        self.parts[-1].arguments += text

    def close(self, *, cut: bool) -> None:
        """End the last call. `cut`: the answer reached its limit, so that arguments may be missing."""
        if self._is_empty and not cut:
            self.write("{}")


class GroupReader:
    """Reads groups of calls of one format from a source."""

    def __init__(
        self,
        form: CallFormat,
        source: Source,
        calls: Calls,
        tools: Tools,
        watch: Watch,
        *,
        one_call: bool = False,
    ) -> None:
        """`one_call`: a group ends after its first call."""
        self._form = form
        self._one_call = one_call
        self._source = source
        self._calls = calls
        self._tools = tools
        self._watch = watch
        self._is_open = False  # the arguments of a call are read

    def is_start(self, text: str) -> bool:
        """Whether a text that ended too early is the start of a call: any text after a marker; without a marker, the
        start of a call of a tool."""
        if not self._form.at_start:
            return True
        text = "".join(text.split())
        return any("".join(example(self._form, [(name, {})]).split()).startswith(text) for name in self._tools)

    def read(self) -> Steps[None]:
        """Read one group. Raises NotACall if the text is no call. After the first call, text that is no call ends the
        group, and so does the end of the text. The caller has marked the source."""
        form = self._form
        source = self._source
        if not (yield from source.accept(form.begin)) and not form.call_trigger:
            raise NotACall
        if not form.at_start:
            self._watch(form, "", source.rest)
        if form.is_object and not form.at_start:
            yield from source.skip_space("[")
        yield from self._call()
        while not self._one_call and (yield from self._next_call()):
            pass

    def _next_call(self) -> Steps[bool]:
        """Read the end of the group, or another call. False if the group has ended."""
        form, source = self._form, self._source
        if (yield from source.accept_end(form.end)):
            return False
        if self._is_cut() and form.end:
            source.rest = ""
        if source.ended or not (form.end or form.separator is not None):
            return False
        source.mark()
        yield from source.skip_space(",;}]")
        try:
            if not (yield from source.accept_end(form.end)):
                yield from self._call()
                return True
        except NotACall:
            if self._is_cut():
                source.rest = ""  # the start of another call
            else:
                source.rewind()
        source.commit()
        return False

    def _is_cut(self) -> bool:
        """Whether the limit of the answer cut the text that the reader needed."""
        return self._source.cut and self._source.starved

    def _call(self) -> Steps[None]:
        """Read a call. Raises NotACall, but not after the name of the call was reported."""
        self._is_open = False
        try:
            yield from self._object() if self._form.is_object else self._parts()
        except NotACall:
            if not self._is_open:
                raise
            if self._is_cut():
                self._source.rest = ""  # the start of a text of the call
        self._calls.close(cut=self._source.cut)

    def _open(self, name: str, identifier: str = "") -> None:
        if not NAME.fullmatch(name) or (self._form.at_start and name not in self._tools):
            raise NotACall
        self._source.commit()
        self._is_open = True
        self._calls.open(name, identifier)
        self._watch(self._form, name, self._source.rest)

    def _parts(self) -> Steps[None]:
        """Read a call part by part."""
        name = ""
        identifier = ""
        parts = self._form.parts
        for index, part in enumerate(parts):
            if isinstance(part, Literal):
                yield from self._source.expect(part.text)
            elif part.name == "name":
                yield from self._source.skip_space()
                name = yield from self._source.take_match(NAME)
            elif part.name in ("id", "index"):
                text = yield from self._source.take_match(_ID)
                identifier = text if part.name == "id" else ""
            else:
                yield from self._check_name(name, index)
                yield from self._check_arguments(part)
                self._open(name, identifier)
                yield from _ARGUMENTS[part.name](self, name)

    def _check_name(self, name: str, index: int) -> Steps[None]:
        """Raises NotACall for a word that only white space separates from other text than arguments."""
        form = self._form
        between = form.parts[index - 1]
        if isinstance(between, Literal) and between.text.strip():
            return
        if name in self._tools and not form.at_start:
            return
        source = self._source
        yield from source.skip_space()
        head = words_of(_text(form.parameter_parts[0]))[0] if form.parameter else "{"
        while head.startswith(source.rest) and head != source.rest and (yield from source.more()):
            pass
        if not source.rest.startswith(head):
            raise NotACall

    def _check_arguments(self, part: Field) -> Steps[None]:
        """Raises NotACall if the JSON value is no object of arguments, such as a tool name in a similar format."""
        source = self._source
        if part.name != "arguments":
            return
        yield from source.skip_space()
        word = "null"
        while word.startswith(source.rest) and word != source.rest and (yield from source.more()):
            pass
        if source.rest and not source.rest.startswith(("{", "[", '"', "null", "<")):
            raise NotACall

    def _json_arguments(self, name: str) -> Steps[None]:
        yield from self._json_value(self._calls.write)

    def _json_value(self, write: Callable[[str], None]) -> Steps[None]:
        """Read arguments in JSON. An object is passed on as it arrives. Empty text and null are no arguments, the text
        of an object is the object, and every other value stays as the model wrote it."""
        source = self._source
        yield from source.skip_space()
        nesting = Nesting(stops=",}]< \t\r\n")
        if not source.rest.startswith("{"):
            write(_arguments_of((yield from self._buffered(nesting))))
            return
        position = 0
        while True:
            end, position = nesting.scan(source.rest, position, final=source.ended)
            if end >= 0:
                write(source.take(end))
                return
            write(source.take(position))
            position = 0
            if not (yield from source.more()):
                write(source.take(len(source.rest)))
                return

    def _buffered(self, nesting: Nesting) -> Steps[str]:
        """The text of a value, when it is complete."""
        source = self._source
        position = 0
        while True:
            end, position = nesting.scan(source.rest, position, final=source.ended)
            if end >= 0:
                return source.take(end)
            if not (yield from source.more()):
                return source.take(len(source.rest))

    def _object(self) -> Steps[None]:
        """Read a call that is a JSON object, with its members in any order."""
        yield from self._source.expect("{")
        members = _Members()
        yield from self._members(members)
        if not members.is_open:
            if not members.name or members.unknown or self._is_cut():
                raise NotACall
            self._open(members.name)
            self._calls.write(_arguments_of(members.arguments))

    def _members(self, members: _Members) -> Steps[None]:
        """Read the members of an object after its opening bracket, up to its closing bracket."""
        source = self._source
        while True:
            yield from source.skip_space(",")
            if (yield from source.accept("}")) or (source.ended and not source.rest):
                return
            key = yield from self._string()
            yield from source.expect(":")
            yield from self._member(key, members)

    def _member(self, key: str, members: _Members) -> Steps[None]:
        if key in ARGUMENT_KEYS and members.name and not members.is_open:
            members.is_open = True
            self._open(members.name)
            yield from self._json_value(self._calls.write)
            return
        yield from self._source.skip_space()
        if key in _NAME_KEYS and not members.is_open and self._source.rest.startswith('"'):
            members.name = yield from self._string()
        elif key == "function" and self._source.rest.startswith("{"):
            self._source.take(1)
            yield from self._members(members)
        else:
            yield from self._other_member(key, members)

    def _other_member(self, key: str, members: _Members) -> Steps[None]:
        """Read a member that is no name, or arguments before the name."""
        is_arguments = key in ARGUMENT_KEYS
        is_unknown = not is_arguments and key not in OTHER_KEYS
        if is_unknown and self._form.at_start and not members.name:
            raise NotACall
        text = yield from self._buffered(Nesting())
        members.unknown |= is_unknown
        if is_arguments:
            members.arguments = text

    def _string(self) -> Steps[str]:
        """A JSON string. Raises NotACall for another value."""
        source = self._source
        while True:
            match = _STRING.match(source.rest)
            if match:
                break
            if (source.rest and source.rest[0] != '"') or not (yield from source.more()):
                raise NotACall
        try:
            return msgspec.json.decode(source.take(match.end()), type=str)
        except (msgspec.MsgspecError, UnicodeError):
            raise NotACall from None

    def _parameters(self, name: str) -> Steps[None]:
        """Read one parameter after the other."""
        source = self._source
        head, *_ = self._form.parameter_parts
        before = "{"
        while (yield from source.accept(_text(head))):
            try:
                fields = yield from self._fields()
            except NotACall:
                break
            self._calls.write(f"{before}{dumps(fields['key'])}: ")
            before = ", "
            is_complete = yield from self._value(self._types_of(name, fields))
            if not is_complete and source.cut:
                return
        if before != "{" and not self._is_cut():
            self._calls.write("}")

    def _fields(self) -> Steps[dict[str, str]]:
        """The fields of a parameter before its value. Raises NotACall if the text ends before."""
        parts = self._form.parameter_parts
        fields: dict[str, str] = {}
        for field_part, after in zip(parts[1:-2:2], parts[2:-2:2], strict=True):
            assert isinstance(field_part, Field)
            fields[field_part.name] = yield from self._word(_text(after))
        return fields

    def _types_of(self, name: str, fields: Mapping[str, str]) -> frozenset[str]:
        """The types of a parameter: those that the call names, otherwise those of its schema."""
        if "raw" not in fields and "type" not in fields:
            return self._tools.types(name, fields["key"])
        is_text = fields.get("raw") == "true" or fields.get("type") == "string"
        return frozenset({"string"}) if is_text else frozenset()

    def _word(self, after: str) -> Steps[str]:
        """Take the text up to and including a literal. Returns it without the literal.

        Raises NotACall if the text ends before the literal."""
        first, *others = words_of(after)
        pieces: list[str] = []
        if not (yield from self._source.until(first, pieces.append)):
            raise NotACall
        yield from self._source.expect(" ".join(others))
        return "".join(pieces)

    def _value(self, types: frozenset[str]) -> Steps[bool]:
        """Read the value of a parameter up to the literal after it. A text is passed on as it arrives."""
        source = self._source
        *_, before, _, after = self._form.parameter_parts
        end = _text(after)
        if _text(before).endswith("\n"):
            if not source.rest:
                yield from source.more()
            source.take(int(source.rest.startswith("\n")))
        hold = "\n" if end.startswith("\n") else ""
        if self._form.cdata and (yield from source.accept("<![CDATA[")):
            end = "]]>" + end
        pieces: list[str] = []
        streams = types == {"string"}
        if streams:
            self._calls.write('"')
        emit = (lambda text: self._calls.write(dumps(text)[1:-1])) if streams else pieces.append
        is_complete = yield from source.until(end.split()[0], emit, follows=self._ends_value, hold=hold)
        if not is_complete and source.cut:
            return False
        if not streams:
            self._calls.write(json_of("".join(pieces), types))
        else:
            self._calls.write('"')
        return is_complete

    def _ends_value(self, text: str) -> bool | None:
        """Whether a text may follow a parameter: a value may have the text of its end marker."""
        form = self._form
        index = next(i for i, part in enumerate(form.parts) if part == Field("parameters"))
        candidates = [_text(form.parameter_parts[0]), form.end, form.begin, form.separator or ""]
        candidates += [_text(part) for part in form.parts[index + 1 :] if isinstance(part, Literal)]
        words = [words_of(literal)[0] for literal in candidates if literal.strip()]
        text = text.lstrip()
        if any(text.startswith(word) for word in words):
            return True
        return None if any(word.startswith(text) for word in words) else False

    def _keywords(self, name: str) -> Steps[None]:
        """Read keyword arguments of Python up to the closing parenthesis. Positions count as keywords, in order."""
        names = iter(self._tools.parameters(name))
        before = "{"
        while True:
            yield from self._source.skip_space(",")
            text = yield from self._buffered(Nesting(_PYTHON_QUOTES, stops=",)", stops_only=True))
            if not text.strip() or (self._source.ended and not self._source.rest and self._source.cut):
                break
            match = _KEYWORD.match(text)
            key = match[1] if match else next(names, "argument")
            value = text[match.end() :] if match else text
            self._calls.write(f"{before}{dumps(key)}: {keyword_json(value)}")
            before = ", "
        if before != "{" and not self._source.cut:
            self._calls.write("}")

    def _entries(self, name: str) -> Steps[None]:
        """Read the entries of an object with bare keys up to its closing bracket."""
        quote = self._form.quote
        before = "{"
        while True:
            yield from self._source.skip_space(",")
            nesting = Nesting((quote,), escapes=False, stops=",}", stops_only=True)
            text = yield from self._buffered(nesting)
            if not text.strip() or (self._source.ended and not self._source.rest and self._source.cut):
                break
            entry = entries_json("{" + text + "}", quote)
            if entry is None:
                key, _, value = text.partition(":")
                entry = dumps({key.strip(): value})
            self._calls.write(before + entry[1:-1])
            before = ", "
        if before != "{" and not self._source.cut:
            self._calls.write("}")


@dataclass
class _Members:
    """The members of a call in JSON that are read so far."""

    name: str = ""
    arguments: str = ""  # those before the name
    is_open: bool = False  # the call is reported
    unknown: bool = False  # a member has no meaning: only a call with arguments may have it


_ARGUMENTS: dict[str, Callable[[GroupReader, str], Steps[None]]] = {
    "arguments": GroupReader._json_arguments,
    "parameters": GroupReader._parameters,
    "keywords": GroupReader._keywords,
    "entries": GroupReader._entries,
}


def _text(part: Literal | Field) -> str:
    assert isinstance(part, Literal)
    return part.text


def _arguments_of(text: str) -> str:
    """The arguments in a JSON value that is no object: see _json_value."""
    text = text.strip()
    if text in ("", "null"):
        return ""
    try:
        inner = msgspec.json.decode(text, type=str)
        if not inner.strip():
            return ""
        msgspec.json.decode(inner, type=dict)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    return inner
