"""Structured output: compiles a response format to a grammar that computes the allowed tokens, with `llguidance`.

A grammar that exceeds a limit below raises InvalidRequest. Some grammars take minutes although no limit of the library
is exceeded, so a child process (grammar_child) tries each grammar first. Nothing is cached on disk, and no schema is
fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from ..errors import InvalidRequest, UnsupportedParameter
from ..frames import ResponseFormat
from . import harmony_grammar
from .bounded import BoundedChild, ChildLost
from .matcher import make_matcher, make_tokens
from .parsers import CALL, END_CALL
from .patterns import PatternProblem, translate
from .schema import SelfContained, rewrite
from .schema_place import SchemaProblem
from .tokens import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE = 256 * 1024  # characters of a schema (as JSON), a regex or all choices
MAX_DEPTH = 64  # maximum nesting of objects and arrays in a schema
MAX_NODES = 20_000  # values in a schema
MAX_CHOICES = 4096
MAX_COMPARED = 4096  # tokens whose bytes in the tokenizer and in the library are compared
CPU_LIMIT = 0.4  # seconds of processor time of one trial
WALL_LIMIT = 5.0  # seconds of elapsed time of one trial
MEMORY_LIMIT = 2 * 2**30  # bytes of address space, including the tables of the vocabulary

# White space is one space, or a line break and indentation: a small model may otherwise write spaces without end.
# \u escapes are not allowed: the grammar compares spellings, so the constraints of "a" would not apply to "\u0061".
_JSON: JsonCompileOptions = {"whitespace_pattern": r"( |\n[ \t]{0,24})", "json_allowed_escapes": 'nrbtf\\"'}

# As in OpenAI's API, a tool without `parameters` has no arguments.
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


class TokenGrammar:
    """Implements engine.grammar.Grammar for one request. Methods raise ValueError at a limit of the library."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> TokenGrammar:
        """An independent grammar in the same state."""
        return TokenGrammar(self._matcher.deep_copy(), self._vocab_size)

    def allowed(self) -> NDArray[np.uint32]:
        """Allowed-token mask, [ceil(vocab / 32)] uint32. It contains the end-of-sequence ids if the text may end."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)
        self._check()
        return mask[: -(-self._vocab_size // 32)]

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(self._matcher.get_error().split("\n")[0])


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; a compiled grammar is for one request and one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: vocabulary size of the model, which may be larger than that of the tokenizer.

        Takes about a second for a large vocabulary. Raises InvalidRequest or UnsupportedParameter if the tokenizer is
        not supported.
        """
        if not tokenizer.eos_ids:
            raise InvalidRequest("structured output is not supported for this model: it has no end-of-sequence token")
        self._vocab_size = vocab_size
        vocabulary = tokenizer.vocabulary(max(vocab_size, tokenizer.vocab_size))
        try:
            self._tokens = make_tokens(vocabulary, partial(tokenizer.encode, add_special_tokens=False))
        except ValueError as error:
            raise _unreadable(tokenizer, str(error)) from None
        self._compare_bytes(tokenizer)
        self._call_markers = [_marker(tokenizer, marker) for marker in (CALL, END_CALL)]
        # Special tokens that text may contain, such as <think>. They need their own rule: TEXT matches only characters.
        others = tokenizer.added_ids - tokenizer.eos_ids - {tokenizer.id_of(CALL)}
        self._other_special_ids = sorted(filter(self._tokens.is_special_token, others))
        self._trials = BoundedChild(
            "localllm.app.chat.grammar_child",
            cpu=CPU_LIMIT,
            wall=WALL_LIMIT,
            memory=MEMORY_LIMIT,
            hello=lambda: msgspec.msgpack.encode(vocabulary),
        )

    def _compare_bytes(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedParameter if a token has different bytes in the library and in the tokenizer.

        With different bytes, a grammar could allow forbidden text. Only a sample of the tokens is compared.
        """
        sample = set(range(0, tokenizer.vocab_size, 1 + tokenizer.vocab_size // MAX_COMPARED))
        for token in sorted(sample - tokenizer.added_ids):
            compiler_bytes = self._tokens.decode_bytes([token])
            tokenizer_bytes = tokenizer.token_bytes(token)
            if compiler_bytes != tokenizer_bytes and not self._tokens.is_special_token(token):
                raise _unreadable(
                    tokenizer, f"token {token} is {tokenizer_bytes!r}, but the library has {compiler_bytes!r}"
                )

    def close(self) -> None:
        self._trials.close()

    def compile(self, response_format: ResponseFormat) -> TokenGrammar:
        """The grammar of a response format.

        Raises InvalidRequest if the format is malformed, too large, or has an unsupported keyword.
        """
        match response_format.kind:
            case "json_object":
                where = "response_format"
                grammar = _json_grammar({"type": "object"}, where)
            case "json_schema":
                where = "response_format.json_schema.schema"
                grammar = _json_grammar(response_format.schema, where)
            case "regex":
                where = "regex"
                grammar = _regex_grammar(response_format.regex or "")
            case "choice":
                where = "choice"
                grammar = _choice_grammar(response_format.choices or [])
        return self._compile(grammar, where)

    def compile_tool_calls(self, tools: Sequence[dict[str, Any]], *, parallel: bool) -> TokenGrammar:
        """The grammar of a call of one of the tools, in the format of Hermes. The arguments match the tool's schema.

        `parallel`: the grammar allows several calls. Raises InvalidRequest.
        """
        more = '("\\n" call)*' if parallel else ""
        lark = [f"start: call {more}", f"call: {self._call_markers[0]} rest_of_call", *self._rest_of_call(tools)]
        return self._compile(LLMatcher.grammar_from_lark("\n".join(lark)), "tools")

    def compile_harmony_calls(self, tools: Sequence[dict[str, Any]], *, forced: bool) -> TokenGrammar:
        """The grammar of an answer in the format of harmony.py, with a call at its end.

        `forced`: the answer has a call, whose arguments match the schema of the tool. Otherwise it may have a call, as
        in compile_text_with_calls. Raises InvalidRequest.
        """
        rules = harmony_grammar.one_call if forced else harmony_grammar.text_with_calls
        functions = [
            (tool["function"]["name"], json.dumps(_arguments_schema(*_parameters(tool, index, only_strict=not forced))))
            for index, tool in enumerate(tools)
        ]
        return self._compile(LLMatcher.grammar_from_lark("\n".join(rules(functions))), "tools")

    def compile_text_with_calls(self, tools: Sequence[dict[str, Any]]) -> TokenGrammar:
        """The grammar of free text with any number of tool calls. The arguments of a strict tool match its schema;
        those of a tool that is not strict are any object. Raises InvalidRequest."""
        text, separator = self._text_rules()
        rules = [
            "start: (begin rest_of_call)* text",
            *self._opening_rules(separator),
            *text,
            f"TEXT: /(?s:.+)/ & ~/(?s:.*){CALL}(?s:.*)/",  # text without the spelling of the marker
            *self._rest_of_call(tools, only_strict=True),
        ]
        return self._compile(LLMatcher.grammar_from_lark("\n".join(rules)), "tools")

    def _text_rules(self) -> tuple[list[str], str]:
        """The rules of text without a call, and an expression for text up to the last special token before a call."""
        if not self._other_special_ids:
            return ["text: TEXT?"], ""
        other_ids = ",".join(map(str, self._other_special_ids))
        return ["text: TEXT? (other TEXT?)*", f"other: <[{other_ids}]>"], "(text other)?"

    def _opening_rules(self, separator: str) -> list[str]:
        """The rules of text that is followed by the opening marker of a call."""
        opening = self._call_markers[0]
        if opening == CALL:  # the marker is one token; TEXT excludes its spelling
            return ["begin: text opening", f"opening: {opening}"]
        # Text and marker are one lexeme: with two lexemes, the lexer would continue TEXT across the marker.
        return [f"begin: {separator} opening", f"opening[lazy]: /(?s:.*){CALL}/"]

    def _rest_of_call(self, tools: Sequence[dict[str, Any]], *, only_strict: bool = False) -> list[str]:
        """The rules of a call after its opening marker. `only_strict`: a tool that is not strict accepts any object."""
        rules = []
        for index, tool in enumerate(tools):
            schema = _call_schema(tool["function"]["name"], *_parameters(tool, index, only_strict=only_strict))
            rules.append(f"call_{index}: %json {json.dumps(schema)}")
        any_call = " | ".join(f"call_{index}" for index in range(len(rules)))
        return [f'rest_of_call: "\\n" ({any_call}) "\\n" {self._call_markers[1]}', *rules]

    def _compile(self, grammar: str, where: str) -> TokenGrammar:
        try:
            problem = self._trials.call(grammar.encode()).decode()
        except (ChildLost, UnicodeError) as error:
            problem = str(error)
        if not problem:
            matcher, problem = make_matcher(self._tokens, grammar)
        if problem:
            raise _unusable(where, problem)
        return TokenGrammar(matcher, self._vocab_size)


def _marker(tokenizer: Tokenizer, marker: str) -> str:
    """A marker in the syntax of a grammar: a token, or the text between quotes if the vocabulary has no such token."""
    return marker if tokenizer.id_of(marker) is not None else json.dumps(marker)


def _unusable(where: str, problem: object) -> InvalidRequest:
    return InvalidRequest(f"{where} cannot be used for structured output: {problem}", param=where)


def _unreadable(tokenizer: Tokenizer, problem: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"structured output is not supported for the tokenizer of this model ({tokenizer.kind}): {problem:.200}"
    )


def _json_grammar(schema: object, where: str) -> str:
    rewritten = _self_contained(schema, where)
    root = {"$defs": rewritten.definitions}
    if isinstance(rewritten.root, dict):
        root |= rewritten.root
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(root), defaults=_JSON)
    except ValueError as error:  # a property name is not valid Unicode
        raise _unusable(where, error) from None


def _regex_grammar(regex: str) -> str:
    if not regex:
        raise InvalidRequest("regex is empty", param="regex")
    _check_size(len(regex), "regex")
    try:
        return LLMatcher.grammar_from_regex(translate(regex))
    except PatternProblem as error:
        raise _unusable("regex", error) from None


def _self_contained(schema: object, where: str) -> SelfContained:
    check_schema(schema, where)
    assert isinstance(schema, dict)
    try:
        return rewrite(schema)
    except SchemaProblem as error:
        raise _unusable(where, error) from None


def _choice_grammar(choices: Sequence[str]) -> str:
    if not choices or "" in choices:
        raise InvalidRequest("choice must have at least one text and no empty text", param="choice")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"choice has {len(choices)} texts; the limit is {MAX_CHOICES}", param="choice")
    _check_size(sum(map(len, choices)), "choice")
    quoted = (json.dumps(choice, ensure_ascii=False).replace("\x7f", "\\u007f") for choice in choices)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _parameters(tool: dict[str, Any], index: int, *, only_strict: bool) -> tuple[object, str]:
    """The schema of the arguments of a tool, and its JSON path for errors. `only_strict`: as in _rest_of_call."""
    function = tool["function"]
    where = f"tools[{index}].function.parameters"
    if only_strict and not function.get("strict"):
        return _ANY_ARGUMENTS, where
    return function.get("parameters") or _NO_ARGUMENTS, where


def _arguments_schema(parameters: object, where: str) -> dict[str, Any]:
    """The schema of the arguments alone."""
    arguments = _self_contained(parameters, where)
    root = arguments.root if isinstance(arguments.root, dict) else {"allOf": [arguments.root]}
    return root | {"$defs": arguments.definitions, "x-guidance": _JSON}


def _call_schema(name: str, parameters: object, where: str) -> dict[str, Any]:
    """The schema of the JSON object between the tool-call markers."""
    arguments = _self_contained(parameters, where)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments.root},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "$defs": arguments.definitions,
        "x-guidance": _JSON,
    }


def check_schema(schema: object, where: str) -> None:
    """Raises InvalidRequest if the schema is too large or too deep for the compiler."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{where} must be a JSON schema object", param=where)
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
