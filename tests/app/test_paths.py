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
