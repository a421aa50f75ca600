"""The registry: honest probes on this machine and on made-up ones, and which backend is taken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm import backends
from localllm.backends import cuda, hip, llamacpp, mlx, npu, xpu
from localllm.engine.errors import ModelRefused
from localllm.engine.runner import DeviceInfo, Unavailable


def test_every_backend_answers_with_its_own_name_and_imports_no_tensor_library() -> None:
    before = set(sys.modules)
    answers = backends.probe_all()
    assert [answer.backend for answer in answers] == list(backends.ORDER)
    assert all(answer.reason for answer in answers if isinstance(answer, Unavailable))
    new = set(sys.modules) - before
    assert not {"torch", "mlx", "llama_cpp", "torch_npu", "triton"} & new
    for answer in answers:
        if isinstance(answer, DeviceInfo):
            assert {"accepts", "open", "read_bandwidth"} <= set(dir(backends.load(answer.backend)))
            assert 0 < answer.free <= answer.memory


class Machine:
    """A table of backends that can be written down."""

    def __init__(self, answers: dict[str, str], refuses: dict[str, str] | None = None, second: str = "") -> None:
        self.answers, self.refuses, self.second = answers, refuses or {}, second

    def load(self, name: str) -> Any:
        reason = self.answers.get(name, "not there")
        found = (
            Unavailable(name, reason)
            if reason
            else DeviceInfo(name, f"{name} thing", 2, 1, second_choice=name == self.second)
        )
        return SimpleNamespace(name=name, probe=lambda: found, accepts=lambda files: self.refuses.get(name, ""))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    made: Machine = request.param
    monkeypatch.setattr(backends, "load", made.load)
    return made


@pytest.mark.parametrize("machine", [Machine({"hip": "", "cpu": ""})], indirect=True)
def test_the_first_that_works_is_taken_and_says_why(machine: Machine) -> None:
    choice = backends.choose()
    assert choice.info.backend == "hip"
    assert choice.reason == "hip is the first that works here; not cuda"
    assert backends.choose("cpu").reason == "cpu was asked for"


@pytest.mark.parametrize("machine", [Machine({"cuda": "", "cpu": ""}, {"cuda": "no such weights"})], indirect=True)
def test_one_that_cannot_load_these_files_is_passed_over(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine")
    assert backends.choose().info.backend == "cuda"
    assert backends.choose(files=files).info.backend == "cpu"
    with pytest.raises(ModelRefused, match=r"mine cannot be run here.*no such weights"):
        backends.choose("cuda", files)


@pytest.mark.parametrize("machine", [Machine({"cuda": "", "cpu": ""}, {"cuda": "no", "cpu": "never"})], indirect=True)
def test_files_that_every_backend_refuses(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine")
    with pytest.raises(ModelRefused, match=r"cuda: no; cpu: never"):
        backends.choose(files=files)


@pytest.mark.parametrize("machine", [Machine({"mlx": "", "cpu": ""}, {"cpu": "no"}, second="mlx")], indirect=True)
def test_a_second_choice_runs_where_nothing_else_does(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine")
    assert backends.choose().info.backend == "cpu"
    assert backends.choose(files=files).info.backend == "mlx"
    assert backends.choose(files=files).reason == "nothing else takes this model; mlx does, if slowly"
    assert backends.choose("mlx").reason == "mlx was asked for"


@pytest.mark.parametrize("machine", [Machine({"mlx": ""}, second="mlx")], indirect=True)
def test_a_second_choice_is_better_than_none(machine: Machine) -> None:
    assert backends.choose().reason == "nothing else runs here; mlx does, if slowly"


@pytest.mark.parametrize("machine", [Machine({})], indirect=True)
def test_none_at_all_gives_every_reason(machine: Machine) -> None:
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose()
    assert list(caught.value.reasons) == list(backends.ORDER)


def test_unknown_names_get_near_matches() -> None:
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose("cudaa")
    assert caught.value.hint == "did you mean cuda?"


def reason(answer: DeviceInfo | Unavailable) -> str:
    assert isinstance(answer, Unavailable)
    return answer.reason


def test_amd_gpus_are_named_by_their_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip, "DRIVER", tmp_path)
    monkeypatch.setattr(hip, "NODES", tmp_path)
    assert "shows no GPU" in reason(hip.probe())
    for node, version in enumerate((0, 90402, 110001, 90010)):
        (tmp_path / str(node)).mkdir()
        (tmp_path / str(node) / "properties").write_text(f"cpu_cores_count 0\ngfx_target_version {version}\n")
    assert "AMD GPU gfx942, gfx1101, gfx90a is present" in reason(hip.probe())


def test_intel_gpus_are_counted_by_vendor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xpu, "RENDER_NODES", tmp_path)
    assert "no Intel GPU" in reason(xpu.probe())
    for node, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de")):
        (tmp_path / node / "device").mkdir(parents=True)
        (tmp_path / node / "device" / "vendor").write_text(f"{vendor}\n")
    assert reason(xpu.probe()).startswith("1 Intel GPU present")


def test_npus_need_driver_device_and_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "DEVICES", tmp_path)
    assert "no Ascend driver" in reason(npu.probe())
    (tmp_path / "davinci_manager").touch()
    assert "shows no NPU" in reason(npu.probe())
    (tmp_path / "davinci0").touch()
    monkeypatch.setattr(npu, "find_spec", lambda name: None)
    assert reason(npu.probe()) == "1 Ascend NPU present, but torch_npu is not installed"
    monkeypatch.setattr(npu, "find_spec", lambda name: name)
    assert "no NPU runner yet" in reason(npu.probe())


def test_mlx_is_for_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(mlx, "find_spec", lambda name: None)
    assert reason(mlx.probe()) == "Apple silicon is present, but mlx and mlx_lm are not installed"
    monkeypatch.setattr(mlx, "find_spec", lambda name: name)
    monkeypatch.setattr(mlx, "version", lambda package: "0.32.4")
    found = mlx.probe()
    assert isinstance(found, DeviceInfo)
    assert found.main_memory
    assert not found.second_choice


def test_mlx_elsewhere_is_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(mlx, "find_spec", lambda name: None)
    assert "mlx and mlx_lm are not installed" in reason(mlx.probe())
    monkeypatch.setattr(mlx, "find_spec", lambda name: name)
    for packages, told in (
        ({"mlx": "1"}, "MLX's CPU device"),
        ({"mlx": "1", "mlx-cuda-13": "1"}, "NVIDIA GPU through MLX"),
    ):
        monkeypatch.setattr(mlx, "_version", lambda package, packages=packages: packages.get(package, ""))
        found = mlx.probe()
        assert isinstance(found, DeviceInfo)
        assert found.name == told
        assert found.second_choice


def test_llama_cpp_is_looked_for_and_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: name)
    assert "no llama.cpp runner yet" in reason(llamacpp.probe())


def features(found: object) -> Mapping[str, str]:
    assert isinstance(found, DeviceInfo)
    return found.features


class FakeCuda:
    """The few calls of libcuda that the probe makes; the management library is not there."""

    def __init__(self, status: int = 0, count: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        self.status, self.count, self.capability = status, count, capability

    def load(self, name: str) -> FakeCuda:
        if name != "libcuda.so.1":
            raise OSError(name)
        return self

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetName(self, title: Any, length: int, device: int) -> int:
        title.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: int) -> int:
        total._obj.value = 141 * 2**30
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        value._obj.value = self.capability[number - 75]
        return 0


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (FakeCuda(status=100), "error 100"),
        (FakeCuda(count=0), "shows no GPU"),
        (FakeCuda(capability=(7, 5)), "NVIDIA H200 has compute capability 7.5, at least 8.0 is needed"),
    ],
)
def test_nvidia_gpus_that_cannot_be_used(fake: FakeCuda, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", fake.load)
    assert says in reason(cuda.probe())


def test_an_nvidia_gpu_needs_a_torch_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", FakeCuda().load)
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(cuda, "find_spec", lambda name: torch if name == "torch" else None)
    assert "the installed torch was built without CUDA" in reason(cuda.probe())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    found = cuda.probe()
    assert isinstance(found, DeviceInfo)
    assert (found.name, found.memory, found.free) == ("NVIDIA H200", 141 * 2**30, 141 * 2**30)
    assert found.features["GPUs"] == "2, the first is used"
    library = tmp_path / "localllm_cuda.so"
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(library))
    said = f"none, references compute what they would, slower: LOCALLLM_CUDA_LIBRARY names {library}, which is no file"
    assert features(cuda.probe())["kernels"] == said
    library.touch()
    assert features(cuda.probe())["kernels"] == str(library)
