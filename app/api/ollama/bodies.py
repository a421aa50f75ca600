"""The request bodies of Ollama's chats and completions, and their conversion to bodies of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest, UnsupportedParameter
from ...frames import Reasoning
from ..body import WireBody, check_depth, without_none
from ..formats import JsonObjectFormat, JsonSchemaFormat
from ..inputs import Name
from ..lifetime import seconds
from ..messages import (
    MAX_CALLS,
    MAX_MESSAGES,
    AssistantMessage,
    CalledFunction,
    EarlierToolCall,
    SystemMessage,
    Tool,
    ToolMessage,
    UserMessage,
)
from ..messages import Message as OpenAIMessage
from ..openai import ChatBody, CompletionBody
from ..sampling import TopLogprobs

StopText = Annotated[str, Meta(max_length=1024)]
THOUGHT: dict[bool, Reasoning] = {False: "none", True: "on"}
# Options with the same meaning and name in a body of OpenAI's API.
SAME = (
    "seed top_k top_p min_p temperature repeat_penalty presence_penalty frequency_penalty stop typical_p tfs_z mirostat"
).split()


class Options(WireBody):
    """The options of a model file. Those of the load have no effect: the settings decide how a model is loaded."""

    seed: int | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**53 - 1)] | None = None  # -1 and -2: until the context is full
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    temperature: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None  # without a penalty any value, otherwise -1: all tokens
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    penalize_newline: Literal[True] | None = None
    # Without effect: see ignored.py.
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None
    draft_num_predict: int | None = None


class CalledByName(WireBody):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class Call(WireBody):
    function: CalledByName
    id: str | None = None
    type: Literal["function"] | None = None


class Message(WireBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class _AnswerBody(WireBody, kw_only=True):
    """The fields that chats and completions have in common."""

    REFUSED: ClassVar[dict[str, str]] = {"truncate": "a prompt is never cut", "shift": "a context is never shifted"}

    model: Name
    stream: bool | None = None
    options: Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["", "none", "low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: Literal[False] | None = None
    shift: Literal[False] | None = None

    @property
    def lifetime(self) -> float | None:
        return None if self.keep_alive is None else seconds(self.keep_alive, "keep_alive")

    def shared(self) -> dict[str, Any]:
        """The fields of OpenAI's bodies that do not depend on the prompt. Raises InvalidRequest."""
        options = self.options or Options()
        fields = {name: getattr(options, name) for name in SAME}
        if options.num_predict is not None:
            fields["max_tokens"] = max(options.num_predict, -1)
        if options.repeat_last_n is not None and options.repeat_penalty not in (None, 1):
            fields["repeat_last_n"] = options.repeat_last_n
        if isinstance(self.format, dict):
            check_depth(self.format, "format")
            fields["response_format"] = JsonSchemaFormat(schema=self.format)
        elif self.format:
            fields["response_format"] = JsonObjectFormat()
        return without_none(fields) | {"model": plain_name(self.model), "keep_alive": self.keep_alive}

    @property
    def reasoning(self) -> Reasoning | None:
        return THOUGHT[self.think] if isinstance(self.think, bool) else self.think or None

    def chat(self, messages: Sequence[OpenAIMessage], **more: Any) -> ChatBody:
        return ChatBody(
            messages=list(messages),
            reasoning_effort=self.reasoning,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            **self.shared(),
            **more,
        )


class OllamaChatBody(_AnswerBody, kw_only=True):
    """POST /api/chat. Without messages, the model is only loaded."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None

    def openai(self) -> ChatBody | None:
        """The body of OpenAI's API; None without messages. Raises InvalidRequest."""
        if not self.messages:
            return None
        return self.chat(_Conversion().messages(self.messages), tools=self.tools)


class GenerateBody(_AnswerBody, kw_only=True):
    """POST /api/generate. Without a prompt, the model is only loaded."""

    REFUSED: ClassVar[dict[str, str]] = _AnswerBody.REFUSED | {
        "template": "the model has its own chat template; use raw for a prompt without one",
        "context": "send the conversation to /api/chat",
        "width": "models write text only",
        "height": "models write text only",
        "steps": "models write text only",
    }

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Meta(max_length=0)] | None = None
    width: Literal[0] | None = None
    height: Literal[0] | None = None
    steps: Literal[0] | None = None

    def openai(self) -> ChatBody | CompletionBody | None:
        """The body of OpenAI's API; None without a prompt. Raises InvalidRequest."""
        refuse_images(self.images, "images")
        if not self.prompt and not self.suffix:
            return None
        if self.raw or self.suffix:
            return self._completion(self.prompt or "")
        system = [SystemMessage(content=self.system)] if self.system else []
        return self.chat([*system, UserMessage(content=self.prompt or "")])

    def _completion(self, prompt: str) -> CompletionBody:
        for name in ("system", "think"):
            if getattr(self, name):
                raise InvalidRequest(f"{name}: a raw prompt and a suffix have no chat template", param=name)
        fields = {"max_tokens": -1} | self.shared()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return CompletionBody(prompt=prompt, suffix=self.suffix or None, logprobs=logprobs, **fields)


def plain_name(name: str) -> str:
    """The name of a model without the tag that Ollama's clients add to a name."""
    return name.removesuffix(":latest")


def refuse_images(images: list[Any] | None, param: str) -> None:
    if images:
        raise UnsupportedParameter(
            f"{param}: only text is supported", hint="the models read text only: leave images out", param=param
        )


class _Conversion:
    """Gives calls ids, and finds the calls of results, which Ollama's messages only name."""

    def __init__(self) -> None:
        self._pending: list[EarlierToolCall] = []
        self._count = 0

    def messages(self, messages: Sequence[Message]) -> list[OpenAIMessage]:
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: Message, where: str) -> OpenAIMessage:
        refuse_images(message.images, f"{where}.images")
        content = message.content or ""
        if message.role == "tool":
            return ToolMessage(content=content, tool_call_id=self._answered(message, where).id)
        self._pending = [self._call(call) for call in message.tool_calls or ()]
        if message.role == "assistant":
            calls = list(self._pending)
            return AssistantMessage(content=content, reasoning_content=message.thinking, tool_calls=calls or None)
        if self._pending:
            raise InvalidRequest(f"{where}.tool_calls: only the assistant calls tools", param=f"{where}.tool_calls")
        return (SystemMessage if message.role == "system" else UserMessage)(content=content)

    def _call(self, call: Call) -> EarlierToolCall:
        self._count += 1
        arguments = msgspec.json.encode(call.function.arguments).decode()
        function = CalledFunction(name=call.function.name, arguments=arguments)
        return EarlierToolCall(id=call.id or f"call_{self._count}", function=function)

    def _answered(self, message: Message, where: str) -> EarlierToolCall:
        """The call of a result: that with its id, otherwise the first one of its tool, otherwise the first one."""

        def matches(call: EarlierToolCall) -> bool:
            if message.tool_call_id:
                return call.id == message.tool_call_id
            return message.tool_name in (None, "", call.function.name)

        call = next(filter(matches, self._pending), None)
        if call is None:
            raise InvalidRequest(f"{where}: the assistant message before it has no such tool call", param=where)
        self._pending.remove(call)
        return call
