"""`localllm inspect` and `localllm fit` before a download: ranges of files from a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.app.errors import DownloadFailed
from localllm.app.store.hub import ranges
from localllm.app.store.hub.ranges import range_requests
from localllm.app.store.remote import RemoteFile
from localllm.app.store.transfer.http import Credentials
from localllm.app.store.transfer.policy import Policy

from ....engine.files.gguf_files import sound
from ...embedder import write_embedder
from ...hub import CONFIG, Hub, Request, adapter_files, commit_of, serving
from ...tiny_qwen import write_model

POLICY = Policy(first_wait=0.001, longest_wait=0.002, stall_timeout=2.0, lookup_attempts=3)
DATA = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_model(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(tiny: dict[str, bytes]) -> Iterator[Hub]:
    mamba = json.dumps({**json.loads(CONFIG), "model_type": "mamba2"}).encode()
    repos = {
        "org/tiny": {**tiny, "pytorch_model.bin": b"pickle", "modeling.py": b"code"},
        "org/adapter": adapter_files(),
        "org/gguf": {"Q4_K_M/m-Q4_K_M-00001-of-00001.gguf": sound().content()},
        "org/mamba": {**tiny, "config.json": mamba},
        "org/broken": {**tiny, "model.safetensors": tiny["model.safetensors"][:-7]},
        "org/data": {"x.safetensors": DATA},
    }
    with serving(Hub(repos)) as hub:
        yield hub


def run(hub: Hub, *arguments: str) -> tuple[int, Any]:
    """The exit code and the JSON of a command that uses the hub."""
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    code = "import sys; from localllm.app.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"], env=environment, capture_output=True, text=True
    )
    return done.returncode, json.loads(done.stdout or done.stderr.splitlines()[-1])


def test_model_is_inspected_before_its_download(hub: Hub, tiny: dict[str, bytes]) -> None:
    code, result = run(hub, "inspect", "org/tiny")
    assert code == 0
    assert (result["name"], result["kind"], result["architecture"]) == ("org/tiny", "model", "qwen3")
    assert (result["local"], result["usable"], result["choice"]) == (False, True, "cpu")
    assert result["source"] == f"Hugging Face org/tiny@{commit_of('org/tiny')[:12]}"
    assert result["template"]["status"] == "works"
    assert (result["pickles"], result["code"]) == (["pytorch_model.bin"], ["modeling.py"])
    requested = {path.rpartition("/")[2] for _, path in hub.log}
    assert "tokenizer.json" not in requested
    assert "pytorch_model.bin" not in requested


def test_embedding_model_is_inspected_before_its_download(hub: Hub, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "embedder", tied=False)
    files = [path for path in folder.rglob("*") if path.is_file()]
    hub.repos["org/embedder"] = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    code, result = run(hub, "inspect", "org/embedder")
    assert (code, result["usable"], result["choice"], result["problems"]) == (0, True, "cpu", [])
    assert result["embeddings"] == "last token, normalised, 32 numbers"
    assert run(hub, "inspect", "org/tiny")[1]["embeddings"] == ""


def test_other_kinds_are_inspected_before_their_download(hub: Hub) -> None:
    code, adapter = run(hub, "inspect", "org/adapter")
    assert (code, adapter["kind"], adapter["rank"], adapter["usable"]) == (0, "adapter", 4, True)
    code, gguf = run(hub, "inspect", "org/gguf:q4_k_m")
    assert (code, gguf["kind"], gguf["architecture"], gguf["usable"]) == (5, "gguf", "llama", False)
    code, mamba = run(hub, "inspect", "org/mamba")
    assert (code, mamba["choice"]) == (5, "")
    assert any("code of mamba2 is not supported" in verdict["says"] for verdict in mamba["backends"])
    code, broken = run(hub, "inspect", "org/broken")
    assert code == 5
    assert "tensors end at byte" in broken["problems"][0]


def test_file_of_another_host_is_inspected(hub: Hub) -> None:
    address = f"{hub.url}/org/gguf/resolve/main/Q4_K_M/m-Q4_K_M-00001-of-00001.gguf"
    code, result = run(hub, "inspect", address)
    assert (code, result["kind"], result["architecture"], result["source"]) == (5, "gguf", "llama", f"file {address}")


def test_model_is_measured_before_its_download(hub: Hub) -> None:
    code, result = run(hub, "fit", "org/tiny", "--backend", "cpu", "--parallel", "2")
    [entry] = result["fits"]
    assert (code, result["model"], entry["fits"], entry["parallel"]) == (0, "org/tiny", True, 2)
    assert entry["weights"] > 0
    code, error = run(hub, "fit", "org/mamba", "--backend", "cpu")
    assert (code, error["fits"][0]["fits"]) == (5, False)
    code, error = run(hub, "fit", "org/nothing")
    assert (code, error["error"]["code"]) == (3, "model_not_found")


def data(hub: Hub) -> RemoteFile:
    return RemoteFile("x.safetensors", len(DATA), None, None, f"{hub.url}/org/data/resolve/main/x.safetensors")


def test_range_is_fetched(hub: Hub) -> None:
    with range_requests(POLICY) as fetch:
        assert fetch(data(hub), 0, 10) == DATA[:10]
        assert fetch(data(hub), 1000, 3000) == DATA[1000:4000]
        assert fetch(data(hub), 0, len(DATA)) == DATA
        assert fetch(data(hub), len(DATA) - 1, 1) == DATA[-1:]


def test_server_without_ranges_sends_the_file(hub: Hub) -> None:
    def ignore_range(request: Request) -> bool:
        if request.stage == "metadata" or not request.body:
            return False
        request.handler.reply(200, request.body)
        return True

    hub.fault = ignore_range
    with range_requests(POLICY) as fetch:
        assert fetch(data(hub), 1000, 3000) == DATA[1000:4000]


def test_failed_request_is_repeated(hub: Hub) -> None:
    failures = 2

    def fail(request: Request) -> bool:
        nonlocal failures
        failures -= 1
        if failures < 0:
            return False
        request.handler.reply(503, b"busy")
        return True

    hub.fault = fail
    with range_requests(POLICY) as fetch:
        assert fetch(data(hub), 5, 10) == DATA[5:15]
        failures = 99
        with pytest.raises(DownloadFailed, match=r"cannot read x.safetensors: .* returned status 503"):
            fetch(data(hub), 5, 10)


def test_mirror_is_next_and_gets_no_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "http://127.0.0.1:9/x.safetensors"
    file = replace(data(hub), url=other, mirrors=(data(hub).url,))
    headers = {"http://127.0.0.1:9": {"Authorization": "Bearer secret"}}
    monkeypatch.setattr(ranges, "credentials", lambda: Credentials(headers))
    with range_requests(POLICY) as fetch:
        assert fetch(file, 0, 10) == DATA[:10]
        with pytest.raises(DownloadFailed, match="cannot reach"):
            fetch(replace(file, mirrors=()), 0, 10)
    assert hub.leaked == []


def test_file_of_another_size_is_an_error(hub: Hub) -> None:
    with range_requests(POLICY) as fetch, pytest.raises(DownloadFailed, match="instead of"):
        fetch(replace(data(hub), size=len(DATA) + 5), 0, 10)
