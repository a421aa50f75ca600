"""The backend of NVIDIA GPUs. `probe` calls the driver's libraries and imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ...kernels.compiled.library import LibraryMissing, find_cuda_library, find_library
from ...kernels.gpu.architectures import read_architectures, require_code
from ...kernels.gpu.limits import gpu_limits
from ...kernels.triton.problem import compiler_problem, triton_problem
from ..pytorch.models import accepts as accepted_by_torch
from ..pytorch.models import code as code
from .driver import Driver, DriverFailed

name = "cuda"

MIN_CAPABILITY = (8, 0)  # the first compute capability with bfloat16 instructions, and the oldest target of our kernels


def probe() -> DeviceInfo | Unavailable:
    try:
        driver = Driver()
        gpu = driver.first()
    except DriverFailed as error:
        return Unavailable(name, str(error))
    capability = _version(gpu.capability)
    if gpu.capability < MIN_CAPABILITY:
        minimum = _version(MIN_CAPABILITY)
        return Unavailable(name, f"{gpu.name} has compute capability {capability}; the minimum is {minimum}")
    problem = _torch_problem()
    if problem:
        return Unavailable(name, f"{gpu.name} is present, but {problem}")
    features = {
        "compute capability": capability,
        "GPUs": f"{gpu.count}, the first is used",
        "driver": driver.version(),
    }
    limits = gpu_limits().describe()
    if limits:
        features["imitated GPU"] = limits
    return DeviceInfo(name, gpu.name, gpu.memory, gpu.free, features | _kernels(driver.capability()))


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .device import open_on_cuda

    return open_on_cuda(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .device import plan_on_cuda

    return plan_on_cuda(files, options)


def read_bandwidth() -> float | None:
    if triton_problem():
        return None
    import torch

    from ..pytorch.gpu.bandwidth import read_bandwidth, triton_readers

    return read_bandwidth(torch.cuda, triton_readers)


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


def _triton() -> str:
    problem = compiler_problem()
    return f"yes, with slower launches: {problem}" if problem else "yes"


def _kernels(capability: tuple[int, int]) -> dict[str, str]:
    """The kernels that a model on this GPU uses, as title -> value pairs for `localllm doctor`.

    `capability`: the compute capability of the GPU, without the limits of gpu_limits.
    """
    problem = triton_problem()
    features = {"Triton": f"no, references instead: {problem}" if problem else _triton()}
    try:
        find_library()  # the CUDA library depends on the CPU library
        library = find_cuda_library()
        require_code(library, capability)
    except LibraryMissing as error:
        replacement = "references" if problem else "Triton"
        return {"kernels": f"none, {replacement} instead (slower): {error}"} | features
    architectures = ", ".join(map(str, read_architectures(library)))
    return {"kernels": str(library), "built for": architectures or "not stated in the file"} | features
