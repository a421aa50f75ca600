"""If the system refuses the tile registers, the library uses AVX-512 and not the references.
kernels/cpu/isa/dispatch.cpp is compiled against headers that report a CPU with all instructions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu"


def compiled(folder: Path, variants: str) -> Path:
    """A program that prints the usable variants of a library with `variants`, separated by spaces."""
    if shutil.which("g++") is None or platform.machine() != "x86_64":
        pytest.skip("needs g++ on x86-64")
    target = folder / "variants"
    each = f"-DEACH_ISA={' '.join(f'ISA({variant})' for variant in variants.split())}"
    files = [str(SOURCES / "isa" / "dispatch.cpp"), str(HERE / "variants.cpp")]
    flags = ["-std=c++20", "-O0", "-w", f"-I{HERE / 'fakes'}", f"-I{SOURCES}"]
    subprocess.run(["g++", *flags, each, *files, "-o", str(target)], check=True, timeout=100)
    return target


def run(program: Path, granted: str | None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TILES_GRANTED"}
    if granted:
        environment["TILES_GRANTED"] = granted
    found = subprocess.run([str(program)], env=environment, capture_output=True, text=True, check=True, timeout=100)
    return found.stdout.strip()


@pytest.mark.emulated
@pytest.mark.parametrize(
    ("granted", "output"),
    [
        ("1", "generic avx2 avxvnni avx512 amx -> amx"),
        (None, "generic avx2 avxvnni avx512 -> avx512"),
    ],
)
def test_tiles_are_used_only_where_the_system_grants_them(tmp_path: Path, granted: str | None, output: str) -> None:
    assert run(compiled(tmp_path, "generic avx2 avxvnni avx512 amx"), granted) == output


@pytest.mark.emulated
def test_a_library_for_other_processors_is_refused(tmp_path: Path) -> None:
    refusal = "they are compiled for other processors (amx): run make build"
    assert run(compiled(tmp_path, "amx"), None) == refusal
