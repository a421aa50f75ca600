"""Plans to delete models from the shared cache, without a hub."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from huggingface_hub import DeleteCacheStrategy

from localllm.app import paths
from localllm.app.errors import AdapterNotFound, InvalidRequest, ModelNotFound, StorageFailed, WrongKind
from localllm.app.store.changes import deletion

from ..local.test_snapshots import ADAPTER, CONFIG, WHOLE, make

SIZE = len(CONFIG) + 10


def keep(snapshot: Path, size: int) -> Path:
    folder = paths.packed_dir(snapshot)
    folder.mkdir(parents=True)
    (folder / "int8").write_bytes(bytes(size))
    return folder


@pytest.mark.parametrize("apart", [False, True])
def test_removal_of_a_repo_includes_its_packed_weights(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    """The packed weights are deleted too, inside or outside the repo folder, and count once."""
    if apart:
        monkeypatch.setattr(paths.os, "access", lambda *_: False)
    snapshot = make("org/m", WHOLE)
    other = make("org/other", WHOLE)
    folders = [keep(snapshot, 100), keep(other, 100)]
    plan = deletion.plan_removal("org/m")
    refs = len("c" * 40)
    assert (plan.name, plan.frees) == ("org/m", SIZE + refs + 100)
    assert snapshot.exists(), "nothing is deleted yet"
    plan.execute()
    assert not (paths.hub_cache_dir() / "models--org--m").exists()
    assert [folder.exists() for folder in folders] == [False, True]
    assert (other / "config.json").exists()


def test_removal_of_one_revision_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    old, new = make("org/m", WHOLE, "a" * 40, refs=("v1",)), make("org/m", WHOLE, "b" * 40)
    packed = [keep(snapshot, 100) for snapshot in (old, new)]
    for unknown in ("v2", "aaaaaa", "c" * 40):
        with pytest.raises(ModelNotFound, match="no revision"):
            deletion.plan_removal(f"org/m@{unknown}")
    plan = deletion.plan_removal("org/m@v1")
    assert (plan.name, plan.frees) == ("org/m@v1", SIZE + 100)
    plan.execute()
    assert [folder.exists() for folder in (old, new, *packed)] == [False, True, False, True]
    assert deletion.plan_removal("org/m@bbbbbbb").frees == SIZE + 100


@pytest.mark.parametrize("name", ["org/m", "org/m@main"])
def test_removal_from_a_read_only_cache_is_an_error_of_the_cache(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make("org/m", WHOLE)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "main")

    monkeypatch.setattr(deletion.shutil, "rmtree", refuse)
    monkeypatch.setattr(DeleteCacheStrategy, "execute", refuse)
    with pytest.raises(StorageFailed, match="cannot write the model cache") as caught:
        deletion.plan_removal(name).execute()
    assert "HF_HOME" in caught.value.hint


def test_removal_of_packed_weights_keeps_the_model() -> None:
    snapshot = make("org/m", WHOLE)
    with pytest.raises(ModelNotFound, match="org/m has no cached quantised weights"):
        deletion.plan_packed_removal("org/m")
    folder = keep(snapshot, 100)
    plan = deletion.plan_packed_removal("org/m")
    assert plan.frees == 100
    plan.execute()
    assert (folder.exists(), snapshot.exists()) == (False, True)
    for name in ("guide", "org/none"):
        with pytest.raises((InvalidRequest, ModelNotFound)):
            deletion.plan_removal(name)


def test_ambiguous_commit_prefix_deletes_nothing() -> None:
    for end in "bc":
        make("org/m", WHOLE, "a" * 20 + end * 20, refs=())
    with pytest.raises(ModelNotFound, match="no revision"):
        deletion.plan_removal("org/m@aaaaaaa")
    assert deletion.plan_removal(f"org/m@{'a' * 20}b").name == f"org/m@{'a' * 20}b"


def test_removal_of_an_adapter_deletes_only_files_of_the_cache(tmp_path: Path) -> None:
    folder = make("org/pirate", ADAPTER)
    for name, reason in ((str(tmp_path), "deletes only files that it downloaded"), ("./pirate", "model cache")):
        with pytest.raises(InvalidRequest, match=reason):
            deletion.plan_adapter_removal(name)
    with pytest.raises(AdapterNotFound):
        deletion.plan_adapter_removal("org/other")
    make("org/both", WHOLE | ADAPTER)
    with pytest.raises(InvalidRequest, match="is also a model"):
        deletion.plan_adapter_removal("org/both")
    make("org/model", WHOLE)
    with pytest.raises(WrongKind):
        deletion.plan_adapter_removal("org/model")
    deletion.plan_adapter_removal("org/pirate").execute()
    assert not folder.exists()
    assert tmp_path.exists()


def test_removal_of_a_revision_keeps_the_same_commit_of_other_repositories() -> None:
    """A renamed repository has two names and one commit. huggingface_hub deletes the commit of one of the two."""
    names = [f"org/name{number}" for number in range(12)] + ["ms/org--name0"]
    folders = {name: make(name, WHOLE, "a" * 40) for name in names}
    deletion.plan_removal("org/name0@main").execute()
    assert [name for name, folder in folders.items() if not folder.exists()] == ["org/name0"]
    assert deletion.plan_removal("ms:org/name0").name == "ms:org/name0"
