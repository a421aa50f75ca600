"""The backend of GGUF models, which llama.cpp computes. This version has no runner for GGUF models yet."""

from __future__ import annotations

from importlib.util import find_spec

from ...engine.runner import DeviceInfo, Unavailable

name = "llamacpp"


def probe() -> DeviceInfo | Unavailable:
    """Checks whether llama-cpp-python is installed, without importing it."""
    if find_spec("llama_cpp") is None:
        return Unavailable(name, "llama-cpp-python is not installed")
    return Unavailable(name, "llama-cpp-python is installed, but this version has no llama.cpp runner yet")
