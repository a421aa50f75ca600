"""`localllm import`: folders of models and adapters; files, damaged folders and half imports are refused by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.errors import AppError, InvalidRequest, ModelUnusable, StorageFailed
from localllm.app.store import listing, resolved
from localllm.app.store.changes import prune
from localllm.app.store.changes.importing import import_model
from localllm.app.store.checks import architectures, tokenizer
from localllm.app.store.local import snapshots
from localllm.app.store.names import repo_folder
from localllm.app.store.transfer import lock
from localllm.app.store.transfer.disk import Disk
from localllm.app.store.transfer.policy import HEADROOM

from ....engine.files.gguf_files import TINY
from ....engine.files.gguf_files import model as gguf_model
from ...disk_changes import look_before_changes
from ...hub import adapter_files, safetensors
from ...tiny_qwen import write_model


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_model(folder)
    return folder


def adapter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "lora"
    folder.mkdir()
    for name, data in {**adapter_files(), "optimizer.pt": b"x"}.items():
        (folder / name).write_bytes(data)
    return folder


def write(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        return folder / name

    return make


def beside_config(folder: Path) -> Path:
    write_model(folder)
    return folder / "model.safetensors"


def gguf_folder(folder: Path) -> Path:
    (folder / "m-Q4_0.gguf").write_bytes(gguf_model(TINY))
    (folder / "m-Q8_0.gguf").write_bytes(gguf_model(TINY))
    return folder


def pickle_folder(folder: Path) -> Path:
    write_model(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (write("m.gguf", b"GGUF"), ModelUnusable, "m.gguf is not a valid GGUF file"),
        (write("m.safetensors", safetensors(10)), ModelUnusable, "m.safetensors: weights without config.json"),
        (beside_config, InvalidRequest, "model.safetensors is one file of a model"),
        (write("m.bin", b"x"), ModelUnusable, "m.bin is a pickle file"),
        (write("notes.txt", b"x"), InvalidRequest, "notes.txt is not a folder"),
        (lambda folder: folder / "none", InvalidRequest, "none does not exist"),
        (lambda folder: folder, ModelUnusable, "has no config.json"),
        (gguf_folder, ModelUnusable, "has 2 GGUF models"),
        (pickle_folder, ModelUnusable, "only pickle weights"),
        (lambda folder: folder / ("x" * 5000), InvalidRequest, "does not exist"),
    ],
)
def test_import_refuses_other_things_by_name(
    make: Callable[[Path], Path], error: type[AppError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as refused:
        import_model(make(tmp_path))
    assert words in refused.value.message
    assert refused.value.hint
    assert "local/" not in refused.value.message
    assert not list(paths.hub_cache_dir().glob("models--*"))


@pytest.mark.parametrize("copy", [False, True])
def test_imported_adapter_has_only_the_files_of_an_adapter(tmp_path: Path, copy: bool) -> None:
    adapter = import_model(adapter_folder(tmp_path), copy=copy)
    assert adapter.id == "local/lora"
    assert {file.name for file in adapter.path.iterdir()} == set(adapter_files())
    assert resolved.adapter("local/lora").path == adapter.path


def test_import_says_if_it_links_or_copies(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tiny)]) == 0
    assert f"(links to {tiny})" in capsys.readouterr().err
    assert main(["import", str(tiny), "--name", "two", "--copy"]) == 0
    assert "(copies of" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"{", b'{"model": {"type": "BPE", "vocab": {}}}'])
def test_broken_tokenizer_is_not_ready(tiny: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "tokenizer.json").write_bytes(content)
    assert main(["import", str(tiny)]) == ModelUnusable.exit_code
    assert "tokenizer.json is not a valid tokenizer" in capsys.readouterr().err
    assert main(["inspect", str(tiny), "--json"]) == ModelUnusable.exit_code
    [problem] = json.loads(capsys.readouterr().out)["problems"]
    assert main(["show", str(tiny), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == [problem]


def test_list_remembers_a_broken_tokenizer(tiny: Path) -> None:
    assert main(["import", str(tiny)]) == 0
    (tiny / "tokenizer.json").write_text("{}")
    assert {model.id: model.problem for model in listing.listed()}["local/tiny"] is None, "no process has opened it"
    assert main(["show", "local/tiny"]) == 0
    assert "tokenizer.json" in ({model.id: model.problem for model in listing.listed()}["local/tiny"] or "")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import time; time.sleep(9)", "was not opened within 0.5 s"),
        ("import os; os.abort()", "the process ended with -6"),
    ],
)
def test_process_that_opens_a_tokenizer_may_fail(
    tiny: Path, script: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "SECONDS", 0.5 if "sleep" in script else 60)
    with monkeypatch.context() as failing:
        failing.setattr(tokenizer, "OPENS", (sys.executable, "-S", "-c", script))
        assert words in tokenizer.problem(tiny)
    monkeypatch.setattr(tokenizer, "SECONDS", 60)
    assert tokenizer.problem(tiny) == "", "the failure is not remembered"


def test_gguf_model_without_llama_cpp_is_not_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "import json; print(json.dumps([['', 'llama-cpp-python is not installed: make it', 'make it']]))"
    monkeypatch.setattr(architectures, "ACCEPTS", (sys.executable, "-c", script))
    (tmp_path / "m.gguf").write_bytes(gguf_model(TINY))
    assert main(["import", str(tmp_path / "m.gguf")]) == 0
    errors = capsys.readouterr().err
    assert "it cannot be used: llama-cpp-python is not installed: make it" in errors
    assert "ready" not in errors


@pytest.mark.parametrize("name", ["/tmp/m.gguf", "a b", "a:Q8_0", "a@b", "..", "a--b"])
def test_wrong_name_is_an_error_about_the_name(tiny: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^'{name}' cannot be the name of a model"):
        import_model(tiny, name)


def test_import_takes_files_in_subfolders(tiny: Path) -> None:
    (tiny / "additional_chat_templates").mkdir()
    (tiny / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (tiny / "1_Pooling").mkdir()
    (tiny / "1_Pooling" / "config.json").write_text("{}")
    for copy in (False, True):
        model = import_model(tiny, f"copy-{copy}".lower(), copy=copy)
        assert (model.path / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
        assert (model.path / "1_Pooling" / "config.json").read_text() == "{}"


def test_full_disk_is_reported_before_the_copy(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "disk_free", lambda _: HEADROOM + 1000)
    with pytest.raises(StorageFailed, match="not enough disk space") as refused:
        import_model(tiny, copy=True)
    assert refused.value.hint == "import without --copy"
    assert not list(paths.hub_cache_dir().glob("models--*"))
    assert import_model(tiny).id == "local/tiny"


def test_half_import_is_never_listed_as_a_model(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state before each change of the disk is the state that a killed process leaves."""
    states: list[list[str]] = []
    stored: set[frozenset[str]] = set()

    def look() -> None:
        for snapshot in (repo_folder("local/tiny") / "snapshots").glob("*"):
            stored.add(frozenset(file.name for file in snapshot.iterdir()))
        usable = [model.id for model in listing.listed() if not model.problem and not model.bundled]
        states.append(usable + [model.id for model in snapshots.available() if not model.bundled])

    look_before_changes(monkeypatch, look)
    import_model(tiny, copy=True)
    look()
    assert len(stored) == 1, "a snapshot appears with all its files"
    ready = states.index(next(state for state in states if state))
    assert ready > 5
    assert all(len(state) == 2 for state in states[ready:]), "complete in both lists, and never gone"


def test_import_replaces_the_files_of_an_import_that_died(tiny: Path) -> None:
    folder = repo_folder("local/tiny")
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "import-1.incomplete").write_bytes(bytes(10_000))
    [unfinished] = [model for model in listing.listed() if model.id == "local/tiny"]
    assert "the import is not complete" in unfinished.problem
    assert [item.repo for item in prune.find_unused(everything=True)] == ["local/tiny"]
    assert import_model(tiny, copy=True).id == "local/tiny"
    assert not (folder / "blobs" / "import-1.incomplete").exists()


def test_second_import_of_a_name_at_the_same_time_is_refused(tiny: Path) -> None:
    with lock.locked(repo_folder("local/tiny"), Disk(), lambda: None):
        with pytest.raises(InvalidRequest, match="another process imports local/tiny"):
            import_model(tiny)


def test_list_says_that_imported_files_have_moved(tiny: Path) -> None:
    import_model(tiny)
    tiny.rename(tiny.with_name("moved"))
    [model] = [model for model in listing.listed() if model.id == "local/tiny"]
    assert "have moved" in model.problem
    assert "localllm pull" not in model.problem


def test_import_of_a_read_only_store_is_an_error_with_the_path(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Disk, text: str, link: Path) -> None:
        raise PermissionError(13, os.strerror(13), str(link))

    monkeypatch.setattr(Disk, "link", fail)
    with pytest.raises(StorageFailed, match="Permission denied"):
        import_model(tiny)
    assert not list(paths.hub_cache_dir().glob("models--*"))
