"""The request bodies of OpenAI's API, and their conversion to frames for a worker.

A field has an effect or is refused by name; ignored.py lists the few fields that are accepted without effect. The
fields are those of OpenAI, and common ones of vLLM and llama.cpp (top_k, min_p, repetition_penalty, guided_json, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ..errors import InvalidRequest, UnsupportedParameter
from ..frames import Generate, Reasoning, Tokenize
from .body import WireBody, check_depth, without_none
from .inputs import Name, Texts, TokenId, texts_of
from .messages import AssistantMessage, Messages, NamedTool, Tool, plain_messages, plain_tool
from .sampling import Count, SamplingBody, TopLogprobs

MAX_PROMPTS = 128
COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

SWITCHED: dict[bool, Reasoning] = {False: "none", True: "on"}

# Variables of the chat template that a client may set; they must not include names that the renderer sets.
TEMPLATE_VARIABLES = ("enable_thinking", "thinking", "preserve_thinking", "reasoning_effort", "date_string")


class ReasoningOptions(WireBody):
    """The form of OpenRouter."""

    effort: Reasoning | None = None
    enabled: bool | None = None


class ChatBody(SamplingBody, kw_only=True):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        "audio": "only text is supported",
        "modalities": "only text is supported",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "web search is not supported",
        "functions": "deprecated: use tools",
        "function_call": "deprecated: use tool_choice",
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
    reasoning_effort: Reasoning | None = None
    reasoning: ReasoningOptions | None = None
    enable_thinking: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: Annotated[list[Literal["text"]], Meta(max_length=1)] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @property
    def shows_logprobs(self) -> bool:
        return bool(self.logprobs)

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self._value("max_tokens"), self._value("max_completion_tokens")} - {None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_tokens")
        self._check_tools()
        self._check_template_variables()
        self._check_continuation()

    def ignored_by_template(self, names: Sequence[str]) -> list[str]:
        """The fields of the client that the chat template has no switch for. `names`: those of the frame."""
        fields = {"reasoning": self._reasoning()[0], "verbosity": "verbosity"}
        return [fields.get(name, f"chat_template_kwargs.{name}") for name in names]

    def _reasoning(self) -> tuple[str, Reasoning | None]:
        """The field that says how much the model reasons, and its value. The first one of several counts."""
        options = self.reasoning or ReasoningOptions()
        values: dict[str, Reasoning | bool | None] = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning": options.effort or options.enabled,
            "enable_thinking": self.enable_thinking,
        }
        present = without_none(values) or {"": None}
        name, value = next(iter(present.items()))
        return name, SWITCHED[value] if isinstance(value, bool) else value

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
                max_tokens=self._value("max_completion_tokens") or self._value("max_tokens"),
                reasoning=self._reasoning()[1],
                verbosity=self.verbosity,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                **self.sampling(),
            )
        ]


class CompletionBody(SamplingBody, kw_only=True):
    """POST /v1/completions."""

    prompt: Texts
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        """Whether the answer has the log-probabilities of the prompt. Then it may have no other tokens."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def kept(self) -> int | None:
        """The number of choices of a prompt that are the best of more; None: the answer has all choices."""
        choices = self.n or 1
        return choices if (self.best_of or choices) > choices else None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequest("best_of must be at least n", param="best_of")
        if self.kept is not None and self.stream:
            raise UnsupportedParameter(
                "best_of: the best choices are known at the end: without stream", param="best_of"
            )
        if self.scores_prompt:
            self._check_scores()
        if self.suffix and (self.echo or not isinstance(self.prompt, str)):
            raise UnsupportedParameter("suffix: needs one text as prompt, without echo", param="suffix")

    def _check_scores(self) -> None:
        """Raises UnsupportedParameter for a field that would act on the repeated prompt, too."""
        for name in ("stop", "presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                raise UnsupportedParameter(f"{name}: not supported with logprobs of an echoed prompt", param=name)

    def _value(self, field: str) -> Any:
        if field == "max_tokens" and self.max_tokens == 0 and self.scores_prompt:
            return None  # see `frames`
        return super()._value(field)

    def frames(self, request_id: str) -> list[Generate]:
        """The request as one frame per prompt for a worker. Raises InvalidRequest."""
        self.check()
        prompts = (
            [self.prompt]
            if self.suffix and isinstance(self.prompt, str)
            else texts_of(self.prompt, "prompt", MAX_PROMPTS)
        )
        defaults = {None: COMPLETION_TOKENS, 0: 0}
        sampling = self.sampling()
        if self.kept is not None:
            sampling["n"] = self.best_of
        return [
            Generate(
                id=f"{request_id}-{index}",
                prompt=prompt,
                suffix=self.suffix or None,
                max_tokens=defaults.get(self.max_tokens, self._value("max_tokens")),
                echo=bool(self.echo),
                logprobs=0 if self.logprobs is None and self.kept is not None else self.logprobs,
                **sampling,
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
