"""Converts the messages or the text of a request to the token ids of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from ..errors import ContextTooLong, InvalidRequest, UnsupportedParameter
from ..frames import Reasoning as ReasoningLevel
from .calls.harmony import ANSWER_HEADER
from .calls.records import Reasoning
from .output.parser import AnswerFormat
from .template.call_ids import CallIds
from .template.chat_template import ChatTemplate, Rendering
from .template.detection import DetectedCalls
from .template.messages import Conversation, in_order
from .template.renderer import TemplateRenderer
from .template.switches import switches
from .tokenizer.base import Tokenizer
from .tokenizer.doubled import added_around, doubled

# A private-use character at the end of the message to continue. The rendered prompt is cut there.
_CUT = "\U000fff02"
_RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of the template that no client may set

# Assumed maximum number of characters per token. If a text has more than twice the characters that would then fill the
# context, only its beginning is tokenized at first.
CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt, and the options for the parser of the answer."""

    ids: tuple[int, ...]
    form: AnswerFormat = AnswerFormat()  # how the model writes reasoning and calls
    inside_reasoning: bool = False  # the prompt ends inside reasoning
    certain_calls: bool = False  # the template renders calls in the format of `form`
    parallel_calls: bool = True  # the template can render several calls of an answer
    harmony: bool = False  # the answer has the format of output/harmony.py, otherwise of output/parser.py
    inside_answer: bool = False  # the prompt ends with an open message of the channel `final` (harmony)
    continues_text: bool = False  # the answer continues the text of the prompt and may start with a space
    call_ids: CallIds = CallIds()  # the ids of new calls
    warnings: tuple[str, ...] = ()  # texts for the user about special tokens that the prompt has twice
    ignored: tuple[str, ...] = ()  # see frames.Started


class PromptMaker:
    """Makes the prompts of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer
        self._templates: dict[str, ChatTemplate] = {}

    def from_text(
        self,
        prompt: str | Sequence[int],
        *,
        add_special_tokens: bool = True,
        context: int | None = None,
        where: str = "prompt",
    ) -> Prompt:
        """A raw prompt. Special tokens in a text become their ids; token ids stay unchanged.

        `context`: as in from_messages. `where`: the parameter with the prompt. Raises ContextTooLong.
        """
        if not isinstance(prompt, str):
            return Prompt(tuple(prompt), continues_text=True)
        self._refuse_early(prompt, context, where)
        ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        warnings = self._doubled(ids, *self._around, where) if add_special_tokens else ()
        return Prompt(ids, continues_text=True, warnings=warnings)

    def from_messages(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
        reasoning: ReasoningLevel | None = None,
        verbosity: str | None = None,
        continue_final_message: bool = False,
        close_reasoning: bool = False,
        context: int | None = None,
    ) -> Prompt:
        """A conversation, rendered with the chat template of the model.

        `kwargs`, `reasoning`, `verbosity`: variables of the template, as in Generate; see template/switches.py.
        `continue_final_message`: the answer continues the last message. `close_reasoning`: close the reasoning that the
        prompt opens, or open the channel `final`, because a grammar describes the answer. `context`: the context of the
        model in tokens; a much longer text is refused before all of it is tokenized.
        Raises TemplateFailed, InvalidRequest (or its subclass ContextTooLong), or UnsupportedParameter.
        """
        template = self._template(with_tools=bool(tools))
        self._check(kwargs)
        for message in messages:
            self._refuse_early(message["content"], context, "messages", is_message=True)
        conversation = Conversation(in_order(messages), list(tools) or None)
        if continue_final_message:
            _mark_end(conversation.messages[-1], is_harmony=template.is_harmony)
        chosen = switches(template.source, kwargs, reasoning, verbosity, is_harmony=template.is_harmony)
        rendering = template.render(conversation, chosen.variables, continued=continue_final_message)
        text = rendering.text
        if continue_final_message:
            text = _cut_at_mark(text)
        detected = _answer_format(template, with_tools=bool(tools))
        markers = detected.form.reasoning
        if markers is None or not _is_open(text, markers):  # most prompts
            is_inside = False
        else:
            continued = conversation.messages[-1] if continue_final_message else None
            is_inside = _ends_inside(markers, template, rendering, continued)
        prompt = Prompt(
            ids=(),
            form=detected.form,
            inside_reasoning=is_inside,
            certain_calls=detected.is_certain,
            parallel_calls=detected.parallel,
            harmony=template.is_harmony,
            inside_answer=template.is_harmony and continue_final_message,
            continues_text=continue_final_message,
            call_ids=template.call_ids(messages) if tools else CallIds(),
            ignored=tuple(chosen.ignored),
        )
        if close_reasoning:
            text, prompt = _without_reasoning(text, prompt, with_tools=bool(tools))
        self._refuse_early(text, context, "messages")
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return replace(prompt, ids=ids, warnings=self._doubled(ids, self._begin_of_chats, (), "chat template"))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        return added_around(self.tokenizer)

    @cached_property
    def _begin_of_chats(self) -> list[int]:
        """The token that begins a rendered conversation; empty if the model has none."""
        token = self.tokenizer.id_of(self.tokenizer.special_tokens.get("bos_token", ""))
        return [] if token is None else [token]

    def _doubled(self, ids: Sequence[int], begin: Sequence[int], end: Sequence[int], source: str) -> tuple[str, ...]:
        """Warnings of special tokens that the prompt has twice. `source`: of the text."""
        return tuple(
            f"the prompt {verb} with {self.tokenizer.decode([token])!r} twice: the {source} has it"
            + (", and the tokenizer adds it; leave it out of the text" if source != "chat template" else " twice")
            for verb, token in doubled(ids, begin, end)
        )

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        """Raises UnsupportedParameter for variables that a client may not set."""
        reserved = sorted(kwargs.keys() & {*_RESERVED, *self.tokenizer.special_tokens})
        if reserved:
            param = f"chat_template_kwargs.{reserved[0]}"
            raise UnsupportedParameter(f"{param} is set by localllm", param=param)

    def _refuse_early(self, text: str, context: int | None, where: str, *, is_message: bool = False) -> None:
        """Raises ContextTooLong if the beginning of a long text already has too many tokens.

        The rest is then not tokenized, because 10 MB would take seconds. `is_message`: control tokens are plain text.
        """
        if context is None or len(text) <= 2 * CHARACTERS * context:
            return
        beginning = text[: CHARACTERS * context]
        marked = self.tokenizer.protect(beginning) if is_message else beginning
        tokens = len(self.tokenizer.encode(marked, add_special_tokens=False))
        if tokens > 1.25 * context:  # the margin is for a cut inside a word, which makes more tokens
            estimate = round(tokens * len(text) / len(beginning))
            raise too_long(context, estimate, where, estimated=True)

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        templates = self.tokenizer.templates
        if not templates:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        named = templates.get("tool_use") if with_tools else None
        source = named or templates.get("default") or next(iter(templates.values()))
        if with_tools and "tools" not in source:
            raise UnsupportedParameter("tools: the chat template of this model does not support tools", param="tools")
        return self._templates.setdefault(source, ChatTemplate(source, self._renderer, self.tokenizer))


def too_long(context: int, tokens: int, where: str, *, estimated: bool = False) -> ContextTooLong:
    """The error for a prompt of `tokens` tokens. `where`: the parameter with the prompt."""
    about = "about " if estimated else ""
    return ContextTooLong(
        f"this model's maximum context length is {context} tokens, but the prompt has {about}{tokens}",
        param=where,
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def _answer_format(template: ChatTemplate, *, with_tools: bool) -> DetectedCalls:
    """The format of the answer. Raises UnsupportedParameter for tools if the format is unknown."""
    if template.is_harmony or not with_tools:
        return DetectedCalls(AnswerFormat() if template.is_harmony else template.answers, parallel=False)
    detected = template.answers_with_calls
    if detected is None:
        raise UnsupportedParameter(
            "tools: not supported for this model: its chat template shows no format of tool calls that localllm knows",
            hint="docs/tools.md lists the formats",
            param="tools",
        )
    return detected


def _ends_inside(
    reasoning: Reasoning, template: ChatTemplate, rendering: Rendering, continued: Mapping[str, Any] | None
) -> bool:
    """Whether a prompt with a marker of reasoning ends inside reasoning. `continued`: the message that the answer
    continues."""
    if continued is None:  # the marker may be that of a message
        return _is_open(rendering.opening(), reasoning)
    mentions = reasoning.begin.strip() in template.source or reasoning.end in template.source
    return mentions and _is_open(continued["content"], reasoning)


def _is_open(text: str, reasoning: Reasoning) -> bool:
    """Whether the last marker of reasoning in a text is the one that begins it."""
    return text.rfind(reasoning.begin.strip()) > text.rfind(reasoning.end.strip())


def _closed(text: str, reasoning: Reasoning) -> str:
    """A prompt that ends inside reasoning, with the marker that ends it."""
    return f"{text.rstrip()}\n\n{reasoning.end.strip()}\n\n"


def _without_reasoning(text: str, prompt: Prompt, *, with_tools: bool) -> tuple[str, Prompt]:
    """The text, and the options, of a prompt whose answer has no reasoning."""
    if prompt.inside_reasoning and prompt.form.reasoning is not None:
        text = _closed(text, prompt.form.reasoning)
    # Without wrappers, too: a text that begins with a marker is the answer.
    prompt = replace(prompt, form=replace(prompt.form, reasoning=None, wrappers=()), inside_reasoning=False)
    if prompt.harmony and not with_tools and not prompt.inside_answer:
        return text + ANSWER_HEADER, replace(prompt, inside_answer=True)
    return text, prompt


def _mark_end(message: dict[str, Any], *, is_harmony: bool) -> None:
    if message["role"] != "assistant" or not message["content"]:
        raise InvalidRequest(
            "continue_final_message needs an assistant message with text as the last message",
            param="continue_final_message",
        )
    if is_harmony and message.get("tool_calls"):
        raise UnsupportedParameter(
            "continue_final_message: the final message has tool calls", param="continue_final_message"
        )
    message["content"] += _CUT


def _cut_at_mark(text: str) -> str:
    beginning, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise UnsupportedParameter(
            "continue_final_message: the chat template of this model changes the final message",
            param="continue_final_message",
        )
    return beginning
