"""One chat template of a model, and the changes to conversations that it needs.

A template may fail for a valid conversation, or silently leave out a part of it. Examples show which form of calls the
template needs, and which of the steps of adaptation.py: the fewest and least with which the prompt shows all messages.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from ...errors import TemplateFailed
from ..calls.harmony import uses_harmony
from ..calls.writing import example
from ..output.parser import AnswerFormat
from ..tokenizer.base import Tokenizer
from .adaptation import Step
from .call_ids import CallIds, IdStyle, call_count
from .detection import DetectedCalls, Detector
from .messages import HERMES, ArgumentsForm, Conversation, named_arguments
from .renderer import TemplateExceeded, TemplateRenderer
from .skeleton import Score, Skeleton, shape_of, skeleton_of
from .trials import Trials, applied

MAX_PLANS = 512
_NAMED_ID = re.compile(r"functions\.\w+:[0-9]")  # an id that the template makes, as those of Kimi
_CALL_FIELDS = ("tool_calls", "tool_call_id")

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


@dataclass(frozen=True)
class Rendering:
    """A prompt. `opening` returns its end, which the template wrote after the last message, to open a new answer."""

    text: str
    opening: Callable[[], str]


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
        """The format of answers without tools."""
        return self._detector.answers()

    @cached_property
    def answers_with_calls(self) -> DetectedCalls | None:
        """The format of answers with tools; None if the format of the calls is unknown."""
        return self._detector.calls()

    @property
    def _detector(self) -> Detector:
        return Detector(self.source, self._rendered, self._tokenizer.id_of)

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return self._renderer.render(self.source, self._tokenizer.special_tokens | dict(variables))

    def render(self, conversation: Conversation, kwargs: Mapping[str, Any], *, continued: bool = False) -> Rendering:
        """The prompt. Special tokens in the values of the client are marked as plain text. `continued`: the last
        message has no end. Raises TemplateFailed; if no step helps, with the reason for the unchanged conversation."""
        conversation = self._prepared(conversation)
        variables = self._variables(kwargs, continued=continued)
        plan = self._plan(conversation, variables)
        try:
            text = self._text(applied(plan.steps, conversation), variables)
        except TemplateExceeded:
            raise
        except TemplateFailed:  # for a reason that the skeleton does not show
            best = self._trials(conversation, variables).best()
            text = best.prompt
            plan = Plan(best.steps)
        return Rendering(text, partial(self._opening, text, conversation, variables, plan))

    def _opening(self, text: str, conversation: Conversation, variables: Mapping[str, Any], plan: Plan) -> str:
        if plan.tail is not None and text.endswith(plan.tail):
            return plan.tail
        try:  # the opening depends on the texts of the messages
            unopened = self._text(applied(plan.steps, conversation), {**variables, "add_generation_prompt": False})
        except TemplateFailed:
            return ""
        return text[_common_length(text, unopened) :]

    def _variables(self, kwargs: Mapping[str, Any], *, continued: bool) -> dict[str, Any]:
        return {**self._tokenizer.protect(dict(kwargs)), "add_generation_prompt": not continued}

    def _prepared(self, conversation: Conversation) -> Conversation:
        """The conversation in the form of the template. Control tokens are marked as plain text, except in calls and
        ids: the steps compare and convert them."""
        arguments, ids = self._call_form if conversation.has_calls else _FORMS[0]
        return Conversation(
            [self._protected(message) for message in conversation.messages],
            self._tokenizer.protect(conversation.tools),
            arguments,
            ids,
            self._calls_text,
        )

    def _protected(self, message: dict[str, Any]) -> dict[str, Any]:
        """Earlier answers keep their own markers."""
        calls = {key: message[key] for key in _CALL_FIELDS if key in message}
        others = {key: message[key] for key in message if key not in calls}
        content = self._tokenizer.protect(message["content"], own=message["role"] == "assistant")
        protected = {**self._tokenizer.protect(others), **calls, "content": content}
        return _harmony_message(protected) if self.is_harmony else protected

    def _calls_text(self, calls: Sequence[dict[str, Any]]) -> str:
        detected = self.answers_with_calls
        protect = self._tokenizer.protect
        named = [(protect(name), protect(arguments)) for name, arguments in named_arguments(calls)]
        return example(detected.form.calls[0] if detected else HERMES, named)

    def _text(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        """The prompt of a prepared conversation."""
        messages = [self._with_protected_calls(message) for message in conversation.for_template()]
        return self._rendered({**variables, "messages": messages, "tools": conversation.tools})

    def _with_protected_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        return message | {key: self._tokenizer.protect(message[key]) for key in _CALL_FIELDS if key in message}

    @cached_property
    def _call_form(self) -> tuple[ArgumentsForm, IdStyle]:
        """The form of arguments and ids with which an example shows all of a call."""
        skeleton = skeleton_of(_EXAMPLE)
        variables = self._variables({}, continued=False)
        scores: dict[tuple[ArgumentsForm, IdStyle], Score] = {}
        for arguments, ids in _FORMS:
            conversation = replace(skeleton.conversation, arguments=arguments, ids=ids)
            try:
                text = self._text(conversation, variables)
            except TemplateExceeded:
                raise
            except TemplateFailed:
                continue
            if _NAMED_ID.search(text):
                return arguments, "functions"
            scores[arguments, ids] = skeleton.score(text)
            if scores[arguments, ids] == skeleton.complete:
                break
        return max(scores, key=lambda form: scores[form], default=_FORMS[0])

    def _plan(self, conversation: Conversation, variables: Mapping[str, Any]) -> Plan:
        key = shape_of(conversation, variables)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(skeleton_of(conversation), variables)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _new_plan(self, skeleton: Skeleton, variables: Mapping[str, Any]) -> Plan:
        try:
            best = self._trials(skeleton.conversation, variables, skeleton.score, skeleton.complete).best()
        except TemplateExceeded:
            raise
        except TemplateFailed:
            return Plan()
        return Plan(best.steps, skeleton.tail(best.prompt))

    def _trials(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        score: Callable[[str], Score] = lambda _: Score(0, 0),
        complete: Score = Score(0, 0),
    ) -> Trials:
        """The trials of changes to a conversation. Without `score`, every prompt counts as complete."""
        return Trials(conversation, lambda changed: self._text(changed, variables), score, complete)


def _common_length(first: str, second: str) -> int:
    """Number of characters with which both texts begin."""
    counts = range(min(len(first), len(second)))
    return bisect_left(counts, True, key=lambda count: first[: count + 1] != second[: count + 1])


def _harmony_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text beside calls is the end of its reasoning.

    The template shows both in the channel `analysis`, and refuses a message with calls that has both fields.
    """
    if not message.get("tool_calls"):
        return message
    thoughts = [text for text in (message.get("reasoning_content"), message["content"]) if text]
    return message | {"content": "", "reasoning_content": "\n\n".join(thoughts)}
