from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from localllm.app.chat.calls.records import FORMATS, REASONING, WRAPPERS, CallFormat
from localllm.app.chat.output.parser import AnswerFormat, Output, OutputParser

HERMES = FORMATS[0]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = [("weather", '{"city": "Paris"}')]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": {"city": {"type": "string"}}}}}
    for name in ("weather", "now", "f")
]
Read = tuple[str, str, list[tuple[str, str]]]

# output -> (reasoning, text, calls)
TABLE: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "plain": ("hello world", "", "hello world", []),
    "nothing": ("", "", "", []),
    "white space only": (" \n ", "", " \n ", []),
    "leading white space stays": ("  hi\n", "", "  hi\n", []),
    "less-than signs": ("a < b <tool> <thin", "", "a < b <tool> <thin", []),
    "unfinished marker": ("see <tool_cal", "", "see <tool_cal", []),
    "thinking": ("<think>\nhm, so\n</think>\n\nYes.", "hm, so", "Yes.", []),
    "thinking after blanks": ("\n<think>hm</think>Yes.", "hm", "Yes.", []),
    "empty thinking": ("<think>\n\n</think>\n\nYes.", "", "Yes.", []),
    "thinking cut off": ("<think>\nhm, so", "hm, so", "", []),
    "thinking with inner marker": ("<think>a < b </thin> c</think>d", "a < b </thin> c", "d", []),
    "thinking later is text": ("Well <think>x</think>", "", "Well <think>x</think>", []),
    "call": (CALL, "", "", WEATHER),
    "call with text around": (f"Sure.\n{CALL}\nDone.", "", "Sure.\n\nDone.", WEATHER),
    "call with text before": (f"Sure.\n\n{CALL}\n", "", "Sure.", WEATHER),
    "call with text after": (f"{CALL}\n\nDone.\n", "", "Done.", WEATHER),
    "two calls": (f"{CALL}\n{CALL}", "", "", WEATHER * 2),
    "thinking and call": (f"<think>look it up</think>\n{CALL}", "look it up", "", WEATHER),
    "call in thinking is thought": (f"<think>{CALL}</think>ok", CALL, "ok", []),
    "unclosed call": (CALL.removesuffix("\n</tool_call>"), "", "", WEATHER),
    "unclosed object": (CALL.removesuffix("}\n</tool_call>"), "", "", WEATHER),
    "call without an end of its name": ('<tool_call>\n{"name": "wea', "", '<tool_call>\n{"name": "wea', []),
    "malformed call": ("<tool_call>{oops}</tool_call> x", "", "<tool_call>{oops}</tool_call> x", []),
    "call without a name": ('<tool_call>{"a": 1}</tool_call>', "", '<tool_call>{"a": 1}</tool_call>', []),
    "call without arguments": ('<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>', "", "", [("f", '{"a": 1}')]),
    "args": ('<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>', "", "", [("f", '{"a": 1}')]),
    "input": ('<tool_call>{"name": "f", "input": {"a": 1}}</tool_call>', "", "", [("f", '{"a": 1}')]),
    "unknown member": (
        '<tool_call>{"name": "f", "a": 1}</tool_call>',
        "",
        '<tool_call>{"name": "f", "a": 1}</tool_call>',
        [],
    ),
    "members of a call": (
        '<tool_call>{"id": "c1", "type": "function", "name": "f", "arguments": {"a": 1}, "index": 0}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "arguments before the name": (
        '<tool_call>{"arguments": {"a": "}"}, "name": "f"}</tool_call>',
        "",
        "",
        [("f", '{"a": "}"}')],
    ),
    "call of OpenAI": (
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}</tool_call>.',
        "",
        ".",
        [("f", '{"a": 1}')],
    ),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "empty text as arguments": ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", "", [("f", "{}")]),
    "null as arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", "", [("f", "{}")]),
    "a list as arguments": ('<tool_call>{"name": "f", "arguments": [1, 2]}</tool_call>', "", "", [("f", "[1, 2]")]),
    "a number as arguments": ('<tool_call>{"name": "f", "arguments": 5}</tool_call>', "", "", [("f", "5")]),
    "bad text as arguments": (
        '<tool_call>{"name": "f", "arguments": "oops"}</tool_call>',
        "",
        "",
        [("f", '"oops"')],
    ),
    "unicode in a call": (
        '<tool_call>{"name": "f", "arguments": {"q": "日本 🙂 </b>"}}</tool_call>é',
        "",
        "é",
        [("f", '{"q": "日本 🙂 </b>"}')],
    ),
    "end marker in a string": (
        '<tool_call>{"name": "f", "arguments": {"q": "a \\" </tool_call> b"}}</tool_call>c',
        "",
        "c",
        [("f", '{"q": "a \\" </tool_call> b"}')],
    ),
    "end marker in the string of an unclosed call": (
        '<tool_call>{"name": "f", "arguments": {"q": "</tool_call>"}}',
        "",
        "",
        [("f", '{"q": "</tool_call>"}')],
    ),
}


def feed(parser: OutputParser, text: str) -> Output:
    parser.feed(text)
    return parser.take()


def merged(outputs: list[Output]) -> Read:
    """The joined outputs. The first part of each call has its id and name, and the parts come in order."""
    calls: list[list[str]] = []
    for part in (part for output in outputs for part in output.calls):
        if part.index == len(calls):
            assert part.id
            assert part.name
            calls.append([part.name, ""])
        assert part.index == len(calls) - 1
        calls[-1][1] += part.arguments
    return (
        "".join(output.reasoning for output in outputs),
        "".join(output.text for output in outputs),
        [(name, arguments) for name, arguments in calls],
    )


def read(
    chunks: list[str],
    form: AnswerFormat = AnswerFormat(REASONING[0], (HERMES,)),
    tools: list[dict[str, Any]] = TOOLS,
    *,
    cut: bool = False,
    **options: Any,
) -> Read:
    parser = OutputParser(form, tools, **options)
    outputs = [feed(parser, chunk) for chunk in chunks]
    parser.finish(cut=cut)
    return merged([*outputs, parser.take()])


@pytest.mark.parametrize("name", TABLE)
def test_output_split_at_any_position(name: str) -> None:
    output, *expected = TABLE[name]
    assert read([output]) == tuple(expected)
    assert read(list(output)) == tuple(expected)
    for cut in range(1, len(output)):
        assert read([output[:cut], output[cut:]]) == tuple(expected), cut


def test_output_split_at_any_two_positions() -> None:
    output = '<think>a</think>b<tool_call>{"name":"f"}</tool_call>c'
    for first, second in combinations(range(1, len(output)), 2):
        chunks = [output[:first], output[first:second], output[second:]]
        assert read(chunks) == ("a", "bc", [("f", "{}")]), chunks


def test_markers_are_text_without_reasoning_or_tools() -> None:
    output = f"<think>a</think>{CALL}"
    assert read([output], AnswerFormat(), []) == ("", output, [])
    assert read(list(output), tools=[]) == ("a", CALL, [])
    assert read(list(output), AnswerFormat(None, (HERMES,))) == ("", "<think>a</think>", WEATHER)


@pytest.mark.parametrize("cut", range(1, 12))
def test_output_inside_reasoning_starts_with_reasoning(cut: int) -> None:
    output = "\nhm\n</think>\nYes"
    assert read([output[:cut], output[cut:]], inside_reasoning=True) == ("hm", "Yes", [])


def test_text_waits_only_while_it_may_start_a_marker() -> None:
    parser = OutputParser(AnswerFormat(REASONING[0], (HERMES,)), TOOLS)
    assert feed(parser, "<") == Output()
    assert parser.pending == 1
    assert feed(parser, "b> and <tool_call") == Output(text="<b> and")
    assert feed(parser, "ing>") == Output(text=" <tool_calling>")
    assert parser.pending == 0


def test_names_and_arguments_are_reported_as_they_come() -> None:
    parser = OutputParser(AnswerFormat(None, (HERMES,)), TOOLS)
    assert merged([feed(parser, '<tool_call>{"name": "f", "arguments": ')]) == ("", "", [("f", "")])
    fragments = ['{"a', '": "', "x", "\\", '"', "y", '"', "}"]
    assert ["".join(part.arguments for part in feed(parser, text).calls) for text in fragments] == [
        '{"a', '": "', "x", "", '\\"', "y", '"', "}"
    ]  # fmt: skip


def test_a_cut_call_has_the_arguments_so_far_and_no_markup() -> None:
    counts = []
    for length in range(1, len(CALL)):
        reasoning, text, calls = read([CALL[:length]], cut=True)
        assert not reasoning
        assert CALL.startswith(text)
        assert len(text) < len("<tool_call>")
        if '"arguments": {' in CALL[:length]:
            assert calls == [("weather", CALL[:length].partition('"arguments": ')[2][: len(WEATHER[0][1])])]
        else:
            assert calls in ([], [("weather", "")])
        counts.append(len(calls))
    assert counts == sorted(counts)


def test_a_cut_json_answer_stays_text() -> None:
    form = AnswerFormat(None, (form_of("llama-3"), form_of("list")))
    for text in ('{"a": 1', '[{"a": "x', '{"name": "Bob'):
        assert read(list(text), form, cut=True) == ("", text, [])
    for text in ('{"name": "wea', '{ "na'):
        assert read(list(text), form, cut=True) == ("", "", [])


def test_two_calls_never_have_one_id() -> None:
    form = AnswerFormat(None, (form_of("mistral-id"),))
    parser = OutputParser(form, TOOLS)
    output = feed(parser, "[TOOL_CALLS]now[CALL_ID]abcdefgh1[ARGS]{}" * 2)
    first, second = (part.id for part in output.calls if part.id)
    assert first == "abcdefgh1" != second


def test_the_first_call_ends_the_answer_if_there_may_be_only_one() -> None:
    parser = OutputParser(AnswerFormat(None, (HERMES,)), TOOLS, one_call=True)
    assert merged([feed(parser, f"a{CALL}\n{CALL} b")]) == ("", "a", WEATHER)
    assert parser.ended


def test_arguments_stay_unchanged() -> None:
    arguments = '{"b":1.50,"a":[1,  2]}'
    _, _, calls = read([f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert calls == [("f", arguments)]


# (title of the format, output, text, calls); the output may differ from what the template of a model writes
VARIANTS = [
    ("llama-3", '{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama-3", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama-3", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    ("llama-3", 'I say {"name": "now", "parameters": {}}', 'I say {"name": "now", "parameters": {}}', []),
    ("llama-3", '{"answer": 42}', '{"answer": 42}', []),
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]', "", [("now", {})]),
    (
        "mistral-args",
        'Now.[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]f[ARGS]{"a": "]"}',
        "Now.",
        [("now", {}), ("f", {"a": "]"})],
    ),
    (
        "qwen3-coder",
        "<tool_call><function=f><parameter=city>a</parameter></function></tool_call>",
        "",
        [("f", {"city": "a"})],
    ),
    (
        "qwen3-coder",
        "<tool_call>\n<function=f>\n<parameter=city>\n</parameter>\n is no end\n\n</parameter>\n</function>",
        "",
        [("f", {"city": "</parameter>\n is no end\n"})],
    ),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n", "", [("f", {"n": 5})]),
    ("glm-4.5", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    ("glm-4.5", "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    (
        "lfm2",
        "<|tool_call_start|>[f(city='it\\'s', n=-1.5, x=[None, {'a': True}])]<|tool_call_end|>",
        "",
        [("f", {"city": "it's", "n": -1.5, "x": [None, {"a": True}]})],
    ),
    ("llama-4", '[f("Oslo")]', "", [("f", {"city": "Oslo"})]),
    ("llama-4", "[1] is a footnote", "[1] is a footnote", []),
    (
        "gemma-4",
        '<|tool_call>call:f{city:<|"|>a "b", {c}\\<|"|>,n:null}<tool_call|>.',
        ".",
        [("f", {"city": 'a "b", {c}\\', "n": None})],
    ),
    ("glm-4", 'f\n{"a": 1}', "", [("f", {"a": 1})]),
    ("glm-4", "f is a letter", "f is a letter", []),
    (
        "hermes",
        '<tool_call>[{"name": "now"}, {"name": "f", "arguments": {}}]</tool_call>.',
        ".",
        [("now", {}), ("f", {})],
    ),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "f"}}</tool_call>.', ".", [("now", {}), ("f", {})]),
    ("qwen3-coder", "<function=f>\n<parameter=n>\n5\n</parameter>\n</function>.", ".", [("f", {"n": 5})]),
    ("lfm2", "<|tool_call_start|>[f(n=1e400)]<|tool_call_end|>", "", [("f", {"n": "1e400"})]),
    (
        "deepseek-r1",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n"{\\"n\\": 5}"<｜tool▁call▁end｜>',
        "",
        [("f", {"n": 5})],
    ),
    (
        "deepseek-v3.1",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}<｜tool▁call▁end｜>",
        [],
    ),
]


def form_of(title: str) -> CallFormat:
    return next(form for form in FORMATS if form.title == title)


@pytest.mark.parametrize(("title", "output", "text", "calls"), VARIANTS)
def test_spellings_of_other_formats(title: str, output: str, text: str, calls: list[tuple[str, Any]]) -> None:
    form = AnswerFormat(None, (form_of(title),))
    for chunks in ([output], list(output)):
        _, answer, parts = read(chunks, form)
        assert (answer, [(name, json.loads(arguments)) for name, arguments in parts]) == (text, calls)


def test_texts_around_an_answer_are_dropped() -> None:
    form = AnswerFormat(REASONING[5], (), WRAPPERS)
    output = "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>It is <response>.<|END_RESPONSE|>"
    assert read(list(output), form) == ("hm", "It is <response>.", [])
