"""list, show, verify, import, alias, search and rm, over a store in a temporary folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import scan_cache_dir

from localllm.app import paths
from localllm.app.commands import models, store
from localllm.app.errors import AppError, InvalidRequest, ModelNotFound, ModelUnusable
from localllm.app.store import listing, preferences, resolved
from localllm.app.store.changes import deletion
from localllm.app.store.changes.importing import import_model
from localllm.app.store.hub import searching
from localllm.app.store.local import finding, snapshots
from localllm.app.store.local.verify import verify
from localllm.app.store.records import HubMatch

from ... import work
from ..embedder import write_embedder
from ..tiny_qwen import write_model


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def store_model(repo: str, folder: Path, commit: str = "a" * 40, ref: str = "main") -> Path:
    """A repository in the layout of huggingface_hub, with hashes as the names of the blobs."""
    root = paths.hub_cache_dir() / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir(exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    for file in folder.iterdir():
        if file.is_file():
            data = file.read_bytes()
            name = hashlib.sha256(data).hexdigest() if file.suffix == ".safetensors" else git_hash(data)
            (root / "blobs" / name).write_bytes(data)
            (snapshot / file.name).symlink_to(Path("../../blobs") / name)
    return snapshot


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "tiny-model"
    folder.mkdir()
    write_model(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def weights_of(snapshot: Path) -> Path:
    return next(snapshot.glob("*.safetensors")).resolve()


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "random bytes": lambda data: bytes(range(256)) * 2000,
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_list_marks_models_with_damaged_weights(tiny: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    store_model("org/good", tiny)
    blob = weights_of(store_model("org/bad", tiny))
    blob.write_bytes(DAMAGES[damage](blob.read_bytes()))
    problems = {model.id: model.problem for model in listing.listed()}
    assert (problems["guide"], problems["org/good"]) == (None, None)
    assert problems["org/bad"]
    models.list_models(False)
    printed = capsys.readouterr()
    assert "org/bad cannot be used" in printed.err
    assert next(line for line in printed.out.splitlines() if "org/bad" in line).split()[-2] == "!"
    blob.write_bytes(weights_of(paths.hub_cache_dir() / "models--org--good/snapshots" / ("a" * 40)).read_bytes())
    assert not any(model.problem for model in listing.listed()), "a repaired model is checked again"


def test_list_shows_unfinished_downloads_and_missing_files(tiny: Path) -> None:
    weights_of(store_model("org/gone", tiny)).unlink()
    blobs = paths.hub_cache_dir() / "models--org--half" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.0123.incomplete").write_bytes(bytes(100_000))
    entries = {model.id: model for model in listing.listed()}
    assert "files are missing" in entries["org/gone"].problem
    assert entries["org/half"].size >= 100_000
    assert "localllm pull org/half continues" in entries["org/half"].problem
    assert [model.id for model in snapshots.available()] == ["guide"]


def test_name_of_an_unfinished_download_gets_the_command_that_continues_it() -> None:
    for repo in ("org--half", "local--half"):
        blobs = paths.hub_cache_dir() / f"models--{repo}" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / "abc.localllm.incomplete").write_bytes(bytes(100_000))
    preferences.set_alias("h", "org/half")
    for name in ("org/half", "org/half@main", "org/half:Q4_K_M", "h"):
        for resolve in (resolved.stored, resolved.model):
            with pytest.raises(ModelNotFound, match="the download of org/half is not complete") as caught:
                resolve(name)
            assert caught.value.hint == f"localllm pull {name} continues it; localllm rm org/half deletes it"
    with pytest.raises(ModelNotFound, match="the import of local/half is not complete"):
        resolved.stored("local/half")


def test_name_without_a_main_branch_gets_the_stored_revision_as_its_hint(tiny: Path) -> None:
    store_model("org/m", tiny, ref="v1")
    with pytest.raises(ModelNotFound) as caught:
        resolved.stored("org/m")
    assert caught.value.hint == "did you mean org/m@v1?"


def test_import_of_a_deleted_folder_is_shown_with_missing_files(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(tiny, folder)
    import_model(folder)
    shutil.rmtree(folder)
    models.list_models(False)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("local/folder")]
    assert line.endswith("! missing files")
    assert store.show("local/folder", True) == 0
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith("imported files have moved or were deleted; localllm rm local/folder")


def test_unfinished_download_of_another_revision_is_not_that_of_the_name(tiny: Path) -> None:
    folder = store_model("org/m", tiny).parents[1]
    (folder / "blobs" / "abc.localllm.incomplete").write_bytes(bytes(100_000))
    with pytest.raises(ModelNotFound, match="'org/m@v2' is not on this machine"):
        resolved.model("org/m@v2")


def test_model_with_missing_weights_is_shown_and_verified_by_its_name(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights_of(store_model("org/gone", tiny)).unlink()
    assert store.show("org/gone", True) == 0
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert problem == "files are missing; localllm pull org/gone downloads them"
    assert store.verify(("org/gone",), False) == 1
    assert "model.safetensors is missing\nhint: localllm pull org/gone" in capsys.readouterr().err
    with pytest.raises(ModelNotFound, match="org/gone: files are missing") as caught:
        resolved.model("org/gone")
    assert caught.value.hint == "localllm pull org/gone downloads them"


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_entry_of_the_cache_that_is_no_folder_is_not_suggested(kind: str) -> None:
    entry = paths.hub_cache_dir() / "models--org--odd"
    entry.parent.mkdir(parents=True)
    if kind == "file":
        entry.write_text("")
    else:
        entry.symlink_to("nowhere")
    for find in (resolved.stored, deletion.plan_removal):
        with pytest.raises(ModelNotFound) as caught:
            find("org/odd")
        assert "org/odd" not in caught.value.hint


DISK = ("stat", "lstat", "open", "open_code", "scandir", "listdir", "readlink", "read")  # calls that read the disk


def test_a_list_of_many_models_reads_little_of_each(tiny: Path) -> None:
    """The work for each model does not grow with their number."""
    counts = []
    for number in range(200):
        store_model(f"org/m{number}", tiny)
        if number + 1 in (50, 100, 200):
            listing._checked.cache_clear()
            counts.append(work.calls(lambda expected=number + 2: _expect(len(listing.listed()), expected)))
    each = (counts[2] - counts[1]).total() / 100
    assert each < 1.1 * (counts[1] - counts[0]).total() / 50
    assert each < 6000
    assert sum(counts[2][name] for name in DISK) < 200 * 250


def _expect(actual: object, expected: object) -> None:
    assert actual == expected


def test_verify_finds_one_changed_byte(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = store_model("org/m", tiny)
    assert {verdict.status for verdict in verify(resolved.model("org/m")).files} == {"ok"}
    assert store.verify(("org/m",), False) == 0
    capsys.readouterr()
    for path in (weights_of(snapshot), (snapshot / "config.json").resolve()):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        assert store.verify((), True) == 1
        (model,) = [entry for entry in json.loads(capsys.readouterr().out) if not entry["ok"]]
        assert [file["status"] for file in model["files"] if file["status"] != "ok"] == ["damaged"]
        path.write_bytes(data)
    (snapshot / "tokenizer.json").resolve().unlink()
    assert store.verify(("org/m",), False) == 1
    assert "tokenizer.json is missing" in capsys.readouterr().err


def test_verify_of_all_models_includes_those_with_missing_files(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights_of(store_model("org/gone", tiny)).unlink()
    assert store.verify((), False) == 1
    printed = capsys.readouterr()
    assert "org/gone: model.safetensors is missing\nhint: localllm pull org/gone" in printed.err
    assert "guide: " in printed.out


def test_verify_names_the_command_that_repairs(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pull does not replace a damaged file of the right size."""
    imported = import_model(tiny, "mine", copy=True)
    for blob, hint in (
        (weights_of(store_model("org/m", tiny)), "localllm rm org/m, then localllm pull org/m"),
        (weights_of(imported.path), "localllm rm local/mine, then import the model again"),
    ):
        data = blob.read_bytes()
        blob.write_bytes(bytes(len(data)))
        assert store.verify((), False) == 1
        assert f"hint: {hint}\n" in capsys.readouterr().err
        blob.write_bytes(data)


def test_verify_without_hashes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.verify(("guide",), False) == 0
    assert "guide: 0 files are correct; 9 have no hash" in capsys.readouterr().out


@pytest.mark.parametrize("copy", [False, True])
def test_imported_model_is_listed_and_rm_keeps_the_files_of_the_user(tiny: Path, copy: bool) -> None:
    model = import_model(tiny, "mine", copy=copy)
    assert (model.id, listing.entry_of(model).problem) == ("local/mine", None)
    assert "local/mine" in [entry.id for entry in listing.listed()]
    statuses = {verdict.status for verdict in verify(model).files}
    assert statuses == ({"ok"} if copy else {"unknown"})
    assert "local/mine" in [repo.repo_id for repo in scan_cache_dir(paths.hub_cache_dir()).repos]
    with pytest.raises(InvalidRequest, match="already in the store"):
        import_model(tiny, "mine")
    before = sorted(file.name for file in tiny.iterdir())
    deletion.plan_removal("local/mine").execute()
    assert sorted(file.name for file in tiny.iterdir()) == before
    assert finding.find_model("local/mine") is None


def test_import_has_the_name_of_the_folder(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store.import_(str(tiny), "", copy=False, as_json=True)
    assert json.loads(capsys.readouterr().out)["id"] == "local/tiny-model"


@pytest.mark.parametrize("name", ["..", "a/b", "../x", "a@b", "a:Q4_0", "a b", "nul", "a--b", "/etc", ".x", "x" * 200])
def test_import_refuses_names_that_leave_the_store(tiny: Path, name: str) -> None:
    with pytest.raises(InvalidRequest):
        import_model(tiny, name)
    assert not list(paths.hub_cache_dir().glob("*"))


def test_import_refuses_damaged_models_and_files(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="does not exist"):
        import_model(tmp_path / "none")
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[:100])
    with pytest.raises(ModelUnusable):
        import_model(broken)
    assert not list(paths.hub_cache_dir().glob("*"))


def test_rm_of_one_revision_keeps_the_blobs_of_another(tiny: Path, tmp_path: Path) -> None:
    kept = store_model("org/m", tiny)
    changed = tmp_path / "changed"
    changed.mkdir()
    for file in tiny.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    (changed / "README.md").write_text("other")
    store_model("org/m", changed, "b" * 40, "v2")
    preferences.set_alias("second", "org/m@v2")
    plan = deletion.plan_removal("second")
    assert plan.frees < 10_000, "only README.md belongs to this revision alone"
    plan.execute()
    assert finding.find_model("org/m@v2") is None
    assert all(file.is_file() for file in kept.iterdir())
    assert {verdict.status for verdict in verify(resolved.model("org/m")).files} == {"ok"}


def test_rm_removes_the_aliases_of_what_it_deletes(tiny: Path) -> None:
    aliases = {
        "whole": "org/m",
        "revision": "org/m@v1",
        "format": "org/m:Q4_0",
        "short": "qwen3:0.6b",
        "other": "org/mm",
        "odd": "org/m/../../x",
    }
    for alias, target in aliases.items():
        preferences.set_alias(alias, target)
    store_model("org/m", tiny, "a" * 40, "v1")
    store_model("Qwen/Qwen3-0.6B", tiny)
    plan = deletion.plan_removal("org/m@v1")
    assert plan.aliases == ("revision",)
    assert preferences.read().aliases == aliases, "a plan changes nothing"
    plan = deletion.plan_removal("whole")
    assert plan.aliases == ("format", "revision", "whole")
    plan.execute()
    assert preferences.read().aliases.keys() == {"short", "other", "odd"}
    deletion.plan_removal("Qwen/Qwen3-0.6B").execute()
    assert preferences.read().aliases.keys() == {"other", "odd"}


def test_rm_accepts_short_names_and_refuses_paths(tiny: Path) -> None:
    store_model("Qwen/Qwen3-0.6B", tiny)
    deletion.plan_removal("qwen3:0.6b").execute()
    assert finding.find_model("qwen3:0.6b") is None
    for name in (str(tiny), "unknown", "../../etc"):
        with pytest.raises(AppError):
            deletion.plan_removal(name)


def test_rm_accepts_repositories_without_an_organisation(tiny: Path) -> None:
    store_model("gpt2", tiny)
    assert finding.find_model("gpt2") is not None
    deletion.plan_removal("gpt2").execute()
    assert finding.find_model("gpt2") is None


@pytest.mark.parametrize("find", [deletion.plan_removal, resolved.model])
def test_unknown_names_have_near_matches(find: Callable[[str], object]) -> None:
    with pytest.raises(ModelNotFound) as error:
        find("guid")
    assert error.value.hint == "did you mean guide?"


def test_show_says_if_a_model_embeds(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(folder: Path) -> str:
        assert store.show(str(folder), True) == 0
        return str(json.loads(capsys.readouterr().out)["embeddings"])

    assert shown(tiny) == ""
    embedder = write_embedder(tmp_path / "embedder")
    assert shown(embedder) == "last token, normalised, 32 numbers"
    store.show(str(embedder), False)
    assert "embeddings  last token, normalised, 32 numbers" in capsys.readouterr().out
    (embedder / "modules.json").write_text("[]")
    assert shown(embedder).startswith("none: modules.json: the modules none are not supported")


def test_show_has_the_warnings_about_the_files(tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "odd"))
    (folder / "generation_config.json").write_text('{"top_k": -1, "top_p": 7}')
    assert store.show(str(folder), True) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [
        "generation_config.json: top_k -1 is read as no limit",
        "generation_config.json: top_p 7 is ignored: it must be a number in 0…1",
    ]
    assert store.show(str(folder), False) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "warnings    generation_config.json: top_k -1 is read as no limit" in lines
    assert "warnings    generation_config.json: top_p 7 is ignored: it must be a number in 0…1" in lines


def test_show_has_the_provenance_of_a_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store_model("org/m", tiny)
    preferences.set_alias("mine", "org/m")
    preferences.set_settings("org/m", {"quant": "int8"})
    assert store.show("mine", True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["id"], facts["repository"], facts["revision"]) == ("org/m", "org/m", "a" * 40)
    assert (facts["licence"], facts["aliases"], facts["settings"]) == ("apache-2.0", ["mine"], {"quant": "int8"})
    assert facts["problems"] == []
    hashes = {file["name"]: file["hash"].partition(":")[0] for file in facts["files"]}
    assert (hashes["config.json"], hashes["model.safetensors"]) == ("git", "sha256")
    store.show("org/m", False)
    assert "quant=int8" in capsys.readouterr().out
    with pytest.raises(ModelNotFound):
        store.show("org/none", False)


def test_show_has_the_base_model_of_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.show("pirate", True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["base"], facts["template"]) == ("adapter", "guide", None)


def test_alias_command_adds_lists_and_removes(capsys: pytest.CaptureFixture[str]) -> None:
    store.alias("tiny", "guide", False, False)
    assert resolved.model("tiny").id == "guide"
    store.alias(None, None, False, True)
    assert json.loads(capsys.readouterr().out) == {"tiny": "guide"}
    for name, model in (("tiny2", "tiny"), ("guide", "org/m"), ("x", None), ("y/z", "guide"), ("x", "a b")):
        with pytest.raises(InvalidRequest):
            store.alias(name, model, False, False)
    store.alias("tiny", None, True, False)
    assert preferences.read().aliases == {}
    for name, model in ((None, None), ("a", "guide")):
        with pytest.raises(InvalidRequest, match="--rm takes the name of one alias"):
            store.alias(name, model, True, False)
    with pytest.raises(ModelNotFound, match="is not an alias"):
        store.alias("tiny", None, True, False)
    store.alias("later", "org/later", False, False)
    assert "localllm pull org/later" in capsys.readouterr().err
    with pytest.raises(ModelNotFound, match="not on this machine"):  # neither here nor a name that pull accepts
        store.alias("never", "nosuch", False, False)
    assert "never" not in preferences.read().aliases


def test_search_lists_the_catalog_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert store.search((), 20, False, False) == 0
    assert "qwen3:0.6b" in capsys.readouterr().out
    assert store.search(("llama", "q4"), 20, True, True) == 0
    result = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in result["catalog"]] == ["llama3.2:1b-q4", "llama3.2:3b-q4"]
    assert result["catalog"][0]["formats"] == ["gguf"]


def answer_search(monkeypatch: pytest.MonkeyPatch, answer: Callable[[dict[str, list[str]]], object]) -> None:
    """Replace the hub. `answer`: the query of a request → its reply."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(searching, "fetch_json", lambda task, url, policy: answer(parse_qs(urlsplit(url).query)))


def test_search_shows_gguf_repositories_with_their_quantisations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request for each format: the many GGUF repositories of a model leave room for its safetensors weights."""
    requests = []

    def siblings(*names: str) -> list[dict[str, str]]:
        return [{"rfilename": name} for name in names]

    quants = siblings("m-Q8_0.gguf", "m-Q4_K_M.gguf", "BF16/m-BF16-00001-of-00002.gguf", "mmproj-F16.gguf")
    gguf = [
        {"id": "org/m-GGUF", "downloads": 9, "tags": ["license:mit"], "siblings": quants},
        {"id": "org/m", "siblings": siblings("m.safetensors", "m-UD-IQ1_S.gguf"), "pipeline_tag": "text-generation"},
        {"id": "org/images", "siblings": siblings("x-Q8_0.gguf"), "pipeline_tag": "text-to-image"},
        {"id": "org/without-siblings", "gated": "auto"},
    ]

    def answer(query: dict[str, list[str]]) -> object:
        requests.append((query["filter"], query["limit"]))
        return gguf if query["filter"] == ["gguf"] else [{"id": "org/m", "safetensors": {"parameters": {"BF16": 500}}}]

    answer_search(monkeypatch, answer)
    assert store.search(("m",), 3, False, True) == 0
    assert sorted(requests) == [(["gguf"], ["3"]), (["safetensors,text-generation"], ["3"])]
    entries = {entry.pop("id"): entry for entry in json.loads(capsys.readouterr().out)["hub"]}
    assert list(entries) == ["org/m", "org/m-GGUF", "org/without-siblings"]
    assert entries["org/m"]["formats"] == ["safetensors", "gguf"]
    assert (entries["org/m"]["size"], entries["org/m"]["quants"]) == (1000, ["UD-IQ1_S"])
    assert entries["org/m-GGUF"]["formats"] == ["gguf"]
    assert entries["org/m-GGUF"]["quants"] == ["Q4_K_M", "Q8_0", "BF16"], "the fewest bits first, no projector"
    assert store.search(("m",), 3, False, False) == 0
    printed = capsys.readouterr()
    hub, gguf_table = printed.out.split("GGUF ON HUGGING FACE")
    assert "org/m-GGUF" not in hub
    assert "org/m " in hub
    assert "mit      Q4_K_M, Q8_0, BF16" in gguf_table
    assert "localllm pull org/m:UD-IQ1_S" in printed.err


def test_search_lists_the_models_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"id": "org/m", "downloads": 7, "tags": ["license:mit", "x"]}
    other = {
        "id": "org/n",
        "likes": 3,
        "gated": "manual",
        "safetensors": {"parameters": {"BF16": 100, "F8_E4M3": 50}, "total": 150},
    }
    unknown = {"id": "org/o", "safetensors": {"parameters": {"F4": 100}}}
    unusable = [{"id": id} for id in ("gpt2", "org/m\u202e", "../etc", "org/a b", "--org/m")]
    answer_search(monkeypatch, lambda _: [model, other, unknown, *unusable])
    both: tuple[searching.Format, ...] = ("safetensors", "gguf")  # this hub ignores the filter
    assert searching.search_hub("m", 3) == [
        HubMatch(id="org/m", downloads=7, licence="mit", formats=both),
        HubMatch(id="org/n", likes=3, size=250, gated=True, formats=both),
        HubMatch(id="org/o", formats=both),
    ]


def test_run_with_a_folder_does_not_walk_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()

    def walk(*_: object, **__: object) -> object:
        raise AssertionError("walks the folder")

    monkeypatch.setattr(Path, "rglob", walk)
    with pytest.raises(ModelNotFound, match=r"config\.json is missing"):
        resolved.model(str(tmp_path), allow_path=True)
