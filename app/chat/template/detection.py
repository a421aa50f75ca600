"""Detects the answer format of a model from the text that its chat template renders, never from its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from ...errors import TemplateFailed
from ..calls.records import FORMATS, REASONING, WRAPPERS, CallFormat, Reasoning
from ..calls.values import parsed
from ..calls.writing import example
from ..output.parser import AnswerFormat, OutputParser

Render = Callable[[Mapping[str, Any]], str]  # raises TemplateFailed
IdOf = Callable[[str], int | None]

_QUESTION = "Question 7f3a?"
_QUESTION_TURN = {"role": "user", "content": _QUESTION}
_THOUGHT = "Thought 7f3a."
_ANSWER = "Answer 7f3a."
_EXAMPLES = {"first_tool": {"text": "string", "count": "integer"}, "second_tool": {"flag": "boolean"}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": "A value."} for key, kind in properties.items()},
                "required": [*properties][:1],
            },
        },
    }
    for name, properties in (
        ("first_tool", {"text": "string", "count": "integer"}),
        ("second_tool", {"flag": "boolean"}),
    )
]
_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("first_tool", {"text": "Oslo and Rome", "count": 3}),
    ("second_tool", {"flag": True}),
]
_MARKERS = re.compile(r"</?[^<>\s]*>|\[/?[A-Z_]*\]")
_IDS = (("call_0123456789abcdef01234567", "call_0123456789abcdef01234568"), ("abcdefgh1", "abcdefgh2"))


@dataclass(frozen=True)
class DetectedCalls:
    """The format of answers with tools, and whether an answer may have several calls."""

    form: AnswerFormat
    parallel: bool = True
    is_certain: bool = False  # the template renders calls in this format


class Detector:
    """Renders examples with one chat template."""

    def __init__(self, template: str, render: Render, id_of: IdOf) -> None:
        """`render` renders the template with variables. `id_of`: the id of a token with this text."""
        self._template = template
        self._render = render
        self._id_of = id_of

    def reasoning(self) -> Reasoning | None:
        """The markers of reasoning: those around rendered reasoning, otherwise those in the template or vocabulary."""
        message = {"content": _ANSWER, "reasoning_content": _THOUGHT, "reasoning": _THOUGHT, "thinking": _THOUGHT}
        try:
            turn = _after(self._render, [_QUESTION_TURN, {"role": "assistant", **message}], [])
        except TemplateFailed:
            turn = ""
        before, found, after = turn.partition(_THOUGHT)
        around = [pair for pair in REASONING if found and pair.begin.strip() in before and pair.end in after]
        if around:
            return max(around, key=lambda pair: before.rfind(pair.begin.strip()))
        return next(filter(self._mentions, REASONING), None)

    def _mentions(self, pair: Reasoning) -> bool:
        in_template = pair.begin in self._template or pair.end in self._template
        return pair.is_known and (in_template or None not in (self._id_of(pair.begin), self._id_of(pair.end)))

    def answers(self) -> AnswerFormat:
        """The format of answers without tools."""
        shown = self._template + self._turn({"content": _ANSWER}, tools=[])
        wrappers = (wrapper for wrapper in WRAPPERS if (wrapper.begin or wrapper.end) in shown)
        return AnswerFormat(self.reasoning(), (), tuple(wrappers))

    def calls(self) -> DetectedCalls | None:
        """The format of answers with tools; None if it is unknown."""
        answers = self.answers()
        turns = []
        for count in (len(_CALLS), 1):
            for turn in self._examples(count):
                form = self._form_of(turn, _CALLS[:count], answers)
                if form is not None:
                    return DetectedCalls(_reading(form, answers), count > 1, is_certain=True)
                turns.append(turn)
        form = self._described("".join(turns))
        return DetectedCalls(_reading(form, answers, others=True)) if form else None

    def _examples(self, count: int) -> Iterable[str]:
        """Rendered turns of the assistant with calls; the template may need JSON text as arguments, or other ids."""
        for ids in _IDS:
            for convert in (dict, json.dumps):
                calls = [
                    {"id": name_id, "type": "function", "function": {"name": name, "arguments": convert(arguments)}}
                    for name_id, (name, arguments) in zip(ids, _CALLS[:count], strict=False)
                ]
                turn = self._turn({"content": "", "tool_calls": calls}, tools=_TOOLS)
                if turn:
                    yield turn

    def _turn(self, message: Mapping[str, Any], *, tools: Sequence[Mapping[str, Any]]) -> str:
        """The rendered text of a message of the assistant, without the start of its turn; empty if that fails."""
        try:
            return turn_after(self._render, _QUESTION_TURN, {"role": "assistant", **message}, tools)
        except TemplateFailed:
            return ""

    def _form_of(
        self, turn: str, calls: Sequence[tuple[str, Mapping[str, Any]]], answers: AnswerFormat
    ) -> CallFormat | None:
        """The format in which a turn has these calls. If several read it, the one that writes the most of its text."""
        shown = [form for form in FORMATS if form.trigger in turn]
        forms = [form for form in shown if _reads(turn, calls, replace(answers, calls=(form,)))]
        exact = [form for form in forms if example(form, calls) in turn]
        form = max(exact, key=lambda form: len(example(form, calls)), default=next(iter(forms), None))
        if form is None or not form.at_start:
            return form
        text = self._turn({"content": _ANSWER}, tools=_TOOLS)
        return form if text.lstrip().startswith(_ANSWER) else None

    def _described(self, unread: str) -> CallFormat | None:
        """The format whose texts the rendered prompt has; otherwise that of the template or the vocabulary. `unread`:
        rendered calls that no format reads, and so none whose texts they have."""
        forms = [form for form in FORMATS if not (form.marks and all(mark in unread for mark in form.marks))]
        try:
            prompt = self._render({"messages": [_QUESTION_TURN], "tools": _TOOLS, "add_generation_prompt": True})
            plain = self._render({"messages": [_QUESTION_TURN], "tools": None, "add_generation_prompt": True})
        except TemplateFailed:
            prompt = plain = ""
        return (
            _best(forms, lambda mark: mark in prompt and mark not in plain)
            or _best(forms, lambda mark: mark in self._template)
            or _best(forms, lambda mark: self._id_of(mark) is not None)
        )


def turn_after(
    render: Render, question: Mapping[str, Any], answer: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> str:
    """The rendered text of an answer to a question, without the start of the turn. Raises TemplateFailed."""
    start = _after(render, [question], tools, add_generation_prompt=True)
    turn = _after(render, [question, answer], tools)
    return turn[len(_whole_markers(_common_start(start, turn))) :]


def _after(
    render: Render, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], **variables: Any
) -> str:
    """The rendered text after the first message."""
    text = render({"messages": messages, "tools": list(tools) or None, "add_generation_prompt": False} | variables)
    return text.rpartition(messages[0]["content"])[2]


def _reads(turn: str, calls: Sequence[tuple[str, Mapping[str, Any]]], form: AnswerFormat) -> bool:
    """Whether a turn has these calls in a format, and only markers before the last one."""
    texts: list[str] = []

    def take(form: CallFormat, name: str, rest: str) -> None:
        texts.append(parser.text)

    parser = OutputParser(form, _TOOLS, inside_reasoning=ends_reasoning(turn, form.reasoning), watch=take)
    parser.feed(turn)
    parser.finish()
    parts = parser.take().calls
    names = [part.name for part in parts if part.name]
    arguments = ["".join(part.arguments for part in parts if part.index == index) for index in range(parser.calls)]
    if names != [name for name, _ in calls] or [parsed(text) for text in arguments] != [(value,) for _, value in calls]:
        return False
    return not _MARKERS.sub("", texts[-1]).strip()


def ends_reasoning(turn: str, reasoning: Reasoning | None) -> bool:
    """Whether a turn ends reasoning that it did not begin."""
    return reasoning is not None and reasoning.begin not in turn.partition(reasoning.end)[0] and reasoning.end in turn


def _best(forms: Sequence[CallFormat], has: Callable[[str], bool]) -> CallFormat | None:
    """The format with a hint, or the one with the most marks, if there are all but those of the end."""
    shown = [form for form in forms if any(map(has, form.hints)) or (form.opening and all(map(has, form.opening)))]
    return max(shown, key=lambda form: (any(map(has, form.hints)), len(form.opening)), default=None)


def _is_equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _common_start(one: str, other: str) -> str:
    """The longest text with which both texts start."""
    return "".join(pair[0] for pair in takewhile(_is_equal, zip(one, other, strict=False)))


def _whole_markers(text: str) -> str:
    """A text without the incomplete marker at its end."""
    start = max(text.rfind("<"), text.rfind("["))
    return text if start <= max(text.rfind(">"), text.rfind("]")) else text[:start]


def _reading(form: CallFormat, answers: AnswerFormat, *, others: bool = False) -> AnswerFormat:
    """The formats to read: `form`, and those that begin with the same text. `others`: all formats, because the template
    shows no call."""
    more = [
        other
        for other in FORMATS
        if other is not form and (others or (form.at_start, form.trigger) == (other.at_start, other.trigger))
    ]
    return AnswerFormat(answers.reasoning, (form, *more), answers.wrappers)
