"""Writes W8A8 checkpoints in the layout of msModelSlim, and the same model in floats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .checkpoints import CHECKPOINTS

Tensors = dict[str, Tensor]
INPUT_SCALE, OFFSET = 0.0390625, -10  # activations of -4.6…5.4 have integers
INT8 = next(checkpoint for checkpoint in CHECKPOINTS if checkpoint.label == "compressed-int8")


def dynamic(name: str, tensors: Tensors) -> Tensors:
    return {"weight_offset": torch.zeros_like(tensors[f"{name}.weight_scale"])}


def static(name: str, tensors: Tensors) -> Tensors:
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"].float().flatten()
    factors = scale * INPUT_SCALE
    bias = tensors.get(f"{name}.bias", torch.zeros(len(weight))).float()
    return {
        **dynamic(name, tensors),
        "input_scale": torch.tensor([INPUT_SCALE]).bfloat16(),
        "input_offset": torch.tensor([OFFSET]).bfloat16(),
        "deq_scale": factors,
        "quant_bias": (bias / factors).round().int() - OFFSET * weight.sum(1, dtype=torch.int32),
    }


def save(
    folder: Path,
    meant: Path,
    kind: Callable[[str, Tensors], Tensors],
    model: str = "llama",
    *,
    old: bool = False,
) -> None:
    """The checkpoint in `folder`, the floats in `meant`. `old`: a static file of float16 models without weight_scale
    and biases, in the names of older releases."""
    replace(INT8, model=model).save(folder, meant)
    tensors, floats = load_file(folder / "model.safetensors"), load_file(meant / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj.bias")]:
        tensors[name] = floats[name] = torch.randn(tensors[name].shape, generator=generator) / 2
    for name in [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        more = kind(name, tensors)
        if old:
            del tensors[f"{name}.weight_scale"], more["weight_offset"]
            tensors.pop(f"{name}.bias", None)
            more["deq_scale"] = more["deq_scale"].view(torch.int32).long()
        tensors |= {f"{name}.{part}": value for part, value in more.items()}
    (folder / "model.safetensors").unlink()
    end = "_w8a8" if old else ""
    save_file(tensors, folder / f"quant_model_weight{end or 's'}.safetensors")
    save_file(floats, meant / "model.safetensors")
    config = json.loads((meant / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    title = "W8A8_DYNAMIC" if kind is dynamic else "W8A8"
    quantised = {name for name in tensors if name.rpartition(".")[0] + ".quant_bias" in tensors or kind is dynamic}
    types = {name: title if name in quantised and "_proj" in name else "FLOAT" for name in tensors}
    description = {"model_quant_type": title, "version": "1.0.0", "group_size": 0, "kv_quant_type": None, **types}
    (folder / f"quant_model_description{end}.json").write_text(json.dumps(description))
