"""The remembered answers of the backends about architectures, and the list of models that shows them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.app import paths
from localllm.app.cli import main
from localllm.app.store import listing
from localllm.app.store.checks import architectures

from ....waiting import wait_until
from ...tiny_qwen import write_model
from ..test_commands import store_model

Answer = Callable[[list[str]], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mamba"
    folder.mkdir()
    write_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba2"}))
    return folder


def answering(monkeypatch: pytest.MonkeyPatch, *answers: subprocess.CompletedProcess[str] | Exception) -> list[object]:
    """Replace the process. Returns the list of its calls."""
    calls: list[object] = []
    replies = iter(answers)

    def run(command: object, **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        reply = next(replies)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(architectures.subprocess, "run", run)
    return calls


def done(*reasons: str) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 0, json.dumps([(reason, "") for reason in reasons]), "")


def problems() -> dict[str, str]:
    return {model.id: model.problem for model in listing.listed()}


def test_list_marks_a_model_that_no_backend_supports(
    mamba: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_model("org/mamba", mamba)
    assert main(["list"]) == 0
    assert "org/mamba cannot be used: no backend supports this model" in capsys.readouterr().err
    calls = answering(monkeypatch)
    assert "transformers' code of mamba2 is not supported" in problems()["org/mamba"]
    assert calls == [], "the answer is remembered"


def test_list_without_wait_asks_in_the_background(mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_model("org/mamba", mamba)
    calls = answering(monkeypatch, done("no backend"))
    assert problems()["org/mamba"] is None
    wait_until(lambda: problems()["org/mamba"])
    assert problems()["org/mamba"] == "no backend"
    assert len(calls) == 1


def test_one_process_answers_about_all_models(mamba: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_model("org/mamba", mamba)
    (tmp_path / "other").mkdir()
    for file in mamba.iterdir():
        (tmp_path / "other" / file.name).write_bytes(file.read_bytes().replace(b"mamba2", b"rwkv77"))
    store_model("org/other", tmp_path / "other")
    calls = answering(monkeypatch, done("first", ""))
    found = {model.id: model.problem for model in listing.listed(wait=True)}
    assert (found["org/mamba"], found["org/other"], len(calls)) == ("first", None, 1)


def test_changed_configuration_is_another_question(
    mamba: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, done("first"), done(""), done("third"))
    assert architectures.unsupported(mamba) == "first"
    assert architectures.unsupported(mamba) == "first"
    config = json.loads((mamba / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "jamba"}))
    assert architectures.unsupported(tmp_path) == ""
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 128}')
    assert architectures.unsupported(tmp_path) == "third"


@pytest.mark.parametrize(
    "failure",
    [subprocess.TimeoutExpired("child", 60), subprocess.CompletedProcess([], 3, "", "")],
)
def test_failed_process_is_a_reason_that_is_not_remembered(
    mamba: Path, monkeypatch: pytest.MonkeyPatch, failure: subprocess.CompletedProcess[str] | Exception
) -> None:
    answering(monkeypatch, failure, done(""))
    assert "the architecture" in architectures.unsupported(mamba)
    assert architectures.unsupported(mamba) == ""


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"a": 1}'])
def test_damaged_file_is_written_again(mamba: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    answering(monkeypatch, done("reason"))
    paths.architectures_file().parent.mkdir(parents=True, exist_ok=True)
    paths.architectures_file().write_bytes(content)
    assert architectures.unsupported(mamba) == "reason"
    assert architectures.unsupported(mamba) == "reason"


def test_known_architecture_needs_no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_model(tmp_path)
    answering(monkeypatch)
    assert architectures.unsupported(tmp_path) == ""
