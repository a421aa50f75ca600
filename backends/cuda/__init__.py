"""NVIDIA GPUs. `probe` calls the driver's libraries and imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ...kernels.library import LibraryMissing, find_cuda_library, find_library
from ..pytorch.models import accepts as accepted_by_torch
from .driver import Driver, DriverFailed

name = "cuda"

OLDEST = (8, 0)  # minimum compute capability: bfloat16 instructions, and the oldest target of the kernels


def probe() -> DeviceInfo | Unavailable:
    try:
        gpu = Driver().first()
    except DriverFailed as error:
        return Unavailable(name, str(error))
    capability = _version(gpu.capability)
    if gpu.capability < OLDEST:
        least = _version(OLDEST)
        return Unavailable(name, f"{gpu.name} has compute capability {capability}; the minimum is {least}")
    reason = _lacking()
    if reason:
        return Unavailable(name, f"{gpu.name} is present, but {reason}")
    features = {"compute capability": capability, "GPUs": f"{gpu.count}, the first is used"}
    return DeviceInfo(name, gpu.name, gpu.memory, gpu.free, features | _kernels())


def accepts(files: ModelFiles) -> str:
    return accepted_by_torch(files)


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .device import open_on_cuda

    return open_on_cuda(files, options)


def read_bandwidth() -> float | None:
    if find_spec("triton") is None:
        return None
    from .bandwidth import read_bandwidth as measured

    return measured()


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))


def _lacking() -> str:
    """The reason why torch cannot use the GPU; empty: it can."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return "torch is not installed"
    libraries = Path(torch.origin).parent / "lib"
    if any(libraries.glob("*torch_cuda*")):
        return ""
    return "the installed torch was built without CUDA: install a torch with CUDA (see pytorch.org)"


def _kernels() -> dict[str, str]:
    triton = find_spec("triton") is not None
    try:
        find_library()  # the CUDA library needs it
        kernels = str(find_cuda_library())
    except LibraryMissing as error:
        kernels = f"none, {'Triton' if triton else 'references'} instead (slower): {error}"
    return {"kernels": kernels, "Triton": "yes" if triton else "no, references instead"}
