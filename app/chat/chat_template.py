"""One chat template of a model, and the changes to conversations that it needs.

A template may fail for a valid conversation, or silently leave out a part of it. Examples show which form of calls the
template needs, and which of the steps of adaptation.py: the fewest and least with which the prompt shows all messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import TemplateFailed
from .adaptation import STEPS, Step
from .call_ids import CallIds, IdStyle, call_count
from .calls.detection import DetectedCalls, Detector
from .harmony import uses_harmony
from .harmony_messages import harmony_messages, harmony_tools
from .messages import ArgumentsForm, Conversation
from .parsers import AnswerFormat
from .skeleton import Score, Skeleton, shape_of, skeleton_of
from .template import TemplateExceeded, TemplateRenderer
from .tokens import Tokenizer

MAX_PLANS = 512

_FORMS: tuple[tuple[ArgumentsForm, IdStyle], ...] = (
    ("value", "plain"),
    ("text", "plain"),
    ("value", "nine"),
    ("text", "nine"),
    ("value", "functions"),
    ("text", "functions"),
)
_EXAMPLE_CALL = {"id": "", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_EXAMPLE = Conversation(
    [
        {"role": "user", "content": "text"},
        {"role": "assistant", "content": "", "tool_calls": [_EXAMPLE_CALL]},
        {"role": "tool", "content": "text", "tool_call_id": ""},
    ],
    [{"function": {"description": "text", "parameters": {"type": "object", "properties": {}}}}],
)


@dataclass(frozen=True)
class Plan:
    """The steps that conversations of one shape need. `tail`: the text of the prompt after the last message; None if
    the examples do not show it."""

    steps: tuple[Step, ...] = ()
    tail: str | None = None


class ChatTemplate:
    """Renders conversations with one chat template. Thread-safe."""

    def __init__(self, source: str, renderer: TemplateRenderer, tokenizer: Tokenizer) -> None:
        self.source = source
        self.is_harmony = uses_harmony(source, tokenizer.id_of)
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._plans: dict[bytes, Plan] = {}

    def call_ids(self, messages: Sequence[dict[str, Any]]) -> CallIds:
        """The ids that the template needs for new calls after these messages."""
        _, style = self._call_form
        return CallIds(style, call_count(messages))

    @cached_property
    def answers(self) -> AnswerFormat:
        """How the model writes answers without tools."""
        return self._detector.answers()

    @cached_property
    def answers_with_calls(self) -> DetectedCalls | None:
        """How the model writes answers with tools; None if the format of its calls is unknown."""
        return self._detector.calls()

    @property
    def _detector(self) -> Detector:
        return Detector(self.source, self._rendered, self._tokenizer.id_of)

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return self._renderer.render(self.source, self._tokenizer.special_tokens | dict(variables))

    def render(self, conversation: Conversation, kwargs: Mapping[str, Any], *, continued: bool = False) -> str:
        """The prompt. Special tokens in the values of the client are marked as plain text. `continued`: the last
        message has no end. Raises TemplateFailed; if no step helps, with the reason for the unchanged conversation."""
        conversation = self._in_form(conversation)
        plan = self._plan(conversation, kwargs, continued)
        try:
            return self._text(_applied(conversation, plan.steps), kwargs, continued)
        except TemplateExceeded:
            raise
        except TemplateFailed:
            return self._first_text(conversation, kwargs, continued)

    def opening(self, prompt: str, conversation: Conversation, kwargs: Mapping[str, Any]) -> str:
        """The end of a prompt that `render` made for a new answer, which the template wrote after the last message."""
        conversation = self._in_form(conversation)
        plan = self._plan(conversation, kwargs, False)
        if plan.tail is not None and prompt.endswith(plan.tail):
            return plan.tail
        try:  # the opening depends on the texts of the messages
            unopened = self._text(_applied(conversation, plan.steps), kwargs, True)
        except TemplateFailed:
            return ""
        return prompt[_common_length(prompt, unopened) :]

    def _text(self, conversation: Conversation, kwargs: Mapping[str, Any], continued: bool) -> str:
        messages = conversation.for_template()
        tools = conversation.tools
        if self.is_harmony:
            messages = harmony_messages(messages)
            tools = harmony_tools(tools)
        protect = self._tokenizer.protect
        values = {
            "messages": [self._protected(message) for message in messages],
            "tools": protect(tools),
            "add_generation_prompt": not continued,
        }
        return self._renderer.render(self.source, self._tokenizer.special_tokens | protect(dict(kwargs)) | values)

    def _protected(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message; control tokens in its texts are marked as plain text. Earlier answers keep their own markers."""
        protected: dict[str, Any] = self._tokenizer.protect(message)
        if message["role"] == "assistant":
            protected["content"] = self._tokenizer.protect(message["content"], own=True)
        return protected

    def _in_form(self, conversation: Conversation) -> Conversation:
        if not conversation.has_calls:
            return conversation
        arguments, ids = self._call_form
        return replace(conversation, arguments=arguments, ids=ids)

    @cached_property
    def _call_form(self) -> tuple[ArgumentsForm, IdStyle]:
        """The form of arguments and ids with which an example shows all of a call."""
        skeleton = skeleton_of(_EXAMPLE)
        scores: dict[tuple[ArgumentsForm, IdStyle], Score] = {}
        for arguments, ids in _FORMS:
            example = replace(skeleton.conversation, arguments=arguments, ids=ids)
            try:
                scores[arguments, ids] = skeleton.score(self._text(example, {}, False))
            except TemplateExceeded:
                raise
            except TemplateFailed:
                continue
            if skeleton.is_complete(scores[arguments, ids]):
                break
        return max(scores, key=lambda form: scores[form], default=_FORMS[0])

    def _plan(self, conversation: Conversation, kwargs: Mapping[str, Any], continued: bool) -> Plan:
        key = shape_of(conversation, kwargs, continued)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(skeleton_of(conversation), kwargs, continued)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _new_plan(self, skeleton: Skeleton, kwargs: Mapping[str, Any], continued: bool) -> Plan:
        examples: list[tuple[Conversation, str]] = []

        def score(changed: Conversation) -> Score | None:
            try:
                examples.append((changed, self._text(changed, kwargs, continued)))
            except TemplateExceeded:
                raise
            except TemplateFailed:
                return None
            return skeleton.score(examples[-1][1])

        steps = best_steps(skeleton.conversation, score, skeleton.is_complete)
        if steps is None:
            return Plan()
        changed = _applied(skeleton.conversation, steps)
        return Plan(steps, skeleton.tail(next(text for example, text in examples if example == changed)))

    def _first_text(self, conversation: Conversation, kwargs: Mapping[str, Any], continued: bool) -> str:
        """The prompt with the fewest steps with which the template does not fail."""
        errors = []

        def score(changed: Conversation) -> Score | None:
            try:
                self._text(changed, kwargs, continued)
            except TemplateExceeded:
                raise
            except TemplateFailed as error:
                errors.append(error)
                return None
            return Score(0, 0)

        steps = best_steps(conversation, score, lambda _: True)
        if steps is None:
            raise errors[0]
        return self._text(_applied(conversation, steps), kwargs, continued)


def best_steps(
    conversation: Conversation,
    score: Callable[[Conversation], Score | None],
    is_complete: Callable[[Score], bool],
) -> tuple[Step, ...] | None:
    """The steps with the best score, the first of equal ones; None if all fail. Tries none, each, then the first ones.

    `score`: of a changed conversation; None if it fails. `is_complete`: no score is better.
    """
    tried: list[Conversation] = []
    best: tuple[Score, tuple[Step, ...]] | None = None
    for steps in [(), *((step,) for step in STEPS), *(STEPS[:count] for count in range(2, len(STEPS) + 1))]:
        changed = _applied(conversation, steps)
        if changed in tried:
            continue
        tried.append(changed)
        value = score(changed)
        if value is not None and (best is None or value > best[0]):
            best = (value, steps)
        if value is not None and is_complete(value):
            break
    return None if best is None else _necessary(conversation, score, *best)


def _necessary(
    conversation: Conversation, score: Callable[[Conversation], Score | None], value: Score, steps: tuple[Step, ...]
) -> tuple[Step, ...]:
    """The steps without those that do not change the score, from the greatest change to the least."""
    for step in reversed(steps):
        fewer = tuple(other for other in steps if other is not step)
        if len(steps) > 1 and score(_applied(conversation, fewer)) == value:
            steps = fewer
    return steps


def _applied(conversation: Conversation, steps: Sequence[Step]) -> Conversation:
    for step in steps:
        conversation = step(conversation)
    return conversation


def _common_length(first: str, second: str) -> int:
    """Number of characters with which both texts begin."""
    counts = range(min(len(first), len(second)))
    return bisect_left(counts, True, key=lambda count: first[: count + 1] != second[: count + 1])
