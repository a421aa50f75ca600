"""POST /v1/embeddings over scripted models: which requests they get, and the groups of inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.app.api import embeddings
from localllm.app.api.embeddings import EmbeddingBody, Embeddings, group_inputs
from localllm.app.api.metrics import Metrics
from localllm.app.api.stream import Stream
from localllm.app.config import Settings
from localllm.app.errors import AppError, Forbidden, Overloaded
from localllm.app.frames import Embed, Embedded, Finished, Started

from ..samples import model_info


@dataclass
class ScriptedModels:
    """Answers every input with four bytes. `fail`: number of the group that gets an error."""

    settings: Settings = field(default_factory=Settings)
    calls: list[dict[str, Any]] = field(default_factory=list)
    fail: int = -1

    async def open(self, name: str | None, requests: Sequence[Embed], **options: Any) -> Stream:
        if len(self.calls) == self.fail:
            raise Overloaded("full")
        self.calls.append({"name": name, "inputs": [request.input for request in requests]} | options)
        stream = Stream(model_info(), [request.id for request in requests], len(requests), lambda _: None)
        for request in reversed(requests):
            stream.put(Started(id=request.id, prompt_tokens=len(request.input)))
            stream.put(Embedded(id=request.id, vector=bytes([len(request.input), 0, 0, 0])))
            stream.put(Finished(id=request.id, prompt_tokens=len(request.input)))
        return stream

    def find(self, name: str) -> object:
        return SimpleNamespace(model=name)


def route(models: ScriptedModels) -> Embeddings:
    def check_admin(_: object) -> None:
        raise Forbidden("no")

    return Embeddings(models, Metrics(), check_admin)  # type: ignore[arg-type]


async def compute(models: ScriptedModels, **body: Any) -> Any:
    decoded = EmbeddingBody(**body)
    return json.loads(await route(models)._compute(decoded, decoded.frames("id"), local=True))


async def test_groups_go_to_one_model_in_order() -> None:
    """Without a name, the first group selects the only loaded model. Another one may be loaded meanwhile."""
    models = ScriptedModels()
    reply = await compute(models, input=["a" * (1 + index % 5) for index in range(130)], encoding_format="base64")
    assert [call["name"] for call in models.calls] == [None, "m", "m"]
    assert [len(call["inputs"]) for call in models.calls] == [64, 64, 2]
    assert all(call["weight"] == len(call["inputs"]) and call["local"] for call in models.calls)
    assert [entry["index"] for entry in reply["data"]] == list(range(130))
    first = ["AQAAAA==", "AgAAAA==", "AwAAAA==", "BAAAAA==", "BQAAAA=="]
    assert [entry["embedding"] for entry in reply["data"]] == first * 26
    assert reply["usage"]["prompt_tokens"] == 26 * 15


async def test_name_of_the_client_selects_the_model_of_every_group() -> None:
    models = ScriptedModels()
    await compute(models, input=["a"] * 65, model="m:adapter")
    assert [call["name"] for call in models.calls] == ["m:adapter"] * 2


async def test_error_of_a_later_group_ends_the_request() -> None:
    models = ScriptedModels(fail=1)
    with pytest.raises(Overloaded):
        await compute(models, input=["a"] * 200, model="m")
    assert len(models.calls) == 1


async def test_stream_without_a_vector_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    put: Callable[[Stream, Any], None] = Stream.put
    monkeypatch.setattr(Stream, "put", lambda self, frame: isinstance(frame, Embedded) or put(self, frame))
    with pytest.raises(AppError, match="without a vector"):
        await compute(ScriptedModels(), input="a")


def test_groups_have_limited_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "GROUP_LENGTH", 10)
    inputs: list[str | list[int]] = ["a" * 4, "b" * 6, "c", "d" * 30, [1] * 10, [2], [3], [4]]
    requests = [Embed(id=str(index), input=text) for index, text in enumerate(inputs)]
    groups = [[request.id for request in group] for group in group_inputs(requests, 2)]
    assert groups == [["0", "1"], ["2"], ["3"], ["4"], ["5", "6"], ["7"]]
    assert group_inputs(requests[:1], 2) == [requests[:1]]
