"""Where things lie, and that the socket's folder is the person's alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from localllm.app import paths


def test_the_runtime_folder_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "fresh"))
    assert stat.S_IMODE(paths.runtime_dir().stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_runtime_folder_others_may_enter_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(folder))
    with pytest.raises(PermissionError, match="0700"):
        paths.socket_file()


def test_a_link_is_no_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "link"))
    with pytest.raises(PermissionError):
        paths.runtime_dir()


def test_without_a_session_folder_the_temporary_one_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_model_cache_is_where_other_programs_put_it(
    env: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert paths.hub_cache_dir() == Path(expected)


def test_weights_made_smaller_are_kept_beside_the_model_where_that_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paths.packed_dir(tmp_path) == tmp_path / ".localllm"
    assert paths.cache_dir() in paths.packed_dir(paths.guide_dir()).parents, "the program's own folder stays as it is"
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    assert paths.cache_dir() in paths.packed_dir(tmp_path).parents
    assert paths.packed_dir(tmp_path) != paths.packed_dir(tmp_path / "other")


def test_what_torch_compiled_is_where_torch_is_told_to_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert paths.compiled_dir() == paths.cache_dir() / "compiled"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert paths.compiled_dir() == Path("/elsewhere")


def test_every_file_has_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_CONFIG", raising=False)
    for kind in ("config", "data", "cache", "log"):
        monkeypatch.setattr(paths.platformdirs, f"user_{kind}_path", lambda app, kind=kind: tmp_path / kind / app)
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    ours = {
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
    assert {name: str(getattr(paths, name)().relative_to(tmp_path)) for name in ours} == ours
    monkeypatch.setenv("LOCALLLM_CONFIG", "/elsewhere.toml")
    assert paths.config_file() == Path("/elsewhere.toml")


def test_the_folder_of_the_session_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCALLLM_RUNTIME_DIR")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "temporary"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir() == tmp_path / "localllm"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.runtime_dir() == tmp_path / "temporary" / f"localllm-{os.getuid()}"


def test_a_runtime_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_RUNTIME_DIR", str(tmp_path / "run"))
    paths.runtime_dir()
    mine = os.getuid()
    monkeypatch.setattr(paths.os, "getuid", lambda: mine + 1)
    with pytest.raises(PermissionError):
        paths.runtime_dir()
