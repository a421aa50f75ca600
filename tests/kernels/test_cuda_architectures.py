"""The GPUs that a CUDA library states to have code for, and the check that it has code for the GPU of a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localllm.kernels.compiled.library import LibraryMissing
from localllm.kernels.gpu.architectures import Architecture, read_architectures, require_code

ROOT = Path(__file__).resolve().parents[2]
TEXT = b"localllm CUDA architectures: %s\0"


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return tmp_path / "localllm_cuda.so"


def test_architectures_are_read_from_the_file(library: Path) -> None:
    library.write_bytes(b"\x7fELF" + bytes(5000) + TEXT % b"80-real 90a-real 100-virtual 120" + bytes(100))
    assert read_architectures(library) == (
        Architecture((8, 0), real=True, virtual=False),
        Architecture((9, 0), real=True, virtual=False, specific=True),
        Architecture((10, 0), real=False, virtual=True),
        Architecture((12, 0), real=True, virtual=True),
    )
    assert [str(one) for one in read_architectures(library)] == [
        "8.0", "9.0a", "10.0 and later (PTX)", "12.0 and later (PTX)"
    ]  # fmt: skip


@pytest.mark.parametrize("content", [b"", b"a library of another version", TEXT % b"native", TEXT % b"80-real all"])
def test_a_library_that_names_no_architectures_is_accepted(library: Path, content: bytes) -> None:
    library.write_bytes(content)
    assert read_architectures(library) == ()
    require_code(library, (8, 6))


@pytest.mark.parametrize(
    ("names", "runs_on", "fails_on"),
    [
        ("80-real", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("86-real", [(8, 6), (8, 9)], [(8, 0)]),
        ("80-virtual", [(8, 0), (9, 0), (12, 0), (13, 1)], [(7, 5)]),
        ("90a-real", [(9, 0)], [(8, 9), (10, 0)]),
        ("90a-virtual", [(9, 0)], [(10, 0)]),
        ("120", [(12, 0), (12, 1), (13, 0)], [(10, 0), (11, 0)]),
        ("80-real 120", [(8, 6), (12, 0)], [(9, 0), (10, 0)]),
    ],
)
def test_a_library_without_code_for_the_gpu_is_refused(
    library: Path, names: str, runs_on: list[tuple[int, int]], fails_on: list[tuple[int, int]]
) -> None:
    library.write_bytes(TEXT % names.encode())
    for capability in runs_on:
        require_code(library, capability)
    for capability in fails_on:
        with pytest.raises(LibraryMissing, match=rf"this GPU has {capability[0]}\.{capability[1]}: run make build"):
            require_code(library, capability)


def test_default_build_has_code_for_every_supported_gpu(library: Path) -> None:
    """From compute capability 8.0 on; 11.0 and unknown later GPUs use PTX."""
    cmake = (ROOT / "kernels" / "cuda" / "CMakeLists.txt").read_text()
    match = re.search(r"set\(LOCALLLM_CUDA_ARCHITECTURES (.*?) CACHE", cmake)
    assert match
    library.write_bytes(TEXT % match[1].encode())
    for capability in ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1), (13, 0)):
        require_code(library, capability)
