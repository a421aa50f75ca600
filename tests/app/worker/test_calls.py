"""Tool calls in every format, written by a model with a known text in a real worker.

`make test` runs a sample of the formats, `make test-all` all of them, each with two vocabularies: the markers of the
format are added tokens, special or not, or ordinary tokens spell them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import pytest

from localllm.app import frames
from localllm.app.chat.calls import records
from localllm.app.chat.calls.records import FORMATS, CallFormat, Part
from localllm.app.chat.calls.writing import example
from localllm.app.frames import Failed, Generate

from ..chat.template.call_templates import template_of
from ..script_model import END, START, Markers, write_script_model
from .worker_process import Result, WorkerProcess

MAX_TOKENS = 380
Kind = Literal["special", "added", "spelled"]
Call = tuple[str, dict[str, Any]]

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "ratio": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "opts": {"type": "object"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "write_note": NOTE}
FLAT = WEATHER | {"properties": {key: WEATHER["properties"][key] for key in ("city", "days", "unit")}}
OSLO: Call = ("get_weather", {"city": "Oslo", "days": 30})
ALL: Call = (
    "get_weather",
    {
        "city": "Tromsø 🙂",
        "days": 30,
        "unit": "C",
        "exact": True,
        "ratio": 0.25,
        "tags": ["a", "b c"],
        "opts": {"a": {"b": [1, None, False]}},
    },
)
NOTED: Call = ("write_note", {"text": 'say "hi" \\ and \'x\'\n\n  <p class="a">{b} [c], d) </p> & <br/>\n'})
WRONG: dict[str, Call] = {
    "name": ("get_wether", {"city": "Oslo", "days": 30}),
    "missing": ("get_weather", {"days": 30}),
    "type": ("get_weather", {"city": ["Oslo"], "days": "many"}),
    "enum": ("get_weather", {"city": "Oslo", "days": 30, "unit": "Kelvin"}),
    "unknown": ("get_weather", {"city": "Oslo", "days": 30, "color": "red"}),
    "spaces": ("get_weather", {"city": "Oslo", "days": 30, "unit": "\n\n C\n\n"}),
}
EXACT = {"one": OSLO, "all": ALL, "note": NOTED}
TEXT = "I will look."

# The formats of `make test`, and how the vocabulary has their markers.
SAMPLE: dict[str, Kind] = {
    "hermes": "special",
    "qwen3-coder": "spelled",
    "kimi-k3": "added",
    "gemma-4": "special",
    "llama-3": "spelled",
}

_MARK = re.compile(r"<[^<>]+>|\[[A-Z_/]+\]")
_ids = itertools.count()


@dataclass
class Bench:
    """A worker with a model that writes calls in one format."""

    form: CallFormat
    kind: Kind
    worker: WorkerProcess

    def ask(self, script: str, **fields: Any) -> Generate:
        messages = [{"role": "user", "content": script}]
        options = {"tools": tools(), "temperature": 0.0, "max_tokens": MAX_TOKENS} | fields
        return Generate(id=f"r{next(_ids)}", messages=messages, **options)

    def one(self, script: str, **fields: Any) -> Result:
        (result,) = self.worker.generate(self.ask(script, **fields))
        return result

    @property
    def has_parallel_calls(self) -> bool:
        return not self.form.at_start or self.form.separator is not None

    @property
    def hostile(self) -> str:
        """A text with the markup of the format, of the template and of other languages."""
        form = self.form
        marks = _MARK.findall(form.begin + form.parameter[form.parameter.find("$value") :] + form.end)
        texts = [END, START, *dict.fromkeys(marks), '"', "\\", "\n", "<b>&amp;</b>", "ø🙂", "'"]
        return f"a {' x '.join(texts)} z"


def tools(weather: dict[str, Any] = WEATHER, **extra: Any) -> list[dict[str, Any]]:
    return [tool("get_weather", weather, **extra), tool("write_note", NOTE, **extra)]


def tool(name: str, schema: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **extra}}


def _marks(form: CallFormat) -> list[str]:
    """The markers of a format that real vocabularies have as tokens."""
    marks = form.marks | ({form.quote} if form.quote != '"' else set())
    return sorted(mark for mark in marks if mark.endswith((">", "]")) and "$" not in mark)


def _scripts(form: CallFormat) -> dict[str, str]:
    scripts = {name: example(form, [call]) for name, call in EXACT.items()}
    scripts |= {"two": example(form, [OSLO, NOTED]), "text": f"{TEXT} <b>[1]</b>"}
    scripts |= {"text before": f"{TEXT}\n\n{scripts['one']}"}
    return scripts | {f"wrong {name}": example(form, [call]) for name, call in WRONG.items()}


def _last(form: CallFormat) -> str:
    """The text that ends a call: a grammar refuses a token that goes on after it."""
    last = form.parts[-1]
    is_end = form.at_start or not form.end
    return (last.text if isinstance(last, records.Literal) else "}") if is_end else form.end.strip()


def _closing(form: CallFormat, kind: Kind) -> list[str]:
    """Texts that end a value and a call, so that a call which a grammar completes is short."""
    tail = _text_of(form.parameter_parts[-1]) if form.parameter else form.quote
    first = [tail] if kind == "spelled" else [mark for mark in _MARK.findall(tail + form.end) if mark in _marks(form)]
    last = [_text_of(form.parts[-1])] if isinstance(form.parts[-1], records.Literal) else []
    texts = [*first, '"', "}", "]", ")", *last, form.end, _MARK.split(form.end)[0]]
    return list(dict.fromkeys(text for text in texts if text))


def _text_of(part: Part) -> str:
    assert isinstance(part, records.Literal)
    return part.text


def _pairs() -> Iterator[Any]:
    for index, form in enumerate(FORMATS):
        sampled = SAMPLE.get(form.title, "spelled")
        marked = sampled if sampled != "spelled" else ("special", "added")[index % 2]
        for kind in ("spelled", marked) if _marks(form) else ("spelled",):
            marks = [] if SAMPLE.get(form.title) == kind else [pytest.mark.slow]
            yield pytest.param((form, kind), id=f"{form.title}-{kind}", marks=marks)


@pytest.fixture(scope="module", params=_pairs())
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    form, kind = request.param
    markers = Markers(() if kind == "spelled" else _marks(form), special=kind == "special")
    folder = tmp_path_factory.mktemp("script")
    write_script_model(
        folder,
        _scripts(form),
        template_of(form),
        markers=markers,
        preferred=_closing(form, kind),
        last=_last(form),
    )
    worker = WorkerProcess()
    loaded = worker.load(folder)
    assert isinstance(loaded, frames.Loaded), loaded
    yield Bench(form, kind, worker)
    worker.send(frames.Shutdown())
    code, log = worker.close()
    assert (code, "Traceback" in log) == (0, False), log


def read(result: Result) -> list[Call]:
    """The calls of an answer, which has no text and ends by itself."""
    assert not isinstance(result.end, Failed), result.end
    assert (result.text(), result.finish()) == ("", "tool_calls"), result.calls()
    return [(name, json.loads(arguments)) for name, arguments in result.calls()]


@pytest.mark.parametrize("script", EXACT)
def test_calls_of_the_script_stream(bench: Bench, script: str) -> None:
    result = bench.one(script)
    assert read(result) == [EXACT[script]]
    pieces = [part for piece in result.pieces() for part in piece.tool_calls]
    assert [bool(part.name) for part in pieces] == [True] + [False] * (len(pieces) - 1)
    is_whole = bench.form.arguments in ("keywords", "entries")  # arguments stream one by one
    assert len([part for part in pieces if part.arguments]) > (0 if is_whole else 1)


def test_text_before_a_call(bench: Bench) -> None:
    result = bench.one("text before")
    if bench.form.at_start:
        assert (result.text(), result.finish()) == (_scripts(bench.form)["text before"], "stop")
        return
    assert (result.text(), result.finish()) == (TEXT, "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in result.calls()] == [OSLO]


def test_answer_without_a_call(bench: Bench) -> None:
    result = bench.one("text", tools=tools(strict=True))
    assert (result.text(), result.finish(), result.calls()) == (_scripts(bench.form)["text"], "stop", [])


def test_two_calls(bench: Bench) -> None:
    expected = [OSLO, NOTED] if bench.has_parallel_calls else [OSLO]
    free, forced, strict = bench.worker.generate(
        bench.ask("two"), bench.ask("two", forced_tools=tools()), bench.ask("two", tools=tools(strict=True))
    )
    assert read(free) == read(forced) == read(strict) == expected


def test_one_call_without_parallel_calls(bench: Bench) -> None:
    free, forced, strict = bench.worker.generate(
        bench.ask("two", parallel_tool_calls=False),
        bench.ask("two", parallel_tool_calls=False, forced_tools=tools()),
        bench.ask("two", parallel_tool_calls=False, tools=tools(strict=True)),
    )
    assert read(forced) == [OSLO]
    assert read(free) == read(strict) == [OSLO]


@pytest.mark.parametrize("script", ["one", *(pytest.param(name, marks=pytest.mark.slow) for name in ("all", "two"))])
def test_call_that_max_tokens_cuts(bench: Bench, script: str) -> None:
    whole = bench.one(script)
    expected = whole.calls()
    count = whole.end.completion_tokens - 1  # without the end token
    results = bench.worker.generate(*(bench.ask(script, max_tokens=limit) for limit in range(1, count + 1)))
    sizes = []
    for result in results:
        assert result.finish() == "length"
        assert bench.form.trigger.startswith(result.text().strip())  # the start of a marker may also be text
        calls = result.calls()
        *complete, last = calls or [("", "")]
        assert complete == expected[: len(complete)]
        if calls:
            assert last[0] == expected[len(complete)][0]
            assert expected[len(complete)][1].startswith(
                last[1].rstrip("\ufffd")
            )  # U+FFFD stands for an incomplete character
        sizes.append(len(calls))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("script", [f"wrong {name}" for name in WRONG])
def test_grammar_corrects_a_wrong_call(bench: Bench, script: str) -> None:
    flat = tools(FLAT)
    forced, required, strict, free = bench.worker.generate(
        bench.ask(script, tools=flat, forced_tools=flat[:1], parallel_tool_calls=False),
        bench.ask(script, tools=flat, forced_tools=flat),
        bench.ask(script, tools=tools(FLAT, strict=True)),
        bench.ask(script, tools=flat),
    )
    is_text = bench.form.at_start and script == "wrong name"
    for result in [forced, required] if is_text else [forced, required, strict]:
        assert result.finish() == "tool_calls", result.calls()
        for name, arguments in result.calls():
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert [name for name, _ in read(forced)] == ["get_weather"]
    assert read(required)
    if is_text:
        assert (strict.finish(), free.finish()) == ("stop", "stop")
        assert strict.text() == free.text() == _scripts(bench.form)[script]
        return
    assert free.finish() == "tool_calls", free.calls()
    for name, arguments in free.calls():
        assert name in SCHEMAS
        json.loads(arguments)


def test_stop_strings_do_not_end_a_call(bench: Bench) -> None:
    stop = ["Troms", '"', "30", *_marks(bench.form)][:4]
    assert read(bench.one("all", stop=stop)) == [ALL]
    assert read(bench.one("all", stop=stop, forced_tools=tools())) == [ALL]


@pytest.mark.parametrize("schema", ["const", "enum", "const and text"])
def test_constants_with_markup(bench: Bench, schema: str) -> None:
    text = bench.hostile
    value: dict[str, Any] = {"enum": [text, f"{text}2"]} if schema == "enum" else {"const": text}
    properties = {"text": value, "more": {"type": "string"}} if schema == "const and text" else {"text": value}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    noted = [tool("write_note", parameters)]
    strict = [tool("write_note", parameters, strict=True)]
    requests = [bench.ask("note", tools=noted, forced_tools=noted), bench.ask("note", tools=strict)]
    for result in bench.worker.generate(*requests):
        assert result.finish() == "tool_calls", result.calls()
        for name, arguments in result.calls():
            assert name == "write_note"
            jsonschema.validate(json.loads(arguments), parameters)
