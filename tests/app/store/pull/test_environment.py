"""The environment of the store commands: endpoints, tokens, proxies, offline mode, ModelScope, the shared cache."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir, snapshot_download

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.commands import pull
from localllm.app.store import resolved
from localllm.app.store.local import finding
from localllm.app.store.transfer.policy import HEADROOM
from localllm.app.store.transfer.progress import Progress

from ...hub import Hub, Server, commit_of, model_files, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    old = commit_of("old")
    revisions = {"org/two": {"main": commit_of("org/two"), "v1": old}}
    repos = {"org/m": model_files(), "org/two": model_files(seed=1), "org/three": model_files(shards=3)}
    with serving(Hub(repos, revisions=revisions)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "5")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["a folder", "no text"])
def test_unreadable_token_file_is_no_error_of_the_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    token = tmp_path / "token"
    if content is None:
        token.mkdir()
    else:
        token.write_bytes(content)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(token))
    for command in (["pull", "org/m", "--yes"], ["inspect", "org/m"], ["search", "m"]):
        assert main(command) == 11
        assert "cannot read the access token: " in capsys.readouterr().err


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def in_process(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own: huggingface_hub reads some variables when it is imported."""
    command = [sys.executable, "-m", "localllm.app.cli", *args]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(("prefix", "suffix"), [("", "/"), ("/hf", ""), ("/a/b", "/")])
def test_endpoint_may_have_a_path_and_a_slash_at_its_end(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, prefix: str, suffix: str
) -> None:
    hub.prefix = prefix
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}{prefix}{suffix}")
    assert main(["pull", "org/m", "--yes"]) == 0
    assert main(["verify", "org/m"]) == 0
    assert all(path.startswith((prefix, "/content/")) and "//" not in path for _, path in hub.log)
    main(["search", "m", "--json"])
    assert ("GET", f"{prefix}/api/models") in hub.log


def test_token_file_of_huggingface_hub_is_used(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    (tmp_path / "token").write_text("hf_secret\n")
    denied = in_process("pull", "org/m", "--yes")
    assert denied.returncode in (3, 10), denied.stderr
    done = in_process("pull", "org/m", "--yes", HF_TOKEN_PATH=str(tmp_path / "token"))
    assert done.returncode == 0, done.stderr
    assert hub.leaked == []
    assert "hf_secret" not in done.stderr + done.stdout


class ProxyRequest(BaseHTTPRequestHandler):
    """Answers a request with an absolute address, as a proxy."""

    log: list[str]

    def do_GET(self) -> None:
        self.log.append(self.path)
        headers = {name: value for name, value in self.headers.items() if name.lower() in ("range", "authorization")}
        from urllib.error import HTTPError
        from urllib.request import Request

        try:
            reply = build_opener(ProxyHandler({})).open(Request(self.path, headers=headers), timeout=100)
        except HTTPError as error:
            reply = error
        body = reply.read()
        self.send_response(reply.status)
        for name in ("Content-Range", "ETag", "Content-Type", "X-Repo-Commit", "X-Error-Code"):
            if reply.headers.get(name):
                self.send_header(name, reply.headers[name])
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """The address of a proxy, and the addresses that were requested through it."""
    log: list[str] = []
    server = Server(("127.0.0.1", 0), type("Logged", (ProxyRequest,), {"log": log}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", log
    server.shutdown()
    thread.join()
    server.server_close()


def test_proxy_gets_metadata_and_files(hub: Hub, proxy: tuple[str, list[str]]) -> None:
    address, log = proxy
    variables = {"HTTP_PROXY": address, "http_proxy": address, "NO_PROXY": "", "no_proxy": ""}
    done = in_process("pull", "org/m", "--yes", **variables)
    assert done.returncode == 0, done.stderr
    requested = {path.rpartition("/")[2].partition("?")[0] for path in log}
    assert {"main", "config.json", "model.safetensors"} <= requested, "metadata, small and large files"
    assert main(["verify", "org/m"]) == 0


def test_no_proxy_names_the_hosts_that_are_reached_directly(hub: Hub, proxy: tuple[str, list[str]]) -> None:
    address, log = proxy
    variables = {"HTTP_PROXY": address, "http_proxy": address, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = in_process("pull", "org/m", "--yes", **variables)
    assert done.returncode == 0, done.stderr
    assert log == []


OFFLINE = [
    (("list",), 0, ""),
    (("show", "org/m"), 0, ""),
    (("inspect", "org/m"), 0, "org/m"),
    (("verify", "org/m"), 0, "org/m"),
    (("pull", "org/m", "--yes"), 0, "offline mode is on"),
    (("pull", "org/two", "--yes"), 10, "org/two is not on this machine, and offline mode is on"),
    (("pull", "ms:org/two", "--yes"), 10, "ms:org/two is not on this machine, and offline mode is on"),
    (("pull", "qwen3:0.6b", "--yes"), 10, "Qwen/Qwen3-0.6B is not on this machine"),
    (("inspect", "org/two"), 10, "org/two is not on this machine, and offline mode is on"),
    (("fit", "org/two"), 10, "org/two is not on this machine, and offline mode is on"),
    (("search", "qwen3"), 10, "cannot search Hugging Face: offline mode is on"),
    (("search",), 0, "qwen3:0.6b"),
    (("alias", "mine", "org/m"), 0, ""),
    (("prune", "--dry-run"), 0, ""),
    (("rm", "org/m", "--yes"), 0, "deleted org/m"),
]


def test_offline_mode_of_every_command(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "org/m", "--yes"]) == 0
    go_offline(monkeypatch)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", hub.url)
    hub.log.clear()
    capsys.readouterr()
    for args, code, words in OFFLINE:
        assert main(list(args)) == code, args
        printed = capsys.readouterr()
        assert words in printed.out + printed.err, args
    assert hub.log == [], "no request"


def test_unfinished_model_is_not_called_complete_in_offline_mode(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["pull", "org/three", "--yes"]) == 0
    next(resolved.model("org/three").path.glob("*.safetensors")).resolve().unlink()
    go_offline(monkeypatch)
    assert main(["pull", "org/three", "--yes"]) == 10


def test_modelscope_from_pull_to_rm(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"{hub.url}/")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["inspect", "ms:org/m"]) == 0
    assert main(["pull", "ms:org/m", "--yes"]) == 0
    assert "ms:org/m: " in capsys.readouterr().err
    assert main(["list"]) == 0
    assert "ms:org/m" in capsys.readouterr().out
    assert main(["show", "ms:org/m"]) == 0
    assert main(["verify", "https://modelscope.cn/models/org/m"]) == 0
    assert "ms:org/m: 4 files are correct" in capsys.readouterr().out
    assert main(["pull", "org/m", "--yes"]) == 10, "the repository of Hugging Face is another one"
    assert main(["pull", "ms:org/none", "--yes"]) == 3
    assert "MODELSCOPE_API_TOKEN" in capsys.readouterr().err
    assert main(["rm", "ms:org/m", "--yes"]) == 0
    assert "deleted ms:org/m" in capsys.readouterr().err
    assert not (paths.hub_cache_dir() / "models--ms--org--m").exists()


def test_cache_is_shared_with_huggingface_hub_in_two_revisions(hub: Hub) -> None:
    for name in ("org/two", "org/two@v1"):
        assert main(["pull", name, "--yes"]) == 0
    folder = paths.hub_cache_dir()
    for revision in ("main", "v1"):
        snapshot = Path(snapshot_download("org/two", revision=revision, cache_dir=folder, local_files_only=True))
        assert (snapshot / "model.safetensors").is_file()
    [repo] = scan_cache_dir(folder).repos
    assert {ref for revision in repo.revisions for ref in revision.refs} == {"main", "v1"}
    assert not scan_cache_dir(folder).warnings
    assert main(["rm", "org/two@v1", "--yes"]) == 0
    assert main(["verify", "org/two"]) == 0
    snapshot_download("org/two", cache_dir=folder, local_files_only=True)
    [revision] = next(iter(scan_cache_dir(folder).repos)).revisions
    scan_cache_dir(folder).delete_revisions(revision.commit_hash).execute()
    assert finding.find_model("org/two") is None


def test_pull_continues_a_download_of_huggingface_hub(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that huggingface_hub has completed are not downloaded again."""
    hf_hub_download("org/m", "model.safetensors", cache_dir=paths.hub_cache_dir(), endpoint=hub.url)
    assert main(["pull", "org/m", "--yes", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[0]["missing_files"] == len(model_files()) - 1
    assert events[0]["missing_bytes"] < len(model_files()["model.safetensors"])


def test_new_revision_needs_only_the_bytes_of_its_new_files(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", "org/two@v1", "--yes"]) == 0
    hub.repos["org/two"]["README.md"] = b"new"
    monkeypatch.setattr(paths, "disk_free", lambda _: HEADROOM + 100)
    assert main(["pull", "org/two", "--yes"]) == 0
    assert "org/two: 1 of 4 files to download, 3 B" in capsys.readouterr().err
    assert main(["pull", "org/two", "--yes", "--json"]) == 0
    [plan, _] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (plan["missing_files"], plan["missing_bytes"]) == (0, 0)


def test_pull_without_a_terminal_says_once_that_it_waits(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    with pull._display(as_json=False) as notify:
        for state in ("waiting", "waiting", "downloading"):
            notify(Progress(state, 0, 1, 0, 1))
    assert capsys.readouterr().err == "another process downloads this model; waiting for it\n"


def test_space_for_all_models_is_checked_before_the_first_byte(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = len(model_files()["model.safetensors"])
    monkeypatch.setattr(paths, "disk_free", lambda _: int(1.5 * size) + 64 * 2**20)
    assert main(["pull", "org/m", "org/two", "--yes"]) == 11
    assert "not enough disk space" in capsys.readouterr().err
    assert not any("resolve" in path for _, path in hub.log)
    assert main(["pull", "org/m", "org/m", "--yes"]) == 0, "a name that occurs twice counts once"


def test_wrong_entry_of_the_catalog_decides_nothing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sizes and the licence are those of the hub, before the first byte of a file."""
    hub.card = {"license": "other", "license_name": "qwen-research"}
    entry = '["mine:1b"]\nrepository = "org/m"\nlicence = "mit"\nsize = 1e6\nmemory = 1e6\ngated = true\n'
    paths.user_catalog_file().parent.mkdir(parents=True, exist_ok=True)
    paths.user_catalog_file().write_text(entry)
    assert main(["search", "mine", "--offline"]) == 0
    assert "about 1e+06 GB" in capsys.readouterr().out
    assert main(["inspect", "mine:1b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["licence"] == "qwen-research"
    assert main(["fit", "mine:1b", "--backend", "cpu"]) == 0
    capsys.readouterr()
    assert main(["pull", "mine:1b", "--yes"]) == 0
    assert re.search("org/m: 4 of 4 files to download, .* KiB, licence qwen-research", capsys.readouterr().err)
