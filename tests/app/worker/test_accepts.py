"""The process that asks the backends about GGUF files: it tells a missing package from an unsupported architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm import backends
from localllm.app.worker.accepts_child import reasons_of
from localllm.engine.runner import DeviceInfo, Unavailable

from ...engine.files.gguf_files import TINY, model

DEVICE = DeviceInfo("llamacpp", "a processor", 1, 1)
MISSING = Unavailable("llamacpp", "llama-cpp-python is not installed: pip install it", "pip install it")


def file_of(folder: Path, architecture: str) -> Path:
    values = {key.replace("llama.", f"{architecture}."): value for key, value in TINY.items()}
    file = folder / "m.gguf"
    file.write_bytes(model({**values, "general.architecture": architecture}))
    return file


@pytest.mark.parametrize(
    ("probe", "missing", "install"), [(DEVICE, "", ""), (MISSING, MISSING.reason, "pip install it")]
)
def test_missing_package_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, probe: DeviceInfo | Unavailable, missing: str, install: str
) -> None:
    monkeypatch.setattr(backends.load("llamacpp"), "probe", lambda: probe)
    assert reasons_of(file_of(tmp_path, "llama")) == ("", missing, install)


def test_encoder_is_refused_by_every_backend(tmp_path: Path) -> None:
    refusal, missing, install = reasons_of(file_of(tmp_path, "nomic-bert"))
    assert "llamacpp: the architecture nomic-bert is an encoder" in refusal
    assert "it reads no GGUF files" in refusal
    assert missing == install == ""


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "m.gguf is not a valid GGUF file" in reasons_of(tmp_path / "m.gguf")[0]
