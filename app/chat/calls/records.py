"""The records of tool-call formats: how models write calls, reasoning and answers.

A record has the texts of a call as the model writes them. Fields in a text:

    $name        name of the tool
    $arguments   arguments as a JSON object
    $parameters  arguments one by one, each as in `parameter`, which has the fields $key, $value and
                 $raw (true or false) or $type (string or a JSON type): whether the value is a text
    $keywords    arguments as keywords of Python: city="Oslo", days=3
    $entries     arguments as entries of an object with bare keys and the quotes of `quote`
    $id, $index  id of the call, and its number in the answer

The value of a parameter is a text if the schema of the tool says string, otherwise JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from .source import words_of

_FIELD = re.compile(r"\$(name|arguments|parameters|keywords|entries|id|index|key|value|raw|type)")
_MARK = re.compile(r"</?[^<>\s=]+[>=]?|\[/?[A-Z_]+\]")
_ARGUMENTS = ("arguments", "parameters", "keywords", "entries")


@dataclass(frozen=True)
class Literal:
    """A text that every call has at this place."""

    text: str


@dataclass(frozen=True)
class Field:
    """A part of a call that differs from call to call."""

    name: str


Part = Literal | Field


def parts_of(text: str) -> tuple[Part, ...]:
    """The literals and fields of a text of a record."""
    pieces = _FIELD.split(text)
    parts = [Field(piece) if index % 2 else Literal(piece) for index, piece in enumerate(pieces)]
    return tuple(part for part in parts if part != Literal(""))


def marks_of(*texts: str) -> frozenset[str]:
    """The markers in texts of a record, such as <tool_call> and [ARGS]."""
    return frozenset(mark for text in texts for mark in _MARK.findall(text))


@dataclass(frozen=True)
class CallFormat:
    """The format of a model's tool calls.

    A group of calls is `begin`, calls with `separator` between them, `end`. Without a separator, a group has one call,
    and `gap` is between two groups.
    """

    title: str
    begin: str
    call: str
    end: str = ""
    separator: str | None = None
    gap: str = ""
    parameter: str = ""  # one of $parameters
    between: str = ""  # text between two of $parameters
    cdata: bool = False  # a value may be in <![CDATA[…]]>
    quote: str = '"'  # begins and ends a text in $entries
    hints: tuple[str, ...] = ()  # texts of a prompt with tools that belong to this format alone
    at_start: bool = False  # without a marker: only at the start of an answer, and only for a tool of the request

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.call)

    @cached_property
    def parameter_parts(self) -> tuple[Part, ...]:
        return parts_of(self.parameter)

    @cached_property
    def arguments(self) -> str:
        """The field that has the arguments."""
        return next(part.name for part in self.parts if isinstance(part, Field) and part.name in _ARGUMENTS)

    @cached_property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with the name as a value, so that its members may have another order."""
        return self.call.startswith("{") and ': "$name"' in self.call

    @cached_property
    def trigger(self) -> str:
        """The first word of a group. Empty for a format without a marker."""
        first = self.parts[0]
        start = self.begin or (first.text if isinstance(first, Literal) else "")
        return "" if self.at_start else words_of(start)[0]

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts of a group of calls, with their fields."""
        return (self.begin, self.call, self.end, self.parameter, self.quote)

    @cached_property
    def call_trigger(self) -> str:
        """The first word of a call, where models leave out `begin`. Empty: a call has no marker of its own."""
        first = self.parts[0]
        is_marker = self.begin and isinstance(first, Literal) and first.text.strip().startswith("<")
        return words_of(first.text)[0] if isinstance(first, Literal) and is_marker else ""

    @cached_property
    def opening(self) -> frozenset[str]:
        """The markers of a group without its end."""
        return marks_of(self.begin, self.call, self.parameter)

    @cached_property
    def marks(self) -> frozenset[str]:
        """The markers of the format."""
        return marks_of(self.begin, self.call, self.end, self.parameter)


@dataclass(frozen=True)
class Reasoning:
    """The texts before and after the reasoning of an answer."""

    begin: str
    end: str
    is_known: bool = True  # the markers alone show that a template reasons


@dataclass(frozen=True)
class Wrapper:
    """Texts that a model writes around its answer. `begin` is dropped at the start of the answer, and then `end`.
    Without `begin`, `end` is always dropped."""

    begin: str
    end: str


_JSON = '{"name": "$name", "arguments": $arguments}'
_LLAMA = '{"name": "$name", "parameters": $arguments}'
_QWEN_PARAMETER = "<parameter=$key>\n$value\n</parameter>\n"
_GLM_PARAMETER = "<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"
_DSML_PARAMETER = '<｜DSML｜parameter name="$key" string="$raw">$value</｜DSML｜parameter>\n'
_DSML_CALL = '<｜DSML｜invoke name="$name">\n$parameters</｜DSML｜invoke>'

# Where several formats begin with the same word, the text after it decides which of them a call has.
FORMATS = (
    # An object in JSON between two markers.
    CallFormat("hermes", "<tool_call>\n", _JSON, "\n</tool_call>", gap="\n"),
    CallFormat("nemotron", "<TOOLCALL>[", _JSON, "]</TOOLCALL>", ", "),
    CallFormat("tool_calls", "<tool_calls>[", _JSON, "]</tool_calls>", ", "),
    CallFormat("minimax-m1", "<tool_calls>\n", _JSON, "\n</tool_calls>", "\n"),
    CallFormat("granite", "<|tool_call|>[", _JSON, "]", ", "),
    CallFormat("phi-4", "<|tool_call|>[", _JSON, "]<|/tool_call|>", ", ", hints=("<|/tool|>",)),
    CallFormat("granite-3.1", "<tool_call>[", _JSON, "]", ", "),
    CallFormat("mistral", "[TOOL_CALLS][", '{"name": "$name", "arguments": $arguments, "id": "$id"}', "]", ", "),
    CallFormat("mistral-list", "[TOOL_CALLS][", _JSON, "]", ", "),
    CallFormat(
        "command-r7b",
        "<|START_ACTION|>[\n    ",
        '{"tool_call_id": "$index", "tool_name": "$name", "parameters": $arguments}',
        "\n]<|END_ACTION|>",
        ",\n    ",
    ),
    CallFormat(
        "command-r",
        "Action:\n```json\n[\n    ",
        '{\n        "tool_name": "$name",\n        "parameters": $arguments\n    }',
        "\n]```",
        ",\n    ",
        hints=("Write 'Action:'",),
    ),
    CallFormat("gigachat-3", "<|message_sep|>\n\nfunction call<|role_sep|>\n", _JSON),
    CallFormat("gigachat-3.1", "<|function_call|>", _JSON),
    CallFormat("internlm", "<|action_start|><|plugin|>\n", _LLAMA, "<|action_end|>"),
    CallFormat("firefunction", " functools[", _JSON, "]", ", ", hints=("functools[",)),
    CallFormat("apertus", "<|tools_prefix|>[", '{"$name": $arguments}', "]<|tools_suffix|>", ", "),
    # The name outside of the arguments.
    CallFormat("mistral-args", "", "[TOOL_CALLS]$name[ARGS]$arguments"),
    CallFormat("mistral-id", "", "[TOOL_CALLS]$name[CALL_ID]$id[ARGS]$arguments"),
    CallFormat(
        "deepseek-v3",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    CallFormat(
        "deepseek-r1",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n$arguments<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    CallFormat(
        "deepseek-v3.1",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "",
    ),
    CallFormat(
        "kimi-k2",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.$name:$index<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "",
    ),
    CallFormat(
        "solar",
        "<|tool_calls|>",
        "<|tool_call:begin|>$id<|tool_call:name|>$name<|tool_call:args|>$arguments<|tool_call:end|>",
        "<|calls|>",
        "",
    ),
    CallFormat(
        "hunyuan",
        "<tool_calls>\n",
        "<tool_call>$name\n```json\n$arguments\n```\n</tool_call>",
        "\n</tool_calls>",
        "\n",
    ),
    CallFormat("functionary-3.1", "", "<function=$name>$arguments</function>"),
    # One parameter after the other.
    CallFormat(
        "qwen3-coder",
        "<tool_call>\n",
        "<function=$name>\n$parameters</function>",
        "\n</tool_call>",
        gap="\n",
        parameter=_QWEN_PARAMETER,
    ),
    CallFormat(
        "seed-oss",
        "<seed:tool_call>\n",
        "<function=$name>\n$parameters</function>",
        "\n</seed:tool_call>",
        gap="\n",
        parameter="<parameter=$key>$value</parameter>\n",
    ),
    CallFormat("glm-4.5", "<tool_call>", "$name\n$parameters", "</tool_call>", gap="\n", parameter=_GLM_PARAMETER),
    CallFormat(
        "glm-4.7",
        "<tool_call>",
        "$name$parameters",
        "</tool_call>",
        parameter="<arg_key>$key</arg_key><arg_value>$value</arg_value>",
    ),
    CallFormat(
        "longcat",
        "<longcat_tool_call>",
        "$name\n$parameters",
        "</longcat_tool_call>",
        gap="\n",
        parameter="<longcat_arg_key>$key</longcat_arg_key>\n<longcat_arg_value>$value</longcat_arg_value>\n",
    ),
    CallFormat(
        "hunyuan-3",
        "<tool_calls:opensource>\n",
        "<tool_call:opensource>$name<tool_sep:opensource>\n$parameters</tool_call:opensource>",
        "\n</tool_calls:opensource>",
        "\n",
        parameter=(
            "<arg_key:opensource>$key</arg_key:opensource>\n<arg_value:opensource>$value</arg_value:opensource>\n"
        ),
    ),
    CallFormat(
        "minimax-m2",
        "<minimax:tool_call>\n",
        '<invoke name="$name">\n$parameters</invoke>',
        "\n</minimax:tool_call>",
        "\n",
        parameter='<parameter name="$key">$value</parameter>\n',
    ),
    CallFormat(
        "deepseek-v3.2",
        "<｜DSML｜function_calls>\n",
        _DSML_CALL,
        "\n</｜DSML｜function_calls>",
        "\n",
        parameter=_DSML_PARAMETER,
    ),
    CallFormat(
        "deepseek-v4", "<｜DSML｜tool_calls>\n", _DSML_CALL, "\n</｜DSML｜tool_calls>", "\n", parameter=_DSML_PARAMETER
    ),
    CallFormat(
        "step-3",
        "<｜tool_calls_begin｜>\n",
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="$name">\n$parameters</steptml:invoke>'
        "<｜tool_call_end｜>",
        "\n<｜tool_calls_end｜>",
        "\n",
        parameter='<steptml:parameter name="$key">$value</steptml:parameter>\n',
    ),
    CallFormat(
        "minicpm-5",
        "",
        '<function name="$name">$parameters</function>',
        gap="\n",
        parameter='<param name="$key">$value</param>',
        cdata=True,
    ),
    CallFormat(
        "kimi-k3",
        "<|open|>tools<|sep|>",
        '<|open|>call tool="$name" index="$index"<|sep|>$parameters<|close|>call<|sep|>',
        "<|close|>tools<|sep|>",
        "",
        parameter='<|open|>argument key="$key" type="$type"<|sep|>$value<|close|>argument<|sep|>',
    ),
    # A call of Python, and objects with bare keys.
    CallFormat(
        "lfm2",
        "<|tool_call_start|>[",
        "$name($keywords)",
        "]<|tool_call_end|>",
        ", ",
        hints=("<|tool_list_start|>", "List of tools: ["),
    ),
    CallFormat("olmo-3", "<function_calls>\n", "$name($keywords)", "\n</function_calls>", "\n"),
    CallFormat("gemma-4", "<|tool_call>", "call:$name{$entries}", "<tool_call|>", quote='<|"|>'),
    CallFormat(
        "functiongemma", "<start_function_call>", "call:$name{$entries}", "<end_function_call>", quote="<escape>"
    ),
    # No marker.
    CallFormat("llama-3", "", _LLAMA, separator="; ", at_start=True),
    CallFormat("llama-4", "[", "$name($keywords)", "]", ", ", at_start=True),
    CallFormat("list", "[", _JSON, "]", ", ", at_start=True),
    CallFormat("bare", "", _JSON, separator="\n", at_start=True),
    CallFormat("glm-4", "", "$name\n$arguments", at_start=True),
)

REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<mm:think>", "</mm:think>"),
    Reasoning("<think:opensource>", "</think:opensource>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("<|inner_prefix|>", "<|inner_suffix|>"),
    Reasoning("<|channel>thought\n", "<channel|>"),
    Reasoning("<|think|>", "<|end|>", is_known=False),
    Reasoning("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    Reasoning("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),
)

# Texts around an answer, for templates that have them.
WRAPPERS = (
    Wrapper("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    Wrapper("<|START_TEXT|>", "<|END_TEXT|>"),
    Wrapper("<response>", "</response>"),
    Wrapper("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
    Wrapper("<|begin|>assistant", ""),
    Wrapper("<|content|>", ""),
    Wrapper("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    Wrapper("", "<|close|>message<|sep|>"),
    Wrapper("<|python_tag|>", ""),
    Wrapper("<|python_start|>", "<|python_end|>"),
)

REASONING_MARKERS = frozenset().union(*(marks_of(pair.begin, pair.end) for pair in REASONING if pair.is_known))
# All texts that a parser of answers acts on.
MARKERS = frozenset().union(
    *(marks_of(*form.texts) for form in FORMATS),
    *(marks_of(pair.begin, pair.end) for pair in (*REASONING, *WRAPPERS)),
)
