"""Writes the tables of README.md from what they describe. `python scripts/tables.py [--check]`

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. --check changes nothing and exits 1 when one is stale.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from localllm.app import config
from localllm.app.cli import cli
from localllm.backends import ORDER

ROOT = Path(__file__).resolve().parent.parent
REGION = re.compile(r"(<!-- table: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)

HARDWARE = {
    "cuda": "NVIDIA GPU (CUDA)",
    "hip": "AMD GPU (ROCm)",
    "npu": "Huawei Ascend NPU",
    "xpu": "Intel GPU",
    "mlx": "Apple silicon (MLX)",
    "cpu": "CPU (tried on x86-64)",
    "llamacpp": "GGUF models (llama.cpp)",
}
WHERE = {
    "mlx": "MLX's CPU device, in CI, and on its CUDA device (an H200, 2026-11-22: "
    "`pytest tests/backends/test_mlx*.py tests/kernels/test_mlx_*.py`; of 1,018 tests 944 passed and none failed, 71 "
    "were skipped there, and time was up before three had ended)",
    "cpu": "in CI",
    "cuda": "an H200, with versions of 2026-11-22: "
    "`pytest tests/backends/test_cuda.py tests/backends/test_cuda_split.py`, all passed, the suite among them",
}
TIERS = {
    "real": "Verified: the conformance suite runs on the hardware itself ({where})",
    "real_otherdevice": "Verified on {where}; never run on this hardware",
    "contract": "Checked against the vendor's schemas; never run",
    "emulated": "Run on an emulator; never run on the hardware",
    "compile": "Compiles; never run",
}
NOT_YET = "Not yet: `localllm doctor` finds it, and this version has no runner for it"


def tiers() -> dict[str, str]:
    """Backend → tier, from the markers on the conformance suite and on its subclass for each backend."""
    found = {}
    suite = _tier(next(_classes(ROOT / "tests/backends/conformance.py", "Conformance")))
    for file in sorted((ROOT / "tests/backends").glob("test_*.py")):
        for node in _classes(file):
            if any(isinstance(base, ast.Name) and base.id == "Conformance" for base in node.bases):
                found[_backend(node)] = _tier(node) or suite
    return found


def _classes(file: Path, name: str = "") -> Iterator[ast.ClassDef]:
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef) and name in ("", node.name):
            yield node


def _tier(node: ast.ClassDef) -> str:
    """The tier among `@pytest.mark.<name>` decorators; empty when there is none."""
    marks = [mark.attr for mark in node.decorator_list if isinstance(mark, ast.Attribute)]
    return next((mark for mark in marks if mark in TIERS), "")


def _backend(node: ast.ClassDef) -> str:
    values = [
        part.value.value
        for part in node.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant) and part.targets[0].id == "backend"  # type: ignore[attr-defined]
    ]
    return str(values[0])


def support() -> str:
    known = tiers()
    rows = [
        (HARDWARE[name], f"`{name}`", TIERS.get(known.get(name, ""), NOT_YET).format(where=WHERE.get(name, "")))
        for name in ORDER
    ]
    return _table(("Hardware", "Backend", "State"), rows)


def commands() -> str:
    rows = []
    for name, command in cli.commands.items():
        arguments = [
            param.make_metavar(click.Context(command)) for param in command.params if isinstance(param, click.Argument)
        ]
        rows.append((f"`{' '.join(['localllm', name, *arguments])}`", command.get_short_help_str(100)))
    return _table(("Command", "What it does"), rows)


def settings() -> str:
    rows = []
    for setting in config.describe():
        default = "" if setting.default in ("", ()) else f"`{setting.default}`"
        rows.append((f"`{setting.name}`", default, f"`{setting.env}`", setting.meaning))
    return _table(("Setting", "Default", "Variable", "Meaning"), rows)


def architectures() -> str:
    names = sorted(file.stem for file in (ROOT / "backends/pytorch/models").glob("[!_]*.py"))
    return ", ".join(f"`{name}`" for name in names)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {
    "support": support,
    "commands": commands,
    "settings": settings,
    "architectures": architectures,
}


def main() -> int:
    file = ROOT / "README.md"
    before = file.read_text("utf-8")
    after = REGION.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], before)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("README.md has stale tables: run python scripts/tables.py", file=sys.stderr)
        return int(after != before)
    file.write_text(after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
