"""The models of the shared cache, and the hints for unknown model names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.errors import AdapterNotFound, InvalidRequest, ModelNotFound, ModelUnusable, WrongKind
from localllm.app.store import resolved
from localllm.app.store.local import snapshots
from localllm.app.store.names import is_path, parse


def make(repo: str, files: dict[str, str], commit: str = "c" * 40, refs: tuple[str, ...] = ("main",)) -> Path:
    """Create one repo with the layout of huggingface_hub."""
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
    return [model.id for model in snapshots.available() if not model.bundled]


def test_complete_models_are_listed_with_their_properties() -> None:
    make("org/whole", WHOLE)
    assert names() == ["org/whole"]
    model = resolved.model("org/whole")
    assert (model.size, model.context, model.description) == (len(CONFIG) + 10, 8192, "llama")


def test_incomplete_models_are_not_listed() -> None:
    make("org/sharded", SHARDED)
    make("org/gguf", {"config.json": CONFIG, "model-00001-of-00002.gguf": "g"})
    make("org/bare", {"model.safetensors": "w"})
    snapshot = make("org/dangling", WHOLE)
    (snapshot / "model.safetensors").resolve().unlink()
    assert names() == []
    for name in ("org/sharded", "org/gguf", "org/bare", "org/dangling"):
        with pytest.raises((ModelNotFound, ModelUnusable)):
            resolved.model(name)


def test_model_is_listed_when_its_last_shard_exists() -> None:
    make("org/sharded", {**SHARDED, "two.safetensors": "2"})
    assert names() == ["org/sharded"]


BROKEN_INDEXES = {
    "empty file": "",
    "a list": "[]",
    "map is a number": '{"weight_map": 3}',
    "file is a number": '{"weight_map": {"a": 5}}',
    "empty map": '{"weight_map": {}}',
    "long file name": json.dumps({"weight_map": {"a": "x" * 5000}}),
    "file name with a zero byte": json.dumps({"weight_map": {"a": "x\0y"}}),
    "file name with a surrogate": '{"weight_map": {"a": "\\ud800"}}',
    "deep lists": "[" * 100_000,
    "deep objects": '{"weight_map":' * 100_000,
}


@pytest.mark.parametrize("kind", BROKEN_INDEXES)
def test_broken_index_hides_only_its_model(kind: str) -> None:
    index = BROKEN_INDEXES[kind]
    make("org/broken", {**WHOLE, "model.safetensors.index.json": index})
    make("org/fine", WHOLE)
    assert names() == ["org/fine"]


def test_broken_config_hides_no_other_model() -> None:
    make("org/deep", {**WHOLE, "config.json": "[" * 100_000})
    make("org/fine", WHOLE)
    assert "org/fine" in names()


def test_context_is_read_from_text_config() -> None:
    make("org/nested", {**WHOLE, "config.json": '{"text_config": {"max_position_embeddings": 5}}'})
    assert resolved.model("org/nested").context == 5


def test_revisions_are_listed_with_their_names() -> None:
    make("org/many", WHOLE, "a" * 40)
    make("org/many", WHOLE, "b" * 40, refs=("v1", "refs/pr/1"))
    make("org/many", WHOLE, "d" * 40, refs=())
    assert names() == ["org/many", "org/many@refs/pr/1", "org/many@dddddddddddd"]
    for name in ("bbbbbbb", "b" * 40, "v1", "refs/pr/1"):
        assert resolved.model(f"org/many@{name}").revision == "b" * 40
    with pytest.raises(ModelNotFound):
        resolved.model("org/many@bbb")


def test_every_listed_name_selects_its_snapshot() -> None:
    make("org/odd", WHOLE, "main", refs=("main",))  # other programs can write such folders
    make("org/odd", WHOLE, "of mine", refs=("mine",))
    make("org/odd", WHOLE, "e" * 40, refs=("v1+cpu",))
    assert names() == ["org/odd@eeeeeeeeeeee"]
    assert resolved.model("org/odd@eeeeeeeeeeee").revision == "e" * 40
    for name in ("org/odd", "org/odd@main", "org/odd@mine"):
        with pytest.raises(ModelNotFound):
            resolved.model(name)


@pytest.mark.parametrize(
    ("query", "hint"),
    [
        ("guid", "did you mean guide?"),
        ("org/Whle", "did you mean org/whole?"),
        ("whole", "did you mean org/whole?"),
        ("other/model", "to download it: localllm pull other/model"),
        ("zzz", "localllm list shows"),
        ("../../etc", "localllm list shows"),
        ("", "for example qwen3:0.6b"),
        ("a\x00b", "for example qwen3:0.6b"),
    ],
)
def test_unknown_names_get_a_hint(query: str, hint: str) -> None:
    make("org/whole", WHOLE)
    with pytest.raises(ModelNotFound) as caught:
        resolved.model(query)
    assert hint in caught.value.hint


def test_very_long_name_is_an_unknown_model() -> None:
    for name in ("x" * 10_000, f"org/{'x' * 300}", f"org/repo@{'x' * 10_000}"):
        with pytest.raises(ModelNotFound) as caught:
            resolved.model(name)
        assert len(str(caught.value)) < 300


def test_folder_without_config_is_rejected_without_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(*_: object) -> None:
        raise AssertionError("the folder may be a whole disk")

    monkeypatch.setattr(Path, "rglob", walk)
    with pytest.raises(ModelNotFound, match=r"is not a model folder: config\.json is missing"):
        resolved.model(str(tmp_path), allow_path=True)
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x" * 1000)
    assert resolved.model(str(tmp_path), allow_path=True).size == len(CONFIG)


def test_paths_are_models_only_with_allow_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    assert resolved.model(str(tmp_path), allow_path=True).path == tmp_path
    with pytest.raises(ModelNotFound):
        resolved.model(str(tmp_path))
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolved.model("./no-such-folder", allow_path=True)


def test_names_have_the_maximum_length_of_hugging_face() -> None:
    part, revision = "x" * 96, "v" * 200
    make(f"{part}/{part}", WHOLE)
    assert resolved.model(f"{part}/{part}").revision == "c" * 40
    for name, good in (
        (f"org/{part}@{revision}", True),
        (f"org/{part}x", False),
        (f"{part}x/repo", False),
        (f"org/repo@{revision}v", False),
        ("-org/repo", False),
        ("a/b/c", False),
    ):
        try:
            parse(name)
        except InvalidRequest:
            assert not good, name
        else:
            assert good, name


def test_commit_prefix_has_at_least_seven_letters() -> None:
    make("org/one", WHOLE, "abcdef0123" * 4, refs=())
    assert resolved.model("org/one@abcdef0").revision == "abcdef0123" * 4
    for short in ("abcdef", "bcdef01", "abcdef1"):
        with pytest.raises(ModelNotFound):
            resolved.model(f"org/one@{short}")
    make("org/one", WHOLE, "abcdef0999" * 4, refs=())
    with pytest.raises(ModelNotFound):
        resolved.model("org/one@abcdef0")
    assert resolved.model("org/one@abcdef09").revision == "abcdef0999" * 4


def test_main_precedes_other_branches_and_branches_precede_commits() -> None:
    make("org/two-parts", WHOLE, refs=("a", "main", "z"))
    assert names() == ["org/two-parts"]
    make("org/tagged", WHOLE, "d" * 40, refs=("v2", "v1"))
    assert "org/tagged@v1" in names()
    with pytest.raises(ModelNotFound):
        resolved.model("org/tagged")


def test_list_starts_with_the_built_in_model_and_is_sorted() -> None:
    for repo in ("org/b", "Org/A", "org/c"):
        make(repo, WHOLE)
    guide, *others = snapshots.available()
    assert (guide.id, guide.bundled, guide.description) == ("guide", True, snapshots.GUIDE_DESCRIPTION)
    assert [model.id for model in others] == ["Org/A", "org/b", "org/c"]
    assert not any(model.bundled for model in others)
    assert resolved.model("guide").bundled


def test_file_of_another_kind_is_not_called_missing(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match="is not a GGUF file") as raised:
        resolved.model(str(file), allow_path=True)
    assert "ends in .gguf" in raised.value.hint


def test_packed_weights_are_not_part_of_the_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": "many"}')
    packed = paths.packed_dir(tmp_path)
    packed.mkdir(parents=True)
    (packed / "weights").write_bytes(b"x" * 100)
    model = resolved.model(str(tmp_path), allow_path=True)
    assert (model.packed, model.context, model.description) == (100, 0, "")
    assert model.size == (tmp_path / "config.json").stat().st_size
    snapshot = make("org/packed", WHOLE)
    inside = paths.packed_dir(snapshot)
    inside.mkdir(parents=True, exist_ok=True)
    (inside / "weights").write_bytes(b"x" * 100)
    model = resolved.model("org/packed")
    assert (model.packed, model.size) == (100, len(CONFIG) + 10)


def test_hint_has_at_most_three_similar_names() -> None:
    for number in range(5):
        make(f"org/model-{number}", WHOLE)
    with pytest.raises(ModelNotFound) as caught:
        resolved.model("org/model-x")
    assert caught.value.hint.count(" or ") == 2
    assert caught.value.param == "model"
    with pytest.raises(ModelNotFound) as caught:
        resolved.model("L-3")
    assert caught.value.hint == "did you mean org/model-3?"


def test_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(CONFIG)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert resolved.model("~/m", allow_path=True).id == str(tmp_path / "m")
    assert resolved.model("./m", allow_path=True).id == str(tmp_path / "m")
    for name, good in (
        (".", True),
        ("..", True),
        ("~", True),
        ("../x", True),
        ("~x", False),
        ("m", False),
        ("", False),
    ):
        assert is_path(name) is good


ADAPTER = {"adapter_config.json": json.dumps({"base_model_name_or_path": "org/base"}), "adapter_model.safetensors": "w"}


def test_adapters_are_listed_apart_from_models() -> None:
    make("org/base", WHOLE)
    folder = make("org/pirate", ADAPTER)
    make("org/empty", {"adapter_config.json": "{}"})
    assert names() == ["org/base"]
    (adapter,) = (ref for ref in snapshots.adapters() if not ref.bundled)
    assert (adapter.id, adapter.path, adapter.description) == ("org/pirate", folder, "org/base")
    assert resolved.adapter("org/pirate") == resolved.adapter("org/pirate@main")
    with pytest.raises(WrongKind):
        resolved.model("org/pirate")


def test_unknown_adapter_has_a_hint(tmp_path: Path) -> None:
    make("org/pirate", ADAPTER)
    hints = {
        "org/pirat": "did you mean org/pirate or pirate?",
        "pirate-lora-folder": "localllm adapters list shows the adapters on this machine; a folder has a "
        "leading ./ or /",
    }
    for name, hint in hints.items():
        with pytest.raises(AdapterNotFound) as refused:
            resolved.adapter(name, allow_path=True)
        assert refused.value.hint == hint
    for name in (str(tmp_path), "../pirate"):
        with pytest.raises(AdapterNotFound):
            resolved.adapter(name)
    assert resolved.adapter(str(tmp_path), allow_path=True).path == tmp_path
    with pytest.raises(AdapterNotFound, match="does not exist"):
        resolved.adapter(str(tmp_path / "none"), allow_path=True)
