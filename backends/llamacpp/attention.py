"""Flash attention in llama.cpp, with settings that avoid the faults of its CUDA kernels."""

from __future__ import annotations

import os

from ...engine.files.model_files import ModelFiles
from .library import devices

AUTO, DISABLED, ENABLED = -1, 0, 1  # llama_flash_attn_type
CUDA_HEADS = (40, 64, 72, 80, 96, 112, 128, 192, 256, 320, 512, 576)  # head sizes with CUDA kernels
CAPPED_HEADS = (128, 256, 512)  # head sizes whose CUDA kernels support a cap of the scores


def flash_attention(files: ModelFiles, gpu_layers: int) -> int:
    """The llama_flash_attn_type for a model. `gpu_layers`: number of layers in the memory of the GPUs; -1: all."""
    if not any(device.name.startswith("CUDA") for device in devices()):
        return AUTO
    if files.config.model_type == "gemma2" and files.config.head_dim not in CAPPED_HEADS:
        return DISABLED  # llama.cpp would start a kernel that ends the process
    # With AUTO, llama.cpp disables flash attention in all layers, because the GPU computes prefill of the CPU's layers.
    return AUTO if gpu_layers < 0 else ENABLED


def avoid_graphs(files: ModelFiles, flash: int) -> None:
    """Let llama.cpp use no CUDA graphs for a model without flash attention. In a graph, its products of more than 16
    rows can end with an illegal instruction. `flash`: the llama_flash_attn_type. llama.cpp reads the environment for
    the first context of a process."""
    has_kernels = files.config.head_dim in CUDA_HEADS and files.config.model_type != "grok"
    if flash == DISABLED or not has_kernels:
        os.environ["GGML_CUDA_DISABLE_GRAPHS"] = "1"
