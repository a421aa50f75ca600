"""The registry of backends: probes on this machine and on simulated machines, and the choice of a backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from localllm import backends
from localllm.backends import cpu, cuda, llamacpp, llamacpp_install, mlx
from localllm.backends import machine as machine_of_cpu
from localllm.backends.cpu.kernels import kernels
from localllm.backends.cuda.driver import Driver
from localllm.backends.llamacpp import library
from localllm.backends.llamacpp.library import BuildDevice
from localllm.engine.errors import ModelRefused
from localllm.engine.runner import DeviceInfo, Unavailable
from localllm.kernels.compiled.library import LibraryMissing
from localllm.kernels.gpu.limits import gpu_limits


def test_probes_return_their_name_and_import_no_tensor_library() -> None:
    before = set(sys.modules)
    answers = backends.probe_all()
    assert [answer.backend for answer in answers] == list(backends.ORDER)
    assert all(answer.reason for answer in answers if isinstance(answer, Unavailable))
    new = set(sys.modules) - before
    assert not {"torch", "mlx", "torch_npu", "triton"} & new  # llama.cpp itself knows the devices of its build
    for answer in answers:
        if isinstance(answer, DeviceInfo):
            assert {"accepts", "open", "plan_memory", "read_bandwidth"} <= set(dir(backends.load(answer.backend)))
            assert 0 < answer.free <= answer.memory


class Machine:
    """A simulated machine: the availability of each backend."""

    def __init__(self, answers: dict[str, str], refuses: dict[str, str] | None = None, second: str = "") -> None:
        self.answers, self.refuses, self.second = answers, refuses or {}, second

    def load(self, name: str) -> Any:
        reason = self.answers.get(name, "not there")
        result = (
            Unavailable(name, reason)
            if reason
            else DeviceInfo(name, f"{name} thing", 2, 1, second_choice=name == self.second)
        )
        return SimpleNamespace(name=name, probe=lambda: result, accepts=lambda files: self.refuses.get(name, ""))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Machine:
    made: Machine = request.param
    monkeypatch.setattr(backends, "load", made.load)
    return made


@pytest.mark.parametrize("machine", [Machine({"hip": "", "cpu": ""})], indirect=True)
def test_first_working_backend_is_chosen_with_a_reason(machine: Machine) -> None:
    choice = backends.choose()
    assert choice.info.backend == "hip"
    assert choice.reason == "hip is the first that works; not available: cuda"
    assert backends.choose("cpu").reason == "cpu was requested"


@pytest.mark.parametrize("machine", [Machine({"cuda": "", "cpu": ""}, {"cuda": "no such weights"})], indirect=True)
def test_backend_that_refuses_the_files_is_skipped(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine", gguf=())
    assert backends.choose().info.backend == "cuda"
    assert backends.choose(files=files).info.backend == "cpu"
    with pytest.raises(ModelRefused, match=r"backend cuda does not support mine: no such weights") as refused:
        backends.choose("cuda", files)
    assert refused.value.hint == "omit --backend, or set backend to auto"


@pytest.mark.parametrize("machine", [Machine({"cuda": "", "cpu": ""}, {"cuda": "no", "cpu": "never"})], indirect=True)
@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize(
    ("model_type", "hint"),
    [
        ("mystery", "choose another model"),
        ("gemma2", "llama.cpp runs GGUF files of this architecture; to find them: localllm search mine gguf"),
    ],
)
def test_files_refused_by_all_backends_are_an_error(machine: Machine, backend: str, model_type: str, hint: str) -> None:
    files: Any = SimpleNamespace(name="org/mine", gguf=(), config=SimpleNamespace(model_type=model_type, multimodal=""))
    with pytest.raises(
        ModelRefused, match=r"cuda: no; cpu: never|backend cpu does not support org/mine: never"
    ) as error:
        backends.choose(backend, files)
    assert error.value.hint == hint


@pytest.mark.parametrize("machine", [Machine({"mlx": "", "cpu": ""}, {"cpu": "no"}, second="mlx")], indirect=True)
def test_second_choice_runs_if_no_other_backend_works(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine", gguf=())
    assert backends.choose().info.backend == "cpu"
    assert backends.choose(files=files).info.backend == "mlx"
    assert backends.choose(files=files).reason == "no other backend supports this model; mlx does, but slowly"
    assert backends.choose("mlx").reason == "mlx was requested"


@pytest.mark.parametrize("machine", [Machine({"mlx": ""}, second="mlx")], indirect=True)
def test_second_choice_runs_on_a_machine_without_other_backends(machine: Machine) -> None:
    assert backends.choose().reason == "no other backend works; mlx does, but slowly"


REFUSES = dict.fromkeys(("cuda", "cpu", "mlx"), "it reads no GGUF files")
GGUF: Any = SimpleNamespace(name="mine", gguf=(Path("mine.gguf"),))


@pytest.mark.parametrize("machine", [Machine({"mlx": "", "cpu": "", "llamacpp": ""}, REFUSES)], indirect=True)
def test_llama_cpp_runs_gguf_files(machine: Machine) -> None:
    choice = backends.choose(files=GGUF)
    assert choice.info.backend == "llamacpp"
    assert choice.reason == "llama.cpp runs all GGUF files"
    with pytest.raises(ModelRefused, match="backend cpu does not support mine: it reads no GGUF files"):
        backends.choose("cpu", GGUF)


@pytest.mark.parametrize("machine", [Machine({"cpu": "", "llamacpp": "not installed: pip"}, REFUSES)], indirect=True)
def test_gguf_files_without_llama_cpp_give_only_its_reason(machine: Machine) -> None:
    with pytest.raises(
        backends.BackendUnavailable, match="backend llamacpp is unavailable: not installed: pip"
    ) as caught:
        backends.choose(files=GGUF)
    assert caught.value.hint == ""


@pytest.mark.parametrize("machine", [Machine({})], indirect=True)
def test_no_working_backend_gives_all_reasons(machine: Machine) -> None:
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose()
    assert list(caught.value.reasons) == list(backends.ORDER)


def test_unknown_names_get_similar_names() -> None:
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose("cudaa")
    assert caught.value.hint == "did you mean cuda?"


def reason(answer: DeviceInfo | Unavailable) -> str:
    assert isinstance(answer, Unavailable)
    return answer.reason


def test_mlx_is_for_apple_silicon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(mlx, "find_spec", lambda name: None)
    assert reason(mlx.probe()) == "Apple silicon is present, but mlx and mlx_lm are not installed"
    monkeypatch.setattr(mlx, "find_spec", lambda name: name)
    monkeypatch.setattr(mlx, "version", lambda package: "0.32.4")
    result = mlx.probe()
    assert isinstance(result, DeviceInfo)
    assert result.main_memory
    assert not result.second_choice


def test_mlx_outside_apple_silicon_is_a_second_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr(mlx, "find_spec", lambda name: None)
    assert "mlx and mlx_lm are not installed" in reason(mlx.probe())
    monkeypatch.setattr(mlx, "find_spec", lambda name: name)
    for packages, titles in (
        ({"mlx": "1"}, "MLX's CPU device"),
        ({"mlx": "1", "mlx-cuda-13": "1"}, "NVIDIA GPU through MLX"),
    ):
        monkeypatch.setattr(mlx, "_version", lambda package, packages=packages: packages.get(package, ""))
        result = mlx.probe()
        assert isinstance(result, DeviceInfo)
        assert result.name == titles
        assert result.second_choice


def test_llama_cpp_tells_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    for checkout, command in ((True, "make build GGUF=1"), (False, "pip install --no-binary llama-cpp-python")):
        monkeypatch.setattr(llamacpp_install, "is_checkout", lambda checkout=checkout: checkout)
        assert "is not installed" in reason(llamacpp.probe())
        assert command in reason(llamacpp.probe())


def test_llama_cpp_that_does_not_work_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(library, "find_spec", lambda name: name)
    monkeypatch.setattr(library, "library", fail)
    monkeypatch.setattr(llamacpp_install, "is_checkout", lambda: False)
    assert "libcuda.so.1" in reason(llamacpp.probe())
    assert "--force-reinstall" in reason(llamacpp.probe())


def test_llama_cpp_of_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "import_module", lambda name: SimpleNamespace(__version__="0.3.35"))
    with pytest.raises(ImportError, match=r"version 0\.3\.35 is too old"):
        library.Library()


@pytest.mark.parametrize("kinds", [("cpu",), ("igpu", "cpu"), ("gpu", "gpu", "igpu", "accel", "cpu")])
def test_llama_cpp_names_the_devices_of_its_build(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    devices = tuple(BuildDevice(f"{kind}0", f"the {kind}", kind, 8 * 2**30, 2**30) for kind in kinds)
    monkeypatch.setattr(llamacpp, "problem", lambda: "")
    monkeypatch.setattr(llamacpp, "version", lambda: "9.9")
    monkeypatch.setattr(llamacpp, "devices", lambda: devices)
    info = llamacpp.probe()
    assert features(info)["llama-cpp-python"] == "9.9"
    assert features(info)["devices"] == ", ".join(device.name for device in devices)
    assert "safetensors only" in features(info)["GGUF files"]
    assert ("to add a GPU" in features(info)) == (kinds == ("cpu",))
    gpus = [device for device in devices if device.kind == kinds[0] != "cpu"]
    assert isinstance(info, DeviceInfo)
    assert info.main_memory == (not gpus)
    if gpus:
        assert (info.memory, info.free) == (len(gpus) * 8 * 2**30, len(gpus) * 2**30)
        assert all(device.description in info.name for device in gpus)


def features(result: object) -> Mapping[str, str]:
    assert isinstance(result, DeviceInfo)
    return result.features


class FakeCuda:
    """The calls of libcuda that the probe makes. NVML is missing."""

    def __init__(self, status: int = 0, count: int = 2, capability: tuple[int, int] = (9, 0)) -> None:
        self.status, self.count, self.capability = status, count, capability
        self.address_status = 0

    def load(self, name: str) -> FakeCuda:
        if name != "libcuda.so.1":
            raise OSError(name)
        return self

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.count
        return 0

    def cuDeviceGetName(self, title: Any, length: int, device: int) -> int:
        assert device == 0
        title.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, total: Any, device: int) -> int:
        assert device == 0
        total._obj.value = 141 * 2**30
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def cuDeviceGetPCIBusId(self, address: Any, length: int, device: int) -> int:
        assert device == 0
        address.value = b"0000:19:00.0"
        return self.address_status

    def cuDeviceGetAttribute(self, value: Any, number: int, device: int) -> int:
        assert device == 0
        major, minor = self.capability
        value._obj.value = {16: 132, 75: major, 76: minor, 97: 227 << 10}[number]
        return 0


@pytest.mark.parametrize(
    ("fake", "says"),
    [
        (FakeCuda(status=100), "error 100"),
        (FakeCuda(count=0), "shows no GPU"),
        (FakeCuda(capability=(7, 5)), "NVIDIA H200 has compute capability 7.5; the minimum is 8.0"),
    ],
)
def test_unusable_nvidia_gpus_give_a_reason(fake: FakeCuda, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", fake.load)
    assert says in reason(cuda.probe())


def test_nvidia_gpu_needs_torch_with_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", FakeCuda().load)
    torch = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(cuda, "find_spec", lambda name: torch)
    monkeypatch.setattr(cuda, "triton_problem", lambda: "Triton is not installed")
    assert "the installed torch was built without CUDA" in reason(cuda.probe())
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    result = cuda.probe()
    assert isinstance(result, DeviceInfo)
    assert (result.name, result.memory, result.free) == ("NVIDIA H200", 141 * 2**30, 141 * 2**30)
    assert result.features["GPUs"] == "2, the first is used"
    library = tmp_path / "localllm_cuda.so"
    library.touch()
    monkeypatch.setenv("LOCALLLM_CUDA_LIBRARY", str(library))
    assert features(cuda.probe())["kernels"] == str(library)
    assert features(cuda.probe())["built for"] == "not stated in the file"
    library.write_bytes(b"...localllm CUDA architectures: 80-real 90a-real 120\0...")
    assert features(cuda.probe())["built for"] == "8.0, 9.0a, 12.0 and later (PTX)"
    library.write_bytes(b"localllm CUDA architectures: 80-real 120\0")
    said = (
        f"none, references instead (slower): {library} has kernels for compute capability 8.0, 12.0 and later (PTX), "
    )
    assert features(cuda.probe())["kernels"].startswith(said + "and this GPU has 9.0: run make build CUDA=1")
    monkeypatch.setattr(cuda, "find_library", Mock(side_effect=LibraryMissing("not built")))
    said = "none, references instead (slower): not built"
    assert features(cuda.probe())["kernels"] == said, "one does not come without the other"


class FakeManagement:
    """The calls of NVML that the probe makes. `fails` names a call that returns an error."""

    def __init__(self, free: int, fails: str = "") -> None:
        self.free, self.fails = free, fails

    def _answer(self, call: str) -> int:
        return 1 if call == self.fails else 0

    def nvmlInit_v2(self) -> int:
        return self._answer("init")

    def nvmlSystemGetDriverVersion(self, text: Any, length: int) -> int:
        text.value = b"580.65.06"
        return self._answer("version")

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: Any, device: Any) -> int:
        assert address.value == b"0000:19:00.0"
        device._obj.value = 1234
        return self._answer("handle")

    def nvmlDeviceGetMemoryInfo(self, device: Any, info: Any) -> int:
        assert device.value == 1234
        info._obj.total, info._obj.free, info._obj.used = 150 * 2**30, self.free, 1
        return self._answer("memory")


@pytest.mark.parametrize(
    ("fails", "free", "version"),
    [
        ("", 17, "580.65.06"),
        ("init", 141, "CUDA 13000"),
        ("version", 17, "CUDA 13000"),
        ("address", 141, "580.65.06"),
        ("handle", 141, "580.65.06"),
        ("memory", 141, "580.65.06"),
    ],
)
def test_nvml_reports_free_memory(fails: str, free: int, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, management = FakeCuda(), FakeManagement(17 * 2**30, fails)
    fake.address_status = 1 if fails == "address" else 0
    monkeypatch.setattr("ctypes.CDLL", lambda name: management if name == "libnvidia-ml.so.1" else fake.load(name))
    driver = Driver()
    assert driver.first().free == free * 2**30
    assert driver.version() == version


def test_free_memory_is_at_most_the_total_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, management = FakeCuda(capability=(8, 6)), FakeManagement(149 * 2**30)
    monkeypatch.setattr("ctypes.CDLL", lambda name: management if name == "libnvidia-ml.so.1" else fake.load(name))
    gpu = Driver().first()
    assert (gpu.memory, gpu.free, gpu.count, gpu.capability) == (141 * 2**30, 141 * 2**30, 2, (8, 6))


@pytest.fixture
def imitate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets variables of gpu_limits, for a process whose driver shows an H200 with 100 GiB in use."""

    def set_variables(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"LOCALLLM_DEV_CUDA_{name}", value)
        gpu_limits.cache_clear()

    fake = FakeCuda(capability=(9, 0))
    management = FakeManagement(41 * 2**30)
    monkeypatch.setattr("ctypes.CDLL", lambda name: management if name == "libnvidia-ml.so.1" else fake.load(name))
    yield set_variables
    gpu_limits.cache_clear()


def test_driver_reports_the_imitated_gpu(imitate: Callable[..., None]) -> None:
    imitate(CAPABILITY="8.6", SHARED="101376", PROCESSORS="28", MEMORY="102GiB")
    gpu = Driver().first()
    assert (gpu.capability, gpu.memory, gpu.free) == ((8, 6), 102 * 2**30, 2 * 2**30)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("CAPABILITY", "10.0", "CAPABILITY=10.0: this GPU has only 9.0"),
        ("SHARED", "300000", "SHARED=300000: this GPU has only 232448"),
        ("PROCESSORS", "133", "PROCESSORS=133: this GPU has only 132"),
        ("MEMORY", "142GiB", f"MEMORY={142 * 2**30}: this GPU has only {141 * 2**30}"),
        ("MEMORY", "8GB", "MEMORY=8GB: a size such as 8GiB"),
    ],
)
def test_limits_that_the_gpu_does_not_reach_make_it_unavailable(
    imitate: Callable[..., None], name: str, value: str, says: str
) -> None:
    imitate(**{name: value})
    assert says in reason(cuda.probe())


def test_driver_reports_the_cuda_version_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", FakeCuda().load)
    assert Driver().version() == "CUDA 13000"


def test_no_nvidia_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert reason(cuda.probe()) == "no NVIDIA driver (libcuda.so.1 not found)"


def test_nvidia_gpus_without_torch_or_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", FakeCuda(capability=(8, 0)).load)
    modules: dict[str, Any] = {}
    problems = ["Triton is not installed"]
    monkeypatch.setattr(cuda, "find_spec", modules.get)
    monkeypatch.setattr(cuda, "triton_problem", lambda: problems[0])
    assert reason(cuda.probe()) == "NVIDIA H200 is present, but torch is not installed"
    modules["torch"] = SimpleNamespace(origin=None)
    assert reason(cuda.probe()) == "NVIDIA H200 is present, but torch is not installed"
    modules["torch"] = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    result = features(cuda.probe())
    assert result["compute capability"] == "8.0"
    assert result["Triton"] == "no, references instead: Triton is not installed"
    assert cuda.read_bandwidth() is None
    problems[0] = ""
    monkeypatch.setattr(cuda, "compiler_problem", lambda: "install a compiler")
    assert features(cuda.probe())["Triton"] == "yes, with slower launches: install a compiler"
    monkeypatch.setattr(cuda, "compiler_problem", lambda: "")
    monkeypatch.setattr(cuda, "find_cuda_library", Mock(side_effect=LibraryMissing("not built")))
    result = features(cuda.probe())
    assert result["Triton"] == "yes"
    assert result["kernels"].startswith("none, Triton instead (slower)")


def test_names_without_a_similar_name_get_the_list() -> None:
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose("zzz")
    assert caught.value.hint == f"known backends: {', '.join(backends.ORDER)}"
    with pytest.raises(backends.BackendUnavailable) as caught:
        backends.choose("CPU")
    assert caught.value.hint == "did you mean cpu?"


@pytest.mark.parametrize("machine", [Machine({"cpu": ""})], indirect=True)
def test_requested_backend_that_is_unavailable_is_an_error(machine: Machine) -> None:
    with pytest.raises(backends.BackendUnavailable, match="backend cuda is unavailable: not there") as caught:
        backends.choose("cuda")
    assert caught.value.reasons == {"cuda": "not there"}
    assert caught.value.hint == "omit --backend, or set backend to auto"


@pytest.mark.parametrize("machine", [Machine({"cuda": ""})], indirect=True)
def test_first_backend_in_order_is_preferred(machine: Machine) -> None:
    assert backends.choose().reason == "cuda is the preferred backend"


@pytest.mark.parametrize("machine", [Machine({})], indirect=True)
def test_unavailable_backends_do_not_refuse_files(machine: Machine) -> None:
    files: Any = SimpleNamespace(name="mine", gguf=())
    with pytest.raises(backends.BackendUnavailable, match="no backend works on this machine"):
        backends.choose(files=files)


@pytest.mark.parametrize("machine", [Machine({"hip": "", "mlx": ""}, second="hip")], indirect=True)
def test_skipped_second_choice_names_its_option(machine: Machine) -> None:
    choice = backends.choose()
    assert choice.info.backend == "mlx"
    assert choice.reason == "mlx is the first that works; not available: cuda, hip, npu, xpu"


def test_cpu_needs_torch_and_uses_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    result = cpu.probe()
    assert isinstance(result, DeviceInfo)
    assert result.main_memory
    monkeypatch.setattr(cpu, "find_spec", lambda name: None)
    assert reason(cpu.probe()) == "torch is not installed"


def test_thread_count_equals_that_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOCALLLM_THREADS", "OMP_NUM_THREADS", "LOCALLLM_CPU_LANE"):
        monkeypatch.delenv(variable, raising=False)
    library = tmp_path / "localllm_cpu.so"
    library.write_bytes(b"\0ISA variants: generic avx2\0")
    monkeypatch.setenv("LOCALLLM_CPU_LIBRARY", str(library))
    monkeypatch.setattr(sys.modules[kernels.__module__], "cores", lambda: 6)
    titles = kernels(machine_of_cpu.VARIANTS["avx2"])
    assert titles == {"kernels": "avx2, the best for this processor", "threads": "6, one per physical core"}
    for value, threads in (("0", "6, one per physical core"), ("3,2", "3, from OMP_NUM_THREADS")):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert kernels(frozenset())["threads"] == threads
    monkeypatch.setenv("LOCALLLM_THREADS", "5")
    assert kernels(frozenset())["threads"] == "5, from LOCALLLM_THREADS"
    monkeypatch.setenv("LOCALLLM_CPU_LANE", "generic")
    assert kernels(machine_of_cpu.VARIANTS["avx2"])["kernels"] == "generic, forced by LOCALLLM_CPU_LANE"
    monkeypatch.delenv("LOCALLLM_CPU_LANE")
    library.write_bytes(b"\0ISA variants: avx512 amx\0")
    other = kernels(machine_of_cpu.VARIANTS["avx2"])["kernels"]
    assert other == "none, torch only: they are compiled for other processors (avx512, amx): run make build"
    monkeypatch.setattr(sys.modules[kernels.__module__], "find_library", Mock(side_effect=LibraryMissing("not built")))
    titles = kernels(frozenset())
    assert titles["kernels"].startswith("none, torch only")
    assert titles["threads"] == "6"
