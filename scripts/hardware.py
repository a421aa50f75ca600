"""The tables of docs/hardware.md that come from the records of the devices and the register of the ops."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

from localllm.backends import ORDER

if TYPE_CHECKING:
    from localllm.backends.pytorch.device import Device

REFERENCE = "reference"
QUANTISED = ("int8", "int4", "fp8", "mxfp4")  # products with quantised weights


def with_stand_ins() -> None:
    """Replaces the compiled libraries and torch_npu in this process. The records then name the kernels of machines that
    have them; no kernel is called here."""
    import torch

    from localllm.kernels.compiled import library
    from localllm.kernels.triton import problem

    empty = Path(os.devnull)
    library.load_ops = library.find_library = library.find_cuda_library = lambda *_: empty  # type: ignore[assignment]
    problem.triton_problem = lambda: ""  # type: ignore[assignment]
    torch.ops.localllm = MagicMock()
    torch.library.register_fake = MagicMock()
    npu = MagicMock(__name__="torch_npu.npu")
    npu.mem_get_info.return_value = 0, 2**36
    sys.modules["torch_npu"] = MagicMock(npu=npu)


def ops() -> list[tuple[str, ...]]:
    """A header, and the implementations of each op on each platform, in the order in which a load prefers them."""
    from localllm.backends.platforms import kernel_sets, matrix

    table = matrix(kernel_sets())
    names = table.names()
    platforms = [name for name in ORDER if name in names["norm.rms"]]
    rows = [(f"`{op}`", *(_listed(table, op, name) for name in platforms)) for op in names]
    return [("Op", *platforms, "native"), *((*row, names[op]["native"]) for row, op in zip(rows, names, strict=True))]


def _listed(table: Any, op: str, platform: str) -> str:
    """The names of the implementations, without the reference, which every op has."""
    if platform not in table.ops[op].forward:
        return str(table.names()[op][platform])
    return ", ".join(one.name for one in table.ops[op].implementations[platform][:-1]) or REFERENCE


def devices(states: Mapping[str, str]) -> list[tuple[str, ...]]:
    """A header, and what each backend computes a model with. `states`: backend -> state of its tests."""
    from localllm.backends.platforms import kernel_sets

    columns = {name: _of_torch(name, _record(name)) for name in kernel_sets()} | {"mlx": _of_mlx()}
    names = [name for name in ORDER if name in columns]
    rows = [(row, *(columns[name][row] for name in names)) for row in columns["mlx"]]
    return [("", *(f"`{name}`" for name in names)), *rows, ("State of the tests", *(states[name] for name in names))]


def _record(name: str) -> Device:
    """The record of a device; that of an NPU has the defaults for 64 GiB of memory."""
    module = vars(import_module(f"localllm.backends.{name}.device"))
    record: Device = module["DEVICE"] if "DEVICE" in module else module["device"]()
    return record


def _of_torch(name: str, device: Device) -> dict[str, str]:
    from localllm.backends.platforms import kernel_sets

    kernels = kernel_sets()[name]
    sets = {op: [one.name for one in kernels if one.serves(op)] for op, _ in device.ops}
    own = [op for op in QUANTISED if sets[f"linear.{op}"] != [REFERENCE]]
    others = [op for op in QUANTISED if op not in own]
    return {
        "Framework": f"torch, {device.module.__name__}",
        "Attention": ", ".join((*sets["attention.paged"], *device.attentions)),
        "GEMM": ", ".join(sets["linear.dense"]),
        "KV cache": f"pages of {device.page_size} tokens{_cache_dtypes(device)}",
        "Quantisation": ", ".join(own) + (f"; references: {', '.join(others)}" if others else ""),
        "Graph": _graph(device),
        "LoRA": ", ".join(device.lora_backends),
    }


def _cache_dtypes(device: Device) -> str:
    dtypes = [dtype for dtype, has in (("fp8", device.fp8_cache), ("int8", device.int8_cache)) if has]
    return f", also {' and '.join(dtypes)}" if dtypes else ""


def _graph(device: Device) -> str:
    """The graphs that the setting `auto` selects."""
    if device.recorder is None:
        return "no"
    return "off by default" if device.graphs == "off" else device.graphs


def _of_mlx() -> dict[str, str]:
    from localllm.backends.mlx import loading, opening
    from localllm.backends.mlx.ops import OPS

    return {
        "Framework": "mlx, mlx_lm",
        "Attention": OPS["attention.paged"],
        "GEMM": f"{OPS['linear.dense']}, {OPS['linear.int8']}",
        "KV cache": f"pages of {opening.PAGE_SIZE} tokens",
        "Quantisation": ", ".join(loading.BITS),
        "Graph": "no" if opening.SUPPORTED["graphs"] == ("auto", "off") else "yes",
        "LoRA": OPS["lora.add"],
    }
