"""The wheel with CUDA kernels (make wheel), and the tools that build it. No test needs a GPU.

The slow tests inspect the wheel in dist. They are skipped if it is not built; make test-all builds it first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from localllm.app.version import VERSION

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import cuda_toolkit, tag_wheel
from scripts.cuda_resources import Usage, base_names, cuobjdump, occupancy, usages

sys.path.insert(0, str(Path(__file__).parent))
from test_cuda_compile import ARCHITECTURES, KERNELS

ROOT = Path(__file__).resolve().parents[2]
HOPPER_ONLY = {"prefill_kernel", "one_row_hopper_kernel", "step_kernel"}  # other architectures need not have them
# The functions of the CUDA runtime that the library may call. CUDA 12.8 and 13 both have them, with the same arguments.
RUNTIME = {
    "__cudaGetKernel",
    "__cudaLaunchKernel",
    "__cudaPopCallConfiguration",
    "__cudaPushCallConfiguration",
    "__cudaRegisterFatBinary",
    "__cudaRegisterFatBinaryEnd",
    "__cudaRegisterFunction",
    "__cudaRegisterVar",
    "__cudaUnregisterFatBinary",
    "cudaDeviceGetAttribute",
    "cudaFuncSetAttribute",
    "cudaGetDevice",
    "cudaGetDriverEntryPointByVersion",
    "cudaGetErrorString",
    "cudaGetLastError",
    "cudaLaunchKernelExC",
    "cudaMalloc",
    "cudaMemsetAsync",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cudaStreamSynchronize",
    "cudaThreadExchangeStreamCaptureMode",
}


def script(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("#!/bin/sh\n" + text)
    file.chmod(0o755)
    return file


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A stand-in of CUDA 13: its cicc writes PTX 9.0. Returns nvcc, a script outside the toolkit."""
    root = tmp_path / "cuda"
    script(root / "bin" / "nvcc", 'echo "release 13.0, V13.0.88"')
    script(root / "bin" / "ptxas", 'echo "release 13.0, V13.0.88"')
    script(root / "bin" / "fatbinary", "")
    script(
        root / "nvvm" / "bin" / "cicc",
        'for out; do :; done; printf ".version 9.0\\n.target sm_80\\n.version_of_text\\n" > "$out"; exit ${CODE:-0}',
    )
    (root / "nvvm" / "libdevice").mkdir()
    (root / "include").mkdir()
    echo = f'if [ "$1" = --dryrun ]; then echo "#\\$ _HERE_={root}/bin" >&2; else echo "release 13.0"; fi'
    return script(tmp_path / "local" / "nvcc", echo)


def test_toolkit_writes_ptx_of_cuda_12(installed: Path, tmp_path: Path) -> None:
    ptxas = script(tmp_path / "ptxas", 'echo "release 12.8, V12.8.93"')
    for _ in range(2):  # the second call replaces the folder
        nvcc = cuda_toolkit.make_toolkit(tmp_path / "toolkit", str(installed), ptxas)
    assert nvcc == tmp_path / "toolkit" / "bin" / "nvcc"
    assert not nvcc.is_symlink()
    assert cuda_toolkit.release(nvcc.parent / "ptxas") == "12.8"
    assert (nvcc.parent / "fatbinary").resolve() == tmp_path / "cuda" / "bin" / "fatbinary"
    assert {entry.name for entry in (tmp_path / "toolkit").iterdir()} == {"bin", "nvvm", "include"}
    assert {entry.name for entry in (tmp_path / "toolkit" / "nvvm").iterdir()} == {"bin", "libdevice"}
    output = tmp_path / "kernel.ptx"
    cicc = tmp_path / "toolkit" / "nvvm" / "bin" / "cicc"
    subprocess.run([cicc, "--arch", "sm_80", "a.cu", "-o", output], check=True)
    assert output.read_text() == ".version 8.7\n.target sm_80\n.version_of_text\n"
    failed = subprocess.run([cicc, "a.cu", "-o", output], env=os.environ | {"CODE": "3"})
    assert failed.returncode == 3


def test_toolkit_of_cuda_12_is_used_directly(tmp_path: Path) -> None:
    nvcc = script(tmp_path / "nvcc", 'echo "release 12.8, V12.8.93"')
    assert cuda_toolkit.make_toolkit(tmp_path / "toolkit", str(nvcc), tmp_path / "ptxas") == nvcc
    assert not (tmp_path / "toolkit").exists()


def test_assembler_of_another_release_is_refused(installed: Path, tmp_path: Path) -> None:
    ptxas = script(tmp_path / "ptxas", 'echo "release 12.4, V12.4.1"')
    with pytest.raises(SystemExit, match=r"ptxas is of CUDA 12\.4; 12\.8 is needed"):
        cuda_toolkit.make_toolkit(tmp_path / "toolkit", str(installed), ptxas)


class TestTags:
    """tag_wheel with stand-ins of auditwheel and wheel."""

    @pytest.fixture(autouse=True)
    def _tools(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.audit = {"external_libs": {"libtorch_cpu.so": None}, "sym_tag": "manylinux_2_34_x86_64"}
        self.commands: list[tuple[str, ...]] = []
        monkeypatch.setattr(tag_wheel, "_run", self._answer)

    def _answer(self, *command: str) -> str:
        self.commands.append(command)
        return json.dumps(self.audit) if command[0] == "auditwheel" else "tagged.whl\n"

    def wheel(self, folder: Path, names: tuple[str, ...] = tag_wheel.LIBRARIES) -> Path:
        with ZipFile(folder / "localllm-1-py3-none-linux_x86_64.whl", "w") as archive:
            for name in names:
                archive.writestr(name, "library")
        return Path(archive.filename or "")

    def test_the_tag_is_that_of_auditwheel(self, tmp_path: Path) -> None:
        wheel = self.wheel(tmp_path)
        assert tag_wheel.tag(wheel, tmp_path / "dist") == tmp_path / "dist" / "tagged.whl"
        copy = tmp_path / "dist" / wheel.name
        tagged = ("wheel", "tags", "--remove", "--platform-tag", "manylinux_2_34_x86_64", str(copy))
        assert self.commands[1:] == [tagged]

    def test_a_wheel_without_a_library_is_refused(self, tmp_path: Path) -> None:
        wheel = self.wheel(tmp_path, tag_wheel.LIBRARIES[:1])
        with pytest.raises(SystemExit, match=r"lacks localllm/kernels/cuda/localllm_cuda\.so: the build"):
            tag_wheel.tag(wheel, tmp_path / "dist")

    def test_other_problems_are_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = self.wheel(tmp_path)
        self.audit["external_libs"] = {"libtorch_cpu.so": None, "libcudart.so.13": None}
        with pytest.raises(SystemExit, match=r"need libcudart\.so\.13, which not every system has"):
            tag_wheel.tag(wheel, tmp_path / "dist")
        self.audit = {"external_libs": {}, "sym_tag": "linux_x86_64"}
        with pytest.raises(SystemExit, match="no manylinux tag fits, only linux_x86_64"):
            tag_wheel.tag(wheel, tmp_path / "dist")
        monkeypatch.setattr(tag_wheel, "MAX_BYTES", 10)
        with pytest.raises(SystemExit, match="more than 10"):
            tag_wheel.tag(wheel, tmp_path / "dist")


def test_occupancy_is_limited_by_registers_threads_and_blocks() -> None:
    assert occupancy(Usage("", "80", registers=32, local=0, threads=256)) == 1.0
    assert occupancy(Usage("", "80", registers=128, local=0, threads=256)) == 0.25
    assert occupancy(Usage("", "86", registers=128, local=0, threads=256)) == pytest.approx(1 / 3)
    assert occupancy(Usage("", "80", registers=16, local=0, threads=32)) == 0.5, "32 blocks of one warp"
    assert occupancy(Usage("", "80", registers=168, local=0, threads=384)) == 0.1875


def test_names_of_kernels_have_no_namespace() -> None:
    mangled = "_ZN8localllm4cuda39_GLOBAL__N__5d5edc7f_7_lora_cu_53c55b6112expand_tilesIfEEvNS0_8LoraStepE"
    assert base_names([mangled, "plain"]) == {mangled: "expand_tiles", "plain": "plain"}


@pytest.fixture(scope="module")
def wheel() -> Path:
    wheels = list((ROOT / "dist").glob(f"localllm-{VERSION}-py3-none-manylinux_*.whl"))
    if not wheels:
        pytest.skip("make wheel was not run")
    return max(wheels, key=lambda file: file.stat().st_mtime)


@pytest.fixture(scope="module")
def library(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ZipFile(wheel).extract(tag_wheel.LIBRARIES[1], tmp_path_factory.mktemp("wheel")))


def output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.compile
class TestWheel:
    def test_size_and_contents(self, wheel: Path) -> None:
        assert tag_wheel.size(wheel) <= tag_wheel.MAX_BYTES
        names = ZipFile(wheel).namelist()
        assert set(tag_wheel.LIBRARIES) <= set(names)
        assert not [name for name in names if name.endswith((".cpp", ".h", ".cu", ".cuh"))]

    def test_every_architecture_has_every_kernel(self, library: Path) -> None:
        kernels: dict[str, set[str]] = {}
        for usage in usages(library):
            kernels.setdefault(usage.architecture, set()).add(usage.kernel)
        assert sorted(kernels) == sorted(ARCHITECTURES)
        everywhere = kernels["80"]
        assert set(KERNELS.values()) - HOPPER_ONLY <= set(base_names(everywhere).values())
        assert set(KERNELS.values()) <= set(base_names(kernels["90a"]).values())
        for architecture, compiled in kernels.items():
            assert everywhere <= compiled, architecture

    @pytest.mark.parametrize("source", ["products/tiled/int8.cu", "products/tiled/fp8.cu"])
    def test_assembler_does_not_serialise_wgmma(self, source: str, tmp_path: Path) -> None:
        """The assembler of CUDA 12.8 writes C7515 if it puts a wait after each wgmma."""
        nvcc = ROOT / "build" / "wheel" / "toolkit" / "bin" / "nvcc"
        if not nvcc.exists():
            pytest.skip("make wheel was not run, or used an nvcc of CUDA 12.8")
        options = "-DLOCALLLM_HOPPER", "-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a"
        command = [nvcc, *options, ROOT / "kernels" / "cuda" / source, "-o", tmp_path / "out.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "C7515" not in done.stdout + done.stderr

    def test_ptx_and_machine_code_load_with_drivers_of_cuda_12(self, library: Path) -> None:
        """PTX of version 8.7, for GPUs without machine code; machine code of the assembler of CUDA 12.8."""
        ptx = output(cuobjdump(), "--dump-ptx", library)
        assert set(re.findall(r"^\.version (.*)$", ptx, re.MULTILINE)) == {cuda_toolkit.PTX_VERSION}
        assert set(re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)) == {"sm_100"}
        elf = output(cuobjdump(), "--dump-resource-usage", library)
        headers = re.findall(r"^Fatbin elf code:\n=+\narch = sm_80\ncode version = (\[.*?\])", elf, re.MULTILINE)
        assert set(headers) == {"[1,7]"}

    def test_library_calls_only_functions_of_both_runtimes(self, library: Path) -> None:
        symbols = output("nm", "--dynamic", "--undefined-only", library).split()
        assert {name for name in symbols if re.match(r"(__)?cu[a-z]*[A-Z]", name)} <= RUNTIME
        needed = re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "--dynamic", library))
        system = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "ld-linux-x86-64.so.2"}
        assert set(needed) - system == tag_wheel.FROM_TORCH

    @pytest.mark.timeout(300)
    def test_wheel_installs_without_compilers(self, wheel: Path, tmp_path: Path) -> None:
        """The PATH has neither nvcc nor a C compiler. The dependencies come from the environment of the test."""
        environment = tmp_path / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        python = environment / "bin" / "python"
        (packages,) = environment.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", packages]
        subprocess.run([*pip, wheel], check=True)
        dependencies = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "dependencies.pth").write_text("\n".join(dependencies))
        code = """
from localllm.kernels.compiled.library import find_cuda_library
from localllm.kernels.gpu.architectures import read_architectures
from localllm.kernels.triton.problem import triton_problem
import localllm.kernels.cpu, torch
print(find_cuda_library(), *read_architectures(find_cuda_library()), triton_problem(), sep="|")
"""
        empty = {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
        done = subprocess.run([python, "-c", code], env=empty, cwd=tmp_path, capture_output=True, text=True, check=True)
        path, *architectures, problem = done.stdout.strip().split("|")
        assert Path(path) == packages / tag_wheel.LIBRARIES[1]
        assert architectures == ["8.0", "8.6", "8.9", "9.0a", "10.0 and later (PTX)", "12.0"]
        assert "C compiler" in problem
        doctor = [python, "-m", "localllm.app.cli", "doctor", "--json"]
        report = json.loads(subprocess.run(doctor, env=empty, cwd=tmp_path, capture_output=True, text=True).stdout)
        (cpu,) = [status for status in report["backends"] if status["backend"] == "cpu"]
        assert not cpu["features"]["kernels"].startswith("none")
