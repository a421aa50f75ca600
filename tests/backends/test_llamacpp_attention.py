"""Flash attention in llama.cpp: its choice with a build for NVIDIA GPUs, and CUDA graphs without it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from localllm.backends import llamacpp
from localllm.backends.llamacpp import attention, library, opening
from localllm.backends.llamacpp.attention import AUTO, DISABLED, ENABLED
from localllm.backends.llamacpp.library import BuildDevice
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from .gguf_models import write_canary

CPU = BuildDevice("CPU", "", "cpu", 2**34, 2**34)
CUDA = BuildDevice("CUDA0", "", "gpu", 2**34, 2**34)
VULKAN = BuildDevice("Vulkan0", "", "gpu", 2**34, 2**34)


@pytest.mark.parametrize(
    ("devices", "model", "gpu_layers", "expected"),
    [
        ((CPU,), ("llama", 64), 0, AUTO),
        ((VULKAN, CPU), ("llama", 64), 4, AUTO),
        ((CUDA, CPU), ("llama", 64), -1, AUTO),
        ((CUDA, CPU), ("llama", 64), 4, ENABLED),
        ((CUDA, CPU), ("llama", 64), 0, ENABLED),
        ((CUDA, CPU), ("gemma2", 256), -1, AUTO),
        ((CUDA, CPU), ("gemma2", 128), 0, ENABLED),
        ((CUDA, CPU), ("gemma2", 64), -1, DISABLED),
        ((CPU,), ("gemma2", 64), 0, AUTO),
    ],
)
def test_choice_of_flash_attention(
    devices: tuple[BuildDevice, ...],
    model: tuple[str, int],
    gpu_layers: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "devices", lambda: devices)
    files: Any = SimpleNamespace(config=SimpleNamespace(model_type=model[0], head_dim=model[1]))
    assert attention.flash_attention(files, gpu_layers) == expected


@pytest.mark.parametrize(
    ("model", "flash", "graphs"),
    [
        (("llama", 64), AUTO, True),
        (("llama", 128), ENABLED, True),
        (("llama", 128), DISABLED, False),
        (("llama", 48), AUTO, False),
        (("grok", 128), AUTO, False),
    ],
)
def test_context_without_flash_attention_uses_no_cuda_graphs(
    model: tuple[str, int], flash: int, graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp reads the environment when it creates the first context."""
    monkeypatch.setenv("GGML_CUDA_DISABLE_GRAPHS", "")
    monkeypatch.delenv("GGML_CUDA_DISABLE_GRAPHS")
    c = library.library().c
    create = c.llama_init_from_model
    seen: list[bool] = []

    def create_and_look(*values: Any) -> Any:
        seen.append("GGML_CUDA_DISABLE_GRAPHS" not in os.environ)
        return create(*values)

    monkeypatch.setattr(c, "llama_init_from_model", create_and_look)
    monkeypatch.setattr(opening, "flash_attention", lambda *_: flash)
    named: Any = SimpleNamespace(config=SimpleNamespace(model_type=model[0], head_dim=model[1]))
    avoid = attention.avoid_graphs
    monkeypatch.setattr(opening, "avoid_graphs", lambda _, kind: avoid(named, kind))
    llamacpp.open(read_model(write_canary(tmp_path)), LoadOptions(context=256, max_rows=2, threads=1)).close()
    assert seen == [graphs]
