"""Structured output: compiles a response format to a grammar that computes the allowed tokens, with `llguidance`.

A grammar that exceeds a limit below raises InvalidRequest. Some grammars take minutes although no limit of the library
is exceeded, so a child process (child.py) tries each grammar first. Nothing is cached on disk, and no schema is
fetched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ..bounded import BoundedChild, ChildLost
from ..chat.calls.constraint import CallGrammars
from ..chat.calls.records import CallFormat
from ..chat.calls.rules import Rules, SchemaRefused, ToolSchema, quoted
from ..chat.tokenizer.base import Tokenizer
from ..errors import AppError, InvalidRequest, UnsupportedParameter
from ..frames import ResponseFormat
from . import harmony
from .matcher import Encode, make_matcher, make_tokens
from .patterns import PatternProblem, translate
from .place import SchemaProblem
from .schema import rewrite

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE = 256 * 1024  # characters of a schema (as JSON), a regex or all choices
MAX_DEPTH = 64  # maximum nesting of objects and arrays in a schema
MAX_NODES = 20_000  # values in a schema
MAX_CHOICES = 4096
MAX_COMPILED = 32  # grammars that a compiler keeps, because clients repeat their tools and formats
CPU_LIMIT = 0.4  # seconds of processor time of one trial
WALL_LIMIT = 5.0  # seconds of elapsed time of one trial
MEMORY_LIMIT = 2 * 2**30  # bytes of address space, including the tables of the vocabulary

# White space is one space, or a line break and indentation: a small model may otherwise write spaces without end.
# \u escapes are not allowed: the grammar compares spellings, so the constraints of "a" would not apply to "\u0061".
_JSON: JsonCompileOptions = {"whitespace_pattern": r"( |\n[ \t]{0,24})", "json_allowed_escapes": 'nrbtf\\"'}

# As in OpenAI's API, a tool without `parameters` has no arguments.
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "x-guidance": _JSON}


class TokenGrammar:
    """Implements engine.grammar.Grammar for one request. Methods raise ValueError at a limit of the library."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> TokenGrammar:
        """An independent grammar in the same state."""
        return TokenGrammar(self.matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> NDArray[np.uint32]:
        """Allowed-token mask, [ceil(vocab / 32)] uint32. It contains the end-of-sequence ids if the text may end."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint32)
        self._check()
        return mask[: -(-self._vocab_size // 32)]

    def accept(self, token: int) -> None:
        self.matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return self.matcher.is_stopped()

    def _check(self) -> None:
        if self.matcher.is_error():
            raise ValueError(self.matcher.get_error().split("\n")[0])


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; a compiled grammar is for one request and one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: vocabulary size of the model, which may be larger than that of the tokenizer.

        Takes about a second for a large vocabulary. Raises InvalidRequest or UnsupportedParameter if the tokenizer is
        not supported.
        """
        size = max(vocab_size, tokenizer.vocab_size)
        if not any(token < vocab_size for token in tokenizer.eos_ids):
            raise InvalidRequest("structured output is not supported for this model: it has no end-of-sequence token")
        self._vocab_size = vocab_size
        try:
            vocabulary = tokenizer.vocabulary(size)
            self._tokens = make_tokens(vocabulary, _encoder(tokenizer))
        except ValueError as error:
            raise _unreadable(tokenizer, str(error)) from None
        self._control_tokens = {text: token for text, token in tokenizer.control_tokens.items() if token < size}
        self._compiled: dict[str, LLMatcher] = {}  # grammar -> its matcher in the start state; the most recent ones
        longest_first = sorted(map(re.escape, self._control_tokens), key=len, reverse=True)
        self._controls = re.compile(f"({'|'.join(longest_first) or '(?!)'})")
        self._trials = BoundedChild(
            "localllm.app.grammar.child",
            cpu=CPU_LIMIT,
            wall=WALL_LIMIT,
            memory=MEMORY_LIMIT,
            hello=lambda: msgspec.msgpack.encode(vocabulary),
        )

    def close(self) -> None:
        self._trials.close()

    def compile(self, response_format: ResponseFormat) -> TokenGrammar:
        """The grammar of a response format.

        Raises InvalidRequest if the format is malformed, too large, or has an unsupported keyword.
        """
        match response_format.kind:
            case "json_object":
                return self._compile_json({"type": "object"}, "response_format")
            case "json_schema":
                where = "response_format.json_schema.schema"
                return self._compile_json(response_format.schema, where, strict=response_format.strict)
            case "regex":
                return self._compile(_regex_grammar(response_format.regex or ""), "regex")
            case "choice":
                return self._compile(_choice_grammar(response_format.choices or []), "choice")

    def compile_forced_calls(
        self, form: CallFormat, tools: Sequence[dict[str, Any]], *, parallel: bool
    ) -> TokenGrammar:
        """The grammar of an answer that is a call of one of the tools, with arguments that match its schema.

        `parallel`: the grammar allows several calls. Raises InvalidRequest.
        """
        schemas = [self._tool_schema(tool, index, only_strict=False) for index, tool in enumerate(tools)]
        return self._compile_calls(Rules(form, self.pieces, _JSON), methodcaller("group", schemas, parallel=parallel))

    def compile_optional_calls(
        self, form: CallFormat, tools: Sequence[dict[str, Any]], *, parallel: bool
    ) -> CallGrammars:
        """The grammars of the calls in an answer that may have calls. The arguments of a strict tool match its schema;
        those of a tool that is not strict are any object. Raises InvalidRequest."""
        schemas = [self._tool_schema(tool, index, only_strict=True) for index, tool in enumerate(tools)]
        if form.at_start:
            starts = {schema.name: methodcaller("rest_of_call", schema) for schema in schemas}
        else:
            starts = {"": methodcaller("rest", schemas, parallel=parallel)}
        rests = {
            name: self._compile_calls(Rules(form, self.pieces, _JSON, exact=False), start).matcher
            for name, start in starts.items()
        }
        return CallGrammars(form, rests, self._vocab_size, any(schema.is_strict for schema in schemas))

    def _compile_calls(self, rules: Rules, start: Callable[[Rules], str]) -> TokenGrammar:
        """The grammar of rules. `start` adds them, and returns the name of the first one."""
        try:
            name = start(rules)
        except SchemaRefused as error:
            raise UnsupportedParameter(str(error), param=error.where) from None
        return self.compile_rules([*rules.lines, f"start: {name}"])

    def _tool_schema(self, tool: dict[str, Any], index: int, *, only_strict: bool) -> ToolSchema:
        """The schema of a tool. `only_strict`: the tool accepts any arguments unless it is strict."""
        function = tool["function"]
        where = f"tools[{index}].function.parameters"
        is_strict = bool(function.get("strict"))
        if only_strict and not is_strict:
            return ToolSchema(function["name"], None, where, is_strict=False)
        schema = _rewritten(function.get("parameters") or _NO_ARGUMENTS, where, strict=is_strict)
        schema = {"type": "object"} | {name: value for name, value in schema.items() if name != "type"}
        return ToolSchema(function["name"], schema | {"x-guidance": _JSON}, where, is_strict)

    def compile_harmony_calls(self, tools: Sequence[dict[str, Any]], *, forced: bool) -> TokenGrammar:
        """The grammar of an answer in the format of chat/output/harmony.py, with a call at its end.

        `forced`: the answer has a call, whose arguments match the schema of the tool. Otherwise it may have a call, as
        in compile_optional_calls. Raises InvalidRequest.
        """
        rules = harmony.one_call if forced else harmony.text_with_calls
        schemas = [self._tool_schema(tool, index, only_strict=not forced) for index, tool in enumerate(tools)]
        functions = [(schema.name, json.dumps(schema.schema or _ANY_ARGUMENTS)) for schema in schemas]
        return self.compile_rules(rules(functions, self.expression))

    def compile_rules(self, rules: Iterable[str], where: str = "tools") -> TokenGrammar:
        """The grammar of an answer in the syntax of llguidance. `where`: the parameter for errors. Raises
        InvalidRequest."""
        return self._compile(LLMatcher.grammar_from_lark("\n".join(rules)), where)

    def pieces(self, text: str) -> list[str | int]:
        """A text of a format as its control tokens, by id, and the text between them.

        A marker that is no control token of this vocabulary is text, even if it is one token.
        """
        segments = self._controls.split(text)  # segments at odd indices are control tokens
        pieces: list[str | int] = [*segments]
        pieces[1::2] = [self._control_tokens[segment] for segment in segments[1::2]]
        return [piece for piece in pieces if piece != ""]

    def expression(self, text: str) -> str:
        """A text of a format in the syntax of a grammar: control tokens by id, other text between quotes."""
        return " ".join(map(_expression, self.pieces(text))) or _expression("")

    def _compile_json(self, schema: object, where: str, *, strict: bool = False) -> TokenGrammar:
        root = _rewritten(schema, where, strict=strict)
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(root), defaults=_JSON)
        except ValueError as error:  # a property name is not valid Unicode
            raise _unusable(where, error) from None
        return self._compile(grammar, where)

    def _compile(self, grammar: str, where: str) -> TokenGrammar:
        known = self._compiled.get(grammar)
        if known is None:
            known = self._new_matcher(grammar, where)
            self._compiled[grammar] = known
            for oldest in list(self._compiled)[:-MAX_COMPILED]:
                self._compiled.pop(oldest, None)
        return TokenGrammar(known.deep_copy(), self._vocab_size)

    def _new_matcher(self, grammar: str, where: str) -> LLMatcher:
        try:
            problem = self._trials.call(grammar.encode()).decode()
        except (ChildLost, UnicodeError) as error:
            problem = str(error)
        if not problem:
            matcher, problem = make_matcher(self._tokens, grammar)
        if problem:
            raise _unusable(where, problem)
        return matcher


def _encoder(tokenizer: Tokenizer) -> Encode:
    """Converts text to ids, as the text of a message; to no ids if the tokenizer refuses the text."""

    def encode(text: str) -> list[int]:
        try:
            return tokenizer.encode(tokenizer.protect(text), add_special_tokens=False)
        except AppError:
            return []

    return encode


def _expression(piece: str | int) -> str:
    """A control token, or a text between quotes, in the syntax of a grammar."""
    return f"<[{piece}]>" if isinstance(piece, int) else quoted(piece)


def _unusable(where: str, problem: object) -> InvalidRequest:
    return InvalidRequest(f"{where} cannot be used for structured output: {problem}", param=where)


def _unreadable(tokenizer: Tokenizer, problem: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"structured output is not supported for the tokenizer of this model ({tokenizer.kind}): {problem:.200}"
    )


def _regex_grammar(regex: str) -> str:
    if not regex:
        raise InvalidRequest("regex is empty", param="regex")
    _check_size(len(regex), "regex")
    try:
        return LLMatcher.grammar_from_regex(translate(regex))
    except PatternProblem as error:
        raise _unusable("regex", error) from None


def _rewritten(schema: object, where: str, *, strict: bool) -> dict[str, Any]:
    """The schema in a form that llguidance enforces. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} must be a JSON schema object", param=where)
    _check_shape(schema, where)
    try:
        return rewrite(schema, strict=strict)
    except SchemaProblem as error:
        raise _unusable(where, error) from None


def _choice_grammar(choices: Sequence[str]) -> str:
    if not choices or "" in choices:
        raise InvalidRequest("choice must have at least one text and no empty text", param="choice")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choice has {len(choices)} texts; the limit is {MAX_CHOICES}", param="choice")
    _check_size(sum(map(len, choices)), "choice")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, choices)))


def _check_shape(schema: dict[str, Any], where: str) -> None:
    """Raises InvalidRequest if the schema is too large or too deep for the compiler."""
    level: list[object] = [schema]  # all values of one depth
    nodes = 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise InvalidRequest(f"{where} has more than {MAX_NODES} values", param=where)
        level = list(chain.from_iterable(map(_children, level)))
    if level:
        raise InvalidRequest(f"{where} is nested deeper than {MAX_DEPTH} levels", param=where)
    _check_size(len(json.dumps(schema)), where)


def _children(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_size(size: int, where: str) -> None:
    if size > MAX_SOURCE:
        raise InvalidRequest(f"{where} has {size} characters; the limit is {MAX_SOURCE}", param=where)
