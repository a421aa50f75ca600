"""The backend of GGUF models, which llama.cpp computes through llama-cpp-python. See docs/gguf.md."""

from __future__ import annotations

from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import DeviceInfo, Runner, Unavailable
from ..llamacpp_install import PACKAGE, gpu_command, repair_command
from ..machine import cpu_name, memory
from .architectures import is_known
from .library import devices, gpus_of, is_installed, problem, version

__all__ = ["accepts", "name", "open", "plan_memory", "probe", "read_bandwidth"]

name = "llamacpp"

# Architectures of llama.cpp that do not compute the next token from the tokens before it.
_ENCODERS = (
    "bert eurobert gemma-embedding jina-bert-v2 jina-bert-v3 llama-embed modern-bert neo-bert nomic-bert "
    "nomic-bert-moe t5 t5encoder wavtokenizer-dec"
)
_DIFFUSION = "dream llada llada-moe rnd1"
_DRAFTS = "dflash eagle3 gemma4-assistant"
_REFUSED = {
    **dict.fromkeys(_ENCODERS.split(), "an encoder, which generates no text"),
    **dict.fromkeys(_DIFFUSION.split(), "a diffusion model, which does not generate its text from left to right"),
    **dict.fromkeys(_DRAFTS.split(), "a draft model, which needs the model that it drafts for"),
}


def probe() -> DeviceInfo | Unavailable:
    """The devices of the installed build of llama.cpp."""
    reason = problem()
    if reason:
        command = repair_command(again=is_installed())
        return Unavailable(name, f"{reason}: {command}", command)
    build_devices = devices()
    gpus = gpus_of(build_devices)
    features = {
        "GGUF files": "computed here on every machine; the other backends read safetensors only",
        PACKAGE: version(),
        "devices": ", ".join(device.name for device in build_devices),
    }
    if not gpus:
        features["to add a GPU"] = gpu_command()
        return DeviceInfo(name, f"{cpu_name()} with llama.cpp", *memory(), features, main_memory=True)
    title = ", ".join(device.description for device in gpus)
    total = sum(device.memory for device in gpus)
    free = sum(device.free for device in gpus)
    return DeviceInfo(name, f"{title} with llama.cpp", total, free, features)


def accepts(files: ModelFiles) -> str:
    """The reason why llama.cpp cannot generate text with these files; empty if it can."""
    if not files.gguf:
        return "it reads only GGUF files"
    architecture = files.config.model_type
    if architecture in _REFUSED:
        return f"the architecture {architecture} is {_REFUSED[architecture]}"
    if files.metadata.get(f"{architecture}.attention.causal") is False:
        return "its attention is not causal: it is an encoder, which generates no text"
    if not is_known(architecture):
        return f"{PACKAGE} {version()} does not know the architecture {architecture}; a newer version may"
    return ""


def open(files: ModelFiles, options: LoadOptions) -> Runner:
    from .opening import open_gguf

    return open_gguf(files, options)


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    from .opening import plan_memory as plan

    return plan(files, options)


def read_bandwidth() -> None:
    """llama.cpp has no function that reads memory."""
    return None
