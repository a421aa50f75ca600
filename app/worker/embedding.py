"""Prepares an Embed frame for the engine, and converts the hidden state of its last token to a vector."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.files.pooling import Pooling
from ...engine.request import Delta, Request
from ..chat.prompt import Prompt, too_long
from ..chat.sampling import check_token_ids
from ..chat.tokenizer.base import Tokenizer
from ..chat.tokenizer.doubled import added_around
from ..errors import AppError, EmbeddingsUnsupported, InvalidRequest, UnsupportedParameter
from ..frames import Embed, Embedded, Finished, Piece
from .faults import check_finish
from .opening import OpenModel


@dataclass(slots=True)
class Embedding:
    """A prepared request for one vector. It has the interface of Generation."""

    frame: Embed
    requests: list[Request]  # one
    pooling: Pooling
    warnings: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    has_ended: bool = False
    cached: int = 0  # prompt tokens from the prefix cache

    @property
    def prompt_tokens(self) -> int:
        return len(self.requests[0].prompt)

    def is_done(self, request_id: str) -> bool:
        return self.has_ended

    def opening(self, tokenizer: Tokenizer) -> list[Piece]:
        return []

    def take(self, delta: Delta) -> Embedded | None:
        """The vector; None if the engine cancelled the request. Raises the errors of check_finish, and AppError for a
        hidden state that is no vector."""
        check_finish(delta)
        self.has_ended = True
        self.cached = delta.cached
        if delta.hidden is None:
            return None
        vector = _vector(delta.hidden, self.pooling, self.frame.dimensions or self.pooling.size)
        return Embedded(id=self.frame.id, vector=vector.astype("<f4").tobytes())

    def finished(self, *, cancelled: bool = False) -> Finished:
        """The last frame."""
        return Finished(
            id=self.frame.id, prompt_tokens=self.prompt_tokens, cached_tokens=self.cached, cancelled=cancelled
        )


def prepare_embedding(frame: Embed, model: OpenModel) -> Embedding:
    """Prepare a request for the engine: tokenize and check. Blocks; raises AppError."""
    pooling = _pooling(model)
    if frame.dimensions is not None and not pooling.allows(frame.dimensions):
        raise UnsupportedParameter(
            f"dimensions: the vectors of this model have {pooling.sizes_title} numbers, not {frame.dimensions}",
            param="dimensions",
        )
    prompt = _prompt(frame.input, pooling, model)
    ids = prompt.ids
    limit = min(model.runner.spec.max_context, pooling.max_tokens or model.runner.spec.max_context)
    if len(ids) > limit:
        if not frame.truncate:
            raise too_long(limit, len(ids), "input")
        end = added_around(model.tokenizer)[1]
        ids = (*ids[: limit - len(end)], *end)
    return Embedding(frame, [Request(f"{frame.id}/0", ids, 0, wants_hidden=True)], pooling, prompt.warnings)


def _pooling(model: OpenModel) -> Pooling:
    """The pooling of the model. Raises EmbeddingsUnsupported."""
    name = model.info.model
    pooling = model.pooling
    if pooling is None:
        raise EmbeddingsUnsupported.without_pooling(name)
    if pooling.problem:
        raise EmbeddingsUnsupported(f"{name}: no embeddings: {pooling.problem}", param="model")
    if not model.info.embedding_size:
        reason = f"the backend {model.info.backend} returns no hidden states of this architecture"
        raise EmbeddingsUnsupported(f"{name}: no embeddings: {reason}", hint="choose another backend", param="model")
    return pooling


def _prompt(text: str | list[int], pooling: Pooling, model: OpenModel) -> Prompt:
    """The prompt of an input. Raises InvalidRequest."""
    if isinstance(text, str):
        context = model.runner.spec.max_context
        prompt = model.prompts.from_text(pooling.prompt + text, context=context, where="input")
        if not prompt.ids:
            raise InvalidRequest("input: a text must have at least one token", param="input")
        # files may name special tokens that the model has no embedding for
        check_token_ids("input", prompt.ids, model.runner.spec.vocab_size)
        return prompt
    if pooling.prompt:
        raise InvalidRequest(
            "input: token ids are not supported for this model: its files put a text before every input, "
            f"{pooling.prompt[:100]!r}",
            hint="send the text of the input",
            param="input",
        )
    check_token_ids("input", text, model.runner.spec.vocab_size)
    _check_origin(text, model.tokenizer)
    return Prompt(tuple(text))


def _check_origin(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raises InvalidRequest if nothing shows that the tokenizer of this model made the ids. Some clients send the ids
    of OpenAI's tokenizers to every server; their vectors would be wrong."""
    before, after = added_around(tokenizer)
    hint = "send the text; to send token ids, use those of POST /v1/tokenize"
    if not before and not after:
        raise InvalidRequest(
            "input: token ids are not supported for this model: its tokenizer adds no special tokens, so ids of "
            "another tokenizer would not be noticed",
            hint="send the text",
            param="input",
        )
    if list(ids[: len(before)]) != before or list(ids[len(ids) - len(after) :]) != after:
        begin = f"begin with {before}" if before else ""
        end = f"end with {after}" if after else ""
        expected = " and ".join(filter(None, [begin, end]))
        raise InvalidRequest(
            f"input: the token ids are not those of this model's tokenizer, which {expected}", hint=hint, param="input"
        )


def _vector(hidden: NDArray[np.float32], pooling: Pooling, size: int) -> NDArray[np.float64]:
    """The vector [size] of a hidden state. Raises AppError if the hidden state has another size or no finite length."""
    vector = hidden[:size].astype(np.float64)
    length = float(np.linalg.norm(vector))
    if len(hidden) != pooling.size or not 0.0 < length < np.inf:
        raise AppError("the model computed a hidden state that is no vector", hint="verify its files: localllm verify")
    return vector / length if pooling.normalised else vector
