"""The routes with fake models."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec import structs
from starlette.requests import Request
from starlette.types import Message, Receive

from localllm.app import frames, paths
from localllm.app.api import openapi, routes
from localllm.app.api.admin import AdapterEntry, LoadedModel, LoadFlags
from localllm.app.api.routes import Address
from localllm.app.api.stream import Stream
from localllm.app.config import Settings, loading
from localllm.app.daemon.server import build
from localllm.app.developer import Developer
from localllm.app.errors import ModelNotFound
from localllm.app.store.local.refs import ModelRef
from localllm.app.store.records import ListedModel
from localllm.app.version import VERSION

from ..embedder import write_embedder
from ..samples import model_info

INFO = model_info(model="here", context=32, vocab=10)
READY = SimpleNamespace(model="here", info=INFO)
LOADING_WORKER = SimpleNamespace(model="coming", info=None)


class FakeModels:
    """Has the loaded model `here` and the loading model `coming`; `asked` collects all calls."""

    def __init__(self) -> None:
        self.settings = Settings(developer=Developer(max_body_mib=1), quant="int8")
        self.stopping = False
        self.deaths = {"here": 2}
        self.calls: list[Any] = []
        self.reply: Any = None
        self.goes_on = asyncio.Event()

    def find(self, name: str) -> Any:
        return {"here": READY, "coming": LOADING_WORKER}.get(name)

    async def load(self, name: str, **how: Any) -> LoadedModel:
        how.pop("progress")("reading", 0.5)
        self.calls.append((name, how))
        await self.goes_on.wait()
        if name != "here":
            raise ModelNotFound("no such model")
        return LoadedModel(id=name, state="ready", pid=7)

    async def open(self, name: str | None, requests: list[Any], *, local: bool) -> Stream:
        self.calls += [(name, local), *requests]
        stream = Stream(INFO, [request.id for request in requests], 1, lambda _: None)
        stream.put(structs.replace(self.reply, id=requests[0].id))
        return stream

    async def stats(self) -> list[Any]:
        known = frames.Stats(id="s", running=5, waiting=0, cache_tokens=0, cache_used=0)
        return [(READY, known), (LOADING_WORKER, None)]

    async def loaded(self) -> list[LoadedModel]:
        return [LoadedModel(id=name, state="ready", pid=7) for name in ("other", "here")]

    def adapters(self) -> list[AdapterEntry]:
        return []

    async def unload(self, name: str) -> None:
        self.calls.append(("unload", name))


@pytest.fixture
def models() -> FakeModels:
    return FakeModels()


@pytest.fixture
def stops() -> list[bool]:
    return []


def list_models(monkeypatch: pytest.MonkeyPatch, known: list[ModelRef], problem: str | None = None) -> None:
    """Let the list of models have these entries."""
    entries = [
        ListedModel(
            id=ref.id,
            path=str(ref.path),
            bundled=ref.bundled,
            size=ref.size,
            context=ref.context,
            description=ref.description,
            problem=problem,
        )
        for ref in known
    ]
    monkeypatch.setattr(routes.listing, "listed", lambda: entries)
    monkeypatch.setattr(routes.listing, "examined", lambda: list(zip(known, entries, strict=True)))
    monkeypatch.setattr(routes.listing, "entry_of", lambda ref: entries[known.index(ref) if ref in known else 0])


@pytest.fixture
async def client(models: FakeModels, stops: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A client on the unix socket."""
    config = tmp_path / "config.json"
    config.write_text("{}")
    os.utime(config, (1000.5, 1000.5))
    known = [
        ModelRef(id=name, path=tmp_path, context=context, size=9, description="d", bundled=name == "here")
        for name, context in (("here", 64), ("coming", 64), ("org/cold", 0))
    ]
    list_models(monkeypatch, known)
    monkeypatch.setattr(routes.resolved, "model", lambda name: next(model for model in known if model.id == name))
    app = build(models, Address(url="http://u", stop=lambda: stops.append(True)))  # type: ignore[arg-type]

    async def on_socket(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {"server": ("/socket", None)}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(on_socket), base_url="http://localhost") as made:
        yield made


async def test_models_route(client: httpx.AsyncClient) -> None:
    cards = {card["id"]: card for card in (await client.get("/v1/models")).json()["data"]}
    same = {"object": "model", "created": 1000, "owned_by": "localllm", "embeddings": False}
    assert cards["here"] == same | {"id": "here", "loaded": True, "max_model_len": 32}
    assert cards["coming"] == same | {"id": "coming", "loaded": True, "max_model_len": 64}
    assert cards["org/cold"] == same | {"id": "org/cold", "loaded": False, "max_model_len": None}
    assert (await client.get("/models/org/cold")).json() == cards["org/cold"]
    assert (await client.get("/v1/models/~/x")).json()["error"]["code"] == "model_not_found"


async def test_models_route_says_which_models_embed(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    embedder = write_embedder(tmp_path / "embedder")
    other = write_embedder(tmp_path / "other")
    (other / "modules.json").write_text("[]")
    damaged = write_embedder(tmp_path / "damaged")
    (damaged / "config.json").write_text("[]")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"")
    listed = [ModelRef(id=path.name, path=path) for path in (embedder, other, damaged, gguf)]
    list_models(monkeypatch, listed)
    cards = (await client.get("/v1/models")).json()["data"]
    assert [card["embeddings"] for card in cards] == [True, False, False, None]
    loaded = SimpleNamespace(model="m", info=INFO)
    monkeypatch.setattr(FakeModels, "find", lambda self, name: loaded)
    assert not (await client.get("/v1/models")).json()["data"][0]["embeddings"]
    loaded.info = structs.replace(INFO, embedding_size=32)
    assert (await client.get("/v1/models")).json()["data"][3]["embeddings"]


async def test_models_with_a_problem_are_marked(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ModelRef(id="broken", path=paths.guide_dir())
    problem = "model.safetensors is truncated"
    list_models(monkeypatch, [broken], problem)
    monkeypatch.setattr(routes.resolved, "model", lambda name: broken)
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["problem"] == problem
    assert (await client.get("/v1/models/here")).json() == card
    (entry,) = (await client.get("/admin/models")).json()
    assert entry["problem"] == problem


async def test_admin_models_route(client: httpx.AsyncClient, models: FakeModels, tmp_path: Path) -> None:
    entries = (await client.get("/admin/models")).json()
    assert entries[0] == {
        "id": "here", "path": str(tmp_path), "bundled": True, "loaded": True, "revision": "", "size": 9,
        "unfinished": 0, "packed": 0, "context": 64, "description": "d", "problem": None, "install": "",
        "purpose": "chat", "gguf": False,
    }  # fmt: skip
    assert [entry["loaded"] for entry in entries] == [True, True, False]
    assert [model["id"] for model in (await client.get("/admin/loaded")).json()] == ["other", "here"]
    assert (await client.post("/admin/unload", json={"model": "here"})).json() == {}
    assert models.calls == [("unload", "here")]


async def test_status_health_and_metrics(client: httpx.AsyncClient, models: FakeModels, stops: list[bool]) -> None:
    status = (await client.get("/admin/status")).json()
    assert (status["version"], status["pid"], status["url"], status["stopping"]) == (
        VERSION,
        os.getpid(),
        "http://u",
        False,
    )
    assert set(status["settings"]) == set(loading(Settings()))
    assert status["settings"]["quant"] == "int8"
    assert (await client.get("/health")).json() == {"status": "ok", "version": VERSION}
    models.stopping = True
    assert (await client.get("/health")).json()["status"] == "stopping"
    assert (await client.get("/admin/status")).json()["stopping"]
    page = (await client.get("/metrics")).text
    assert 'localllm_running{model="here"} 5.0' in page
    assert 'localllm_running{model="coming"}' not in page
    assert 'localllm_worker_restarts_total{model="here"} 2.0' in page
    assert stops == []
    assert (await client.post("/admin/shutdown", json={})).status_code == 202
    assert stops == [True]


@pytest.mark.parametrize(("flag", "sent"), [(None, True), (True, True), (False, False)])
async def test_tokenize_route(client: httpx.AsyncClient, models: FakeModels, flag: bool | None, sent: bool) -> None:
    models.reply = frames.Tokens(id="t", tokens=[1, 2], pieces=["a", "b"])
    reply_body = (await client.post("/tokenize", json={"prompt": "x", "add_special_tokens": flag})).json()
    assert reply_body == {"count": 2, "max_model_len": 32, "tokens": [1, 2], "token_strs": ["a", "b"]}
    (name, local), frame = models.calls
    assert (name, local) == (None, True)
    assert (frame.prompt, frame.messages, frame.add_special_tokens) == ("x", None, sent)
    await client.post("/tokenize", json={"model": "here", "messages": [{"role": "user", "content": "x"}]})
    assert models.calls[-1].messages == [{"role": "user", "content": "x"}]


async def test_detokenize_route(client: httpx.AsyncClient, models: FakeModels) -> None:
    models.reply = frames.Text(id="t", text="ab")
    for tokens in ([], [0, 9]):
        assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "ab"}
        assert models.calls[-1].tokens == tokens
    models.reply = frames.Failed(id="t", fault=frames.Fault(code="invalid_request", message="x", param="tokens"))
    refused = await client.post("/detokenize", json={"tokens": [10, 0]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


async def test_load_route_sends_events(client: httpx.AsyncClient, models: FakeModels) -> None:
    models.goes_on.set()
    loading = await client.post("/admin/load", json={"model": "here", "backend": "cpu", "quant": "int4"})
    flags = LoadFlags(backend="cpu", quant="int4")
    assert models.calls == [("here", {"local": True, "flags": flags, "exact": False, "for_chat": False})]
    body = {"model": "here", "context": 64, "exact": True, "for_chat": True}
    await client.post("/admin/load", json=body)
    flags = LoadFlags(context=64)
    assert models.calls[-1] == ("here", {"local": True, "flags": flags, "exact": True, "for_chat": True})
    assert (await client.post("/admin/load", json={"model": "here", "context": -1})).status_code == 400
    progress, model = [json.loads(line[6:]) for line in loading.text.splitlines() if line]
    assert progress == {"stage": "reading", "done": 0.5}
    assert (model["id"], model["pid"]) == ("here", 7)
    failing = await client.post("/admin/load", json={"model": "nowhere"})
    assert json.loads(failing.text.splitlines()[-2][6:])["error"]["code"] == "model_not_found"
    large = await client.post("/admin/load", json={"model": "x" * 2**20})
    assert large.status_code == 413


SCOPE = {
    "type": "http",
    "method": "POST",
    "server": ("/socket", None),
    "headers": [(b"content-type", b"application/json")],
}


def body_of(value: object) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": json.dumps(value).encode(), "more_body": False}

    return receive


async def test_disconnect_ends_the_events_of_a_load(models: FakeModels) -> None:
    """The tasks of the request end; the load itself continues."""
    load = routes.routes(models, Address())  # type: ignore[arg-type]
    [endpoint] = [route.endpoint for route in load if route.path == "/admin/load"]
    response = await endpoint(Request(SCOPE, body_of({"model": "here"})))
    events = response.events()
    assert b"reading" in await anext(events)
    await events.aclose()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


def test_every_route_is_in_the_openapi_document(models: FakeModels) -> None:
    """Except those of the commands, and other names of a route."""
    paths = openapi.describe("1")["paths"]
    known = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    known |= {(method, path.removeprefix("/v1")) for method, path in known}
    made = routes.routes(models, Address())  # type: ignore[arg-type]
    served = {
        (method, route.path.replace("{id:path}", "{id}")) for route in made for method in route.methods - {"HEAD"}
    }
    assert {(method, path) for method, path in served if not path.startswith("/admin/")} == known


async def test_unknown_route_error_names_the_route(client: httpx.AsyncClient) -> None:
    unknown = (await client.get("/nowhere/" + "x" * 300)).json()["error"]
    assert unknown["code"] == "route_not_found"
    assert len(unknown["message"]) < 250
    wrong = await client.get("/tokenize")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/v1/models/org/cold", "GET, HEAD"),
        ("/health", "GET, HEAD"),
        ("/admin/downloads", "GET, HEAD, POST"),
        ("/lora-adapters", "GET, HEAD, POST"),
    ],
)
async def test_refused_method_gets_all_methods_of_the_path(client: httpx.AsyncClient, path: str, methods: str) -> None:
    for method in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"} - set(methods.split(", ")):
        response = await client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, methods), method


async def test_head_has_the_headers_of_get(client: httpx.AsyncClient, models: FakeModels) -> None:
    got = await client.get("/v1/models")
    head = await client.head("/v1/models")
    assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"])
    assert (await client.head("/nowhere")).status_code == 404


async def test_head_of_an_event_stream_ends_at_once(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.app.store.pull.jobs.Jobs.list", lambda self: [SimpleNamespace(state="running")])
    async with asyncio.timeout(100):
        head = await client.head("/admin/downloads/events")
    assert (head.status_code, head.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
