"""`localllm pull` and `rm` with a fake hub on loopback. Each command runs in a separate process."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import StorageFailed
from localllm.app.frames import Load
from localllm.app.store import listing, resolved
from localllm.app.store.changes import deletion, prune
from localllm.app.store.disk_errors import translate_disk_errors
from localllm.app.store.local import finding, snapshots
from localllm.app.store.local.verify import verify
from localllm.app.store.names import HubName
from localllm.app.store.pull import download
from localllm.app.store.remote import RemoteFile
from localllm.app.store.selection import select
from localllm.app.store.transfer.leftovers import partials
from localllm.app.store.transfer.policy import HEADROOM
from localllm.app.worker.opening import open_model
from localllm.engine.files.tensor_files import read_header
from localllm.engine.files.weight_files import INDEX, SINGLE
from localllm.engine.options import LoadOptions

from ...hub import CONFIG, Hub, adapter_files, commit_of, model_files, safetensors, serving
from ...tiny_qwen import write_model

WHOLE = {
    **model_files(),
    "pytorch_model.bin": b"never",
    "onnx/model.onnx": b"never",
    "onnx/config.json": b"never",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "1_Pooling/config.json": b"{}",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    fresh = commit_of("fresh")
    repos = {
        "org/whole": WHOLE,
        "org/adapter": {
            **adapter_files(),
            "tokenizer.json": b"{}",
        },
        "org/pickle": {"config.json": CONFIG, "pytorch_model.bin": b"x"},
        "org/gated": WHOLE,
        "org/tags": WHOLE,
    }
    revisions = {"org/tags": {"main": commit_of("old"), "v1": commit_of("old"), "fresh": fresh}}
    with serving(Hub(repos, revisions=revisions, gated=frozenset({"org/gated"}))) as hub:
        yield hub


def reaching(hub: Hub, **env: str) -> dict[str, str]:
    """The environment of a command that uses this hub."""
    variables = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
    }
    return {**os.environ, **variables, **env}


def localllm(hub: Hub, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "localllm.app.cli", *args],
        env=reaching(hub, **env),
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_pull_downloads_an_adapter_that_adapters_rm_deletes(hub: Hub) -> None:
    done = localllm(hub, "pull", "org/adapter")
    assert done.returncode == 0, done.stderr
    assert "try: localllm adapters load org/adapter" in done.stderr
    adapter = resolved.adapter("org/adapter")
    assert {file.name for file in adapter.path.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    refused = localllm(hub, "adapters", "rm", "org/adapter")
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    removed = localllm(hub, "adapters", "rm", "org/adapter", "--yes", "--json")
    assert json.loads(removed.stdout)["deleted"] == "org/adapter"
    assert all(adapter.bundled for adapter in snapshots.adapters())


def test_pull_downloads_a_model_that_list_shows_and_rm_deletes(hub: Hub) -> None:
    done = localllm(hub, "pull", "org/whole")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "org/whole is ready" in done.stderr
    model = resolved.model("org/whole")
    assert model.revision == commit_of("org/whole")
    assert model.context == 4096
    assert sorted(str(file.relative_to(model.path)) for file in model.path.rglob("*") if file.is_file()) == [
        "1_Pooling/config.json",
        "README.md",
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (model.path / "model.safetensors").read_bytes() == WHOLE["model.safetensors"]

    again = localllm(hub, "pull", "org/whole")
    assert again.returncode == 0
    assert "downloading" not in again.stderr

    refused = localllm(hub, "rm", "org/whole")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert resolved.model("org/whole")
    removed = localllm(hub, "rm", "org/whole", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert "293." in removed.stderr
    assert "org/whole" not in [model.id for model in snapshots.available()]
    assert not list(paths.hub_cache_dir().glob("models--*"))


def test_pull_of_a_short_name_leaves_verified_files_and_nothing_to_prune(hub: Hub) -> None:
    paths.user_catalog_file().parent.mkdir(parents=True, exist_ok=True)
    paths.user_catalog_file().write_text('["mine:1b"]\nrepository = "org/whole"')
    done = localllm(hub, "pull", "mine:1b")
    assert done.returncode == 0, done.stderr
    model = resolved.model("mine:1b")
    assert model.id == "org/whole"
    assert {verdict.status for verdict in verify(model).files} == {"ok"}
    assert prune.find_unused(everything=True) == []
    assert listing.entry_of(model).problem is None
    assert localllm(hub, "rm", "mine:1b", "--yes", "--json").returncode == 0
    assert finding.find_model("mine:1b") is None


def test_config_is_downloaded_first(hub: Hub) -> None:
    localllm(hub, "pull", "org/whole")
    requested = [path.rpartition("/")[2] for method, path in hub.log if method == "GET" and "/resolve/" in path]
    assert requested[0] == "config.json"
    assert {"model.safetensors", "tokenizer.json"} <= set(requested)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.json": b'{"model_type": "mamba2"}'}, "mamba2"),
        ({"config.json": b"[1, 2"}, "config.json"),
    ],
)
def test_model_that_no_backend_runs_is_refused_before_its_weights(
    hub: Hub, change: dict[str, bytes], words: str
) -> None:
    hub.repos["org/whole"] = {**WHOLE, **change}
    refused = localllm(hub, "pull", "org/whole")
    assert (refused.returncode, words in refused.stderr, "--anyway" in refused.stderr) == (5, True, True), refused
    assert ("localllm search whole gguf, or add --anyway" in refused.stderr) == (words == "mamba2")
    assert "model.safetensors" not in {path.rpartition("/")[2] for _, path in hub.log}
    assert not (paths.hub_cache_dir() / "models--org--whole" / "snapshots").exists()


@pytest.mark.parametrize("damage", ["truncated", "random", "missing"])
def test_weights_that_are_damaged_on_the_hub_are_not_published(hub: Hub, damage: str) -> None:
    weights = {"truncated": safetensors(5000)[:-1], "random": random.Random(0).randbytes(5000)}.get(damage)
    files = {**WHOLE, "model.safetensors": weights} if weights else model_files(shards=2)
    if damage == "missing":
        del files["model-00002-of-00002.safetensors"]
    hub.repos["org/whole"] = files
    refused = localllm(hub, "pull", "org/whole")
    assert (refused.returncode, "Traceback" in refused.stderr) == (5, False), refused.stderr
    assert "ready" not in refused.stderr
    assert "org/whole" not in [model.id for model in snapshots.available()]


def test_transfer_continues_where_the_connection_ended(hub: Hub) -> None:
    weights = safetensors(3 * 2**20)
    hub.repos["org/whole"] = {**WHOLE, "model.safetensors": weights}
    hub.breaks_in = "model.safetensors"
    done = localllm(hub, "pull", "org/whole")
    assert done.returncode == 0, done.stderr
    assert (resolved.model("org/whole").path / "model.safetensors").read_bytes() == weights


def test_killed_pull_is_not_listed_and_continues(hub: Hub) -> None:
    """SIGKILL in the middle: the second pull requests only what is missing."""
    weights = safetensors(60 * 2**20)
    hub.repos["org/whole"] = {**WHOLE, "model.safetensors": weights}
    hub.speed = 3 * 2**20  # of each connection
    command = [sys.executable, "-m", "localllm.app.cli", "pull", "org/whole"]
    process = subprocess.Popen(command, env=reaching(hub), stderr=subprocess.DEVNULL)
    folder = paths.hub_cache_dir() / "models--org--whole"
    while sum(leftover.received for leftover in partials(folder)) < 20 * 2**20:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert "org/whole" not in [model.id for model in snapshots.available()]
    received = sum(leftover.received for leftover in partials(folder))
    hub.speed = 0
    again = localllm(hub, "pull", "org/whole", "--json")
    assert again.returncode == 0, again.stderr
    events = [json.loads(line) for line in again.stdout.splitlines()]
    arrived = max(event["arrived"] for event in events if event["event"] == "progress")
    assert 0 < arrived <= len(weights) - received
    assert (resolved.model("org/whole").path / "model.safetensors").read_bytes() == weights
    assert partials(folder) == []


def test_ctrl_c_ends_a_pull_at_once(hub: Hub) -> None:
    hub.stalls_in = "model.safetensors"
    command = [sys.executable, "-m", "localllm.app.cli", "pull", "org/whole"]
    process = subprocess.Popen(command, env=reaching(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert hub.stalled.wait(100)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "the same command continues the download of org/whole" in err
    assert "org/whole" not in [model.id for model in snapshots.available()]


def test_pull_ends_without_an_error_when_the_reader_of_its_events_ends(hub: Hub) -> None:
    hub.stalls_in = "model.safetensors"
    command = [sys.executable, "-m", "localllm.app.cli", "pull", "org/whole", "--json"]
    process = subprocess.Popen(command, env=reaching(hub), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stderr:
        assert json.loads(process.stdout.readline())["event"] == "plan"
        process.stdout.close()
        assert process.wait(100) == 1
        assert process.stderr.read() == ""


def test_revisions_are_stored_and_deleted_separately(hub: Hub) -> None:
    assert localllm(hub, "pull", "org/tags").returncode == 0
    assert localllm(hub, "pull", "org/tags@fresh").returncode == 0
    assert {model.id for model in snapshots.available()} >= {"org/tags", "org/tags@fresh"}
    assert resolved.model("org/tags@fresh").revision == commit_of("fresh")
    assert resolved.model(f"org/tags@{commit_of('old')[:8]}").id == "org/tags"
    for unknown in ("nothing", commit_of("fresh")[:6]):
        refused = localllm(hub, "rm", f"org/tags@{unknown}", "--yes")
        assert (refused.returncode, f"no revision {unknown!r}" in refused.stderr) == (3, True), refused.stderr
    assert localllm(hub, "rm", "org/tags@fresh", "--yes").returncode == 0
    assert [model.id for model in snapshots.available() if not model.bundled] == ["org/tags"]


def test_packed_weights_are_listed_and_deleted_alone_or_with_the_model(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    localllm(hub, "pull", "org/whole")
    model = resolved.model("org/whole")

    def keep() -> Path:
        folder = paths.packed_dir(model.path)
        folder.mkdir(parents=True)
        (folder / "int8.safetensors").write_bytes(bytes(5000))
        return folder

    beside = keep()
    assert beside.parent == model.path
    assert resolved.model("org/whole").packed == 5000
    assert resolved.model("org/whole").size == model.size, "packed weights are not part of the size"
    assert "PACKED" in localllm(hub, "list").stdout
    freed = localllm(hub, "rm", "org/whole", "--packed", "--yes")
    assert (freed.returncode, beside.exists(), model.path.exists()) == (0, False, True), freed.stderr
    assert "PACKED" not in localllm(hub, "list").stdout
    assert localllm(hub, "rm", "org/whole", "--packed", "--yes").returncode == 3, "there are no packed weights any more"

    keep()
    assert localllm(hub, "rm", "org/whole@main", "--yes").returncode == 0, (
        "huggingface_hub ignores the folder of packed weights"
    )
    assert not model.path.exists()

    localllm(hub, "pull", "org/whole")
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    apart = keep()
    assert paths.cache_dir() in apart.parents
    deletion.plan_removal("org/whole").execute()
    assert not apart.exists()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("pull", "org/pickle"), 5, ["pickle", "pytorch_model.bin"]),
        (("pull", "org/gated"), 10, ["gated", "HF_TOKEN"]),
        (("pull", "org/missing"), 3, ["org/missing", "spelling"]),
        (("pull", "org/tags@nothing"), 3, ["nothing", "main branch"]),
        (("pull", "plain"), 3, ["localllm search"]),
        (("pull", "../../etc/passwd"), 2, ["localllm import"]),
        (("pull", "llama3.2:1b-q4"), 3, ["bartowski/Llama-3.2-1B-Instruct-GGUF", "spelling"]),
        (("pull", "org/whole@a/../../../b"), 2, ["org/whole@a", "Qwen/Qwen3-0.6B"]),
        (("rm", "guide"), 2, ["built in"]),
        (("rm", "org/missing"), 3, ["org/missing"]),
        (("rm", "org/missing@main"), 3, ["org/missing"]),
    ],
)
def test_errors_of_pull_and_rm_have_a_hint(hub: Hub, args: tuple[str, ...], code: int, words: list[str]) -> None:
    done = localllm(hub, *args)
    assert done.returncode == code, done.stderr
    assert done.stderr.splitlines()[-2].startswith("error: ")
    assert done.stderr.splitlines()[-1].startswith("hint: ")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_offline_mode_and_an_unreachable_hub_are_different_errors(hub: Hub) -> None:
    offline = localllm(hub, "pull", "org/whole", HF_HUB_OFFLINE="1")
    assert offline.returncode == 10
    assert "unset HF_HUB_OFFLINE" in offline.stderr
    unreachable = localllm(hub, "pull", "org/whole", HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.returncode == 10
    assert "cannot reach 127.0.0.1:9" in unreachable.stderr


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "no space"), "is full"),
        (OSError(errno.EDQUOT, "quota"), "is full"),
        (PermissionError(errno.EACCES, "not yours"), "cannot write the model cache: .*not yours"),
    ],
)
def test_errors_of_the_disk_become_app_errors(error: OSError, words: str) -> None:
    with pytest.raises(StorageFailed, match=words), translate_disk_errors():
        raise error


@pytest.mark.parametrize(("status", "words"), [(401, "denies access.*401"), (500, "org/whole at .* status 500")])
def test_status_of_the_hub_is_in_the_error(hub: Hub, status: int, words: str) -> None:
    hub.fails_with = status
    done = localllm(hub, "pull", "org/whole")
    assert done.returncode == 10, done.stderr
    assert re.search(words, done.stderr)


def test_full_disk_is_reported_before_the_download(hub: Hub) -> None:
    hub.repos["org/huge"] = {**WHOLE}
    hub.repos["org/huge"]["model.safetensors"] = Huge(b"x")
    done = localllm(hub, "pull", "org/huge")
    assert done.returncode == 11, done.stderr
    assert "iB free" in done.stderr
    assert not [path for _, path in hub.log if "/resolve/" in path]


@pytest.mark.parametrize("room", [0, -1])
def test_download_leaves_free_space_on_the_disk(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The free space is that of an existing parent folder: the first download creates the cache."""
    free = 5000 + HEADROOM + room

    def disk_usage(folder: Path) -> shutil._ntuple_diskusage:
        assert folder.is_dir()
        assert folder in paths.hub_cache_dir().parents
        return shutil._ntuple_diskusage(total=2**40, used=0, free=free)

    assert not paths.hub_cache_dir().exists()
    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    if room == 0:
        download.check_space(5000)
        return
    with pytest.raises(StorageFailed, match=r"4\.9 KiB") as refusal:
        download.check_space(5000)
    assert refusal.value.numbers == {"needed": 5000, "free": free, "reserve": HEADROOM}


def test_existing_files_need_no_disk_space(hub: Hub) -> None:
    assert localllm(hub, "pull", "org/whole").returncode == 0
    (resolved.model("org/whole").path / "README.md").unlink()
    before = len(hub.log)
    again = localllm(hub, "pull", "org/whole")
    assert again.returncode == 0, again.stderr
    assert "to download" not in again.stderr
    assert not [path for _, path in hub.log[before:] if path.endswith("model.safetensors")]


@pytest.mark.parametrize("length", [7, 40])
def test_pull_of_a_commit_creates_no_ref(hub: Hub, length: int) -> None:
    """A ref with the name of a commit would hide the branch in `localllm list`."""
    commit = commit_of("fresh")
    assert localllm(hub, "pull", f"org/tags@{commit[:length]}").returncode == 0
    folder = paths.hub_cache_dir() / "models--org--tags"
    assert snapshots.refs(folder) == {}
    assert [model.id for model in snapshots.available() if not model.bundled] == [f"org/tags@{commit[:12]}"]
    hub.revisions["org/tags"] |= {"a/branch": commit}
    assert localllm(hub, "pull", "org/tags@a/branch").returncode == 0
    assert snapshots.refs(folder) == {"a/branch": commit}
    assert resolved.model("org/tags@a/branch").id == "org/tags@a/branch"


@pytest.mark.parametrize("sharded", [False, True])
def test_pull_downloads_every_file_that_loading_opens(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file that loading looks for in the model folder is downloaded, also optional files."""
    folder = write_model(tmp_path / "model")
    if sharded:
        (folder / SINGLE).rename(folder / "model-00001-of-00001.safetensors")
        names = read_header(folder / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (folder / INDEX).write_text(json.dumps(index))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    opened: set[str] = set()

    def watch(name: str, function: Callable[..., object]) -> Callable[..., object]:
        def watched(path: object, *args: object, **options: object) -> object:
            if isinstance(path, str | Path) and Path(path).is_relative_to(folder):
                opened.add(str(Path(path).relative_to(folder)))
            return function(path, *args, **options)

        return watched

    for module, name in ((os, "stat"), (os, "open"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(module, name, watch(name, getattr(module, name)))
    model = open_model(
        Load(model="tiny", path=str(folder), backend="cpu", options=LoadOptions(cache_bytes=2**20)), lambda *_: None
    )
    monkeypatch.undo()
    model.close()
    files = {name for name in opened if not (folder / name).is_dir()} - ({SINGLE} if sharded else set())
    assert files >= {"config.json", "tokenizer.json", "additional_chat_templates/tool_use.jinja", "chat_template.json"}
    assert {file.name for file in select(HubName("org/x"), [RemoteFile(name, 1) for name in files]).files} == files


class Huge(bytes):
    """File content with a length of one exabyte."""

    def __len__(self) -> int:
        return 10**18


def test_rm_deletes_an_incomplete_download(own_folders: Path) -> None:
    blobs = paths.hub_cache_dir() / "models--org--half" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(b"x" * 1000)
    done = localllm(Hub({}), "rm", "org/half", "--yes")
    assert done.returncode == 0, done.stderr
    assert "1000 B" in done.stderr
    assert not blobs.exists()
