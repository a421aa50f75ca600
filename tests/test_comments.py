"""The files that comments and docstrings name exist: in the folder of the comment, or in a folder above it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("app", "engine", "backends", "kernels", "scripts", "tests", "examples")
C_SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}
SUFFIXES = {".py", ".cmake", *C_SUFFIXES}
NAMED = re.compile(r"(?<![\w./*<>{}-])[A-Za-z_][\w/.-]*\.(?:py|cpp|cuh|cu|h|md|cmake)\b(?![\w(*])")
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
SHELL_COMMENT = re.compile(r"(?:^|\s)#[^\n]*")
# Files of other projects.
FOREIGN = {"llama.cpp", "mlx_lm/tuner/utils.py", "triton/runtime/build.py", "shim.h", "convert_lora_to_gguf.py"}


def comments(file: Path) -> Iterator[str]:
    """The comments and docstrings of a source file, or of a script."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        yield from (C_COMMENT if file.suffix in C_SUFFIXES else SHELL_COMMENT).findall(text)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def missing(file: Path) -> list[str]:
    """The files that the comments of a file name, and that do not exist."""
    names = {name for comment in comments(file) for name in NAMED.findall(comment)} - FOREIGN
    return sorted(name for name in names if not any((folder / name).is_file() for folder in file.parents))


def test_named_files_exist() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.suffix in SUFFIXES]
    scripts = [file for file in (ROOT / "scripts").iterdir() if file.is_file() and not file.suffix]
    assert len(files) > 500
    problems = {str(file.relative_to(ROOT)): names for file in [*files, *scripts] if (names := missing(file))}
    assert not problems, "name a file by its path from a folder that has both files"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""See gone.py."""'),
        ("a.py", "x = 1  # as in sub/gone.h"),
        ("a.py", 'def f():\n    """Layout: gone.cuh."""'),
        ("a.cu", "int x;  // gone.cu"),
        ("a.cu", "/* written by\n   gone.py */"),
        ("script", "echo  # gone.md"),
    ],
)
def test_a_missing_file_is_a_problem(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / name
    file.write_text(text)
    (problem,) = missing(file)
    assert "gone" in problem
    (tmp_path / "sub").mkdir()
    (tmp_path / problem).write_text("")
    assert missing(file) == []
