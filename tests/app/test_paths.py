"""The paths of localllm. The folder of the socket is private to the user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from localllm.app import paths


def test_runtime_folder_is_created_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "fresh"))
    assert stat.S_IMODE(paths.runtime_dir().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_shared_runtime_folder_is_rejected(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(folder))
    with pytest.raises(PermissionError, match="0700"):
        paths.socket_file()


def test_link_is_rejected_as_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(PermissionError):
        paths.runtime_dir()


def test_runtime_folder_is_temporary_without_xdg_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert paths.runtime_dir() == tmp_path / f"localllm-{os.getuid()}"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/b", "HF_HOME": "/c"}, "/b"),
        ({"HF_HOME": "/c", "XDG_CACHE_HOME": "/d"}, "/c/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({"XDG_CACHE_HOME": "", "HOME": "/e"}, "/e/.cache/huggingface/hub"),
    ],
)
def test_model_cache_follows_the_variables_of_hugging_face(
    env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert paths.hub_cache_dir() == Path(expected)


def test_packed_folder_is_inside_a_writable_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.packed_dir(tmp_path) == tmp_path / ".localllm"
    assert paths.cache_dir() in paths.packed_dir(paths.guide_dir()).parents, (
        "nothing is written into the folder of the program"
    )
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    assert paths.cache_dir() in paths.packed_dir(tmp_path).parents
    assert paths.packed_dir(tmp_path) != paths.packed_dir(tmp_path / "other")


def test_compiled_folder_follows_the_variable_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert paths.compiled_dir() == paths.cache_dir() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert paths.compiled_dir() == Path("/elsewhere")


def test_every_path_has_its_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_CONFIG", raising=False)
    for kind in ("config", "data", "cache", "log"):
        monkeypatch.setattr(paths.platformdirs, f"user_{kind}_path", lambda app, kind=kind: tmp_path / kind / app)
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    files = {
        "config_file": "config/localllm/config.toml",
        "history_file": "data/localllm/history.sqlite3",
        "api_key_file": "data/localllm/api-key",
        "compiled_dir": "cache/localllm/compiled",
        "self_test_dir": "cache/localllm/self-test",
        "log_dir": "log/localllm",
        "socket_file": "run/daemon.sock",
        "pid_file": "run/daemon.pid",
        "port_file": "run/daemon.port",
    }
    assert {name: str(getattr(paths, name)().relative_to(tmp_path)) for name in files} == files
    monkeypatch.setenv("LOCALLLM_CONFIG", "/elsewhere.toml")
    assert paths.config_file() == Path("/elsewhere.toml")


def test_runtime_folder_is_in_xdg_runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / "localllm"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.runtime_dir() == tmp_path / "temporary" / f"localllm-{os.getuid()}"


def test_runtime_folder_of_another_user_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "run"))
    paths.runtime_dir()
    mine = os.getuid()
    monkeypatch.setattr(paths.os, "getuid", lambda: mine + 1)
    with pytest.raises(PermissionError):
        paths.runtime_dir()
