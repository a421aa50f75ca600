"""The commands of the store as routes of a real daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from localllm.app.client import Client, FileProgress, ModelFacts, Pruning, SearchResult
from localllm.app.config import Settings
from localllm.app.errors import InvalidRequest, ModelNotFound

from ...waiting import wait_until
from ..hub import Hub, git_oid, model_files, serving
from ..tiny_qwen import write_model
from .conftest import Daemon, events, snapshot


@pytest.fixture(scope="module")
def daemon(short_folder: Callable[[], Path]) -> Iterator[Daemon]:
    with serving(Hub({"org/remote": model_files()})) as hub:
        running = Daemon(short_folder(), env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}, max_body_mib=1)
        assert running.url
        yield running
        assert running.stop() == 0, running.log
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="module")
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    with daemon.local() as client:
        client.timeout = httpx.Timeout(100)
        yield client


@pytest.fixture
async def client(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", daemon.env["LOCALLLM_RUNTIME_DIR"])
    async with await Client.connect(Settings(), start=False) as connected:
        yield connected


@pytest.fixture(scope="module")
def tiny(short_folder: Callable[[], Path]) -> Path:
    """The folder of a small model outside of the store."""
    folder = short_folder() / "tiny"
    write_model(folder)
    return folder


def snapshot_of(folder: Path, repo: str, files: dict[str, bytes]) -> Path:
    """Add a repository to the cache, as a download stores it."""
    root = folder / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "a" * 40
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    for name, data in files.items():
        (root / "blobs" / git_oid(data)).write_bytes(data)
        (snapshot / name).symlink_to(Path("../../blobs") / git_oid(data))
    return snapshot


async def test_client_shows_inspects_and_measures(client: Client) -> None:
    facts = await client.show("guide")
    assert (facts.id, facts.kind, facts.repository) == ("guide", "model", "")
    assert "model.safetensors" in [file.name for file in facts.files]
    inspection = await client.inspect("org/remote")
    assert (inspection.name, inspection.local, inspection.architecture) == ("org/remote", False, "qwen3")
    [fit] = await client.fit("guide", context=4096, parallel=2, quant="int8", backend="cpu")
    assert (fit.backend, fit.fits, fit.context, fit.parallel) == ("cpu", False, 4096, 2)
    with pytest.raises(ModelNotFound, match="nonsense"):
        await client.show("nonsense")


def test_show_has_the_fields_of_the_command(daemon: Daemon, http: httpx.Client) -> None:
    command = [sys.executable, "-m", "localllm.app.cli", "show", "guide", "--json"]
    printed = json.loads(subprocess.run(command, env=daemon.env, capture_output=True, check=True).stdout)
    assert http.post("/admin/show", json={"model": "guide"}).json() == printed
    assert msgspec.to_builtins(msgspec.convert(printed, ModelFacts)) == printed


def test_replies_have_no_fields_that_clients_do_not_know(http: httpx.Client) -> None:
    for route, body, kind in (
        ("search", {"query": "qwen3", "offline": True}, SearchResult),
        ("prune", {"everything": True}, Pruning),
        ("show", {"model": "pirate"}, ModelFacts),
    ):
        reply = http.post(f"/admin/{route}", json=body).json()
        assert json.loads(msgspec.json.encode(msgspec.convert(reply, kind))) == reply


async def test_search_of_the_catalog(client: Client) -> None:
    result = await client.search("qwen3 0.6b", offline=True)
    assert "qwen3:0.6b" in [match.name for match in result.catalog]
    assert result.hub == []
    assert (await client.search("--help", offline=True)).catalog == []


async def test_verify_reports_progress_and_problems(client: Client, daemon: Daemon) -> None:
    snapshot = snapshot_of(daemon.folder, "org/local", model_files(3 * 2**20))
    progress: list[FileProgress] = []
    result = await client.verify("org/local", on_progress=progress.append)
    assert (result.id, result.ok, result.problems) == ("org/local", True, [])
    size = sum(file.stat().st_size for file in snapshot.iterdir())
    assert progress
    assert {event.total for event in progress} == {size}
    with (snapshot / "model.safetensors").open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff\xfe")
    (snapshot / "tokenizer.json").resolve().unlink()
    result = await client.verify("org/local")
    assert not result.ok
    assert result.problems == ["model.safetensors is damaged", "tokenizer.json is missing"]
    with pytest.raises(ModelNotFound, match="org/nothing"):
        await client.verify("org/nothing")


def test_verify_of_an_unknown_model_has_a_status(http: httpx.Client) -> None:
    assert http.post("/admin/verify", json={"model": "org/nothing"}).status_code == 404


async def test_alias_is_added_listed_and_removed(client: Client) -> None:
    assert await client.set_alias("small", "guide") == {"small": "guide"}
    assert await client.aliases() == {"small": "guide"}
    assert (await client.show("guide")).aliases == ["small"]
    assert await client.set_alias("small", None) == {}
    with pytest.raises(ModelNotFound, match="not an alias"):
        await client.set_alias("small", None)
    with pytest.raises(ModelNotFound):
        await client.set_alias("small", "nonsense")


async def test_settings_of_a_model_are_changed_and_removed(client: Client) -> None:
    assert await client.configure("guide", {}) == {}
    assert await client.configure("guide", {"quant": "int8", "context": "512"}) == {"quant": "int8", "context": 512}
    assert (await client.show("guide")).settings == {"quant": "int8", "context": 512}
    assert await client.configure("guide", {"quant": "", "context": ""}) == {}
    with pytest.raises(InvalidRequest, match="contxt"):
        await client.configure("guide", {"contxt": "5"})
    with pytest.raises(InvalidRequest, match="context: expected a number"):
        await client.configure("guide", {"context": "many"})
    with pytest.raises(ModelNotFound):
        await client.configure("nonsense", {"quant": "int8"})
    with pytest.raises(ModelNotFound, match="allowed_origins"):  # no client changes settings of all models
        await client.configure("allowed_origins=https://a.example", {})
    assert await client.configure("guide", {}) == {}


async def test_import_adds_a_folder(client: Client, tiny: Path) -> None:
    progress: list[FileProgress] = []
    imported = await client.import_model(str(tiny), "mine", copy=True, on_progress=progress.append)
    assert imported.id == "local/mine"
    assert progress
    assert (await client.verify("local/mine")).ok
    with pytest.raises(InvalidRequest, match="already in the store"):
        await client.import_model(str(tiny), "mine")
    with pytest.raises(InvalidRequest, match="does not exist"):
        await client.import_model(str(tiny / "nothing"))
    await client.delete("local/mine")


async def test_prune_shows_then_deletes(client: Client, daemon: Daemon) -> None:
    blobs = daemon.folder / "hub/models--org--unused/blobs"
    blobs.mkdir(parents=True)
    (blobs / ("b" * 40)).write_bytes(b"x" * 10_000)
    assert (await client.prune()).unused == []  # the file is fresh
    shown = await client.prune(everything=True)
    assert [(item.repo, item.kind) for item in shown.unused] == [("org/unused", "blob")]
    assert (shown.deleted, shown.freed) == (False, 0)
    deleted = await client.prune(dry_run=False, everything=True)
    assert (deleted.deleted, deleted.freed) == (True, shown.bytes)
    assert not any(blobs.iterdir())


HOSTILE = [
    ("show", {"model": "../../etc/passwd"}),
    ("show", {"model": "a\x00b"}),
    ("show", {"model": "--help"}),
    ("show", {"model": ""}),
    ("show", {"model": "x" * 100_000}),
    ("show", {"model": "org/\u202e/x"}),
    ("show", {"model": 5}),
    ("show", {}),
    ("inspect", {"model": "guide", "extra": 1}),
    ("inspect", {"model": ["guide"]}),
    ("fit", {"model": "guide", "context": -1}),
    ("fit", {"model": "guide", "context": 10**30}),
    ("fit", {"model": "guide", "parallel": 0}),
    ("fit", {"model": "guide", "quant": "--help"}),
    ("fit", {"model": "guide", "backend": "x\ny"}),
    ("fit", {"model": "guide", "backend": "no such backend"}),
    ("search", {"query": "x", "limit": 10_000}),
    ("search", {"query": "x " * 100_000}),
    ("search", {"query": "a\x00b"}),
    ("verify", {"model": "/"}),
    ("verify", {"model": "org/nothing"}),
    ("prune", {"dry_run": "no"}),
    ("prune", {"dry_run": None}),
    ("import", {"path": "relative"}),
    ("import", {"path": "~nobody/x"}),
    ("import", {"path": "/\x00"}),
    ("alias", {"alias": "small"}),
    ("alias", {"alias": "small\n[settings]", "name": "guide"}),
    ("alias", {"alias": "guide", "name": "guide"}),
    ("alias", {"alias": "qwen3:0.6b", "name": "guide"}),
    ("alias", {"alias": "../x", "name": "guide"}),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body"), HOSTILE)
def test_hostile_body_is_a_typed_error(http: httpx.Client, route: str, body: dict[str, Any]) -> None:
    response = http.post(f"/admin/{route}", json=body)
    error = response.json()["error"] if response.status_code != 200 else events(response.text)[-1]["error"]
    assert response.status_code in (200, 400, 404, 413, 422)
    assert error["code"] in ("invalid_request", "model_not_found", "unsupported_parameter", "request_too_large")
    assert http.get("/admin/aliases").json() == {}


def test_error_names_the_field(http: httpx.Client) -> None:
    wrong = http.post("/admin/fit", json={"model": "guide", "backend": "abacus"}).json()["error"]
    assert (wrong["code"], wrong["param"]) == ("invalid_request", "backend")


def test_large_body_is_refused(http: httpx.Client) -> None:
    assert http.post("/admin/show", json={"model": "x" * 2**21}).status_code == 413
    assert http.post("/admin/show", content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert http.post("/admin/show", content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_model_that_is_loading_is_unloaded_before_its_files_are_deleted(daemon: Daemon, http: httpx.Client) -> None:
    folder = snapshot(daemon, "slow")
    (folder / "wait").write_text("on")
    assert http.post("/admin/alias", json={"alias": "snail", "name": "test/slow"}).status_code == 200
    replies: list[str] = []

    def load() -> None:
        with daemon.local() as other:
            replies.append(other.post("/admin/load", json={"model": "snail"}, timeout=100).text)

    loading = threading.Thread(target=load)
    loading.start()
    wait_until(lambda: "test/slow" in daemon.loaded())
    assert http.post("/admin/delete", json={"model": "snail"}).json()["deleted"] == "test/slow"
    loading.join()
    assert events(replies[0])[-1]["error"]["code"] == "server_stopping"
    assert not folder.exists()
    assert "test/slow" not in daemon.loaded()
    assert http.post("/admin/load", json={"model": "snail"}).text.count("model_not_found") == 1
    http.post("/admin/alias", json={"alias": "snail", "name": None})
