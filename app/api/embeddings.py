"""POST /v1/embeddings: the vectors of texts."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import AppError, Stopping
from ..frames import Embed, Embedded, Finished
from .body import is_local, read_converted
from .exchange import open_stream, unless_gone
from .ignored import Policy, ignored_in
from .inputs import TargetBody, Texts, texts_of
from .metrics import Metrics
from .models import Models
from .replies import EmbeddingEntry, EmbeddingList, EmbeddingUsage
from .stream import Stream

MAX_INPUTS = 2048  # OpenAI's limit
# Limits of the inputs that a request computes at a time. The answers of other clients begin between two groups.
GROUP_INPUTS = 64
GROUP_LENGTH = 2**16  # characters and token ids of all inputs; one input may have more


class VectorBody(TargetBody, kw_only=True):
    """The fields of all protocols for vectors."""

    def frames(self, request_id: str) -> list[Embed]:
        """The request as one frame per input for a worker. Raises InvalidRequest."""
        raise NotImplementedError

    def document(self, computed: Computed) -> bytes:
        """The reply as JSON. May take long."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Computed:
    """The vectors [size] of the inputs as float32 bytes, little endian, and the facts of the reply."""

    model: str
    vectors: Sequence[bytes]
    tokens: int
    warnings: Sequence[str]
    seconds: float


class EmbeddingBody(VectorBody, kw_only=True):
    """POST /v1/embeddings."""

    REFUSED: ClassVar[dict[str, str]] = {"encoding_format": "supported: float and base64"}

    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    def frames(self, request_id: str) -> list[Embed]:
        """The request as one frame per input for a worker. Raises InvalidRequest."""
        self.check_lora()
        return [
            Embed(id=f"{request_id}-{index}", input=text, dimensions=self.dimensions, **self.adapter_arguments())
            for index, text in enumerate(texts_of(self.input, "input", MAX_INPUTS))
        ]

    def entry(self, index: int, vector: bytes) -> EmbeddingEntry:
        """The entry of a vector [size] of float32 bytes, little endian, in the encoding that the client requests."""
        if self.encoding_format == "base64":
            return EmbeddingEntry(index=index, embedding=base64.b64encode(vector).decode())
        return EmbeddingEntry(index=index, embedding=list(struct.unpack(f"<{len(vector) // 4}f", vector)))

    def document(self, computed: Computed) -> bytes:
        usage = EmbeddingUsage(prompt_tokens=computed.tokens, total_tokens=computed.tokens)
        reply = EmbeddingList(data=[], model=computed.model, usage=usage)
        if computed.warnings:
            reply.warnings = list(computed.warnings)
        # Each entry is encoded alone: the encoder holds the interpreter lock.
        entries = [msgspec.json.encode(self.entry(index, vector)) for index, vector in enumerate(computed.vectors)]
        return msgspec.json.encode(reply).replace(b'"data":[]', b'"data":[%s]' % b",".join(entries), 1)


class Embeddings:
    """The ASGI app of a route with bodies of type `kind`. `check_admin`: as in Exchange."""

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        check_admin: Callable[[Scope], None],
        kind: type[VectorBody] = EmbeddingBody,
    ) -> None:
        self.kind = kind
        self.models = models
        self.metrics = metrics
        self.check_admin = check_admin
        self.limit = models.settings.developer.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"embd-{uuid.uuid4().hex}"
        body, requests = await read_converted(
            scope, receive, self.kind, self.limit, lambda body: body.frames(request_id)
        )
        policy = Policy(self.models.settings.strict_fields)
        policy.add(ignored_in(body))
        if body.load is not None:
            self.check_admin(scope)
        document = await unless_gone(receive, self._compute(body, requests, is_local(scope)))
        await Response(document, headers=policy.headers, media_type="application/json")(scope, receive, send)

    async def _compute(self, body: VectorBody, requests: Sequence[Embed], local: bool) -> bytes:
        """The reply as JSON."""
        started = time.perf_counter()
        vectors: dict[str, bytes] = {}
        tokens = 0
        name = body.model or ""
        warnings: list[str] = []
        groups = group_inputs(requests, min(GROUP_INPUTS, self.models.settings.max_queue))
        for number, group in enumerate(groups, 1):
            stream = await open_stream(self.models, self.metrics, body, group, weight=len(group), local=local)
            if body.model is None:  # the later groups must use the model of the first one
                body = msgspec.structs.replace(body, model=stream.info.model)
            name = f"{stream.info.model}:{stream.adapter}" if stream.adapter else stream.info.model
            tokens += await self._collect(stream, vectors, is_last=number == len(groups))
            warnings += [warning for warning in stream.warnings if warning not in warnings]
        ordered = [vectors[request.id] for request in requests]
        seconds = time.perf_counter() - started
        return await asyncio.to_thread(body.document, Computed(name, ordered, tokens, warnings, seconds))

    async def _collect(self, stream: Stream, vectors: dict[str, bytes], *, is_last: bool) -> int:
        """Add the vectors of a group, by frame id, to `vectors`. Returns the number of tokens of the group.

        The metrics count the HTTP request once: when its last group ends, or another group fails.
        """
        watch = self.metrics.watch(stream.info.model)
        tokens = 0
        outcome = "cancelled"
        try:
            async with stream:
                while replies := await stream.take():
                    vectors |= {reply.id: reply.vector for reply in replies if isinstance(reply, Embedded)}
                    for reply in replies:
                        tokens += _tokens(reply)
            _check_complete(stream, vectors)
            outcome = "ok"
        except AppError as error:
            outcome = error.code
            raise
        finally:
            watch.tokens(tokens, 0)
            if is_last or outcome != "ok":
                self.metrics.requests.labels(stream.info.model, outcome).inc()
        return tokens


def group_inputs(requests: Sequence[Embed], max_inputs: int) -> list[list[Embed]]:
    """The requests in groups of at most `max_inputs` and, for more than one input, GROUP_LENGTH."""
    groups: list[list[Embed]] = []
    length = 0
    for request in requests:
        length += len(request.input)
        if not groups or len(groups[-1]) == max_inputs or length > GROUP_LENGTH:
            groups.append([])
            length = len(request.input)
        groups[-1].append(request)
    return groups


def _tokens(reply: object) -> int:
    """The number of tokens of the input that ends with this reply; 0 for other replies. Raises Stopping if the engine
    cancelled the input."""
    if not isinstance(reply, Finished):
        return 0
    if reply.cancelled:
        raise Stopping("the engine cancelled the request")
    return reply.prompt_tokens


def _check_complete(stream: Stream, vectors: dict[str, bytes]) -> None:
    """Raises AppError if an input has no vector, which a worker must always send."""
    if not vectors.keys() >= set(stream.ids):
        raise AppError("the engine ended a request without a vector")
