from __future__ import annotations

import contextlib
import json
import math
import random
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import models

from localllm.app.chat.answer import MarkedReader, ReadingOptions
from localllm.app.chat.calls.constraint import LazyGrammar
from localllm.app.chat.calls.records import FORMATS, REASONING, CallFormat
from localllm.app.chat.calls.writing import example
from localllm.app.chat.output.parser import AnswerFormat, OutputParser
from localllm.app.chat.prompt import Prompt
from localllm.app.chat.tokenizer.huggingface import ChatTokenizer
from localllm.app.errors import InvalidRequest, UnsupportedParameter
from localllm.app.frames import ResponseFormat
from localllm.app.grammar import compiler as compiling
from localllm.app.grammar.compiler import GrammarCompiler, TokenGrammar
from localllm.app.grammar.place import SchemaProblem
from localllm.app.grammar.schema import KEYWORDS, TYPES, rewrite
from localllm.engine.grammar import Grammar, unpack_mask

from ..chat.tokenizer.vocabularies import KINDS, MARKERS, NORMALIZERS, TURNS, save, vocabulary, with_markers
from ..tiny_qwen import VOCAB, make_tokenizer, write_tokenizer

Marked = tuple[ChatTokenizer, GrammarCompiler]  # the markers of a call are tokens, or text

HERMES = FORMATS[0]
END = 2
STEPS = 400  # after this many tokens, a random walk prefers tokens that end the text

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "größe"]}, "maxItems": 3},
        "pet": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pet"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "pet": {
            "type": "object",
            "properties": {"kind": {"const": "cat"}, "kittens": {"type": "array", "items": {"$ref": "#/$defs/pet"}}},
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "person": PERSON,
    "number": {"type": "number", "minimum": -1, "maximum": 1},
    "bounded array": {"type": "array", "minItems": 2, "maxItems": 4, "items": {"type": "boolean"}},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}-[0-9]+$", "maxLength": 20},
    "date": {"type": "string", "format": "date"},
    "enum": {"enum": [1, "two", None, [3]]},
    "any of": {"anyOf": [{"type": "integer"}, {"type": "object", "maxProperties": 1}]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "free": {"type": "object"},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def compiler(tokenizer: ChatTokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, VOCAB)
    yield compiler
    compiler.close()


@dataclass
class ParsedCall:
    name: str
    arguments: str


@dataclass
class Parsed:
    text: str
    calls: list[ParsedCall]


def parse(text: str) -> Parsed:
    """The calls of an answer, and the text beside them."""
    parser = OutputParser(AnswerFormat(REASONING[0], (HERMES,)), [tool("f", {})])
    parser.feed(text)
    parser.finish()
    output = parser.take()
    parts = [part for part in output.calls if part.id]
    calls = [ParsedCall(part.name, part.arguments) for part in parts]
    return Parsed(output.text.strip(), calls)


def walk(tokenizer: ChatTokenizer, matcher: TokenGrammar, seed: int) -> str:
    """A text of random allowed tokens."""
    chance = random.Random(seed)
    ids: list[int] = []
    for step in range(4 * STEPS):
        allowed = np.nonzero(unpack_mask(matcher.allowed(), VOCAB))[0].tolist()
        assert allowed
        assert max(allowed) < tokenizer.vocab_size
        token = chance.choice(allowed)
        if END in allowed and (step > STEPS or chance.random() < 0.2):
            token = END
        elif step > STEPS:
            token = min(allowed, key=lambda token: (_closing_rank(tokenizer, token), chance.random()))
        matcher.accept(token)
        if token == END:
            assert matcher.finished
            return tokenizer.decode(ids)
        ids.append(token)
        if matcher.finished:
            return tokenizer.decode(ids)
    raise AssertionError(f"no end after {len(ids)} tokens: {tokenizer.decode(ids)[-100:]!r}")


def walk_call(tokenizer: ChatTokenizer, lazy: LazyGrammar, seed: int) -> str:
    """The rest of a call in random allowed tokens."""
    chance = random.Random(seed)
    ids: list[int] = []
    while not (mask := unpack_mask(lazy.allowed(), VOCAB)).all():
        allowed = np.nonzero(mask)[0].tolist()
        token = chance.choice(allowed)
        if len(ids) > STEPS:
            token = min(allowed, key=lambda token: (_closing_rank(tokenizer, token), chance.random()))
        lazy.accept(token)
        ids.append(token)
    return tokenizer.decode(ids)


def optional(tokenizer: ChatTokenizer, compiler: GrammarCompiler, tools: list[dict[str, Any]]) -> LazyGrammar:
    """The grammar of an answer that may have calls."""
    prompt = Prompt((1,), form=AnswerFormat(REASONING[0], (HERMES,)))

    start = partial(MarkedReader, tokenizer, prompt, ReadingOptions(tools=tools))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    return LazyGrammar(compiler.compile_optional_calls(HERMES, tools, parallel=True), start, encode)


def _closing_rank(tokenizer: ChatTokenizer, token: int) -> int:
    """Smaller for a token that closes a string, an object or an array."""
    text = tokenizer.token_bytes(token).strip()
    order = (b'"', b"}", b"]", b'"}', b'"]')
    return order.index(text) if text in order else 9


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_allowed_tokens_match_the_schema(tokenizer: ChatTokenizer, compiler: GrammarCompiler, name: str) -> None:
    compiled = compiler.compile(ResponseFormat(kind="json_schema", schema=SCHEMAS[name]))
    for seed in range(12):
        text = walk(tokenizer, compiled.copy(), seed)
        jsonschema.validate(json.loads(text), SCHEMAS[name], cls=jsonschema.Draft202012Validator)


def test_json_object_allows_only_objects(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(ResponseFormat(kind="json_object"))
    for seed in range(12):
        assert isinstance(json.loads(walk(tokenizer, compiled.copy(), seed)), dict)


@pytest.mark.parametrize("pattern", [r"[a-z]{3}[0-9]+!", r"(yes|no)( indeed)*", r"größ(e|er) 🙂", r"[^a]{2,4}"])
def test_regex_allows_only_matching_texts(tokenizer: ChatTokenizer, compiler: GrammarCompiler, pattern: str) -> None:
    compiled = compiler.compile(ResponseFormat(kind="regex", regex=pattern))
    for seed in range(12):
        text = walk(tokenizer, compiled.copy(), seed)
        assert re.fullmatch(pattern, text), text


def test_choice_allows_each_choice_and_nothing_else(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    choices = ["yes", "yes, but", 'a "quoted" \\ one', "größer\n", "🙂", "/x/", "%json {}", "\x01\x7f"]
    compiled = compiler.compile(ResponseFormat(kind="choice", choices=choices))
    texts = {walk(tokenizer, compiled.copy(), seed) for seed in range(120)}
    assert texts == set(choices)


def test_tool_calls_match_the_schemas_of_their_tools(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    point = {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}}
    schemas = {"move": point | {"required": ["x"], "additionalProperties": False}, "now": {"maxProperties": 0}}
    tools = [
        {"type": "function", "function": {"name": "move", "parameters": schemas["move"]}},
        {"type": "function", "function": {"name": "now"}},
    ]
    one = compiler.compile_forced_calls(HERMES, tools, parallel=False)
    several = compiler.compile_forced_calls(HERMES, tools, parallel=True)
    counts, names = set(), set()
    for seed in range(24):
        for compiled, max_calls in ((one, 1), (several, 99)):
            output = parse(walk(tokenizer, compiled.copy(), seed))
            assert not output.text
            assert 1 <= len(output.calls) <= max_calls
            counts.add(len(output.calls))
            for tool_call in output.calls:
                names.add(tool_call.name)
                jsonschema.validate(json.loads(tool_call.arguments), schemas[tool_call.name])
    assert names == {"move", "now"}
    assert len(counts) > 1


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.title)
def test_forced_calls_have_the_spelling_of_their_format(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler, form: CallFormat
) -> None:
    parameters = {"type": "object", "properties": {"to": {"type": "string"}, "x": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("move", "turn")]
    count = 1 if form.at_start and form.separator is None else 3
    text = example(form, [("move", {"to": "a\nb", "x": 3}), ("turn", {"x": 4}), ("move", {"to": "c"})][:count])
    compiled = compiler.compile_forced_calls(form, tools, parallel=True)
    assert not refused(tokenizer, compiled, tokenizer.encode(text, add_special_tokens=False))


TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("title", ["gemma-4", "lfm2", "qwen3-coder"])
def test_references_in_formats_that_are_no_json(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler, title: str
) -> None:
    form = next(form for form in FORMATS if form.title == title)
    compiled = compiler.compile_forced_calls(form, [tool("f", TREE)], parallel=False)
    for kid, is_valid in (({"name": "b", "kids": []}, True), ({"kids": []}, False)):
        text = example(form, [("f", {"name": "a", "kids": [kid]})])
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert (refused(tokenizer, compiled.copy(), ids) == "") == is_valid
    beside = closed(a={"$ref": "#/$defs/x", "maxLength": 3}) | {"$defs": {"x": {"type": "string"}}}
    with pytest.raises(UnsupportedParameter, match="maxLength"):
        compiler.compile_forced_calls(form, [tool("f", beside)], parallel=False)
    endless = closed(a={"$ref": "#/properties/a"}) | {"required": ["a"]}
    with contextlib.suppress(InvalidRequest):
        compiler.compile_forced_calls(form, [tool("f", endless)], parallel=False)


@pytest.mark.parametrize("title", ["gemma-4", "lfm2", "qwen3-coder"])
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": "string", "anyOf": [{"type": "string"}, {"type": "integer"}]}, "'type' of a"),
        ({"type": "string", "anyOf": [{"type": "string"}, {}]}, "'type' of a"),
        ({"type": ["number", "null"], "anyOf": [{"type": "integer"}, {"const": None}]}, ""),
        ({"type": "string", "enum": ["x", 1]}, "'type' of a"),
        ({"type": "string", "enum": ["x", "y"]}, ""),
        ({"enum": ["x", "yy"], "maxLength": 1}, "'maxLength' of a"),
        ({"enum": ["x", "y"], "const": "x"}, "'enum' of a"),
        ({"anyOf": [{"const": "x"}], "oneOf": [{"type": "string"}, {"const": "y"}]}, "'oneOf' of a"),
    ],
)
def test_keywords_beside_choices_in_formats_that_are_no_json(
    compiler: GrammarCompiler, title: str, schema: dict[str, Any], problem: str
) -> None:
    form = next(form for form in FORMATS if form.title == title)
    strict = tool("f", closed(a=schema))
    refusal = pytest.raises(UnsupportedParameter, match=problem) if problem else contextlib.nullcontext()
    with refusal:
        compiler.compile_forced_calls(form, [strict], parallel=False)
    lax = {"type": "function", "function": strict["function"] | {"strict": False}}
    compiler.compile_forced_calls(form, [lax], parallel=False)


MOVE = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
STRICT = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE, "strict": True}},
    {"type": "function", "function": {"name": "note", "parameters": MOVE}},
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# A text, and its end from the first refused token on (empty: none).
MIXED: dict[str, tuple[str, str]] = {
    "no call": ("größer < 🙂\n", ""),
    "thoughts": ("<think>\nHm.\n</think>\n\nYes.", ""),
    "a call": (call("move", '{"x": 3}'), ""),
    "text and calls": ("I go. " + call("move", '{"x": 3}') + "\n" + call("note", '{"y": []}') + " Done.", ""),
    "nearly a call": ("<tool_cal> <tool_call", ""),
    "wrong argument": (call("move", '{"y": 3}'), 'y": 3}}\n</tool_call>'),
    "wrong type": ("Well, " + call("move", '{"x": "3"}'), '"3"}}\n</tool_call>'),
    "the second call": (call("note", "{}") + call("move", "{}"), "}}\n</tool_call>"),
    "unknown tool": (call("fly", "{}"), 'fly", "arguments": {}}\n</tool_call>'),
    "no object": (call("note", "3"), "3}\n</tool_call>"),
    "no call at all": ("<tool_call>hello</tool_call>", "hello</tool_call>"),
}


@pytest.fixture(scope="module", params=["marks are tokens", "marks are text"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Marked]:
    folder = write_tokenizer(tmp_path_factory.mktemp("marked"))
    if request.param == "marks are text":
        file = folder / "tokenizer.json"
        table = json.loads(file.read_text())
        table["added_tokens"] = [entry for entry in table["added_tokens"] if entry["special"]]
        file.write_text(json.dumps(table))
    tokenizer = ChatTokenizer(folder)
    compiler = GrammarCompiler(tokenizer, VOCAB)
    yield tokenizer, compiler
    compiler.close()


def refused(tokenizer: ChatTokenizer, matcher: Grammar, ids: list[int]) -> str:
    """The rest of the text from the first token that is not allowed; empty if all tokens and the end are allowed."""
    for index, token in enumerate([*ids, END]):
        if not unpack_mask(matcher.allowed(), VOCAB)[token]:
            return tokenizer.decode(ids[index:]) or "the end"
        matcher.accept(token)
    return ""


def spelled(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """The ids of single letters, also for the markers."""
    letters = [tokenizer.id_of(letter) for letter in text.replace(" ", "Ġ").replace("\n", "Ċ")]
    return [letter for letter in letters if letter is not None]


@pytest.mark.parametrize("name", MIXED)
def test_calls_of_strict_tools_between_text(marked: Marked, name: str) -> None:
    tokenizer, compiler = marked
    text, rest = MIXED[name]
    compiled = optional(tokenizer, compiler, STRICT)
    actual = refused(tokenizer, compiled, tokenizer.encode(text, add_special_tokens=False))
    assert actual == rest or (rest and actual.endswith(rest)), actual
    assert bool(actual) == bool(rest)


def test_a_marker_in_single_letters_does_not_bypass_a_strict_tool(marked: Marked) -> None:
    tokenizer, compiler = marked
    compiled = optional(tokenizer, compiler, STRICT)
    assert refused(tokenizer, compiled, spelled(tokenizer, 'Now <tool_call>{"name": "fly"}')).endswith('fly"}')


@pytest.mark.parametrize("seed", range(8))
def test_a_started_call_of_a_strict_tool_matches_its_schema(marked: Marked, seed: int) -> None:
    tokenizer, compiler = marked
    compiled = optional(tokenizer, compiler, STRICT)
    start = "So: <tool_call>\n"
    for token in tokenizer.encode(start, add_special_tokens=False):
        compiled.accept(token)
    output = parse(start + walk_call(tokenizer, compiled, seed))
    assert output.calls, output
    for tool_call in output.calls:
        arguments = json.loads(tool_call.arguments)
        if tool_call.name == "move":
            jsonschema.validate(arguments, MOVE)


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


# Parameters, valid arguments, and invalid arguments.
REFERENCES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "the root schema": (
        closed(next={"$ref": "#"}, n={"type": "integer"}),
        ['{"next": {"next": {"n": 1}, "n": 2}}'],
        ['{"next": {"name": "f", "arguments": {}}}', '{"next": {"n": "1"}}'],
    ),
    "a property": (
        closed(a={"type": "integer"}, arguments={"type": "string"}, b={"$ref": "#/properties/arguments"}),
        ['{"b": "x"}'],
        ['{"b": {"a": 1}}', '{"b": 1}'],
    ),
    "escapes": (
        closed(a={"$ref": "#/$defs/~0~1%25%7e1%C3%A4"}, b={"$ref": "#/$defs/~01"})
        | {"$defs": {"~/%/ä": {"const": 1}, "~1": {"const": 2}, "/": {"const": 3}}},
        ['{"a": 1, "b": 2}'],
        ['{"a": 2}', '{"b": 3}'],
    ),
    "an item": (
        closed(a={"$ref": "#/properties/b/anyOf/1"}, b={"anyOf": [{"type": "null"}, {"type": "boolean"}]}),
        ['{"a": true}'],
        ['{"a": null}'],
    ),
    "definitions of older drafts": (
        closed(a={"$ref": "#/definitions/x"}, b={"$ref": "#/components/x"})
        | {"definitions": {"x": {"$ref": "#/components/x"}}, "components": {"x": {"const": 3}}},
        ['{"a": 3, "b": 3}'],
        ['{"a": 4}'],
    ),
    "names and values that look like references": (
        closed(**{"$ref": {"enum": [{"$ref": "#/x"}, "#"]}, "$defs": {"const": {"$ref": 1}}})
        | {"default": {"$ref": "#/nowhere"}, "examples": [{"$ref": 1}]},
        ['{"$ref": {"$ref": "#/x"}}', '{"$ref": "#", "$defs": {"$ref": 1}}'],
        ['{"$ref": {"$ref": "#/$defs/x"}}', '{"$defs": 1}'],
    ),
    "beside a reference": (
        closed(a={"$ref": "#/$defs/x", "maximum": 5}) | {"$defs": {"x": {"minimum": 3, "type": "integer"}}},
        ['{"a": 4}'],
        ['{"a": 2}', '{"a": 6}'],
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_of_a_tool_resolve_in_its_parameters(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler, name: str
) -> None:
    parameters, valid, invalid = REFERENCES[name]
    # The other tool has different definitions with the same names.
    other = closed(a={"$ref": "#/$defs/x"}) | {"$defs": {"x": {"const": 99}, "~/%/ä": {"const": 99}}}
    tools = [tool("g", other), tool("f", parameters)]
    parallel = compiler.compile_forced_calls(HERMES, tools, parallel=True)
    strict = [entry | {"function": entry["function"] | {"strict": True}} for entry in tools]
    for compiled in (parallel, optional(tokenizer, compiler, strict)):
        for arguments in valid:
            jsonschema.validate(json.loads(arguments), parameters)
            text = call("g", '{"a": 99}') + "\n" + call("f", arguments)
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert refused(tokenizer, compiled.copy(), ids) == "", arguments
        for arguments in invalid:
            assert not jsonschema.validators.validator_for(parameters)(parameters).is_valid(json.loads(arguments))
            ids = tokenizer.encode(call("f", arguments), add_special_tokens=False)
            assert refused(tokenizer, compiled.copy(), ids), arguments
    for seed in range(4):
        output = parse(walk(tokenizer, parallel.copy(), seed))
        assert not output.text
        for tool_call in output.calls:
            jsonschema.validate(json.loads(tool_call.arguments), parameters if tool_call.name == "f" else other)


def allows(tokenizer: ChatTokenizer, compiler: GrammarCompiler, response_format: ResponseFormat, text: str) -> bool:
    compiled = compiler.compile(response_format)
    return not refused(tokenizer, compiled, tokenizer.encode(text, add_special_tokens=False))


def any_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*schemas]}


def pets(**more: Any) -> dict[str, Any]:
    """A union with a discriminator property, as pydantic and OpenAPI write it."""
    kinds = {name: {"type": "object", "properties": {"kind": {"const": name}}} for name in ("cat", "dog")}
    return {
        "$defs": {name: kind | {"required": ["kind"]} for name, kind in kinds.items()} | {"any": {"type": "object"}},
        "type": "object",
        "properties": {"pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], **more}},
        "required": ["pet"],
    }


# A schema, valid texts, and invalid texts. llguidance alone is wrong for one of them.
EXACT: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "one of, disjoint by a property": (
        pets(discriminator={"propertyName": "kind", "mapping": {"cat": "#/$defs/cat", "dog": "#/$defs/dog"}}),
        ['{"pet": {"kind": "cat"}}', '{"pet": {"kind": "dog", "age": 1}}'],
        ['{"pet": {"kind": "cow"}}', '{"pet": {}}'],
    ),
    "one of, disjoint by the type": (
        {"$defs": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/c"}, "c": {"type": ["string", "null"]}}}
        | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        ["1", '"a"', "null"],
        ["true", "[]"],
    ),
    "one of beside any of": (
        {"anyOf": [{"const": 1}, {"const": "x"}], "oneOf": [{"type": "integer"}, {"type": "string"}]},
        ["1", '"x"'],
        ["2", '"y"'],
    ),
    "one of, disjoint by their texts": (
        {"$defs": {"a": {"enum": ["x", "y"]}, "b": {"const": "z"}}}
        | {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        ['"x"', '"z"'],
        ['"w"'],
    ),
    "another spelling of a name": (
        {"properties": {"a": {"type": "integer"}}, "type": "object"},
        ['{"a": 1}', '{"b": []}'],
        ['{"\\u0061": "x"}', '{"a": 1, "\\u0061": "x"}'],
    ),
    "another spelling of a name of a pattern": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        ['{"ab": 1}'],
        ['{"\\u0061b": "x"}'],
    ),
    "greater than 0": ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.2", "0.5"], ["0", "0.0", "-0"]),
    "above 5 and 7": ({"type": "number", "exclusiveMinimum": 7, "minimum": 5}, ["7.5"], ["7", "6"]),
    "below 1": ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, ["0.9", "0.99", "0"], ["1", "1.0"]),
    "multiples up to a bound with more digits": (
        {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 0.15},
        ["0.1", "0"],
        ["0.2", "0.15"],
    ),
    "a format of numbers": ({"type": "integer", "format": "int64"}, ["1"], ["1.5"]),
    "then without if": ({"then": False, "const": 1}, ["1"], ["2"]),
    "64 bits": (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        ["0", str(2**63 - 1), str(-(2**63)), str(2**63)],
        ["0.5", '"1"'],
    ),
    "additionalItems without an array": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False},
        ["[1, null]"],
        ['["x"]'],
    ),
    "names of a pattern beside alternatives": (
        {
            "type": "object",
            "patternProperties": {"^x": {"type": "integer"}},
            **any_of({"required": ["x"]}, {"required": ["xx"]}),
            "additionalProperties": False,
        },
        ['{"x": 1}'],
        ['{"y": 1}'],
    ),
    "digits": ({"type": "string", "pattern": r"^\d\D$"}, ['"1٣"'], ['"٣٣"']),
    "unused definitions": ({"const": 1, "$defs": {"a": {"not": True}}}, ["1"], ["2"]),
    "options of llguidance": (
        {"type": "object", "x-guidance": {"lenient": True}, "maxProperties": 0},
        ["{}"],
        ['{"a": 1}'],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_grammar_allows_the_texts_that_the_schema_allows(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler, name: str
) -> None:
    schema, valid, invalid = EXACT[name]
    response_format = ResponseFormat(kind="json_schema", schema=schema)
    for text in valid:
        assert allows(tokenizer, compiler, response_format, text), text
    for text in invalid:
        assert not allows(tokenizer, compiler, response_format, text), text


def test_a_regex_follows_ecma_262(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    response_format = ResponseFormat(kind="regex", regex=r"(?i:k)\d")
    assert allows(tokenizer, compiler, response_format, "K1")
    for text in ("\u212a1", "k\u0663"):
        assert not allows(tokenizer, compiler, response_format, text), text


def answers(tokenizer: ChatTokenizer, compiler: GrammarCompiler, response_format: ResponseFormat) -> set[str]:
    """Texts of random allowed tokens, as a client sees them: without control tokens."""
    compiled = compiler.compile(response_format)
    texts = set()
    for seed in range(6):
        grammar = compiled.copy()
        chance = random.Random(seed)
        ids: list[int] = []
        while not grammar.finished and len(ids) < 4 * STEPS:
            allowed = np.nonzero(unpack_mask(grammar.allowed(), VOCAB))[0].tolist()
            ids.append(chance.choice(allowed))
            grammar.accept(ids[-1])
            if ids[-1] in tokenizer.eos_ids:
                break
        texts.add(tokenizer.decode(ids, hidden=tokenizer.control_ids | tokenizer.eos_ids))
    return texts


# Kinds of vocabularies that spell the text of each control token with other tokens.
SPELLING = ["byte level", "llama", "gemma", "metaspace after bytes", "metaspace before bytes"]


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", SPELLING)
def test_text_of_control_tokens_is_complete(kind: str, normalizer: str, tmp_path: Path) -> None:
    """The library makes the tokens of prescribed text, and would make control tokens of it."""
    tokenizer = save(with_markers(kind, normalizer, special=False, seed=1), tmp_path)
    with closing(GrammarCompiler(tokenizer, VOCAB)) as compiler:
        for marker in sorted(tokenizer.control_tokens):
            text = f"a{marker}b {marker}"
            assert answers(tokenizer, compiler, ResponseFormat(kind="choice", choices=[text])) == {text}
            regex = ResponseFormat(kind="regex", regex=f"a{re.escape(marker)}(b|c)")
            assert answers(tokenizer, compiler, regex) <= {f"a{marker}b", f"a{marker}c"}
        for marker in (*TURNS, *MARKERS):
            schema = closed(**{marker: {"enum": [marker, f"{marker}{marker}"]}}) | {"required": [marker]}
            for answer in answers(tokenizer, compiler, ResponseFormat(kind="json_schema", schema=schema)):
                assert json.loads(answer)[marker] in (marker, marker * 2)


@pytest.mark.parametrize(
    "text", ["e\u0301", "\uff1ctool_call\uff1e", "A\u030a\u2126", "\U000fff001\U000fff01", "x\u200b  y"]
)
@pytest.mark.parametrize("kind", ["byte level", "gemma"])
def test_text_that_a_tokenizer_changes_is_complete(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = save(with_markers(kind, "lower case", special=True, seed=0), tmp_path)
    with closing(GrammarCompiler(tokenizer, VOCAB)) as compiler:
        assert answers(tokenizer, compiler, ResponseFormat(kind="choice", choices=[text])) == {text}


def test_a_call_has_the_text_of_control_tokens_in_its_arguments(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler
) -> None:
    text = "<tool_call></tool_call><|im_end|>"
    parameters = closed(**{text: {"const": text}}) | {"required": [text]}
    compiled = compiler.compile_forced_calls(HERMES, [tool("f", parameters)], parallel=False)
    ids = tokenizer.encode("<tool_call>\n", add_special_tokens=False)
    ids += tokenizer.encode(
        tokenizer.protect(json.dumps({"name": "f", "arguments": {text: text}})), add_special_tokens=False
    )
    ids += tokenizer.encode("\n</tool_call>", add_special_tokens=False)
    assert refused(tokenizer, compiled, ids) == ""
    markers = [token for token in ids if token in tokenizer.control_ids]
    assert markers == [tokenizer.id_of("<tool_call>"), tokenizer.id_of("</tool_call>")]


def test_free_strings_may_have_the_text_of_control_tokens_and_no_control_token(
    tokenizer: ChatTokenizer, compiler: GrammarCompiler
) -> None:
    schema = {"type": "string", "minLength": 20, "maxLength": 25}
    compiled = compiler.compile(ResponseFormat(kind="json_schema", schema=schema))
    ids = tokenizer.encode(tokenizer.protect('"<|im_end|></tool_call>"'), add_special_tokens=False)
    assert tokenizer.control_ids.isdisjoint(ids)
    assert refused(tokenizer, compiled.copy(), ids) == ""
    (quote,) = tokenizer.encode('"', add_special_tokens=False)
    compiled.accept(quote)
    allowed = set(np.nonzero(unpack_mask(compiled.allowed(), VOCAB))[0].tolist())
    assert tokenizer.control_ids.isdisjoint(allowed)


def test_a_vocabulary_whose_end_token_is_a_letter_is_refused(tmp_path: Path) -> None:
    """The end tokens of a configuration may be ordinary tokens; a grammar could not write their text."""
    folder = write_tokenizer(tmp_path)
    letter = ChatTokenizer(folder).id_of("x")
    assert letter is not None
    with pytest.raises(UnsupportedParameter, match="no token for some byte"):
        GrammarCompiler(ChatTokenizer(folder, [END, letter, 10**6]), VOCAB)


def test_a_marker_that_is_an_ordinary_token_is_text_in_a_call(tmp_path: Path) -> None:
    """The vocabulary of the model has the markers, but they are no added tokens."""
    table = json.loads(make_tokenizer().to_str())
    entries = table["added_tokens"]
    table["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in entries}
    table["added_tokens"] = [entry for entry in entries if entry["special"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    tokenizer = ChatTokenizer(tmp_path, [END])
    marker = tokenizer.id_of("<tool_call>")
    assert marker is not None
    assert marker not in tokenizer.control_ids
    with closing(GrammarCompiler(tokenizer, VOCAB)) as compiler:
        assert compiler.expression("<tool_call>\n<|im_end|>ß\x7f") == f'"<tool_call>\\n" <[{END}]> "ß\\u007f"'
        compiled = compiler.compile_forced_calls(HERMES, STRICT, parallel=False)
        for seed in range(6):
            assert parse(walk(tokenizer, compiled.copy(), seed)).calls


def test_pieces_of_a_format(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    start, end = (tokenizer.id_of(marker) for marker in ("<tool_call>", "</tool_call>"))
    assert compiler.pieces("<tool_call>\n<|x|></tool_call>") == [start, "\n<|x|>", end]
    assert compiler.pieces("") == []
    assert compiler.expression("") == '""'
    assert compiler.expression("<tool_call>") == f"<[{start}]>"


def test_copies_are_independent(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    compiled = compiler.compile(ResponseFormat(kind="regex", regex="ab"))
    first, second = compiled.copy(), compiled.copy()
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    before = second.allowed().copy()
    first.accept(token)
    assert (second.allowed() == before).all()
    assert not (first.allowed() == before).all()


def test_a_token_that_is_not_allowed_raises(compiler: GrammarCompiler, tokenizer: ChatTokenizer) -> None:
    compiled = compiler.compile(ResponseFormat(kind="regex", regex="ab"))
    (token,) = tokenizer.encode("b", add_special_tokens=False)
    with pytest.raises(ValueError):
        compiled.accept(token)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def nested_definitions() -> dict[str, Any]:
    """References to each of many nested levels. The result has a copy of each level with all levels inside it."""
    schema: dict[str, Any] = {"properties": {f"p{number}": {"type": "null"} for number in range(800)}}
    for _ in range(28):
        schema = {"properties": {"a": schema}}
    levels = ["#" + "/properties/a" * depth for depth in range(28)]
    return schema | {"anyOf": [{"$ref": level} for level in levels]}


def overlapping() -> dict[str, Any]:
    """Definitions such that a value may match two of them."""
    kind = {"type": "object", "properties": {"kind": {"const": "a"}}}
    return {
        "$defs": {
            "a": kind | {"required": ["kind"]},
            "b": {"type": "object", "properties": {"kind": {"const": "b"}}},  # kind is optional
            "c": {"type": "object", "properties": {"kind": {"enum": ["a", "c"]}}, "required": ["kind"]},
            "d": {"type": "integer"},
            "e": {"type": "number"},
            "f": {"$ref": "#/$defs/f"},
            "g": {"type": ["integer", "null"]},
            "h": {"type": ["string", "null"]},
            "i": {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},  # not only objects
            "j": {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
        }
    }


JSON = "response_format.json_schema.schema"
REFUSED: dict[str, tuple[ResponseFormat, str, str]] = {
    "no schema": (ResponseFormat(kind="json_schema"), JSON, "object"),
    "not": (ResponseFormat(kind="json_schema", strict=True, schema={"not": {"type": "null"}}), JSON, '"not"'),
    "remote": (
        ResponseFormat(kind="json_schema", strict=True, schema={"$ref": "http://localhost/a"}),
        JSON,
        "localhost",
    ),
    "impossible": (
        ResponseFormat(kind="json_schema", strict=True, schema={"type": "string", "minLength": 3, "maxLength": 2}),
        JSON,
        "",
    ),
    "endless reference": (
        ResponseFormat(kind="json_schema", strict=True, schema={"$ref": "#"}),
        JSON,
        "no text can match",
    ),
    **{
        name: (ResponseFormat(kind="json_schema", strict=True, schema=schema), JSON, words)
        for name, schema, words in [
            ("large steps", {"allOf": [{"multipleOf": 100_000}, {"multipleOf": 100_000}]}, "#/allOf/0/multipleOf"),
            (
                "a multiple that llguidance does not find",
                {"type": "number", "minimum": 1029.86, "maximum": 1029.86, "multipleOf": 2.21},
                "cannot be generated",
            ),
            ("definitions within each other", nested_definitions(), "with its references"),
            (
                "one of, two may match",
                {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]} | overlapping(),
                "oneOf",
            ),
            (
                "one of, a discriminator with common values",
                {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/c"}], "discriminator": {"propertyName": "kind"}}
                | overlapping(),
                "oneOf",
            ),
            ("one of numbers", {"oneOf": [{"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}]} | overlapping(), "oneOf"),
            ("one of, both null", {"oneOf": [{"$ref": "#/$defs/g"}, {"$ref": "#/$defs/h"}]} | overlapping(), "oneOf"),
            ("one of, no object", {"oneOf": [{"$ref": "#/$defs/i"}, {"$ref": "#/$defs/j"}]} | overlapping(), "oneOf"),
            ("one of itself", {"oneOf": [{"$ref": "#/$defs/f"}, {"$ref": "#/$defs/f"}]} | overlapping(), ""),
            ("a name that is not valid Unicode", {"properties": {"\ud800": {}}}, "cannot be used"),
            ("lenient", {"x-guidance": {"lenient": True}, "not": {}}, '"not"'),
        ]
    },
    "too deep": (ResponseFormat(kind="json_schema", strict=True, schema=nested(100)), JSON, "deeper"),
    "too many values": (
        ResponseFormat(kind="json_schema", strict=True, schema={"enum": list(range(30_000))}),
        JSON,
        "values",
    ),
    "too long": (ResponseFormat(kind="json_schema", strict=True, schema={"const": "x" * 300_000}), JSON, "characters"),
    "many patterns at once": (
        ResponseFormat(
            kind="json_schema",
            strict=True,
            schema={"allOf": [{"type": "string", "pattern": f".*{i}.*"} for i in range(30)]},
        ),
        JSON,
        "",
    ),
    "every combination": (
        ResponseFormat(
            kind="json_schema",
            schema={
                "allOf": [
                    {"anyOf": [{"properties": {f"a{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)
                ]
            },
        ),
        JSON,
        "",
    ),
    "repeated repetition": (ResponseFormat(kind="regex", regex="(a{1000}){1000}"), "regex", "processor time"),
    "empty regex": (ResponseFormat(kind="regex", regex=""), "regex", "empty"),
    "back-reference": (ResponseFormat(kind="regex", regex=r"(a)\1"), "regex", "backreference"),
    "regex of nothing": (ResponseFormat(kind="regex", regex=r"[^\s\S]"), "regex", "no text can match"),
    "long regex": (ResponseFormat(kind="regex", regex="a" * 300_000), "regex", "characters"),
    "no choice": (ResponseFormat(kind="choice", choices=[]), "choice", "at least one"),
    "empty choice": (ResponseFormat(kind="choice", choices=["a", ""]), "choice", "empty"),
    "many choices": (ResponseFormat(kind="choice", choices=["a"] * 5000), "choice", "limit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_format_is_refused_by_name(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, name: str
) -> None:
    response_format, param, words = REFUSED[name]
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(response_format)
    assert caught.value.param == param
    assert words in caught.value.message
    # The next request works.
    assert walk(tokenizer, compiler.compile(ResponseFormat(kind="choice", choices=["ok"])), 0) == "ok"


def test_only_strict_schemas_refuse_an_unknown_format(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "format": "x"}
    compiler.compile(ResponseFormat(kind="json_schema", schema=schema))
    lax = tool("f", closed(a=schema))
    lax["function"]["strict"] = False
    compiler.compile_forced_calls(HERMES, [lax], parallel=False)
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.compile(ResponseFormat(kind="json_schema", schema=schema, strict=True))
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.compile_forced_calls(HERMES, [tool("f", closed(a=schema))], parallel=False)


def test_the_maximum_number_of_choices_compiles_and_runs(tokenizer: ChatTokenizer, compiler: GrammarCompiler) -> None:
    """The default limits of llguidance would end the matcher of such a grammar after its first token."""
    chance = random.Random(0)
    choices = ["".join(chance.choices("abcdefghij", k=30)) for _ in range(compiling.MAX_CHOICES)]
    compiled = compiler.compile(ResponseFormat(kind="choice", choices=choices))
    assert {walk(tokenizer, compiled.copy(), seed) for seed in range(3)} <= set(choices)


MALFORMED: tuple[object, ...] = (
    None, True, -1, 1.5, math.nan, 10**400, "x", "#", "#/", "#/%ff", "//[", "(", "\ud800", [], {}, [[]], [{}], [None],
    ["a"], [1], {"a": 1}, {"a": []}, {"a": {}}, {"a": {"type": [[]]}}, [{"a": []}], {"a": {"$ref": ["x"]}},
)  # fmt: skip
MORE_KEYWORDS = (
    "type", "$id", "id", "$anchor", "$defs", "definitions", "$schema", "title", "default", "nullable", "x-guidance",
)  # fmt: skip


@pytest.mark.parametrize("keyword", [*KEYWORDS, *MORE_KEYWORDS])
def test_a_malformed_value_raises_only_schema_problems(keyword: str) -> None:
    """A client would see any other exception as an internal error."""
    for value in MALFORMED:
        for kind in (None, *TYPES):
            for beside in ({}, {"items": [{}]}, {"properties": {"a": {}}}, {"minimum": 1}, {"multipleOf": 2}):
                schema = beside | ({} if kind is None else {"type": kind}) | {keyword: value}
                with contextlib.suppress(SchemaProblem):
                    rewrite({"properties": {"p": schema}})


def test_invalid_tool_parameters_are_refused(compiler: GrammarCompiler) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nope"}}}]
    with pytest.raises(InvalidRequest, match="tools"):
        compiler.compile_forced_calls(HERMES, tools, parallel=True)
    tools[0]["function"]["strict"] = True
    with pytest.raises(InvalidRequest, match="tools"):
        compiler.compile_optional_calls(HERMES, tools, parallel=True)


def test_a_compilation_is_limited_in_elapsed_time(
    compiler: GrammarCompiler, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "CPU_LIMIT", 600.0)
    monkeypatch.setattr(compiling, "WALL_LIMIT", 0.3)
    limited = GrammarCompiler(tokenizer, VOCAB)
    with pytest.raises(InvalidRequest, match=r"longer than 0\.3 s"):
        limited.compile(ResponseFormat(kind="regex", regex="(a{1000}){1000}"))
    limited.close()


@pytest.mark.parametrize("kind", ["byte level", "llama", "gemma", "metaspace after bytes"])
def test_a_grammar_works_with_each_kind_of_vocabulary(kind: str, tmp_path: Path) -> None:
    """The bytes of a token are the bytes that it adds to a text, with spaces and parts of characters."""
    tokenizer = vocabulary(kind, tmp_path)
    compiler = GrammarCompiler(tokenizer, VOCAB)
    pattern = "the( fox| größer🇫🇷| 日本|\n\t)+"
    compiled = compiler.compile(ResponseFormat(kind="regex", regex=pattern))
    for seed in range(12):
        text = walk(tokenizer, compiled.copy(), seed)
        assert re.fullmatch(pattern, text), text
    compiler.close()


def test_a_grammar_works_with_letters_as_added_tokens(tmp_path: Path) -> None:
    """The vocabulary of the model has one of them, as the spelling of a byte that no text has, but not the other."""
    rust = make_tokenizer()
    rust.add_tokens(["ü", "naïve"])
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(tmp_path, [END])
    compiler = GrammarCompiler(tokenizer, VOCAB)
    compiled = compiler.compile(ResponseFormat(kind="choice", choices=["für x", "so naïve x"]))
    assert {walk(tokenizer, compiled.copy(), seed) for seed in range(30)} == {"für x", "so naïve x"}
    compiler.close()


@pytest.mark.parametrize("kind", ["byte level, word ends", "wordpiece", "suffixes", "words", "metaspace"])
def test_a_vocabulary_without_exact_bytes_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    tokenizer = vocabulary(kind, tmp_path)
    name = re.escape(tokenizer.kind)
    with pytest.raises(UnsupportedParameter, match=rf"structured output.*\({name}\)"):
        GrammarCompiler(tokenizer, VOCAB)


def test_a_vocabulary_that_makes_the_library_panic_is_refused(tmp_path: Path) -> None:
    rust = make_tokenizer()
    rust.add_tokens(["x" * 2000])
    rust.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedParameter, match="structured output"):
        GrammarCompiler(ChatTokenizer(tmp_path, [END]), VOCAB)


def test_a_token_that_resembles_a_byte_is_text(tmp_path: Path) -> None:
    rust = KINDS["llama"]()
    vocab = {**json.loads(rust.to_str())["model"]["vocab"], "<0x1>": rust.get_vocab_size()}
    rust.model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    rust.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ChatTokenizer(tmp_path, [END])
    with closing(GrammarCompiler(tokenizer, VOCAB)) as compiler:
        assert answers(tokenizer, compiler, ResponseFormat(kind="choice", choices=["a<0x1>"])) == {"a<0x1>"}


def test_a_model_without_an_end_of_sequence_token_is_refused(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "eos_ids", frozenset())
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        GrammarCompiler(tokenizer, VOCAB)
