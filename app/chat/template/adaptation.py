"""Changes to conversations for chat templates that cannot show them as they are. No change drops a text.

A step changes one thing, and returns an equal conversation if there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from .messages import Conversation, pairs_of, take_results

Step = Callable[[Conversation], Conversation]
Message = dict[str, Any]

_INSTRUCTIONS = ("system", "developer")


def developer_as_system(conversation: Conversation) -> Conversation:
    """The role `developer` becomes `system`."""
    return _each(conversation, _developer_as_system)


def _developer_as_system(message: Message) -> Message:
    return message | {"role": "system"} if message["role"] == "developer" else message


def described_tools(conversation: Conversation) -> Conversation:
    """Each tool gets a description and the schema of its parameters, and each parameter a description."""
    tools = [tool | {"function": _described(tool["function"])} for tool in conversation.tools or ()]
    return replace(conversation, tools=tools or None)


def _described(function: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {}} | (function.get("parameters") or {})
    if isinstance(parameters["properties"], dict):
        properties = parameters["properties"].items()
        parameters["properties"] = {key: _with_description(schema) for key, schema in properties}
    described: dict[str, Any] = _with_description(function) | {"parameters": parameters}
    return described


def _with_description(value: Any) -> Any:
    return value | {"description": value.get("description") or ""} if isinstance(value, dict) else value


def empty_tools(conversation: Conversation) -> Conversation:
    """An empty list in place of no list of tools."""
    return replace(conversation, tools=conversation.tools or [])


def null_contents(conversation: Conversation) -> Conversation:
    """No text beside calls is null, as in OpenAI's API."""
    return _each(conversation, _with_null)


def _with_null(message: Message) -> Message:
    return message | {"content": message["content"] or None} if message.get("tool_calls") else message


def object_arguments(conversation: Conversation) -> Conversation:
    """Arguments are always objects."""
    is_value = conversation.has_calls and conversation.arguments == "value"
    return replace(conversation, arguments="object") if is_value else conversation


def merged_instructions(conversation: Conversation) -> Conversation:
    """The instructions at the beginning become one message."""
    instructions, others = _split_instructions(conversation.messages)
    if len(instructions) < 2:
        return conversation
    return replace(conversation, messages=[instructions[0] | {"content": _joined(instructions)}, *others])


def single_calls(conversation: Conversation) -> Conversation:
    """Each call gets a message, and its result follows it."""
    pending = conversation.messages[::-1]
    messages: list[Message] = []
    while pending:
        message = pending.pop()
        pairs, rest = pairs_of(message, take_results(pending))
        start = message
        for call, result in pairs:
            messages += [start | {"tool_calls": [call]}, *([result] if result else [])]
            start = {"role": "assistant", "content": ""}
        messages += rest if pairs else [message, *rest]
    return replace(conversation, messages=messages)


def instructions_as_users(conversation: Conversation) -> Conversation:
    """Instructions after the first message become messages of the user."""
    first, others = conversation.messages[:1], conversation.messages[1:]
    return replace(conversation, messages=first + [_instruction_as_user(message) for message in others])


def _instruction_as_user(message: Message) -> Message:
    return message | {"role": "user"} if message["role"] in _INSTRUCTIONS else message


def merged_turns(conversation: Conversation) -> Conversation:
    """Messages of the user, or of the assistant, without another message between them become one message."""
    turns: list[list[Message]] = []
    for message in conversation.messages:
        if turns and _is_one_turn(turns[-1][-1], message):
            turns[-1].append(message)
        else:
            turns.append([message])
    return replace(conversation, messages=[_merged(turn) for turn in turns])


def _is_one_turn(first: Message, second: Message) -> bool:
    is_same = first["role"] == second["role"] and second["role"] in ("user", "assistant")
    return is_same and not first.get("tool_calls")


def _merged(messages: Sequence[Message]) -> Message:
    if len(messages) == 1:
        return messages[0]
    merged = {key: value for message in messages for key, value in message.items()}
    merged |= {key: _joined(messages, key) for key in merged if key in ("content", "reasoning_content")}
    return merged


def folded_instructions(conversation: Conversation) -> Conversation:
    """The instructions at the beginning become the beginning of the first message of the user."""
    instructions, others = _split_instructions(conversation.messages)
    if not instructions:
        return conversation
    first = {"role": "user", "content": _joined(instructions)}
    if others and others[0]["role"] == "user":
        first = _merged([first, others.pop(0)])
    return replace(conversation, messages=[first, *others])


def alternating_turns(conversation: Conversation) -> Conversation:
    """Empty messages: of the user before an assistant that speaks first, of the assistant after calls that the user
    interrupts or comments."""
    messages: list[Message] = []
    before: Message = {"role": "system"}
    for message in conversation.messages:
        messages += [*_between(before, message), message]
        before = message
    return replace(conversation, messages=messages)


def _between(before: Message, message: Message) -> list[Message]:
    if before["role"] in _INSTRUCTIONS and message["role"] == "assistant":
        return [{"role": "user", "content": ""}]
    if (before["role"] == "tool" or before.get("tool_calls")) and message["role"] == "user":
        return [{"role": "assistant", "content": ""}]
    return []


def blank_contents(conversation: Conversation) -> Conversation:
    """Gives a space to each message without text and calls."""
    return _each(conversation, _with_blank)


def _with_blank(message: Message) -> Message:
    return message if message["content"] or message.get("tool_calls") else message | {"content": " "}


def calls_as_text(conversation: Conversation) -> Conversation:
    """Calls become text of their messages, as the model writes them."""

    def without_calls(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        texts = filter(None, [message["content"], conversation.calls_text(message["tool_calls"])])
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return rest | {"content": "\n".join(texts)}

    return _each(conversation, without_calls)


def results_as_users(conversation: Conversation) -> Conversation:
    """Results of calls become messages of the user."""
    if not any(message["role"] == "tool" for message in conversation.messages):
        return conversation
    return merged_turns(_each(conversation, _result_as_user))


def _result_as_user(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _each(conversation: Conversation, change: Callable[[Message], Message]) -> Conversation:
    return replace(conversation, messages=[change(message) for message in conversation.messages])


def _split_instructions(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """The instructions at the beginning, and the other messages."""
    roles = [message["role"] in _INSTRUCTIONS for message in messages]
    count = roles.index(False) if False in roles else len(roles)
    return list(messages[:count]), list(messages[count:])


def _joined(messages: Iterable[Message], key: str = "content") -> str:
    return "\n\n".join(message[key] for message in messages if message.get(key))


# In the order in which they are tried and applied: from the least change to the greatest.
STEPS: tuple[Step, ...] = (
    developer_as_system,
    described_tools,
    empty_tools,
    null_contents,
    object_arguments,
    merged_instructions,
    single_calls,
    instructions_as_users,
    merged_turns,
    folded_instructions,
    alternating_turns,
    calls_as_text,
    results_as_users,
    blank_contents,
)
