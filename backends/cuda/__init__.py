"""The backend of NVIDIA GPUs. `probe` calls the driver's libraries and imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...engine.memory import MemoryPlan
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ...kernels.gpu_limits import gpu_limits
from ...kernels.library import LibraryMissing, find_cuda_library, find_library
from ..pytorch.models import accepts as accepted_by_torch
from .driver import Driver, DriverFailed

name = "cuda"

MIN_CAPABILITY = (8, 0)  # the first compute capability with bfloat16 instructions, and the oldest target of our kernels


def probe() -> DeviceInfo | Unavailable:
    try:
        gpu = Driver().first()
    except DriverFailed as error:
        return Unavailable(name, str(error))
    capability = _version(gpu.capability)
    if gpu.capability < MIN_CAPABILITY:
        minimum = _version(MIN_CAPABILITY)
        return Unavailable(name, f"{gpu.name} has compute capability {capability}; the minimum is {minimum}")
    problem = _torch_problem()
    if problem:
        return Unavailable(name, f"{gpu.name} is present, but {problem}")
    features = {"compute capability": capability, "GPUs": f"{gpu.count}, the first is used"}
    limits = gpu_limits().describe()
    if limits:
        features["imitated GPU"] = limits
    return DeviceInfo(name, gpu.name, gpu.memory, gpu.free, features | _kernels())


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .device import open_on_cuda

    return open_on_cuda(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .device import plan_on_cuda

    return plan_on_cuda(files, options)


def read_bandwidth() -> float | None:
    if find_spec("triton") is None:
        return None
    from . import bandwidth

    return bandwidth.read_bandwidth()


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _torch_problem() -> str:
    """The reason why torch cannot use the GPU; empty if it can."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    libraries = Path(torch.origin).parent / "lib"
    if any(libraries.glob("*torch_cuda*")):
        return ""
    return "the installed torch was built without CUDA: install a torch with CUDA (see pytorch.org)"


def _kernels() -> dict[str, str]:
    """The kernels that a model on this GPU uses, as title -> value pairs for `localllm doctor`."""
    triton = find_spec("triton") is not None
    try:
        find_library()  # the CUDA library depends on the CPU library
        kernels = str(find_cuda_library())
    except LibraryMissing as error:
        replacement = "Triton" if triton else "references"
        kernels = f"none, {replacement} instead (slower): {error}"
    return {"kernels": kernels, "Triton": "yes" if triton else "no, references instead"}
