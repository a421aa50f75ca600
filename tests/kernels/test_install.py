"""Without a compiler the package installs, reports missing kernels, and computes with the references."""

from __future__ import annotations

import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from localllm.app.version import VERSION
from localllm.kernels.compiled.library import CPU_VARIABLE, LibraryMissing, find_library

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(not (shutil.which("cmake") and shutil.which("ninja")), reason="cmake and ninja are not installed")
def test_a_wheel_builds_without_a_compiler(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    tools = tmp_path / "tools"  # cmake finds these, and no compiler
    tools.mkdir()
    for tool in ("cmake", "ninja"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    built = [f"--config-settings=build-dir={tmp_path / 'build'}", "--wheel-dir", str(tmp_path), str(ROOT)]
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")} | {
        "PATH": str(tools)
    }
    done = subprocess.run(pip + built, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"localllm-{VERSION}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert "localllm/kernels/ops/norm.py" in names
    assert {f"localllm/{part}/py.typed" for part in ("app", "backends", "engine", "kernels")} <= set(names)
    assert not [name for name in names if name.endswith((".so", ".cpp", ".h"))]


@pytest.mark.parametrize(("version", "output"), [(VERSION, "those of the wheel"), ("0.0.1", "no C++20 compiler")])
def test_the_set_up_takes_the_kernels_of_a_wheel(version: str, output: str, tmp_path: Path) -> None:
    for file in ("scripts/kernels", "app/version.py"):
        (tmp_path / file).parent.mkdir()
        shutil.copy(ROOT / file, tmp_path / file)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "dist").mkdir()
    information = f"localllm-{version}.dist-info"
    with zipfile.ZipFile(tmp_path / "dist" / f"localllm-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("localllm/kernels/cpu/localllm_cpu.so", "compiled")
        wheel.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: localllm\nVersion: {version}\n")
        wheel.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{information}/RECORD", "")
    environment = os.environ | {"CXX": str(tmp_path / "none"), "CONFIGURE": "false"}
    done = subprocess.run([tmp_path / "scripts" / "kernels"], env=environment, text=True, capture_output=True)
    assert output in done.stdout, done
    assert (tmp_path / "build" / "kernels" / "localllm_cpu.so").is_file() == (version == VERSION)


def localllm(*arguments: str, library: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localllm.app.cli", *arguments]
    environment = os.environ | {CPU_VARIABLE: library}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_a_variable_that_names_no_library_ends_the_command(tmp_path: Path) -> None:
    done = localllm("doctor", library=str(tmp_path / "none.so"))
    assert done.returncode == 2
    assert f"{CPU_VARIABLE} names {tmp_path / 'none.so'}, which is not a file" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_kernels_are_reported_with_the_command_that_builds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CPU_VARIABLE, raising=False)
    monkeypatch.setattr("localllm.kernels.compiled.library._KERNELS", tmp_path)
    with pytest.raises(LibraryMissing, match=r"no C\+\+20 compiler .* install one .* make build"):
        find_library()


def test_a_library_that_torch_cannot_load_is_missing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    ops = json.loads(localllm("doctor", "--ops", "--json", library=str(broken)).stdout)["ops"]
    assert {row["cpu"] for row in ops.values()} == {"reference"}


def test_a_library_of_another_version_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pytest.importorskip("localllm.kernels.cpu", exc_type=ImportError)
    monkeypatch.setattr(cpu, "OPS_WITHOUT_RESULT", [*cpu.OPS_WITHOUT_RESULT, "of_tomorrow"])
    with pytest.raises(LibraryMissing, match="lacks of_tomorrow: run make build again"):
        cpu._load(find_library())


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="there is no Triton for it")
def test_triton_is_installed_for_its_tests() -> None:
    """Tests of Triton are skipped if it is missing; this test reports that."""
    assert find_spec("triton") is not None


def test_a_cuda_library_of_another_version_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU library takes the place of a CUDA library without the required ops."""
    pytest.importorskip("localllm.kernels.cpu", exc_type=ImportError)
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(find_library()))
    with pytest.raises(LibraryMissing, match=r"lacks .*small_batch.*: run make build CUDA=1 again"):
        import_module("localllm.kernels.cuda")


def test_the_schemas_are_registered_before_the_cuda_library() -> None:
    """The CUDA library implements ops that the CPU library defines. Without the CPU library both are missing."""
    pytest.importorskip("localllm.kernels.cpu", exc_type=ImportError)
    script = """
import sys, torch
torch.ops.load_library = lambda file, load=torch.ops.load_library: load(file) if "cpu" in str(file) else None
try:
    import localllm.kernels.cuda
except ImportError as error:
    print(error, "localllm.kernels.cpu" in sys.modules, hasattr(torch.ops.localllm, "gate"))
"""
    environment = os.environ | {"LOCALLLM_CUDA_LIBRARY": __file__}
    done = subprocess.run([sys.executable, "-c", script], env=environment, text=True, capture_output=True)
    assert done.stdout.endswith("run make build CUDA=1 again True True\n"), done


def test_the_ops_of_the_cuda_library_are_named() -> None:
    folder = ROOT / "kernels" / "cuda"
    called = {
        op for file in folder.rglob("*.py") for op in re.findall(r"torch\.ops\.localllm\.(\w+)", file.read_text())
    }
    (own,) = re.findall(r"^CUDA_OPS = (\([^)]*\))", (folder / "__init__.py").read_text(), re.MULTILINE)
    assert called - {"append", "store", "prefill_attention"} == set(ast.literal_eval(own))
