from __future__ import annotations

from itertools import combinations

import pytest

from localllm.app.chat.parsers import Output, OutputParser

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
WEATHER = [("weather", '{"city": "Paris"}')]

# output -> (reasoning, text, calls)
TABLE = {
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
    "call with text around": (f"Sure. {CALL}\nDone.", "", "Sure. Done.", WEATHER),
    "two calls": (f"{CALL}\n{CALL}", "", "", WEATHER * 2),
    "thinking and call": (f"<think>look it up</think>\n{CALL}", "look it up", "", WEATHER),
    "call in thinking is thought": (f"<think>{CALL}</think>ok", CALL, "ok", []),
    "unclosed call": (CALL.removesuffix("\n</tool_call>"), "", "", WEATHER),
    "cut off call": ('<tool_call>\n{"name": "wea', "", '<tool_call>\n{"name": "wea', []),
    "malformed call": ("<tool_call>{oops}</tool_call> x", "", "<tool_call>{oops}</tool_call> x", []),
    "call without a name": ('<tool_call>{"a": 1}</tool_call>', "", '<tool_call>{"a": 1}</tool_call>', []),
    "call without arguments": ('<tool_call>{"name": "now"}</tool_call>', "", "", [("now", "{}")]),
    "arguments as text": (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        "",
        [("f", '{"a": 1}')],
    ),
    "arguments as bad text": (
        '<tool_call>{"name": "f", "arguments": "oops"}</tool_call>',
        "",
        '<tool_call>{"name": "f", "arguments": "oops"}</tool_call>',
        [],
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
    "string that never ends": (
        f'<tool_call>{{"name": "f}}</tool_call> x {CALL} y <tool_call>"</tool_call>z',
        "",
        '<tool_call>{"name": "f}</tool_call> x y <tool_call>"</tool_call>z',
        WEATHER,
    ),
}


def feed(parser: OutputParser, text: str) -> Output:
    parser.feed(text)
    return parser.take()


def read(chunks: list[str], **options: bool) -> tuple[str, str, list[tuple[str, str]]]:
    parser = OutputParser(**{"reasoning": True, "tools": True} | options)
    outputs = [feed(parser, chunk) for chunk in chunks]
    parser.finish()
    outputs.append(parser.take())
    calls = [call for output in outputs for call in output.calls]
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls)
    return (
        "".join(output.reasoning for output in outputs),
        "".join(output.text for output in outputs),
        [(call.name, call.arguments) for call in calls],
    )


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
    assert read([output], reasoning=False, tools=False) == ("", output, [])
    assert read(list(output), reasoning=True, tools=False) == ("a", CALL, [])
    assert read(list(output), reasoning=False, tools=True) == ("", "<think>a</think>", WEATHER)


@pytest.mark.parametrize("cut", range(1, 12))
def test_output_inside_reasoning_starts_with_reasoning(cut: int) -> None:
    output = "\nhm\n</think>\nYes"
    assert read([output[:cut], output[cut:]], inside_reasoning=True) == ("hm", "Yes", [])


def test_text_waits_only_while_it_may_start_a_marker() -> None:
    parser = OutputParser(reasoning=True, tools=True)
    assert feed(parser, "<") == Output()
    assert feed(parser, "b> and <tool_call") == Output(text="<b> and ")
    assert feed(parser, "ing>") == Output(text="<tool_calling>")
    assert feed(parser, '<tool_call>{"name":"f"}') == Output()
    assert len(feed(parser, "</tool_call>").calls) == 1
    parser = OutputParser(reasoning=False, tools=True)
    for _ in range(2):
        assert feed(parser, "x<tool_call></tool_call> y") == Output(text="x<tool_call></tool_call> y")


def test_arguments_stay_unchanged() -> None:
    arguments = '{"b":1.50,"a":[1,  2]}'
    _, _, calls = read([f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert calls == [("f", arguments)]
