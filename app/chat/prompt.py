"""Converts the messages or the text of a request to the token ids of the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ContextTooLong, InvalidRequest, UnsupportedParameter
from .calls.records import FORMATS, REASONING
from .harmony import ANSWER_HEADER, uses_harmony
from .harmony_messages import harmony_messages, harmony_tools
from .messages import for_template
from .parsers import CALL, END_THINK, THINK, AnswerFormat
from .template import TemplateRenderer
from .tokens import Tokenizer

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
    reasoning: bool = False  # the answer may start with <think>…</think>
    inside_reasoning: bool = False  # the prompt ends with an open <think>
    tools: bool = False  # the answer may have tool calls
    harmony: bool = False  # the answer has the format of harmony.py, otherwise that of parsers.py
    inside_answer: bool = False  # the prompt ends with an open message of the channel `final` (harmony)
    form: AnswerFormat = AnswerFormat()  # how the model writes reasoning and calls
    continues_text: bool = False  # the answer continues the text of the prompt and may start with a space


class PromptMaker:
    """Makes the prompts of one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, renderer: TemplateRenderer) -> None:
        self.tokenizer = tokenizer
        self._renderer = renderer

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
        return Prompt(tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)), continues_text=True)

    def from_messages(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        close_reasoning: bool = False,
        context: int | None = None,
    ) -> Prompt:
        """A conversation, rendered with the chat template of the model.

        `continue_final_message`: the answer continues the last message. `close_reasoning`: close the `<think>` that the
        template opened, or open the channel `final`, because the answer must be structured output. `context`: the
        context of the model in tokens; a much longer text is refused before all of it is tokenized.
        Raises TemplateFailed, InvalidRequest (or its subclass ContextTooLong), or UnsupportedParameter.
        """
        template = self._template(bool(tools))
        variables = self._variables(template, messages, tools, kwargs or {})
        variables["add_generation_prompt"] = not continue_final_message
        if continue_final_message:
            _mark_end(variables["messages"][-1])
        harmony = uses_harmony(template, self.tokenizer.id_of)
        if harmony and continue_final_message and messages[-1].get("tool_calls"):
            raise UnsupportedParameter(
                "continue_final_message: the final message has tool calls", param="continue_final_message"
            )
        if harmony:
            variables["messages"] = harmony_messages(variables["messages"])
            variables["tools"] = harmony_tools(variables["tools"])
        text = self._renderer.render(template, variables)
        if continue_final_message:
            text = _cut_at_mark(text)
        ends_in_reasoning = text.rstrip().endswith(THINK)
        if ends_in_reasoning and close_reasoning:
            text = text.rstrip() + f"\n\n{END_THINK}\n\n"
            ends_in_reasoning = False
        opens_answer = harmony and close_reasoning and not tools and not continue_final_message
        if opens_answer:
            text += ANSWER_HEADER
        self._refuse_early(text, context, "messages")
        reasons = self._supports(THINK, template)
        form = AnswerFormat(REASONING[0] if reasons else None, FORMATS if tools else ())
        return Prompt(
            ids=tuple(self.tokenizer.encode(text, add_special_tokens=False)),
            form=form,
            reasoning=self._supports(THINK, template),
            inside_reasoning=ends_in_reasoning,
            tools=bool(tools) and (harmony or self._supports(CALL, template)),
            harmony=harmony,
            inside_answer=opens_answer or (harmony and continue_final_message),
            continues_text=continue_final_message,
        )

    def _supports(self, marker: str, template: str) -> bool:
        return marker in template or self.tokenizer.id_of(marker) is not None

    def _variables(
        self,
        template: str,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The variables of the template. Special tokens in the values of the client are marked as plain text."""
        protect = self.tokenizer.protect
        template_messages = protect(for_template(messages, knows_developer="developer" in template))
        reserved = sorted(kwargs.keys() & {*_RESERVED, *self.tokenizer.special_tokens})
        if reserved:
            param = f"chat_template_kwargs.{reserved[0]}"
            raise UnsupportedParameter(f"{param} is set by localllm", param=param)
        values = {"messages": template_messages, "tools": protect(list(tools)) or None}
        variables: dict[str, Any] = self.tokenizer.special_tokens | protect(dict(kwargs)) | values
        return variables

    def _refuse_early(self, text: str, context: int | None, where: str) -> None:
        """Raises ContextTooLong if the beginning of a long text already has too many tokens.

        The rest is then not tokenized, because 10 MB would take seconds.
        """
        if context is None or len(text) <= 2 * CHARACTERS * context:
            return
        beginning = text[: CHARACTERS * context]
        tokens = len(self.tokenizer.encode(beginning, add_special_tokens=False))
        if tokens > 1.25 * context:  # with a margin: the cut may split a word into more tokens
            estimate = round(tokens * len(text) / len(beginning))
            raise too_long(context, estimate, where, estimated=True)

    def _template(self, with_tools: bool) -> str:
        templates = self.tokenizer.templates
        if not templates:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        named = templates.get("tool_use") if with_tools else None
        template = named or templates.get("default") or next(iter(templates.values()))
        if with_tools and "tools" not in template:
            raise UnsupportedParameter("tools: the chat template of this model does not support tools", param="tools")
        return template


def too_long(context: int, tokens: int, where: str, *, estimated: bool = False) -> ContextTooLong:
    """The error for a prompt of `tokens` tokens. `where`: the parameter with the prompt."""
    about = "about " if estimated else ""
    return ContextTooLong(
        f"this model's maximum context length is {context} tokens, but the prompt has {about}{tokens}",
        param=where,
        n_prompt_tokens=tokens,
        n_ctx=context,
    )


def _mark_end(message: dict[str, Any]) -> None:
    if message["role"] != "assistant" or not message["content"]:
        raise InvalidRequest(
            "continue_final_message needs an assistant message with text as the last message",
            param="continue_final_message",
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
