"""Which models the catalog sees in the shared cache, and what it says about a name it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import ModelNotFound
from localllm.app.store import catalog


def make(repo: str, files: dict[str, str], commit: str = "c" * 40, refs: tuple[str, ...] = ("main",)) -> Path:
    """One repo as huggingface_hub lays it out."""
    root = paths.hub_cache_dir() / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for name, text in files.items():
        blob = root / "blobs" / f"{commit[:4]}-{name}"
        blob.write_text(text)
        (snapshot / name).symlink_to(blob)
    for ref in refs:
        file = root / "refs" / ref
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit)
    return snapshot


CONFIG = json.dumps({"model_type": "llama", "max_position_embeddings": 8192})
WHOLE = {"config.json": CONFIG, "model.safetensors": "w" * 10}
SHARDED = {
    "config.json": CONFIG,
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}),
    "one.safetensors": "1",
}


def names() -> list[str]:
    return [model.id for model in catalog.available() if not model.bundled]


def test_whole_models_are_listed_and_described() -> None:
    make("org/whole", WHOLE)
    assert names() == ["org/whole"]
    model = catalog.resolve("org/whole")
    assert (model.size, model.context, model.description) == (len(CONFIG) + 10, 8192, "llama")


def test_half_models_are_not() -> None:
    make("org/sharded", SHARDED)
    make("org/gguf", {"config.json": CONFIG, "model.gguf": "g"})
    make("org/bare", {"model.safetensors": "w"})
    snapshot = make("org/dangling", WHOLE)
    (snapshot / "model.safetensors").resolve().unlink()
    assert names() == []
    for name in ("org/sharded", "org/gguf", "org/bare", "org/dangling"):
        with pytest.raises(ModelNotFound):
            catalog.resolve(name)


def test_shards_complete_it() -> None:
    make("org/sharded", {**SHARDED, "two.safetensors": "2"})
    assert names() == ["org/sharded"]


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 5}}', '{"weight_map": {}}'])
def test_a_broken_index_hides_one_model_only(index: str) -> None:
    make("org/broken", {**WHOLE, "model.safetensors.index.json": index})
    make("org/fine", WHOLE)
    assert names() == ["org/fine"]


def test_text_config_gives_the_context() -> None:
    make("org/nested", {**WHOLE, "config.json": '{"text_config": {"max_position_embeddings": 5}}'})
    assert catalog.resolve("org/nested").context == 5


def test_revisions_have_names_of_their_own() -> None:
    make("org/many", WHOLE, "a" * 40)
    make("org/many", WHOLE, "b" * 40, refs=("v1", "refs/pr/1"))
    make("org/many", WHOLE, "d" * 40, refs=())
    assert names() == ["org/many", "org/many@refs/pr/1", "org/many@dddddddddddd"]
    for name in ("bbbbbbb", "b" * 40, "v1", "refs/pr/1"):
        assert catalog.resolve(f"org/many@{name}").revision == "b" * 40
    with pytest.raises(ModelNotFound):
        catalog.resolve("org/many@bbb")


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("guid", "did you mean guide?"),
        ("org/Whle", "did you mean org/whole?"),
        ("whole", "did you mean org/whole?"),
        ("other/model", "localllm pull other/model fetches it"),
        ("zzz", "localllm list shows"),
        ("../../etc", "localllm list shows"),
        ("", "localllm list shows"),
        ("a\x00b", "localllm list shows"),
    ],
)
def test_unknown_names_get_a_hint(asked: str, hint: str) -> None:
    make("org/whole", WHOLE)
    with pytest.raises(ModelNotFound) as caught:
        catalog.resolve(asked)
    assert hint in caught.value.hint


def test_a_name_longer_than_any_file_name_is_only_unknown() -> None:
    for name in ("x" * 10_000, f"org/{'x' * 300}", f"org/repo@{'x' * 10_000}"):
        with pytest.raises(ModelNotFound) as caught:
            catalog.resolve(name)
        assert len(str(caught.value)) < 300


def test_a_folder_without_a_config_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: object) -> None:
        raise AssertionError("the folder may be a whole disk")

    monkeypatch.setattr(Path, "rglob", walk)
    with pytest.raises(ModelNotFound, match=r"no model folder: it has no config\.json"):
        catalog.resolve(str(tmp_path), allow_path=True)
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * 1000)
    assert catalog.resolve(str(tmp_path), allow_path=True).size == len(CONFIG)


def test_paths_are_models_only_where_allowed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    assert catalog.resolve(str(tmp_path), allow_path=True).path == tmp_path
    with pytest.raises(ModelNotFound):
        catalog.resolve(str(tmp_path))
    with pytest.raises(ModelNotFound, match="no folder"):
        catalog.resolve("./no-such-folder", allow_path=True)
