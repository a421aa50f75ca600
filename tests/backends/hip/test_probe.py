"""The probe of AMD GPUs on recorded machines."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.backends import hip
from localllm.backends.hip import gpus, installation
from localllm.backends.pytorch.gpu import installation as shared
from localllm.engine.runner import DeviceInfo, Unavailable

from ..sysfs import AMD, NVIDIA, Pci, write_machine
from .kfd import GIB, Radeon, radeon, write_nodes

RX_7900 = radeon("0000:03:00.0", 0x744C, 110000, "renderD128", 24 * GIB, used=GIB, uuid=0xAB12)
RX_9070 = radeon("0000:04:00.0", 0x7550, 120001, "renderD129", 16 * GIB, uuid=0xCD34)
RX_580 = radeon("0000:05:00.0", 0x67DF, 80003, "renderD130", 8 * GIB)
MI300X = radeon("0000:05:00.0", 0x74A1, 90402, "renderD128", 192 * GIB, product="AMD Instinct MI300X")
STRIX_HALO = radeon("0000:c4:00.0", 0x1586, 110501, "renderD128", 62 * GIB, carved_out=GIB // 2, borrowed=2 * GIB)
RYZEN = radeon("0000:0f:00.0", 0x164E, 100306, "renderD128", GIB // 2, carved_out=GIB // 2)
PHOENIX = radeon("0000:c1:00.0", 0x15BF, 110003, "renderD128", 14 * GIB, carved_out=GIB)
OLD_DRIVER = radeon("0000:03:00.0", 0x73BF, 0, "renderD128", 16 * GIB)
PASSED_ON = Pci("0000:03:00.0", AMD, 0x744C, "vfio-pci")
UNKNOWN = Pci("0000:03:00.0", AMD, 0x7999, "amdgpu", "renderD128")
RTX_4060 = Pci("0000:01:00.0", NVIDIA, 0x28A0, "nvidia", "renderD131")
RELEASE = "6.14.0-29-generic"
VERSION = "__version__ = '2.13.0+rocm7.1'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.1.25424'\n"

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A function that makes a machine with these devices, Linux 6.14 and torch for AMD GPUs."""
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text(VERSION)
    for target in ("gfx90a", "gfx942", "gfx1100", "gfx1151", "gfx1201"):
        file = torch / "lib" / "rocblas" / "library" / f"TensileLibrary_lazy_{target}.dat"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "triton" / "backends" / "amd").mkdir(parents=True)
    monkeypatch.setattr(installation, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(installation, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(shared, "compiler_problem", str)
    monkeypatch.setattr(shared, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    monkeypatch.setattr("platform.release", lambda: RELEASE)
    monkeypatch.setattr(gpus, "main_memory", lambda: (64 * GIB, 48 * GIB))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", installation.OVERRIDE):
        monkeypatch.delenv(variable, raising=False)

    def make(*devices: Pci | Radeon, npu: str = "") -> None:
        radeons = [one for one in devices if isinstance(one, Radeon)]
        write_machine(tmp_path, *(one.pci if isinstance(one, Radeon) else one for one in devices), npu=npu)
        if radeons:
            write_nodes(tmp_path, radeons)

    return make


def reason() -> str:
    result = hip.probe()
    assert isinstance(result, Unavailable)
    return result.reason


def device() -> DeviceInfo:
    result = hip.probe()
    assert isinstance(result, DeviceInfo), result
    return result


def test_desktop_with_a_radeon(machine: Machine) -> None:
    machine(RX_7900)
    info = device()
    assert (info.name, info.memory, info.free) == ("AMD GPU (gfx1100)", 24 * GIB, 23 * GIB)
    assert info.features["target"] == "gfx1100"
    assert info.features["GPUs"] == "1, the first is used"
    assert info.features["ROCm"] == "7.1.25424"
    assert installation.visible()[0].multiplications == 256 * 96 * 2.5e9
    assert info.features["driver"] == f"amdgpu of Linux {RELEASE}"
    assert info.features["Triton"] == "yes"
    assert "never on an AMD GPU" in info.features["tested"]
    assert not info.main_memory


def test_server_with_an_instinct(machine: Machine) -> None:
    machine(MI300X)
    assert device().name == "AMD Instinct MI300X (gfx942)"
    assert installation.visible()[0].version == (9, 4, 2)


def test_processor_with_graphics_uses_the_main_memory(machine: Machine) -> None:
    machine(STRIX_HALO)
    info = device()
    assert info.features["target"] == "gfx1151"
    assert info.main_memory
    assert (info.memory, info.free) == (62 * GIB, 48 * GIB), "the main memory has 48 GiB free"
    assert info.features["memory"] == "shared with all programs; 512 MiB are for the GPU alone"


def test_old_driver_gives_only_the_carve_out(machine: Machine) -> None:
    machine(replace(STRIX_HALO, memory=GIB // 2, used=GIB // 4))
    assert (device().memory, device().free) == (GIB // 2, GIB // 4)


def test_machine_without_an_amd_gpu(machine: Machine) -> None:
    machine(RTX_4060)
    assert reason().startswith("no AMD GPU (")


def test_npu_of_a_processor_is_for_nobody(machine: Machine) -> None:
    machine(RTX_4060, npu=installation.PROCESSORS)
    assert reason().startswith("torch has no kernels for the AMD NPU: GGUF models run on the GPU with llama.cpp")


def test_gpu_of_a_virtual_machine(machine: Machine) -> None:
    machine(PASSED_ON)
    assert reason() == "AMD GPU 744c is present, but its driver is vfio-pci, not amdgpu"


def test_driver_is_too_old_for_the_gpu(machine: Machine) -> None:
    machine(UNKNOWN)
    assert (
        reason()
        == f"AMD GPU 7999 is present, but amdgpu of Linux {RELEASE} cannot compute on it: update Linux or amdgpu"
    )


def test_driver_is_too_old_for_rocm(machine: Machine) -> None:
    machine(OLD_DRIVER)
    assert reason() == f"amdgpu of Linux {RELEASE} is too old for ROCm: update Linux or amdgpu"


@pytest.mark.parametrize(("gpu", "target"), [(RX_580, "gfx803"), (PHOENIX, "gfx1103")])
def test_gpu_without_kernels(gpu: Radeon, target: str, machine: Machine) -> None:
    machine(gpu)
    beginning, _, command = reason().partition(" with llama.cpp and Vulkan: ")
    assert beginning == f"torch has no kernels for AMD GPU ({target}): GGUF models run on the GPU"
    assert "-DGGML_VULKAN=ON" in command


def test_targets_of_a_torch_whose_libraries_are_elsewhere(machine: Machine, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "torch" / "lib")
    machine(replace(RX_7900, target=100300))
    assert device().features["target"] == "gfx1030"


def test_graphics_of_the_processor_before_the_card(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the first GPU of ROCm, for which it has no kernels."""
    machine(RYZEN, RX_9070)
    assert reason().endswith("gfx1036, for which it has no kernels: set HIP_VISIBLE_DEVICES=1 for AMD GPU (gfx1201)")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
    assert reason().endswith("set HIP_VISIBLE_DEVICES=1 for AMD GPU (gfx1201)")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert (device().features["target"], device().memory) == ("gfx1201", 16 * GIB)


@pytest.mark.parametrize(
    ("variables", "targets"),
    [
        ({"HIP_VISIBLE_DEVICES": "1,0"}, ["gfx1201", "gfx1100"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["gfx1201"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000cd34, 0"}, ["gfx1201", "gfx1100"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx1201"]),
        ({"HIP_VISIBLE_DEVICES": "0,7,1"}, ["gfx1100"]),
        ({"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}, ["gfx1100", "gfx1100"]),
    ],
)
def test_variables_of_rocm(
    variables: dict[str, str], targets: list[str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(RX_7900, RX_9070)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert [gpu.target for gpu in installation.visible()] == targets
    assert device().features["GPUs"] == f"{len(targets)}, the first is used"


@pytest.mark.parametrize("value", ["", "-1", "2"])
def test_variable_that_selects_nothing(value: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(RX_7900, RX_9070)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", value)
    assert reason() == f"HIP_VISIBLE_DEVICES={value} selects none of 2 AMD GPUs"


def test_user_without_permission(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(RX_7900)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "kfd and " in reason()
    assert reason().endswith("renderD128: add your user to the groups render and video, log in again")


@pytest.mark.parametrize("node", ["kfd", "dri/renderD128"])
def test_container_without_a_device(node: str, machine: Machine, tmp_path: Path) -> None:
    machine(RX_7900)
    (tmp_path / "dev" / node).unlink()
    assert f"{node}: a container needs --device" in reason()


def test_torch_of_another_device(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(RX_7900)
    (tmp_path / "torch" / "version.py").write_text("hip: Optional[str] = None\n")
    assert reason().endswith("the installed torch was built without ROCm: install a torch with ROCm (see pytorch.org)")
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    assert reason().endswith("torch is not installed")


def test_triton_needs_its_backend_for_amd(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(RX_7900)
    (tmp_path / "triton" / "backends" / "amd").rmdir()
    assert "no backend for AMD GPUs" in device().features["Triton"]
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    assert installation.triton_problem() == "Triton is not installed"


def test_unreadable_nodes_are_no_gpus(machine: Machine, tmp_path: Path) -> None:
    """A container sees the nodes of GPUs that it has no right to: their properties are empty."""
    machine(RX_7900, RX_9070)
    (tmp_path / "sys" / gpus.NODES / "1" / "properties").write_text("")
    assert [gpu.target for gpu in installation.visible()] == ["gfx1201"]


def test_probe_imports_no_torch() -> None:
    code = "import sys; from localllm.backends import hip; hip.probe(); print({'torch', 'triton'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
