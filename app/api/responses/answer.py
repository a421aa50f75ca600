"""Writes a response of OpenAI's Responses API from the pieces of an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, structs

from ...errors import AppError, Cancelled
from ...frames import Piece
from ..answers import SERVER_SENT, Head, named_event, token_logprob
from ..parts import Event, Part, Parts
from ..replies import TokenLogprob, UsageReport
from . import replies
from .body import ENCRYPTED, FunctionTool, ResponsesBody
from .items import sealed
from .replies import ItemStatus, Response


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a request that its answer needs. `keep`: stores the JSON of the response."""

    body: ResponsesBody
    keep: Callable[[bytes], object]

    @property
    def is_stored(self) -> bool:
        return self.body.is_stored is not False

    @property
    def seals_reasoning(self) -> bool:
        return ENCRYPTED in (self.body.include or ())


class ResponseAnswer:
    """The answer to POST /v1/responses. Another request can `cancel` it, or read its `snapshot`."""

    framing = SERVER_SENT

    def __init__(self, head: Head, options: Options, fail: Callable[[AppError], None]) -> None:
        """`fail` ends the answer with an error."""
        self._options = options
        self._fail = fail
        self._parts = Parts()
        self._response = _response(head, options)
        self._sequence = 0
        self._name = head.id.removeprefix("resp_")
        self.has_ended = False

    def opening(self) -> bytes:
        created = self._event(replies.Created(response=self._response))
        return created + self._event(replies.InProgress(response=self._response))

    def part(self, choice: int, piece: Piece) -> bytes:
        return self._events(self._parts.take(piece))

    def closing(self, usage: UsageReport) -> bytes:
        events = self._events(self._parts.close())
        response = self._end(usage)
        kind = replies.Incomplete if response.status == "incomplete" else replies.Completed
        return events + self._event(kind(response=response))

    def failure(self, error: AppError) -> bytes:
        if isinstance(error, Cancelled):
            response = self._ended(status="cancelled")
            return self._event(replies.Incomplete(response=response))
        response = self._ended(status="failed", error=replies.ResponseError(_code(error), error.message))
        return self._event(replies.Failed(response=response))

    def take(self, choice: int, piece: Piece) -> None:
        for _ in self._parts.take(piece):
            pass

    def document(self, usage: UsageReport) -> bytes:
        for _ in self._parts.close():
            pass
        return msgspec.json.encode(self._end(usage))

    def cancel(self) -> bytes:
        """End the answer early. Returns the response so far."""
        self._fail(Cancelled("a client has cancelled the response"))
        return msgspec.json.encode(structs.replace(self._response, status="cancelled", output=self._output()))

    def snapshot(self) -> bytes:
        """The response so far."""
        return msgspec.json.encode(structs.replace(self._response, output=self._output()))

    def _end(self, usage: UsageReport) -> Response:
        """The response of an answer that has ended by itself."""
        cached = usage.prompt_tokens_details.cached_tokens
        report = replies.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=replies.InputDetails(cached, usage.prompt_tokens - cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=replies.OutputDetails(self._parts.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        if self._parts.finish == "length":
            details = replies.IncompleteDetails("max_output_tokens")
            return self._ended(status="incomplete", incomplete_details=details, usage=report)
        return self._ended(status="completed", completed_at=int(time.time()), usage=report)

    def _ended(self, **fields: Any) -> Response:
        """The last state of the response; it is stored."""
        response = structs.replace(self._response, output=self._output(), **fields)
        self.has_ended = True
        if self._options.is_stored:
            self._options.keep(msgspec.json.encode(response))
        return response

    def _output(self) -> list[replies.OutputItem]:
        return [self._item(part) for part in self._parts.parts]

    def _events(self, changes: Iterable[Event]) -> bytes:
        events = (event for change, part in changes for event in self._change(change, part))
        return b"".join(map(self._event, events))

    def _event(self, event: replies.Event) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return named_event(event)

    def _change(self, change: str, part: Part) -> Iterator[replies.Event]:
        """The events of one change of a part."""
        place: dict[str, Any] = {"item_id": self._id(part), "output_index": part.index}
        match change, part.kind:
            case "begin", _:
                yield replies.ItemAdded(output_index=part.index, item=self._item(part))
                if part.kind != "call":
                    yield replies.PartAdded(**place, part=_content(part))
            case "add", "text":
                yield replies.OutputTextDelta(**place, delta=part.new, logprobs=_logprobs(part.new_logprobs))
            case "add", "reasoning":
                yield replies.ReasoningDelta(**place, delta=part.new)
            case "add", _:
                yield replies.ArgumentsDelta(**place, delta=part.new)
            case _, "call":
                yield replies.ArgumentsDone(**place, name=part.name, arguments=part.text)
                yield replies.ItemDone(output_index=part.index, item=self._item(part))
            case _, kind:
                if kind == "reasoning":
                    yield replies.ReasoningDone(**place, text=part.text)
                else:
                    yield replies.TextDone(**place, text=part.text, logprobs=_logprobs(part.logprobs))
                yield replies.PartDone(**place, part=_content(part))
                yield replies.ItemDone(output_index=part.index, item=self._item(part))

    def _id(self, part: Part) -> str:
        """The id of an item. References to stored items read it (body.py)."""
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[part.kind]
        return f"{prefix}_{self._name}_{part.index}"

    def _item(self, part: Part) -> replies.OutputItem:
        name = self._id(part)
        status = self._status(part)
        if part.kind == "call":
            return replies.FunctionCallItem(
                id=name, status=status, call_id=part.call_id, name=part.name, arguments=part.text
            )
        content = [_content(part)] if part.text else []
        if part.kind == "text":
            return replies.OutputMessage(id=name, status=status, content=content)  # type: ignore[arg-type]
        is_sealed = self._options.seals_reasoning and part.is_closed
        encrypted = sealed(part.text) if is_sealed else None
        return replies.Reasoning(id=name, status=status, content=content, encrypted_content=encrypted)  # type: ignore[arg-type]

    def _status(self, part: Part) -> ItemStatus:
        if not part.is_closed:
            return "in_progress"
        is_cut = self._parts.finish == "length" and part is self._parts.parts[-1]
        return "incomplete" if is_cut else "completed"


def _content(part: Part) -> replies.ContentPart:
    if part.kind == "reasoning":
        return replies.ReasoningText(part.text)
    return replies.OutputText(part.text, logprobs=_logprobs(part.logprobs))


def _logprobs(entries: Iterable[Any]) -> list[TokenLogprob]:
    return [token_logprob(entry) for entry in entries]


def _response(head: Head, options: Options) -> Response:
    """A response that has begun."""
    body = options.body
    tools = [tool for tool in body.tools or [] if isinstance(tool, FunctionTool)]
    reasoning = body.reasoning
    text = msgspec.to_builtins(body.text) if body.text else {}
    return Response(
        id=head.id,
        created_at=head.created,
        model=head.model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.labels or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=replies.ReasoningChoice(reasoning.effort if reasoning else None),
        store=options.is_stored,
        temperature=body.temperature,
        text=text | {"format": text.get("format") or {"type": "text"}},
        tool_choice=msgspec.to_builtins(body.tool_choice or "auto"),
        tools=[_tool(tool) for tool in tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        warnings=list(head.warnings) or UNSET,
    )


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _code(error: AppError) -> str:
    """The code of an error in a response: the two of OpenAI that clients act on, or that of the error."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.status >= 500 else error.code
