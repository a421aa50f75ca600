"""The request bodies of OpenAI's API, and their conversion to frames for a worker.

A field has an effect or is refused by name. A comment marks the few fields that are accepted without effect. The fields
are those of OpenAI, and common ones of vLLM and llama.cpp (top_k, min_p, repetition_penalty, guided_json, …).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ...engine.ranges import RANGES
from ..errors import InvalidRequest, UnsupportedParameter
from ..frames import Generate, ResponseFormat, Tokenize
from .body import WireBody, check_depth, without_none
from .inputs import Name, TargetBody, Texts, TokenId, texts_of
from .messages import AssistantMessage, Messages, NamedTool, Tool, plain_messages, plain_tool

TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

# Variables of the chat template that a client may set; they must not include names that the renderer sets.
TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "preserve_thinking", "reasoning_effort", "date_string")

StopText = Annotated[str, Meta(min_length=1, max_length=1024)]

# Fields with a range, and the name of the range. SamplingBody checks them, because an error of msgspec does not
# show the invalid value.
RANGED = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "seed": "seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logprobs": "logprobs",
    "top_logprobs": "logprobs",
}


def ranged(name: str, low: int | None = None) -> Meta:
    """The range of a parameter, for the JSON schema. `low`: the lowest accepted value, if it is below the range."""
    limits = RANGES[name]
    lower = "exclusiveMinimum" if limits.excludes_low else "minimum"
    return Meta(extra_json_schema={lower: limits.low if low is None else low, "maximum": limits.high})


Temperature = Annotated[float, ranged("temperature")]
TopP = Annotated[float, ranged("top_p")]
TopK = Annotated[int, ranged("top_k", low=-1)]  # 0 and -1: no limit
MinP = Annotated[float, ranged("min_p")]
Count = Annotated[int, ranged("max_tokens")]
Seed = Annotated[int, ranged("seed", low=-(2**63))]  # OpenAI's seeds are signed; a negative one is taken modulo 2^63
Penalty = Annotated[float, ranged("presence_penalty")]
RepetitionPenalty = Annotated[float, ranged("repetition_penalty")]
TopLogprobs = Annotated[int, ranged("logprobs")]
Bias = Annotated[float, ranged("logit_bias")]


class TextFormat(WireBody, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(WireBody, tag_field="type", tag="json_object"):
    pass


class SchemaSpec(WireBody):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None  # refuse unknown formats and inexact bounds; the schema is always enforced


class JsonSchemaFormat(WireBody, tag_field="type", tag="json_schema"):
    json_schema: SchemaSpec


class StreamOptions(WireBody):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(TargetBody, kw_only=True):
    """The fields that chats and completions have in common."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    guided_json: dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=1024)] | None = None
    # More labels without effect.
    metadata: Annotated[dict[str, str], Meta(max_length=1024)] | None = None
    safety_identifier: str | None = None
    # Without effect: all requests share the prefix cache.
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Check ranges, and rules that the type of a single field cannot express. Raises InvalidRequest."""
        for field, name in RANGED.items():
            value = self._value(field)
            if value is not None and value not in RANGES[name]:
                raise InvalidRequest(f"{field} must be {RANGES[name]}, not {getattr(self, field)}", param=field)
        self._check_logit_bias()
        self.check_lora()
        self._check_stream_options()

    def _value(self, field: str) -> Any:
        """The value of a field. Values outside the range that OpenAI or vLLM accept are converted: -1 of `top_k` to 0,
        a negative `seed` to its value modulo 2^63.
        """
        value = getattr(self, field, None)
        if field == "top_k" and value == -1:
            return 0
        if field == "seed" and value is not None and -(2**63) <= value < 0:
            return value % 2**63
        return value

    def _check_logit_bias(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not TOKEN_ID.fullmatch(token):
                raise InvalidRequest(f"logit_bias: {token[:40]!r} is not a token id", param="logit_bias")
            if bias not in RANGES["logit_bias"]:
                raise InvalidRequest(
                    f"logit_bias of token {token} must be {RANGES['logit_bias']}, not {bias}", param="logit_bias"
                )

    def _check_stream_options(self) -> None:
        if self.stream_options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if self.stream_options.include_obfuscation:
            raise UnsupportedParameter(
                "stream_options.include_obfuscation: padding of chunks is not supported",
                param="stream_options.include_obfuscation",
            )

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments for a Generate frame, without the fields that the client omits: the frame has defaults."""
        arguments = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self._value("top_k"),
            "min_p": self.min_p,
            "n": self.n,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "stop_ids": self.stop_token_ids,
            "seed": self._value("seed"),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "ignore_eos": self.ignore_eos,
            "response_format": self._response_format(),
        }
        return without_none(arguments) | self.adapter_arguments()

    def _response_format(self) -> ResponseFormat | None:
        formats = {
            "response_format": None if isinstance(self.response_format, TextFormat) else self.response_format,
            "regex": self.regex,
            "choice": self.choice,
            "guided_json": self.guided_json,
            "guided_regex": self.guided_regex,
            "guided_choice": self.guided_choice,
        }
        present = without_none(formats)
        if not present:
            return None
        (name, value), *others = present.items()
        if others:
            raise InvalidRequest(f"only one of {', '.join(present)} may be given", param=others[0][0])
        return _constraint(name, value)


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "audio": "only text is supported",
        "modalities": "only text is supported",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "web search is not supported",
        "functions": "deprecated: use tools",
        "function_call": "deprecated: use tool_choice",
        "service_tier": "only auto and default are supported",
        "reasoning_effort": "use chat_template_kwargs, if the chat template of the model supports it",
        "verbosity": "use a message",
    }

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None
    reasoning_effort: None = None
    verbosity: None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        super().check()
        if self.store:
            raise UnsupportedParameter("store: answers are not stored", param="store")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
        self._check_tools()
        self._check_template_variables()
        self._check_continuation()

    def _check_template_variables(self) -> None:
        for name, value in (self.chat_template_kwargs or {}).items():
            param = f"chat_template_kwargs.{name[:100]}"
            if name not in TEMPLATE_VARIABLES:
                raise UnsupportedParameter(f"{param}: supported: {', '.join(TEMPLATE_VARIABLES)}", param=param)
            if not isinstance(value, str | bool | None):
                raise InvalidRequest(f"{param}: expected a string, true, false or null", param=param)

    def _check_continuation(self) -> None:
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise UnsupportedParameter(
                    "add_generation_prompt: false needs continue_final_message: true", param="add_generation_prompt"
                )
            return
        if self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt cannot be combined", param="continue_final_message"
            )
        if not isinstance(self.messages[-1], AssistantMessage):
            raise InvalidRequest(
                "continue_final_message needs an assistant message as the last message",
                param="continue_final_message",
            )

    def _check_tools(self) -> None:
        names: set[str] = set()
        for index, tool in enumerate(self.tools or []):
            _check_parameters(tool.function.parameters or {}, f"tools[{index}].function.parameters")
            if tool.function.name in names:
                raise InvalidRequest(f"two tools have the name {tool.function.name!r}", param=f"tools[{index}]")
            names.add(tool.function.name)
        if self.tool_choice == "required" and not names:
            raise InvalidRequest("tool_choice: required needs tools", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise InvalidRequest(f"there is no tool {self.tool_choice.function.name!r}", param="tool_choice")

    def _plain_tools(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The tools for the prompt, and the tools of which the model must call one."""
        tools = [plain_tool(tool) for tool in self.tools or []]
        match self.tool_choice:
            case "none":
                return [], []
            case "required":
                return tools, tools
            case NamedTool(function=named):
                return tools, [tool for tool in tools if tool["function"]["name"] == named.name]
        return tools, []

    def frames(self, request_id: str) -> list[Generate]:
        """The request as one frame for a worker. Raises InvalidRequest."""
        self.check()
        tools, forced_tools = self._plain_tools()
        return [
            Generate(
                id=request_id,
                messages=plain_messages(self.messages),
                tools=tools,
                forced_tools=forced_tools,
                parallel_tool_calls=self.parallel_tool_calls is not False,
                template_kwargs=self.chat_template_kwargs or {},
                continue_final_message=bool(self.continue_final_message),
                max_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                **self.sampling(),
            )
        ]


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "suffix": "fill-in-the-middle is not supported",
        "best_of": "only 1 is supported; use n",
    }

    prompt: Texts
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    suffix: None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    def check(self) -> None:
        super().check()
        if self.echo and self.logprobs is not None:
            raise UnsupportedParameter("logprobs of an echoed prompt are not supported", param="logprobs")

    def frames(self, request_id: str) -> list[Generate]:
        """The request as one frame per prompt for a worker. Raises InvalidRequest."""
        self.check()
        prompts = texts_of(self.prompt, "prompt", MAX_PROMPTS)
        return [
            Generate(
                id=f"{request_id}-{index}",
                prompt=prompt,
                max_tokens=self.max_tokens or COMPLETION_TOKENS,
                echo=bool(self.echo),
                logprobs=self.logprobs,
                **self.sampling(),
            )
            for index, prompt in enumerate(prompts)
        ]


def _check_parameters(schema: dict[str, Any], param: str) -> None:
    """Raises InvalidRequest for a schema of another type than an object: no arguments of a tool can match it."""
    check_depth(schema, param)
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        raise InvalidRequest(
            f"{param}: the schema describes no object, but the arguments of a tool are an object",
            hint='use "type": "object", with one property for each argument',
            param=param,
        )


def _constraint(name: str, value: object) -> ResponseFormat:
    """The constraint of the field `name` with this value. Raises InvalidRequest if a schema is nested too deep."""
    match value:
        case JsonObjectFormat():
            return ResponseFormat(kind="json_object")
        case JsonSchemaFormat(json_schema=spec):
            check_depth(spec.schema, "response_format.json_schema.schema")
            return ResponseFormat(kind="json_schema", schema=spec.schema, strict=bool(spec.strict))
        case dict():
            check_depth(value, name)
            return ResponseFormat(kind="json_schema", schema=value)
        case str():
            return ResponseFormat(kind="regex", regex=value)
        case list():
            return ResponseFormat(kind="choice", choices=value)
    raise TypeError(f"{name} is a {type(value).__name__}")


class TokenizeBody(WireBody):
    """POST /v1/tokenize: exactly one of prompt and messages."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None

    def frame(self, request_id: str) -> Tokenize:
        """The request as a frame for a worker. Raises InvalidRequest."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
        if self.messages is not None and self.add_special_tokens:
            raise UnsupportedParameter(
                "add_special_tokens: for messages only false is supported: the chat template writes the special tokens",
                param="add_special_tokens",
            )
        return Tokenize(
            id=request_id,
            prompt=self.prompt,
            messages=None if self.messages is None else plain_messages(self.messages),
            add_special_tokens=self.add_special_tokens is not False,
        )


class DetokenizeBody(WireBody):
    """POST /v1/detokenize."""

    tokens: list[TokenId]
    model: Name | None = None
