"""The probe of Intel GPUs on recorded machines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.backends import xpu
from localllm.backends.pytorch.gpu import installation as shared
from localllm.backends.xpu import installation
from localllm.engine.runner import DeviceInfo, Unavailable

from ..sysfs import INTEL, NVIDIA, Pci, write_machine

GIB = 2**30
B580 = Pci("0000:03:00.0", INTEL, 0xE20B, "xe", "renderD128", 16 * GIB)
A770 = Pci("0000:04:00.0", INTEL, 0x56A0, "i915", "renderD129", 16 * GIB)
IRIS_XE = Pci("0000:00:02.0", INTEL, 0x46A6, "i915", "renderD130")
LUNAR_LAKE = Pci("0000:00:02.0", INTEL, 0x64A0, "xe", "renderD128")
RTX_4060 = Pci("0000:01:00.0", NVIDIA, 0x28A0, "nvidia", "renderD131")
AUDIO = Pci("0000:05:00.0", INTEL, 0xE2F7, "snd_hda_intel", kind="0x040300")

Machine = Callable[..., None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A function that makes a machine with these devices, Linux 6.14, Level Zero and torch for Intel GPUs."""
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "lib" / "libtorch_xpu.so").touch()
    (tmp_path / installation.LEVEL_ZERO).touch()
    monkeypatch.setattr(installation, "SYSFS", tmp_path / "sys")
    monkeypatch.setattr(installation, "NODES", tmp_path / "dev" / "dri")
    monkeypatch.setattr(installation, "LIBRARIES", (tmp_path,))
    monkeypatch.setattr(shared, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    monkeypatch.setattr("platform.release", lambda: "6.14.0-29-generic")
    for variable in ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR"):
        monkeypatch.delenv(variable, raising=False)

    def make(*devices: Pci, npu: str = "") -> None:
        write_machine(tmp_path, *devices, npu=npu)

    return make


def reason() -> str:
    result = xpu.probe()
    assert isinstance(result, Unavailable)
    return result.reason


def device() -> DeviceInfo:
    result = xpu.probe()
    assert isinstance(result, DeviceInfo), result
    return result


def test_desktop_with_an_arc_card(machine: Machine) -> None:
    """The region of the B580's 12 GiB has 16 GiB. Its sound device is no GPU."""
    machine(B580, AUDIO)
    info = device()
    assert (info.name, info.memory, info.free) == ("Intel Arc B-series (e20b)", 12 * GIB, 12 * GIB)
    assert info.features["GPUs"] == "1, the first is used"
    assert info.features["driver"] == "xe of Linux 6.14.0-29-generic"
    assert "never on an Intel GPU" in info.features["tested"]
    assert "resizable BAR" not in info.features


def test_machine_without_an_intel_gpu(machine: Machine) -> None:
    machine(RTX_4060)
    assert reason().startswith("no Intel GPU")


def test_hybrid_laptop_whose_intel_graphics_torch_does_not_serve(machine: Machine) -> None:
    machine(IRIS_XE, RTX_4060)
    beginning, _, command = reason().partition(" with llama.cpp and Vulkan: ")
    assert beginning == "torch has no kernels for Intel graphics (46a6): GGUF models run on the GPU"
    assert "-DGGML_VULKAN=ON" in command


def test_integrated_graphics_of_a_new_processor_use_the_main_memory(machine: Machine) -> None:
    machine(LUNAR_LAKE)
    info = device()
    assert info.name == "Intel Lunar Lake graphics (64a0)"
    assert info.main_memory
    assert 0 < info.free <= info.memory


def test_two_cards_beside_integrated_graphics(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves out integrated graphics beside a card. The variables count the GPUs that the driver lists."""
    machine(LUNAR_LAKE, A770, B580)
    assert device().name == "Intel Arc B-series (e20b)"
    assert device().features["GPUs"] == "2, the first is used"
    monkeypatch.setenv("ZE_AFFINITY_MASK", "1")
    assert device().name == "Intel Arc A-series (56a0)"
    assert device().memory == 16 * GIB
    monkeypatch.setenv("ZE_AFFINITY_MASK", "2")
    assert device().main_memory
    monkeypatch.setenv("ZE_AFFINITY_MASK", "3")
    assert reason() == "ZE_AFFINITY_MASK=3 selects none of 3 Intel GPUs"


@pytest.mark.parametrize(
    ("selector", "name"),
    [
        ("level_zero:1", "Intel Arc A-series (56a0)"),
        ("opencl:*;level_zero:gpu", "Intel Arc B-series (e20b)"),
        ("*:gpu", "Intel Arc B-series (e20b)"),
        ("opencl:gpu", ""),
        ("level_zero:7", ""),
    ],
)
def test_selector_of_sycl(selector: str, name: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(B580, A770)
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", selector)
    if name:
        assert device().name == name
    else:
        assert reason() == f"ONEAPI_DEVICE_SELECTOR={selector} selects no Intel GPU of Level Zero"


def test_user_without_permission(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(B580)
    monkeypatch.setattr("os.access", lambda path, mode: "renderD" not in str(path))
    assert reason().startswith("no permission for ")
    assert "renderD128: add your user to the group render" in reason()


def test_container_without_the_device(machine: Machine, tmp_path: Path) -> None:
    machine(B580)
    (tmp_path / "dev" / "dri" / "renderD128").unlink()
    assert "a container needs --device" in reason()


@pytest.mark.parametrize(
    ("driver", "release", "expected"),
    [
        ("", "6.8.0-45-generic", "Linux 6.8.0-45-generic is too old for it: update to Linux 6.12 or newer"),
        ("", "6.14.0-29-generic", "its driver is missing, not i915 or xe"),
        ("vfio-pci", "6.14.0-29-generic", "its driver is vfio-pci, not i915 or xe"),
    ],
)
def test_card_without_a_driver(
    driver: str, release: str, expected: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(Pci(B580.address, INTEL, B580.device, driver))
    monkeypatch.setattr("platform.release", lambda: release)
    assert reason() == f"Intel Arc B-series (e20b) is present, but {expected}"


def test_machine_without_level_zero(machine: Machine, tmp_path: Path) -> None:
    machine(B580)
    (tmp_path / installation.LEVEL_ZERO).unlink()
    assert "apt install libze-intel-gpu1" in reason()


def test_torch_without_xpu(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(B580)
    (tmp_path / "torch" / "lib" / "libtorch_xpu.so").unlink()
    assert reason().endswith("the installed torch was built without XPU: install a torch with XPU (see pytorch.org)")
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    assert reason().endswith("torch is not installed")


def test_firmware_without_resizable_bar(machine: Machine) -> None:
    machine(Pci(B580.address, INTEL, B580.device, "xe", "renderD128"))
    info = device()
    assert info.memory == 0, "unknown"
    assert info.features["resizable BAR"].startswith("off")


def test_npu_without_a_gpu(machine: Machine) -> None:
    machine(RTX_4060, npu=INTEL)
    assert reason().startswith("torch has no kernels for the Intel NPU: GGUF models run on the GPU with llama.cpp")


def test_triton_needs_its_backend_for_intel(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(B580)
    assert "no backend for Intel GPUs" in device().features["Triton"]
    (tmp_path / "triton" / "backends" / "intel").mkdir(parents=True)
    monkeypatch.setattr(shared, "compiler_problem", str)
    assert device().features["Triton"] == "yes"
    monkeypatch.setattr(shared, "find_spec", lambda name: None)
    assert installation.triton_problem() == "Triton is not installed"


def test_probe_imports_no_torch() -> None:
    code = "import sys; from localllm.backends import xpu; xpu.probe(); print({'torch', 'triton'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
