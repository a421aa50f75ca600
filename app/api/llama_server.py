"""Routes of llama.cpp's server: /props, /slots, /apply-template and /infill."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from ..errors import AppError, ModelNotFound, UnsupportedParameter
from ..frames import Detokenize, Generate, Piece, Text, Tokenize, Tokens
from ..version import VERSION
from .admin import LoadedModel
from .answers import SERVER_SENT, Answer, Head, error_event, event
from .body import WireBody, is_local, read_json
from .exchange import Asked, Protocol
from .inputs import Name
from .messages import Messages, Tool, plain_messages
from .models import Models
from .replies import UsageReport
from .sampling import SamplingBody
from .stream import Stream

MAX_SLOTS = 1024


class InfillBody(SamplingBody, kw_only=True):
    """POST /infill: the text between two texts."""

    input_prefix: str
    input_suffix: str
    prompt: str | None = None  # text after the prefix
    input_extra: Annotated[list[Any], Meta(max_length=0)] | None = None
    n_predict: Annotated[int, Meta(ge=-1, le=2**53 - 1)] | None = None
    n_indent: Annotated[int, Meta(ge=0, le=0)] | None = None
    # Without effect: see ignored.py.
    samplers: list[str] | None = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None

    def frames(self, request_id: str) -> list[Generate]:
        """The request as one frame for a worker. Raises InvalidRequest."""
        self.check()
        if (self.n or 1) > 1:
            raise UnsupportedParameter("n: the reply has one text", param="n")
        limit = self._value("max_tokens") if self.n_predict in (None, -1) else self.n_predict
        return [
            Generate(
                id=request_id,
                prompt=self.input_prefix + (self.prompt or ""),
                suffix=self.input_suffix,
                max_tokens=limit,
                **self.sampling(),
            )
        ]


class InfillAnswer:
    """The answer to POST /infill: a document, or a stream of events. The last event has `stop: true`."""

    framing = SERVER_SENT

    def __init__(self, head: Head) -> None:
        self._model = head.model
        self._text: list[str] = []
        self._finish = ""

    def opening(self) -> bytes:
        return b""

    def part(self, choice: int, piece: Piece) -> bytes:
        self._finish = piece.finish or self._finish
        return event(self._record(piece.text, stop=False)) if piece.text else b""

    def closing(self, usage: UsageReport) -> bytes:
        return event(self._end("", usage))

    def failure(self, error: AppError) -> bytes:
        return error_event(error)

    def take(self, choice: int, piece: Piece) -> None:
        self._finish = piece.finish or self._finish
        self._text.append(piece.text)

    def document(self, usage: UsageReport) -> bytes:
        return msgspec.json.encode(self._end("".join(self._text), usage))

    def _record(self, text: str, *, stop: bool) -> dict[str, Any]:
        return {"index": 0, "content": text, "stop": stop, "model": self._model}

    def _end(self, text: str, usage: UsageReport) -> dict[str, Any]:
        if not self._finish:
            raise AppError("the engine ended an answer without a finish reason")
        return self._record(text, stop=True) | {
            "stop_type": "limit" if self._finish == "length" else "eos",
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens_details.cached_tokens,
            "truncated": False,
        }


def _ask(body: InfillBody) -> Asked:
    def answer(head: Head, stream: Stream) -> Answer:
        return InfillAnswer(head)

    identifier = f"infill-{uuid.uuid4().hex}"
    return Asked(identifier, body, body.frames(identifier), bool(body.stream), answer)


INFILL = Protocol(InfillBody, _ask)


class TemplateBody(WireBody):
    """POST /apply-template."""

    messages: Messages
    model: Name | None = None
    tools: Annotated[list[Tool], Meta(max_length=0)] | None = None


class LlamaServer:
    """The handlers of the routes with one document."""

    def __init__(self, models: Models, limit: int) -> None:
        """`limit`: maximum size of a request body in bytes."""
        self.models = models
        self.limit = limit

    async def props(self, request: Request) -> Response:
        """GET /props: facts about a loaded model; `?model=` selects one of several."""
        model = await self._loaded(request)
        settings = self.models.settings
        return _json(
            {
                "default_generation_settings": {"n_ctx": model.context, "params": model.sampling},
                "total_slots": min(settings.max_rows, MAX_SLOTS),
                "model_alias": model.id,
                "model_path": model.id,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"localllm-{VERSION}",
            }
        )

    async def slots(self, request: Request) -> Response:
        """GET /slots: the places of a step of a loaded model; `?model=` selects one of several."""
        model = await self._loaded(request)
        count = min(self.models.settings.max_rows, MAX_SLOTS)
        return _json(
            [{"id": index, "n_ctx": model.context, "is_processing": index < model.requests} for index in range(count)]
        )

    async def apply_template(self, request: Request) -> Response:
        """POST /apply-template: the prompt of a conversation."""
        body = await read_json(request.scope, request.receive, TemplateBody, self.limit)
        identifier = uuid.uuid4().hex
        tokenize = Tokenize(id=identifier, messages=plain_messages(body.messages))
        tokens, model = await self._ask(body.model, tokenize, is_local(request.scope))
        assert isinstance(tokens, Tokens)
        text, _ = await self._ask(model, Detokenize(id=identifier, tokens=tokens.tokens), is_local(request.scope))
        assert isinstance(text, Text)
        return _json({"prompt": text.text})

    async def _ask(self, model: str | None, frame: Tokenize | Detokenize, local: bool) -> tuple[object, str]:
        async with await self.models.open(model, [frame], weight=0, local=local) as stream:
            replies: Sequence[object] = await stream.take()
        return replies[0], stream.info.model

    async def _loaded(self, request: Request) -> LoadedModel:
        """The loaded model that a request selects. Raises ModelNotFound."""
        name = request.query_params.get("model")
        ready = [model for model in await self.models.loaded() if model.state == "ready" and name in (None, model.id)]
        if len(ready) != 1:
            names = ", ".join(model.id for model in ready) or "none"
            raise ModelNotFound("select one of the loaded models with ?model=", hint=f"loaded: {names}", param="model")
        return ready[0]


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
