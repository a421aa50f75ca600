"""Downloads of the daemon from a hub on loopback: progress, the end, errors, removal, and the catalog."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ...waiting import wait_until
from ..hub import Hub, model_files, serving
from .conftest import Daemon


@pytest.fixture(scope="module")
def http(short_folder: Callable[[], Path]) -> Iterator[httpx.Client]:
    with serving(Hub({"org/whole": model_files()})) as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        daemon = Daemon(short_folder(), env=env)
        assert daemon.url
        with daemon.local() as client:
            client.timeout = httpx.Timeout(100)
            yield client
        assert httpx.get(f"{daemon.url}/admin/downloads", trust_env=False).status_code == 403
        daemon.stop()


def finished(http: httpx.Client, name: str) -> dict[str, Any]:
    """The download of this name when it has ended."""
    job: dict[str, Any] = {}

    def has_ended() -> bool:
        (found,) = [job for job in http.get("/admin/downloads").json() if job["name"] == name]
        job.update(found)
        return found["state"] in ("done", "failed", "cancelled")

    wait_until(has_ended, says=lambda: job)
    return job


def test_download_of_a_model_then_removal(http: httpx.Client) -> None:
    assert http.post("/admin/downloads", json={"name": "org/whole"}).json()["state"] == "planning"
    events = [line for line in http.get("/admin/downloads/events").text.split("\n\n") if line]
    (last,) = json.loads(events[-1].removeprefix("data: "))
    assert (last["name"], last["state"]) == ("org/whole", "done")
    job = finished(http, "org/whole")
    assert job["received"] == job["total"] > 300_000
    assert job["model"] in [entry["id"] for entry in http.get("/admin/models").json()]
    http.post("/admin/alias", json={"alias": "mine", "name": "org/whole"}).raise_for_status()
    deleted = http.post("/admin/delete", json={"model": "org/whole"}).json()
    assert deleted.pop("freed") > 300_000
    assert deleted == {"deleted": "org/whole", "aliases": ["mine"], "unloaded": []}
    assert "org/whole" not in [entry["id"] for entry in http.get("/admin/models").json()]


def test_missing_repository_is_a_failed_download(http: httpx.Client) -> None:
    http.post("/admin/downloads", json={"name": "org/nothing"})
    job = finished(http, "org/nothing")
    assert job["state"] == "failed"
    assert "org/nothing" in job["error"]


def test_wrong_requests_are_refused(http: httpx.Client) -> None:
    assert http.post("/admin/downloads", json={"name": "../etc"}).status_code in (400, 404)
    assert http.post("/admin/downloads/pause", json={"name": "org/unknown"}).status_code == 404
    assert http.post("/admin/delete", json={"model": "org/unknown"}).status_code == 404


def test_catalog_names_the_machine_and_its_offers(http: httpx.Client) -> None:
    catalog = http.get("/admin/catalog", timeout=100).json()
    assert catalog["machine"]["memory"] > catalog["machine"]["free"] > 0
    assert all(offer["fit"] != "unknown" for offer in catalog["offers"] if offer["memory"])


def test_daemon_stops_with_a_download_and_the_next_daemon_continues_it(short_folder: Callable[[], Path]) -> None:
    folder = short_folder()
    hub = Hub({"org/slow": model_files(48 * 2**20)}, speed=4_000_000)
    with serving(hub):
        env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        daemon = Daemon(folder, env=env)
        assert daemon.url
        with daemon.local() as client:
            client.post("/admin/downloads", json={"name": "org/slow"})
            wait_until(lambda: client.get("/admin/downloads").json()[0]["received"] > 24 * 2**20)
            assert client.post("/admin/downloads/pause", json={"name": "org/slow"}).json()["state"] == "paused"
        assert daemon.stop() == 0, daemon.log
        (partial,) = (folder / "hub/models--org--slow/blobs").glob("*.incomplete")
        assert partial.stat().st_size > 0
        hub.speed = 0
        hub.sent = 0
        daemon = Daemon(folder, env=env)
        assert daemon.url
        with daemon.local() as client:
            assert client.get("/admin/downloads").json() == []
            client.post("/admin/downloads", json={"name": "org/slow"})
            assert finished(client, "org/slow")["state"] == "done"
        assert hub.sent < 48 * 2**20  # complete chunks are not sent again
        assert daemon.stop() == 0, daemon.log
        assert "Traceback" not in daemon.log


def test_files_of_a_running_download_are_not_deleted(short_folder: Callable[[], Path]) -> None:
    folder = short_folder()
    hub = Hub({"org/slow": model_files(16 * 2**20)}, speed=4_000_000)
    with serving(hub):
        daemon = Daemon(folder, env={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
        assert daemon.url
        with daemon.local() as client:
            client.timeout = httpx.Timeout(100)
            client.post("/admin/downloads", json={"name": "org/slow"})
            wait_until(lambda: client.get("/admin/downloads").json()[0]["received"] > 2**20)
            assert client.post("/admin/downloads/pause", json={"name": "org/slow"}).status_code == 200
            pruned = client.post("/admin/prune", json={"dry_run": False, "everything": True}).json()
            assert pruned["unused"] == []
            deleted = client.post("/admin/delete", json={"model": "org/slow"})
            assert (deleted.status_code, "is being downloaded" in deleted.text) == (400, True)
            hub.speed = 0
            client.post("/admin/downloads/resume", json={"name": "org/slow"})
            assert finished(client, "org/slow")["state"] == "done"
            lines = client.post("/admin/verify", json={"model": "org/slow"}).text.split("\n\n")
            assert json.loads(lines[-2].removeprefix("data: "))["ok"]
        assert daemon.stop() == 0, daemon.log
