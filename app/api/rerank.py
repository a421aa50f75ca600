"""POST /v1/rerank (the forms of Jina and Cohere) and POST /v1/score (the form of vLLM).

The models are chat models that judge a document with one word: Qwen3-Reranker answers yes or no. The score is the
probability of yes among both words. Log-probabilities are those before all constraints, so the answer is held to one
word, and the other word is among the likeliest tokens; if it is not, a second request is held to it.
"""

from __future__ import annotations

import asyncio
import math
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..errors import InvalidRequest, ModelUnusable, Stopping, UnsupportedParameter
from ..frames import Finished, Generate, Piece, PieceLogprob, ResponseFormat
from ..store import resolved
from ..store.names import is_path
from .body import WireBody, is_local, read_converted
from .embeddings import GROUP_INPUTS
from .exchange import open_stream, unless_gone
from .ignored import Policy, ignored_in
from .inputs import TargetBody
from .metrics import Metrics
from .models import Models

MAX_DOCUMENTS = 2048
LISTED = 20  # likeliest tokens in which the other word is looked for
YES, NO = "yes", "no"
RERANKERS = re.compile(r"(^|.*/)[^/]*Qwen3-Reranker-[^/]*", re.IGNORECASE | re.DOTALL)
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"  # that of the model card

Text = Annotated[str, Meta(min_length=1)]
Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_DOCUMENTS)]


class Document(WireBody):
    text: Text


class _Judged(TargetBody, kw_only=True):
    instruction: str | None = None  # what the document must do for the query; None: that of the model card

    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of query and document. Raises InvalidRequest."""
        raise NotImplementedError

    def reply(self, identifier: str, scores: Scores) -> dict[str, Any]:
        raise NotImplementedError


class RerankBody(_Judged, kw_only=True):
    """POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self._texts()]

    def reply(self, identifier: str, scores: Scores) -> dict[str, Any]:
        texts = self._texts()
        ranked = sorted(range(len(texts)), key=lambda index: -scores.values[index])[: self.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores.values[index]} for index in ranked]
        if self.return_documents is not False:
            results = [result | {"document": {"text": texts[result["index"]]}} for result in results]
        usage = {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens}
        meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 0}}
        return {"id": identifier, "model": scores.model, "results": results, "usage": usage, "meta": meta}

    def _texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


class ScoreBody(_Judged, kw_only=True):
    """POST /v1/score: one text and several, or equally many."""

    text_1: Texts
    text_2: Texts

    def pairs(self) -> list[tuple[str, str]]:
        first, second = (text if isinstance(text, list) else [text] for text in (self.text_1, self.text_2))
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts and text_2 has {len(second)}: expected one or equally many",
                param="text_2",
            )
        return list(zip(first, second, strict=True))

    def reply(self, identifier: str, scores: Scores) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores.values)]
        usage = {"prompt_tokens": scores.tokens, "total_tokens": scores.tokens, "completion_tokens": 0}
        return {"id": identifier, "object": "list", "model": scores.model, "data": data, "usage": usage}


@dataclass(frozen=True, slots=True)
class Scores:
    """The probabilities of yes, in the order of the pairs, and the number of tokens of all prompts."""

    model: str
    values: Sequence[float]
    tokens: int


class Reranking:
    """The ASGI app of a route with bodies of type `kind`. `check_admin`: as in Exchange."""

    def __init__(
        self, models: Models, metrics: Metrics, check_admin: Callable[[Scope], None], kind: type[_Judged]
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.check_admin = check_admin
        self.kind = kind
        self.limit = models.settings.developer.max_body_mib * 2**20

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identifier = f"rerank-{uuid.uuid4().hex}"
        body, frames = await read_converted(
            scope, receive, self.kind, self.limit, lambda body: _frames(body, identifier)
        )
        policy = Policy(self.models.settings.strict_fields)
        policy.add(ignored_in(body))
        if body.load is not None:
            self.check_admin(scope)
        scores = await unless_gone(receive, self._scores(body, frames, is_local(scope)))
        document = msgspec.json.encode(body.reply(identifier, scores))
        await Response(document, headers=policy.headers, media_type="application/json")(scope, receive, send)

    async def _scores(self, body: _Judged, frames: Sequence[Generate], local: bool) -> Scores:
        if body.model is not None and not is_path(body.model):
            check_reranker(await asyncio.to_thread(_id_of, body.model))  # before a load
        asking = _Asking(self.models, self.metrics, body, local)
        yes = await asking.judge(frames, YES)
        missing = [frame for frame in frames if NO not in yes[frame.id]]
        no = await asking.judge(missing, NO)
        values = [probability(yes[frame.id][YES], (yes[frame.id] | no.get(frame.id, {}))[NO]) for frame in frames]
        return Scores(asking.name, values, asking.tokens)


class _Asking:
    """Sends the frames of one request in groups, so that the answers of other clients begin between two of them."""

    def __init__(self, models: Models, metrics: Metrics, body: _Judged, local: bool) -> None:
        self._models = models
        self._metrics = metrics
        self._body = body
        self._local = local
        self.name = ""
        self.tokens = 0

    async def judge(self, frames: Sequence[Generate], word: str) -> dict[str, dict[str, float]]:
        """Frame id -> the log-probabilities of the words that the model could answer first."""
        only = ResponseFormat(kind="choice", choices=[word])
        found: dict[str, dict[str, float]] = {}
        size = min(GROUP_INPUTS, self._models.settings.max_queue)
        for start in range(0, len(frames), size):
            group = [msgspec.structs.replace(frame, response_format=only) for frame in frames[start : start + size]]
            stream = await open_stream(
                self._models, self._metrics, self._body, group, weight=len(group), local=self._local
            )
            async with stream:
                check_reranker(stream.info.model)
                if self._body.model is None:  # later groups must use the model of the first one
                    self._body = msgspec.structs.replace(self._body, model=stream.info.model)
                self.name = stream.info.model
                while replies := await stream.take():
                    for reply in replies:
                        if isinstance(reply, Piece) and reply.logprobs:
                            found.setdefault(reply.id, _words(reply.logprobs[0]))
                        elif isinstance(reply, Finished):
                            self._count(reply, word)
            self._metrics.requests.labels(self.name, "ok").inc()
            if any(word not in found.get(frame.id, {}) for frame in group):
                raise ModelUnusable(f"{self.name} has no token {word!r}, with which it would judge a document")
        return found

    def _count(self, end: Finished, word: str) -> None:
        if end.cancelled:
            raise Stopping("the engine cancelled the request")
        self.tokens += end.prompt_tokens if word == YES else 0


def check_reranker(model: str) -> None:
    """Raises UnsupportedParameter for a model without a known prompt to judge documents."""
    if RERANKERS.fullmatch(model) is None:
        raise UnsupportedParameter(
            f"{model} is no reranker that localllm can use: it supports Qwen3-Reranker",
            hint="use a model such as Qwen/Qwen3-Reranker-0.6B",
            param="model",
        )


def _id_of(name: str) -> str:
    """The id of a model. Raises ModelNotFound."""
    return resolved.model(name).id


def probability(yes: float, no: float) -> float:
    """The probability of yes among both words, from their log-probabilities."""
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))


def _words(entry: PieceLogprob) -> dict[str, float]:
    """The log-probabilities of single tokens by their text."""
    return {other.token: other.logprob for other in (*entry.top, entry) if other.token in (YES, NO)}


def _frames(body: _Judged, identifier: str) -> list[Generate]:
    """One frame for each pair, without the word. Raises InvalidRequest."""
    body.check_lora()
    instruction = body.instruction or INSTRUCTION
    return [
        Generate(
            id=f"{identifier}-{index}",
            messages=[
                {"role": "system", "content": SYSTEM},
                {
                    "role": "user",
                    "content": f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
                },
            ],
            reasoning="none",
            max_tokens=1,
            temperature=0.0,
            logprobs=LISTED,
            **body.adapter_arguments(),
        )
        for index, (query, document) in enumerate(body.pairs())
    ]
