"""Reranking by the probability of one word, with models that a test scripts."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from localllm.app.api import rerank
from localllm.app.api.metrics import Metrics
from localllm.app.api.rerank import RerankBody, Reranking, ScoreBody, check_reranker, probability
from localllm.app.api.stream import Stream
from localllm.app.config import Settings
from localllm.app.errors import AppError, UnsupportedParameter
from localllm.app.frames import Finished, Generate, Piece, PieceLogprob, Started

from ..samples import model_info

MODEL = "Qwen/Qwen3-Reranker-0.6B"
YES = {"the answer": -0.1, "half": -0.7, "nonsense": -9.0}  # document -> log-probability of yes
NO = {"the answer": -3.0, "half": -0.7, "nonsense": -0.1}
FAR = {"the answer"}  # documents for which the other word is not among the likeliest tokens


def entry(word: str, logprob: float, top: Sequence[PieceLogprob] = ()) -> PieceLogprob:
    return PieceLogprob(token=word, id=len(word), bytes=list(word.encode()), logprob=logprob, top=list(top))


class FakeModels:
    """A reranker that answers with the word to which it is held."""

    def __init__(self, model: str = MODEL, max_queue: int = 256) -> None:
        self.settings = Settings(max_queue=max_queue)
        self.model = model
        self.groups: list[list[Generate]] = []
        self.closed: list[Stream] = []

    def find(self, name: str) -> Any:
        return None

    async def open(self, name: str | None, requests: Sequence[Generate], **options: Any) -> Stream:
        self.groups.append(list(requests))
        assert options["weight"] == len(requests)
        stream = Stream(model_info(model=self.model), [request.id for request in requests], 1, self.closed.append)
        for request in reversed(requests):
            stream.put(Started(id=request.id, prompt_tokens=5))
            stream.put(self._piece(request))
            stream.put(Finished(id=request.id, prompt_tokens=5, completion_tokens=1))
        return stream

    @staticmethod
    def _piece(request: Generate) -> Piece:
        document = request.messages[1]["content"].rpartition("<Document>: ")[2]  # type: ignore[index]
        words = {"yes": YES[document], "no": NO[document]}
        (word,) = request.response_format.choices  # type: ignore[union-attr, misc]
        top = [entry(other, logprob) for other, logprob in words.items() if other == word or document not in FAR]
        return Piece(id=request.id, text=word, logprobs=[entry(word, words[word], top)], finish="stop")


async def asked(
    models: FakeModels, kind: Any, monkeypatch: pytest.MonkeyPatch, **body: Any
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setattr(rerank, "_id_of", lambda name: name)
    sent: list[Any] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "server": ("127.0.0.1", 1)}
    endpoint = Reranking(models, Metrics(), lambda scope: None, kind)  # type: ignore[arg-type]
    await endpoint(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def test_documents_are_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModels()
    documents = ["nonsense", {"text": "the answer"}, "half"]
    status, reply = await asked(models, RerankBody, monkeypatch, model=MODEL, query="q", documents=documents)
    assert status == 200
    assert [result["index"] for result in reply["results"]] == [1, 2, 0]
    scores = [result["relevance_score"] for result in reply["results"]]
    expected = [math.exp(YES[name]) / (math.exp(YES[name]) + math.exp(NO[name])) for name in YES]
    assert scores == pytest.approx(expected)
    assert reply["results"][0]["document"] == {"text": "the answer"}
    assert (reply["usage"]["total_tokens"], reply["model"]) == (15, MODEL)
    first, second = models.groups
    assert [len(first), len(second)] == [3, 1], "the other word needs a request only if it is not listed"
    frame = first[0]
    assert (frame.logprobs, frame.max_tokens, frame.reasoning, frame.temperature) == (20, 1, "none", 0.0)
    assert len(models.closed) == 2


async def test_options_of_a_ranking(monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModels(max_queue=2)
    options = {"top_n": 1, "return_documents": False, "instruction": "Find it"}
    documents = ["nonsense", "half", "half"]
    _, reply = await asked(models, RerankBody, monkeypatch, query="q", documents=documents, **options)
    assert reply["results"] == [{"index": 1, "relevance_score": pytest.approx(0.5)}]
    assert [len(group) for group in models.groups] == [2, 1]
    assert models.groups[0][0].messages[1]["content"].startswith("<Instruct>: Find it\n<Query>: q\n")  # type: ignore[index]


async def test_scores_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reply = await asked(FakeModels(), ScoreBody, monkeypatch, text_1="q", text_2=["half", "nonsense"])
    assert [entry["score"] for entry in reply["data"]] == pytest.approx([0.5, probability(-9.0, -0.1)])
    _, reply = await asked(FakeModels(), ScoreBody, monkeypatch, text_1=["a", "b"], text_2=["half", "half"])
    assert len(reply["data"]) == 2
    with pytest.raises(AppError) as refused:
        await asked(FakeModels(), ScoreBody, monkeypatch, text_1=["a", "b"], text_2=["half"] * 3)
    assert (refused.value.status, refused.value.param) == (400, "text_2")


@pytest.mark.parametrize(
    "name", ["guide", "org/Qwen3-Embedding-0.6B", "Qwen3-Reranker-x/other", "BAAI/bge-reranker-v2-m3"]
)
async def test_other_models_are_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        await asked(FakeModels(name), RerankBody, monkeypatch, query="q", documents=["half"])
    assert refused.value.param == "model"
    assert name in refused.value.message
    with pytest.raises(UnsupportedParameter):
        await asked(FakeModels(name), RerankBody, monkeypatch, model=name, query="q", documents=["half"])


@pytest.mark.parametrize(
    "name", [MODEL, f"{MODEL}@abc", "org/Qwen3-Reranker-4B-GGUF:Q4_K_M", "local/qwen3-reranker-8b"]
)
def test_names_of_rerankers(name: str) -> None:
    check_reranker(name)


def test_probability_of_far_words() -> None:
    assert probability(0.0, -9999.0) == 1.0
    assert 0.0 < probability(-700.0, 0.0) < 1e-300
    assert probability(-9999.0, 0.0) == pytest.approx(0.0)
