"""The formats of answers on the chat templates that the sources of llama.cpp contain.

`make test` unpacks the templates beside the wheel of llama.cpp. Each conversation is rendered with each template; the
rendered turn of the assistant, in random pieces, must be read back as the same text, reasoning and calls.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from localllm.app.chat.output.parser import AnswerFormat, OutputParser
from localllm.app.chat.template.child import Job, render
from localllm.app.chat.template.detection import DetectedCalls, Detector, ends_reasoning, turn_after
from localllm.app.errors import TemplateFailed

from ..output.test_parser import merged

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "build" / "llamacpp"
NAMES = sorted({path.stem for path in FOLDER.glob("*/templates/*.jinja")})
QUESTION = "Question?"
IDS = (
    ("call_0123456789abcdef01234567", "call_76543210fedcba9876543210", "call_0123"),
    ("abcdefgh1", "abcdefgh2", "abcdefgh3"),
)
PROPERTIES = {
    "city": {"type": "string", "description": "A city."},
    "days": {"type": "integer", "description": "A number."},
    "unit": {"type": "string", "description": "A unit."},
    "exact": {"type": "boolean", "description": "A flag."},
    "ratio": {"type": "number", "description": "A ratio."},
    "tags": {"type": "array", "items": {"type": "string"}, "description": "Tags."},
    "opts": {"type": "object", "description": "Options."},
}


def tool(name: str, *properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: PROPERTIES[key] for key in properties}}
    function = {"name": name, "description": f"Tool {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather", *PROPERTIES), tool("now"), tool("write-file", "city", "unit")]
OSLO = ("get_weather", {"city": "Oslo"})
ROME = ("get_weather", {"city": "Rome"})


def file(text: str) -> tuple[str, dict[str, Any]]:
    return ("write-file", {"city": "a/b.txt", "unit": text})


# name -> (text, reasoning, calls)
CONVERSATIONS: dict[str, tuple[str, str, list[tuple[str, dict[str, Any]]]]] = {
    "text": ("No tool is needed.", "", []),
    "unicode text": ("Größe 日本語 🙂", "", []),
    "one call": ("", "", [OSLO]),
    "two arguments": ("", "", [("get_weather", {"city": "Oslo", "days": 3})]),
    "two calls": ("", "", [OSLO, ROME]),
    "three calls": ("", "", [OSLO, ("now", {}), ROME]),
    "no arguments": ("", "", [("now", {})]),
    "nested": ("", "", [("get_weather", {"city": "Oslo", "opts": {"a": {"b": [1, 2, {"c": "d"}]}, "e": None}})]),
    "list": ("", "", [("get_weather", {"city": "Oslo", "tags": ["a", "b c"]})]),
    "flag and ratio": ("", "", [("get_weather", {"city": "Oslo", "exact": True, "ratio": 0.5})]),
    "unicode": ("", "", [("get_weather", {"city": "Tromsø 日本 🙂"})]),
    "quotes": ("", "", [("get_weather", {"city": "say \"hi\" \\ and 'x'"})]),
    "lines": ("", "", [file("line 1\nline 2\n\n  indented\n")]),
    "markup": ("", "", [file('<p class="a">{b} [c] </p> & <br/>')]),
    "texts of numbers": ("", "", [("get_weather", {"city": "3", "unit": "true"})]),
    "code": ("", "", [file("def f(a, b=1):\n    return {'a': [a, b]}  # ok\n")]),
    "text before": ("I will look.", "", [OSLO]),
    "text before two calls": ("I will look.\n\nTwice.", "", [OSLO, ROME]),
    "reasoning": ("Four.", "Two and two.", []),
    "reasoning before": ("", "I need the weather.", [OSLO]),
    "all": ("I will look.", "First this,\nthen that.", [("get_weather", {"city": "Oslo", "days": 2}), ("now", {})]),
}

# Templates for which localllm refuses tools, and the reason.
REFUSED = {
    "HuggingFaceTB-SmolLM3-3B": "the template does not use tools",
    "MiniMax-M3": "arguments are nested elements of XML",
    "google-gemma-2-2b-it": "the template does not use tools",
    "llama-cpp-rwkv-world": "the template does not use tools",
    "meetkai-functionary-medium-v3.2": "the prompt ends inside the marker of a message",
    "microsoft-Phi-3.5-mini-instruct": "the template does not use tools",
    "muse-glimmer": "calls are messages to a tool",
}
# Templates of which no conversation is rendered: they need variables or schemas of their own.
NOT_RENDERED = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
    "llama-cpp-deepseek-r1",
}
HARMONY = "openai-gpt-oss-120b"  # chat/output/test_harmony.py

END_TOKENS = (
    "<｜end▁of▁sentence｜>",
    "<｜hy_eos:opensource｜>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_msg|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|tool_response>",
    "<EOS>",
)

pytestmark = pytest.mark.skipif(not NAMES, reason="make test unpacks the templates of llama.cpp")


def renderer(template: str) -> Callable[[Mapping[str, Any]], str]:
    def rendered(variables: Mapping[str, Any]) -> str:
        tokens = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
        result = render(Job(template, tokens | dict(variables), 2**20))
        if result.problem:
            raise TemplateFailed(result.problem)
        return result.text

    return rendered


@functools.cache
def shipped(name: str) -> tuple[str, DetectedCalls | None]:
    template = next(FOLDER.glob(f"*/templates/{name}.jinja")).read_text()
    return template, Detector(template, renderer(template), lambda token: None).calls()


def messages(
    conversation: tuple[str, str, Sequence[tuple[str, dict[str, Any]]]],
) -> Iterator[dict[str, Any]]:
    """The message of the assistant in the spellings that templates need: arguments as objects or texts, two ids."""
    text, reasoning, calls = conversation
    for ids in IDS:
        for convert in (dict, json.dumps):
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if reasoning:
                message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
            if calls:
                message["tool_calls"] = [
                    {"id": ids[index], "type": "function", "function": {"name": name, "arguments": convert(arguments)}}
                    for index, (name, arguments) in enumerate(calls)
                ]
            yield message


def turn_of(template: str, conversation: tuple[str, str, Sequence[tuple[str, dict[str, Any]]]]) -> str:
    """The text that a model writes in this turn; empty if the template does not render all calls."""
    rendered = renderer(template)
    question = {"role": "user", "content": QUESTION}
    names = Counter(name for name, _ in conversation[2])
    for message in messages(conversation):
        try:
            turn = turn_after(rendered, question, message, TOOLS)
            end = turn_after(rendered, question, {"role": "assistant", "content": "zq"}, TOOLS).partition("zq")[2]
        except TemplateFailed:
            continue
        if all(turn.count(name) >= count for name, count in names.items()) and '\\"city' not in turn:
            return without_end(turn, end.strip())
    return ""


def without_end(turn: str, end: str) -> str:
    """The turn up to the token that ends it, after which some templates write more."""
    turn = turn.rstrip().removesuffix(end or " ")
    for token in END_TOKENS:
        turn = turn.partition(token)[0]
    return turn


def read(turn: str, form: AnswerFormat, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = OutputParser(form, TOOLS, inside_reasoning=ends_reasoning(turn, form.reasoning))
    outputs = []
    for piece in pieces:
        parser.feed(piece)
        outputs.append(parser.take())
    parser.finish()
    reasoning, text, calls = merged([*outputs, parser.take()])
    return text.strip(), reasoning.strip(), [(name, json.loads(arguments)) for name, arguments in calls]


def split(text: str, chance: random.Random) -> Iterator[list[str]]:
    yield [text]
    yield list(text)
    for size in (2, 4, 9, 30):
        pieces = []
        while text[sum(map(len, pieces)) :]:
            start = sum(map(len, pieces))
            pieces.append(text[start : start + chance.randint(1, size)])
        yield pieces


@pytest.mark.parametrize("name", NAMES)
def test_rendered_turns_are_read_back(name: str) -> None:
    template, detected = shipped(name)
    if name in REFUSED or name == HARMONY:
        assert detected is None
        return
    assert detected is not None
    count = 0
    for conversation in CONVERSATIONS.values():
        turn = turn_of(template, conversation)
        if not turn or ("<SPECIAL_11>" in turn and conversation[2] and conversation[0]):
            continue  # Nemotron Nano 2 renders text and calls as two messages
        count += 1
        text, reasoning, calls = conversation
        expected = (text if text in turn else "", reasoning if reasoning in turn else "", calls)
        for pieces in split(turn, random.Random(0)):
            assert read(turn, detected.form, pieces) == expected, turn
    assert bool(count) == (name not in NOT_RENDERED)


def test_docs_have_the_format_of_each_template() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (ROOT / "docs/tools.md").read_text(), re.MULTILINE)
    listed = {name: title for title, names in rows for name in names.split(", ") if name in NAMES}
    found = {name: detected.form.calls[0].title for name in NAMES if (detected := shipped(name)[1])}
    assert listed == found | {HARMONY: "harmony"}
    refused = {name for names, _ in rows for name in names.split(", ") if name in NAMES}
    assert refused == REFUSED.keys()


def test_most_templates_are_known() -> None:
    assert len(NAMES) >= 65
    titles = Counter(detected.form.calls[0].title for _, detected in map(shipped, NAMES) if detected)
    assert len(titles) >= 24, titles
    assert set(NAMES) - {name for name in NAMES if shipped(name)[1]} == {*REFUSED, HARMONY}
