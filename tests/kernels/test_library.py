"""The search for the kernel libraries: the environment variable, the build of a checkout, the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.kernels.compiled import library
from localllm.kernels.compiled.library import LibraryMissing, LibraryNotFound, find_cuda_library, find_library


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels in a checkout without a build."""
    folder = tmp_path / "checkout" / "kernels"
    folder.mkdir(parents=True)
    monkeypatch.setattr(library, "_KERNELS", folder)
    monkeypatch.delenv("LOCALLLM_CPU_LIBRARY", raising=False)
    monkeypatch.delenv("LOCALLLM_CUDA_LIBRARY", raising=False)
    return folder


def made(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def test_the_first_cpu_library_is_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = made(package / "cpu" / "localllm_cpu.so")
    assert find_library() == installed
    built = made(package.parent / "build" / "kernels" / "localllm_cpu.so")
    assert find_library() == built
    named = made(package / "another.so")
    monkeypatch.setenv("LOCALLLM_CPU_LIBRARY", str(named))
    assert find_library() == named
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(package / "none.so"))
    assert find_library() == named


def test_the_first_cuda_library_is_used(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_wheel = made(package.parent / "build" / "wheel" / "kernels" / "cuda" / "localllm_cuda.so")
    assert find_cuda_library() == of_wheel
    built = made(package.parent / "build" / "kernels" / "cuda" / "localllm_cuda.so")
    assert find_cuda_library() == built
    named = made(package / "another.so")
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(named))
    assert find_cuda_library() == named


@pytest.mark.parametrize(
    ("variable", "find"), [("LOCALLLM_CPU_LIBRARY", find_library), ("LOCALLLM_CUDA_LIBRARY", find_cuda_library)]
)
def test_a_variable_without_a_file_is_refused(
    package: Path, monkeypatch: pytest.MonkeyPatch, variable: str, find: Callable[[], Path]
) -> None:
    """A slower implementation does not take the place of a library that was asked for."""
    made(package / "cpu" / "localllm_cpu.so")
    made(package.parent / "build" / "kernels" / "cuda" / "localllm_cuda.so")
    monkeypatch.setenv(variable, str(package / "none.so"))
    with pytest.raises(LibraryNotFound, match=rf"{variable} names .*none\.so, which is not a file") as refused:
        find()
    assert not isinstance(refused.value, ImportError)


def test_an_empty_variable_is_ignored(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_CPU_LIBRARY", "")
    with pytest.raises(LibraryMissing, match="were not built"):
        find_library()


def test_an_installed_cuda_library_is_found_without_loading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "kernels_of_cuda"
    installed = made(package / "localllm_cuda.so")
    made(package / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    find_spec = library.find_spec
    monkeypatch.setattr(library, "find_spec", lambda *_: find_spec("kernels_of_cuda"))
    assert find_cuda_library() == installed


def test_a_missing_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda *_: None)
    with pytest.raises(LibraryMissing, match="make build CUDA=1"):
        find_cuda_library()
