"""Files that huggingface_hub stores once for several repositories: `blobs/<hash>` of a repository is a link to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download
from huggingface_hub.utils import _shared_blobs

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.store import listing, resolved
from localllm.app.store.changes import deletion, prune
from localllm.app.store.local import finding
from localllm.app.store.local.verify import verify

from ...hub import Hub, model_files, serving
from ...tiny_qwen import write_model
from ..test_commands import store_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_model(folder)
    return folder


def share(snapshot: Path) -> Path:
    """Let huggingface_hub move the weights of a snapshot to the shared folder. Returns the shared file."""
    weights = snapshot / "model.safetensors"
    blob = snapshot / weights.readlink()
    size = blob.stat().st_size
    xet_hash = hashlib.sha256(b"xet" + weights.read_bytes()).hexdigest()
    assert _shared_blobs.publish_blob_to_shared_store(
        blob_path=str(blob.parent.resolve() / blob.name),
        xet_hash=xet_hash,
        cache_dir=paths.hub_cache_dir(),
        expected_size=size,
    )
    assert blob.is_symlink()
    return weights.resolve()


def test_shared_files_are_listed_shown_and_verified(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = share(store_model("org/a", tiny))
    assert {verdict.status for verdict in verify(resolved.model("org/a")).files} == {"ok"}
    assert [model.problem for model in listing.listed()] == [None, None]
    assert main(["show", "org/a", "--json"]) == 0
    [weights] = [file for file in json.loads(capsys.readouterr().out)["files"] if file["name"] == "model.safetensors"]
    assert weights["hash"] == f"sha256:{hashlib.sha256(shared.read_bytes()).hexdigest()}"
    assert prune.find_unused(everything=True) == []
    shared.chmod(0o644)
    shared.write_bytes(bytes(shared.stat().st_size))
    assert main(["verify", "org/a"]) == 1


def test_rm_keeps_files_that_another_repository_shares(tiny: Path) -> None:
    shared = share(store_model("org/a", tiny))
    assert share(store_model("org/b", tiny)) == shared
    plan = deletion.plan_removal("org/a")
    assert plan.frees < shared.stat().st_size, "the weights stay"
    plan.execute()
    assert not (paths.hub_cache_dir() / "models--org--a").exists()
    assert {verdict.status for verdict in verify(resolved.model("org/b")).files} == {"ok"}
    plan = deletion.plan_removal("org/b")
    assert plan.frees > shared.stat().st_size
    plan.execute()
    assert not shared.exists()
    assert not list(paths.hub_cache_dir().glob("models--*"))


def test_rm_of_one_revision_keeps_the_shared_files_of_the_other(tiny: Path) -> None:
    shared = share(store_model("org/a", tiny))
    other = paths.hub_cache_dir() / "models--org--a" / "snapshots" / ("b" * 40)
    other.mkdir()
    for link in (paths.hub_cache_dir() / "models--org--a" / "snapshots" / ("a" * 40)).iterdir():
        (other / link.name).symlink_to(link.readlink())
    (paths.hub_cache_dir() / "models--org--a" / "refs" / "v2").write_text("b" * 40)
    deletion.plan_removal("org/a@v2").execute()
    assert shared.exists()
    assert {verdict.status for verdict in verify(resolved.model("org/a")).files} == {"ok"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(Hub({"org/m": model_files()})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def test_pull_completes_a_model_with_shared_files(server: Hub) -> None:
    assert main(["pull", "org/m", "--yes"]) == 0
    model = resolved.model("org/m")
    shared = share(model.path)
    (model.path / "README.md").unlink()
    (model.path / "tokenizer.json").unlink()
    server.log.clear()
    assert main(["pull", "org/m", "--yes"]) == 0
    assert not any("model.safetensors" in path for _, path in server.log)
    assert (model.path / "model.safetensors").resolve() == shared
    assert main(["verify", "org/m"]) == 0
    assert snapshot_download("org/m", cache_dir=paths.hub_cache_dir(), local_files_only=True)


def test_pull_replaces_a_shared_file_that_is_gone(server: Hub) -> None:
    assert main(["pull", "org/m", "--yes"]) == 0
    share(resolved.model("org/m").path).unlink()
    assert finding.find_model("org/m") is None
    assert main(["pull", "org/m", "--yes"]) == 0
    assert main(["verify", "org/m"]) == 0


def test_prune_deletes_unused_shared_files_that_no_other_repository_uses(tiny: Path) -> None:
    snapshot = store_model("org/a", tiny)
    shared = share(snapshot)
    assert share(store_model("org/b", tiny)) == shared
    (snapshot / "model.safetensors").unlink()
    [unused] = prune.find_unused(everything=True)
    assert (unused.repo, unused.disk_bytes) == ("org/a", 0)
    prune.delete([unused])
    assert {verdict.status for verdict in verify(resolved.model("org/b")).files} == {"ok"}
    (resolved.model("org/b").path / "model.safetensors").unlink()
    [unused] = prune.find_unused(everything=True)
    assert unused.disk_bytes > 100_000
    assert prune.delete([unused]) == unused.disk_bytes
    assert not shared.exists()
    assert prune.find_unused(everything=True) == []
