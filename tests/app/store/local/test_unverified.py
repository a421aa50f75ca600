"""Hubs whose metadata has no hashes: the ETag of a file has its hash, or `pull` and `verify` say that nothing has."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.errors import StorageFailed
from localllm.app.store import resolved
from localllm.app.store.disk_errors import check_space, translate_disk_errors
from localllm.app.store.local.verify import verify
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.policy import HEADROOM

from ...hub import Hub, Request, commit_of, git_oid, model_files, serving

FILES = {**model_files(6_000_000), "merges.txt": b""}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"org/m": dict(FILES)}, has_hashes=False)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield hub


def zeroed(request: Request) -> bool:
    """The hub sends 100 zero bytes in place of those of the weights."""
    end = min(request.end, 200_100)
    if not request.path.endswith(".safetensors") or request.start > 200_000 or end < 200_100:
        return False
    request.body = request.body[:200_000] + bytes(100) + request.body[200_100:]
    request.handler.send_range(request)
    return True


@pytest.mark.parametrize("redirects", [False, True])
def test_etag_of_the_hub_is_the_hash_of_a_file(hub: Hub, redirects: bool, capsys: pytest.CaptureFixture[str]) -> None:
    hub.redirects = redirects
    assert main(["pull", "--yes", "org/m"]) == 0
    assert "vouches" not in capsys.readouterr().err
    folder = resolved.model("org/m").path
    assert (folder / "model.safetensors").readlink().name == hub.sha256(FILES["model.safetensors"])
    assert (folder / "config.json").readlink().name == git_oid(FILES["config.json"])
    assert {verdict.status for verdict in verify(resolved.model("org/m")).files} == {"ok"}


@pytest.mark.parametrize("has_etags", [False, True])
def test_mirror_without_sizes_names_them_in_the_heads_of_files(hub: Hub, has_etags: bool) -> None:
    hub.has_sizes = False
    hub.has_etags = has_etags
    assert main(["pull", "--yes", "org/m"]) == 0
    model = resolved.model("org/m")
    assert {name: (model.path / name).read_bytes() for name in FILES} == FILES
    assert ("unknown" in {verdict.status for verdict in verify(model).files}) is not has_etags


def test_wrong_bytes_are_noticed_with_an_etag(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.redirects = False
    hub.fault = zeroed
    assert main(["pull", "--yes", "org/m"]) == 10
    assert "model.safetensors arrived 3 times with wrong content" in capsys.readouterr().err


def test_nothing_vouches_for_files_without_a_hash(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.redirects = hub.has_etags = False
    hub.fault = zeroed
    assert main(["pull", "--yes", "org/m"]) == 0
    assert "no hash of 4 of 5 files" in (error := capsys.readouterr().err)
    assert "model.safetensors" in error
    assert "nothing vouches for their bytes" in error
    assert main(["verify", "org/m"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("org/m: 1 files are correct; 4 have no hash of a hub, so nothing vouches"), printed
    assert main(["verify", "org/m", "--json"]) == 0
    [result] = json.loads(capsys.readouterr().out)
    assert {file["file"] for file in result["files"] if file["status"] == "ok"} == {"merges.txt"}, "no bytes"

    weights = resolved.model("org/m").path / "model.safetensors"
    with weights.open("r+b") as file:  # later damage of the disk is noticed
        file.seek(300_000)
        file.write(bytes(100))
    assert main(["verify", "org/m"]) == 1
    assert "model.safetensors is damaged" in capsys.readouterr().err

    hub.has_etags = True
    hub.fault = None
    assert main(["pull", "--yes", "org/m"]) == 0
    assert weights.read_bytes() == FILES["model.safetensors"], "now the hub names the hash"
    assert {verdict.status for verdict in verify(resolved.model("org/m")).files} == {"ok"}


def test_plan_as_json_names_the_files_without_a_hash(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.redirects = hub.has_etags = False
    assert main(["pull", "--yes", "--json", "org/m"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[0])
    assert set(plan["unverifiable_files"]) == set(FILES) - {"merges.txt"}


def test_etag_of_another_server_is_no_hash(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """A content server may have any ETag, as huggingface_hub assumes too."""
    hub.has_etags = False
    assert main(["pull", "--yes", "org/m"]) == 0
    assert "model.safetensors): nothing vouches" in capsys.readouterr().err


def test_refusal_for_a_full_disk_names_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "disk_free", lambda _: 9_000_000)
    with pytest.raises(StorageFailed, match=r"needs 293\.7 KiB, and 64\.0 MiB stay in reserve; .* has 8\.6 MiB free"):
        check_space(300_700, "the download", "")
    monkeypatch.setattr(paths, "disk_free", lambda _: HEADROOM + 300_700)
    check_space(300_700, "the download", "")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("inside", [True, False])
def test_read_only_cache_says_so(code: int, inside: bool) -> None:
    file = paths.hub_cache_dir() / "models--org--m" if inside else Path("/elsewhere/file")
    with pytest.raises(StorageFailed) as caught, translate_disk_errors():
        raise OSError(code, "refused", str(file))
    assert ("is read-only for this user" in caught.value.message) is inside
    assert str(file) in caught.value.message
    assert "HF_HOME" in caught.value.hint


def test_complete_model_in_a_read_only_cache_is_ready(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.has_hashes = True
    assert main(["pull", "--yes", "org/m"]) == 0

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(paths.hub_cache_dir()))

    monkeypatch.setattr(Disk, "make_folder", refuse)
    monkeypatch.setattr(Disk, "open", refuse)
    assert main(["pull", "--yes", "org/m"]) == 0
    assert main(["pull", "--yes", "org/m@" + commit_of("org/m")]) == 0
    hub.repos["org/m"]["README.md"] = b"new"
    assert main(["pull", "--yes", "org/m"]) == 11, "a changed file"


def test_error_of_rmtree_is_that_of_the_cache() -> None:
    with pytest.raises(StorageFailed, match="is read-only for this user"), translate_disk_errors():
        raise PermissionError(errno.EACCES, "Permission denied", "model.safetensors")
