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
from .adaptation import Step
from .call_ids import CallIds, IdStyle, call_count
from .calls.detection import DetectedCalls, Detector
from .calls.writing import example
from .harmony import uses_harmony
from .harmony_messages import harmony_message
from .messages import HERMES, ArgumentsForm, Conversation, named_arguments
from .parsers import AnswerFormat
from .skeleton import Score, Skeleton, shape_of, skeleton_of
from .template import TemplateExceeded, TemplateRenderer
from .tokens import Tokenizer
from .trials import Trials, applied

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
        conversation = self._prepared(conversation)
        variables = self._variables(kwargs, continued=continued)
        steps = self._plan(conversation, variables).steps
        try:
            return self._text(applied(steps, conversation), variables)
        except TemplateExceeded:
            raise
        except TemplateFailed:  # for a reason that the skeleton does not show
            return self._trials(conversation, variables).best().prompt

    def opening(self, prompt: str, conversation: Conversation, kwargs: Mapping[str, Any]) -> str:
        """The end of a prompt that `render` made for a new answer, which the template wrote after the last message."""
        conversation = self._prepared(conversation)
        plan = self._plan(conversation, self._variables(kwargs, continued=False))
        if plan.tail is not None and prompt.endswith(plan.tail):
            return plan.tail
        try:  # the opening depends on the texts of the messages
            unopened = self._text(applied(plan.steps, conversation), self._variables(kwargs, continued=True))
        except TemplateFailed:
            return ""
        return prompt[_common_length(prompt, unopened) :]

    def _variables(self, kwargs: Mapping[str, Any], *, continued: bool) -> dict[str, Any]:
        return {**self._tokenizer.protect(dict(kwargs)), "add_generation_prompt": not continued}

    def _prepared(self, conversation: Conversation) -> Conversation:
        """The conversation in the form of the template. Control tokens are marked as plain text, except in calls."""
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
        calls = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        content = self._tokenizer.protect(message["content"], own=message["role"] == "assistant")
        others = {key: value for key, value in message.items() if key not in ("content", "tool_calls")}
        protected = {**self._tokenizer.protect(others), "content": content, **calls}
        return harmony_message(protected) if self.is_harmony else protected

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
        calls = message.get("tool_calls")
        return message | {"tool_calls": self._tokenizer.protect(calls)} if calls else message

    @cached_property
    def _call_form(self) -> tuple[ArgumentsForm, IdStyle]:
        """The form of arguments and ids with which an example shows all of a call."""
        skeleton = skeleton_of(_EXAMPLE)
        variables = self._variables({}, continued=False)
        scores: dict[tuple[ArgumentsForm, IdStyle], Score] = {}
        for arguments, ids in _FORMS:
            example = replace(skeleton.conversation, arguments=arguments, ids=ids)
            try:
                scores[arguments, ids] = skeleton.score(self._text(example, variables))
            except TemplateExceeded:
                raise
            except TemplateFailed:
                continue
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
        """Without a score, every prompt is complete."""
        return Trials(conversation, lambda changed: self._text(changed, variables), score, complete)


def _common_length(first: str, second: str) -> int:
    """Number of characters with which both texts begin."""
    counts = range(min(len(first), len(second)))
    return bisect_left(counts, True, key=lambda count: first[: count + 1] != second[: count + 1])
