"""The request bodies of Ollama's embeddings, and their replies."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...errors import InvalidRequest
from ...frames import Embed
from ..embeddings import MAX_INPUTS, Computed, VectorBody
from ..inputs import texts_of
from .bodies import Options, plain_name


class _OllamaVectors(VectorBody, kw_only=True):
    options: Options | None = None
    truncate: bool | None = None  # false: a longer text is refused; true: it is cut

    def __post_init__(self) -> None:
        if self.model:
            msgspec.structs.force_setattr(self, "model", plain_name(self.model))


class EmbedBody(_OllamaVectors, kw_only=True):
    """POST /api/embed."""

    input: str | list[str]
    dimensions: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    def frames(self, request_id: str) -> list[Embed]:
        self.check_lora()
        if not self.input:
            return []
        return [
            Embed(
                id=f"{request_id}-{index}",
                input=text,
                dimensions=self.dimensions,
                truncate=bool(self.truncate),
                **self.adapter_arguments(),
            )
            for index, text in enumerate(
                texts_of(list(self.input) if isinstance(self.input, list) else self.input, "input", MAX_INPUTS)
            )
        ]

    def document(self, computed: Computed) -> bytes:
        numbers = [msgspec.json.encode(_numbers(vector)) for vector in computed.vectors]
        return _encode(computed, {"embeddings": []}).replace(
            b'"embeddings":[]', b'"embeddings":[%s]' % b",".join(numbers), 1
        )


class EmbeddingsBody(_OllamaVectors, kw_only=True):
    """POST /api/embeddings: the vector of one text. The older route."""

    prompt: str

    def frames(self, request_id: str) -> list[Embed]:
        if not self.prompt:
            raise InvalidRequest("prompt: a text must have at least one token", param="prompt")
        return [Embed(id=request_id, input=self.prompt, truncate=bool(self.truncate))]

    def document(self, computed: Computed) -> bytes:
        return msgspec.json.encode({"embedding": _numbers(computed.vectors[0])})


def _encode(computed: Computed, fields: dict[str, Any]) -> bytes:
    nanoseconds = round(computed.seconds * 1e9)
    head = {"model": computed.model, **fields, "total_duration": nanoseconds, "load_duration": 0}
    return msgspec.json.encode(head | {"prompt_eval_count": computed.tokens})


def _numbers(vector: bytes) -> Sequence[float]:
    return struct.unpack(f"<{len(vector) // 4}f", vector)
