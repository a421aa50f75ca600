"""prune: blobs without a snapshot and unfinished downloads, and nothing else."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.commands import store
from localllm.app.errors import StorageFailed
from localllm.app.store import resolved
from localllm.app.store.changes import prune
from localllm.app.store.transfer.lock import lock_file

from ..local.test_snapshots import WHOLE, make


def old(path: Path) -> Path:
    """Make a file older than a day."""
    past = 0.0
    os.utime(path, (past, past))
    return path


@pytest.fixture
def blobs() -> Path:
    """The blobs of a complete model, one blob that nothing uses, and an unfinished download of huggingface_hub."""
    make("org/m", WHOLE)
    folder = paths.hub_cache_dir() / "models--org--m" / "blobs"
    for name in ("orphan", "abc.0123.incomplete"):
        (folder / name).write_bytes(bytes(8192))
        old(folder / name)
    return folder


def names() -> list[str]:
    return sorted(Path(path).name for item in prune.find_unused() for path in item.paths)


def test_prune_deletes_only_what_nothing_uses(blobs: Path) -> None:
    before = {file.name for file in blobs.iterdir()}
    unused = prune.find_unused()
    assert {item.kind for item in unused} == {"blob", "partial"}
    assert prune.delete(unused) >= 2 * 8192
    assert before - {file.name for file in blobs.iterdir()} == {"orphan", "abc.0123.incomplete"}
    assert resolved.model("org/m").size == sum(map(len, WHOLE.values()))
    assert prune.find_unused() == []


def test_prune_names_the_command_that_deletes_what_it_shows(blobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for everything, command in ((False, "localllm prune --yes"), (True, "localllm prune --all --yes")):
        store.prune(True, False, everything, False)
        assert f"; {command} deletes these files" in capsys.readouterr().err


def test_prune_of_a_read_only_cache_is_an_error_of_the_cache(blobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageFailed, match="cannot write the model cache"):
        prune.delete(prune.find_unused())


def test_dry_run_and_a_missing_confirmation_delete_nothing(blobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(blobs.iterdir())
    for dry_run, yes in ((True, True), (True, False), (False, False)):
        store.prune(dry_run, yes, False, False)
        assert "orphan" in capsys.readouterr().out
        assert sorted(blobs.iterdir()) == before
    store.prune(False, True, False, True)
    result = json.loads(capsys.readouterr().out)
    assert (result["deleted"], result["freed"] >= 2 * 8192, len(result["unused"])) == (True, True, 2)
    assert not (blobs / "orphan").exists()
    store.prune(False, True, False, False)
    assert "nothing to delete" in capsys.readouterr().err


def test_fresh_files_stay_unless_all_are_selected(blobs: Path) -> None:
    (blobs / "fresh").write_bytes(b"x")
    assert names() == ["abc.0123.incomplete", "orphan"]
    assert "fresh" in [Path(item.paths[0]).name for item in prune.find_unused(everything=True)]


def test_files_of_a_running_download_stay(blobs: Path) -> None:
    before = prune.find_unused()
    lock = lock_file(blobs.parent)
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert prune.find_unused(everything=True) == []
        assert prune.delete(before) == 0, "the download began after the plan"
        assert (blobs / "orphan").exists()
    finally:
        os.close(descriptor)
    assert names()


def test_blob_that_a_snapshot_uses_meanwhile_stays(blobs: Path) -> None:
    unused = prune.find_unused()
    (blobs.parent / "snapshots" / ("c" * 40) / "late.txt").symlink_to(blobs / "orphan")
    prune.delete(unused)
    assert (blobs / "orphan").exists()


@pytest.mark.parametrize("what", ["folder", "blobs", "blob"])
def test_links_out_of_the_store_are_not_followed(tmp_path: Path, what: str) -> None:
    outside = tmp_path / "outside"
    (outside / "blobs").mkdir(parents=True)
    precious = old_file(outside / "blobs" / "precious")
    repo = paths.hub_cache_dir() / "models--org--x"
    repo.parent.mkdir(parents=True, exist_ok=True)
    if what == "folder":
        repo.symlink_to(outside)
    elif what == "blobs":
        repo.mkdir()
        (repo / "blobs").symlink_to(outside / "blobs")
    else:
        (repo / "blobs").mkdir(parents=True)
        (repo / "blobs" / "link").symlink_to(precious)
    prune.delete(prune.find_unused(everything=True))
    assert precious.exists()


def old_file(path: Path) -> Path:
    path.write_bytes(b"x")
    return old(path)


def test_used_blobs_are_found_through_links_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder is a link, and links of snapshots are absolute or relative, through it or past it."""
    snapshot = make("org/m", WHOLE)
    real = paths.hub_cache_dir()
    (tmp_path / "link").symlink_to(real)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "link"))
    folder = real / "models--org--m"
    for number, target in enumerate(
        ("../../blobs/a", folder / "blobs" / "b", tmp_path / "link/models--org--m/blobs/c")
    ):
        (folder / "blobs" / Path(target).name).write_bytes(b"x")
        (snapshot / f"file{number}").symlink_to(target)
    (folder / "blobs" / "d").write_bytes(b"x")
    assert [Path(path).name for item in prune.find_unused(everything=True) for path in item.paths] == ["d"]
