"""Every fault of a hub, in every stage of a download: the right files, or a typed error, and never a wrong file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import AppError
from localllm.app.store.pull.download import Download
from localllm.app.store.transfer.policy import Policy

from ...hub import Hub, Stage, model_files, serving
from ...hub_faults import FAULTS, STAGES, inject

CHUNK = 16 * 1024
POLICY = Policy(
    chunk_bytes=CHUNK,
    request_bytes=2 * CHUNK,
    connections=4,
    stall_timeout=0.25,
    connect_timeout=0.5,
    lookup_timeout=3.0,
    attempts=2,
    lookup_attempts=2,
    first_wait=0.001,
    longest_wait=0.01,
    longest_retry_after=0.5,
    minimum_speed=2000,
    tick=0.01,
    headroom=0,
)
FILES = model_files(10 * CHUNK + 123)


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving(Hub({"org/a": FILES})) as hub:
        yield hub


@pytest.fixture
def hub(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    server.fault = None
    server.leaked.clear()
    server.token = ""
    server.redirects = True
    use(server, monkeypatch)
    return server


def use(hub: Hub, monkeypatch: pytest.MonkeyPatch, endpoints: str = "") -> None:
    """Make this process use the hub."""
    monkeypatch.setenv("HF_ENDPOINT", endpoints or hub.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


def pull(name: str = "org/a", policy: Policy = POLICY) -> Path:
    download = Download(name, policy=policy)
    return download.run(download.plan()).path


def check_store(files: dict[str, bytes] = FILES) -> None:
    """No visible file has wrong content, whatever happened."""
    for snapshot in paths.hub_cache_dir().glob("models--*/snapshots/*"):
        for name, data in files.items():
            assert (snapshot / name).read_bytes() == data, name
    contents = set(files.values())
    for blob in paths.hub_cache_dir().glob("models--*/blobs/*"):
        if ".localllm." not in blob.name:
            assert blob.read_bytes() in contents, blob


@pytest.mark.parametrize("source", ["hf", pytest.param("ms", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_ends_in_right_files_or_a_typed_error(fault: str, stage: Stage, source: str, hub: Hub) -> None:
    """A fault that occurs once, then a fault that stays, then a hub without faults. The transfer continues with the
    received data."""
    name = "org/a" if source == "hf" else "ms:org/a"
    outcomes = []
    for times in (1, 10**6):
        used = inject(hub, fault, stage, times)
        try:
            pull(name)
            outcomes.append("complete")
        except AppError as error:
            outcomes.append(error.message)
        check_store()
        assert all(outcomes)
        assert used.count or outcomes[0] == "complete"
    hub.fault = None
    folder = pull(name)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES
