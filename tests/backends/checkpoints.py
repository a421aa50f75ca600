"""Writes quantised checkpoints in the layouts of other programs, packed number by number, and their float values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from .tiny import TINIES, Tiny

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]
Stored = tuple[
    Tensors, torch.Tensor
]  # tensors by the end of their name after the projection, and the weight that they encode


def packed(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[rows, columns] of 0…15 -> [rows, ceil(columns / 8)] int32; `order[i]` stands in bits 4i…4i+3."""
    rows, columns = numbers.shape
    out = np.zeros((rows, -(-columns // 8)), np.uint32)
    for row in range(rows):
        for word in range(out.shape[1]):
            for place, column in enumerate(order):
                if word * 8 + column < columns:
                    out[row, word] |= int(numbers[row, word * 8 + column]) << (4 * place)
    return torch.from_numpy(out.view(np.int32))


def int4(
    out_features: int,
    in_features: int,
    random: np.random.Generator,
    *,
    shuffled: bool = False,
    zeros: tuple[int, int] = (1, 16),
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, np.ndarray, torch.Tensor]:
    """(numbers [out_features, in_features], zero points and float16 scales [out_features, groups], group of each input,
    weight)."""
    groups = -(-in_features // GROUP)
    numbers, zero = random.integers(0, 16, (out_features, in_features)), random.integers(*zeros, (out_features, groups))
    scale = torch.from_numpy((random.random((out_features, groups)) + 0.5) * 0.25 / in_features**0.5).half()
    group_of = np.arange(in_features) // GROUP
    if shuffled:
        random.shuffle(group_of)
    weight = (torch.from_numpy(numbers - zero[:, group_of])).float() * scale.float()[:, torch.from_numpy(group_of)]
    return numbers, zero, scale, group_of, weight


def gptq(version: int, shuffled: bool = False) -> Callable[..., Stored]:
    """GPTQ weights as GPTQModel writes them. Version 1 is version 2 minus a constant in each word of zero points, even
    if a zero point is 0."""

    def make(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
        numbers, zero, scale, group_of, weight = int4(
            out_features, in_features, random, shuffled=shuffled, zeros=(0, 16)
        )
        tensors = {
            "qweight": packed(numbers).t().contiguous(),
            "qzeros": packed(zero.T) - 0x11111111 * (version == 1),
            "scales": scale.t().contiguous(),
            "g_idx": torch.from_numpy(group_of).int(),
        }
        return tensors, weight

    return make


def gptq_same_order(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
    """Projections of one input have one order, as they come from the same calibration. As AutoGPTQ does it: one
    is taken from each zero point, and none is 0."""
    shuffled = np.arange(in_features) // GROUP
    np.random.default_rng(in_features).shuffle(shuffled)
    numbers, zero, scale, _, _ = int4(out_features, in_features, random)
    weight = torch.from_numpy(numbers - zero[:, shuffled]).float() * scale.float()[:, torch.from_numpy(shuffled)]
    tensors = {
        "qweight": packed(numbers).t().contiguous(),
        "qzeros": packed((zero - 1).T),
        "scales": scale.t().contiguous(),
        "g_idx": torch.from_numpy(shuffled).int(),
    }
    return tensors, weight


def awq(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
    numbers, zero, scale, _, weight = int4(out_features, in_features, random, zeros=(0, 16))
    tensors = {
        "qweight": packed(numbers.T, AWQ_ORDER),
        "qzeros": packed(zero.T, AWQ_ORDER),
        "scales": scale.t().contiguous(),
    }
    return tensors, weight


def awq_without_zeros(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
    """Symmetric AWQ without zero points: numbers from -8 to 7."""
    numbers, _, scale, _, weight = int4(out_features, in_features, random, zeros=(8, 9))
    return {"qweight": packed(numbers.T, AWQ_ORDER), "scales": scale.t().contiguous()}, weight


def compressed_int4(symmetric: bool) -> Callable[..., Stored]:
    def make(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
        numbers, zero, scale, *_ = int4(out_features, in_features, random, zeros=(8, 9) if symmetric else (0, 16))
        tensors = {
            "weight_packed": packed(numbers),
            "weight_scale": scale.bfloat16().half(),
            "weight_shape": torch.tensor([out_features, in_features]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed(zero.T).t().contiguous()
        scale = tensors["weight_scale"].float().repeat_interleave(GROUP, 1)[:, :in_features]
        where = torch.from_numpy(zero).repeat_interleave(GROUP, 1)[:, :in_features]
        tensors["weight_scale"] = tensors["weight_scale"].bfloat16()
        return tensors, (torch.from_numpy(numbers) - where).float() * scale

    return make


def compressed_int4_order(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
    numbers, zero, scale, group_of, _ = int4(out_features, in_features, random, shuffled=True, zeros=(8, 9))
    wide = scale.bfloat16()
    tensors = {
        "weight_packed": packed(numbers),
        "weight_scale": wide,
        "weight_shape": torch.tensor([out_features, in_features]),
        "weight_g_idx": torch.from_numpy(group_of).int(),
    }
    where = torch.from_numpy(group_of)
    return tensors, torch.from_numpy(numbers - zero[:, group_of]).float() * wide.float()[:, where]


def compressed_int8(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
    data = torch.from_numpy(random.integers(-127, 128, (out_features, in_features)).astype(np.int8))
    scale = torch.from_numpy(random.random((out_features, 1)) / 64 / in_features**0.5).bfloat16()
    return {"weight": data, "weight_scale": scale}, data.float() * scale.float()


def fp8(
    scale_name: str, shape: Callable[[int, int], tuple[int, ...]], block: tuple[int, int] = (0, 0)
) -> Callable[..., Stored]:
    def make(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
        data = torch.from_numpy(random.standard_normal((out_features, in_features)) * 60).to(torch.float8_e4m3fn)
        scale = torch.from_numpy(
            (random.random(shape(out_features, in_features)) + 0.5) / 60 / in_features**0.5
        ).float()
        spread = scale.unsqueeze(1) if scale.shape == (out_features,) else scale
        if any(block):
            spread = scale.repeat_interleave(block[0], 0)[:out_features].repeat_interleave(block[1], 1)[:, :in_features]
        return {"weight": data, scale_name: scale}, data.float() * spread

    return make


def fp8_blocks(scale_name: str, high: int, wide: int) -> Callable[..., Stored]:
    return fp8(
        scale_name, lambda out_features, in_features: (-(-out_features // high), -(-in_features // wide)), (high, wide)
    )


def float4(group: int, divisor: float = 0.0) -> Callable[..., Stored]:
    """NVFP4 with the scale `divisor` of the tensor, or MXFP4 (0). The numbers are e2m1, the first in the low bits."""

    def make(out_features: int, in_features: int, random: np.random.Generator) -> Stored:
        numbers = random.integers(0, 16, (out_features, in_features))
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[numbers]
        tensors = {"weight_packed": torch.from_numpy((numbers[:, ::2] | numbers[:, 1::2] << 4).astype(np.uint8))}
        groups = out_features, in_features // group
        if not divisor:
            exponents = torch.from_numpy(random.integers(120, 124, groups).astype(np.uint8))
            scale = 2.0 ** (exponents.float() - 127)
            return {**tensors, "weight_scale": exponents}, values * scale.repeat_interleave(group, 1)
        scale = torch.from_numpy(random.random(groups) * 400 + 1).to(torch.float8_e4m3fn)
        tensors |= {"weight_scale": scale, "weight_global_scale": torch.tensor([divisor])}
        return tensors, values * scale.float().repeat_interleave(group, 1) / divisor

    return make


_FLOATS = ("embed", "lm_head", "mlp.gate.", "shared_expert_gate")  # parts of names that stay floats


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint format. `exact`: its products do not round activations."""

    label: str
    config: Mapping[str, Any]
    make: Callable[..., Stored]
    exact: bool = True
    model: str = "llama"
    more: Callable[[str, int], Tensors] = field(default=lambda name, out_features: {})
    sizes: Mapping[str, Any] | None = None  # of another tiny model of the type `model`

    def __str__(self) -> str:
        return self.label

    def save(self, folder: Path, meant: Path) -> None:
        """The checkpoint in `folder`, and the same model in floats in `meant`."""
        labelled = (tiny for tiny in TINIES if tiny.label == self.model)
        (next(labelled) if self.sizes is None else Tiny(self.model, self.model, self.sizes)).save(meant)
        floats, stored = load_file(meant / "model.safetensors"), {}
        random = np.random.default_rng(5)
        for name, tensor in floats.items():
            projection = name.removesuffix(".weight")
            if tensor.dim() != 2 or any(
                part in name for part in ("embed", "lm_head", "mlp.gate.", "shared_expert_gate")
            ):
                stored[name] = tensor
                continue
            made, floats[name] = self.make(*tensor.shape, random)
            made |= self.more(projection, tensor.shape[0])
            stored |= {f"{projection}.{part}": value.contiguous() for part, value in made.items()}
        folder.mkdir(parents=True, exist_ok=True)
        config = json.loads((meant / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(self.config)}))
        save_file(stored, folder / "model.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in floats.items()}, meant / "model.safetensors")


def _compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> Mapping[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return MappingProxyType(
        {
            "quant_method": "compressed-tensors",
            "format": kind,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }
    )


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
_DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

CHECKPOINTS = [
    Checkpoint("gptq", _GPTQ, gptq(1)),
    Checkpoint("gptq-v2", {**_GPTQ, "checkpoint_format": "gptq_v2"}, gptq(2)),
    Checkpoint("gptq-v2-format", {**_GPTQ, "format": "gptq_v2"}, gptq(2)),
    Checkpoint(
        "gptq-as-gptqmodel",
        {
            **_GPTQ,
            "format": "gptq",
            "checkpoint_format": "gptq",
            "pack_dtype": "int32",
            "sym": True,
            "dynamic": {"-:.*lm_head": {}},
        },
        gptq(1),
    ),
    Checkpoint("gptq-order", {**_GPTQ, "desc_act": True}, gptq(1, shuffled=True)),
    Checkpoint("gptq-same-order", {**_GPTQ, "desc_act": True}, gptq_same_order),
    Checkpoint("gptq-biases", _GPTQ, gptq(1), model="qwen2"),
    Checkpoint(
        "gptq-zero-biases", _GPTQ, gptq(1), more=lambda name, out_features: {"bias": torch.zeros(out_features).half()}
    ),
    Checkpoint("awq", _AWQ, awq),
    Checkpoint(
        "awq-as-gptqmodel",
        {**{key: _AWQ[key] for key in _AWQ if key != "version"}, "format": "gemm", "checkpoint_format": "gemm"},
        awq,
    ),
    Checkpoint("awq-without-zeros", {**_AWQ, "zero_point": False}, awq_without_zeros),
    Checkpoint("awq-tied", _AWQ, awq, model="llama-tied"),
    Checkpoint("awq-fused", _AWQ, awq, model="phi3"),
    Checkpoint("compressed-int4", _compressed("pack-quantized", _PACKED), compressed_int4(True)),
    Checkpoint(
        "compressed-int4-zeros", _compressed("pack-quantized", {**_PACKED, "symmetric": False}), compressed_int4(False)
    ),
    Checkpoint(
        "compressed-int4-order", _compressed("pack-quantized", {**_PACKED, "actorder": "group"}), compressed_int4_order
    ),
    Checkpoint(
        "compressed-int4-static",
        _compressed("pack-quantized", {**_PACKED, "actorder": "weight"}),
        compressed_int4(True),
    ),
    Checkpoint("compressed-int8", _compressed("int-quantized", _INT8, _DYNAMIC), compressed_int8, exact=False),
    Checkpoint("compressed-int8-wide", _compressed("int-quantized", _INT8), compressed_int8, exact=False),
    Checkpoint(
        "compressed-fp8",
        _compressed("float-quantized", _FLOAT),
        fp8("weight_scale", lambda out_features, in_features: (out_features, 1)),
    ),
    Checkpoint(
        "compressed-fp8-flat",
        _compressed("float-quantized", _FLOAT),
        fp8("weight_scale", lambda out_features, in_features: (out_features,)),
    ),
    Checkpoint(
        "compressed-fp8-tensor",
        _compressed("float-quantized", {**_FLOAT, "strategy": "tensor"}),
        fp8("weight_scale", lambda out_features, in_features: (1,)),
        more=lambda name, out_features: {"input_scale": torch.ones(1)},
    ),
    Checkpoint(
        "compressed-fp8-blocks",
        _compressed("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [16, 32]}),
        fp8_blocks("weight_scale", 16, 32),
    ),
    Checkpoint("fp8-blocks", _BLOCKS, fp8_blocks("weight_scale_inv", 32, 32)),
]

_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}
_LOCAL = {**_NVFP4, "dynamic": "local"}
_SIZES = {"hidden_size": 64, "intermediate_size": 96}
_SMALL_EXPERTS = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# Formats of floats of 4 bits, which need multiples of 16 or 32 inputs.
FLOAT4_CHECKPOINTS = [
    Checkpoint("nvfp4-exact", _compressed("nvfp4-pack-quantized", _NVFP4), float4(16, 8192.0), sizes=_SIZES),
    Checkpoint(
        "nvfp4",
        _compressed("nvfp4-pack-quantized", _NVFP4, _LOCAL),
        float4(16, 7345.6),
        exact=False,
        more=lambda name, out_features: {"input_global_scale": torch.tensor([123.0])},
        sizes=_SIZES,
    ),
    Checkpoint("mxfp4", _compressed("mxfp4-pack-quantized", _MXFP4), float4(32), sizes=_SIZES),
    Checkpoint(
        "nvfp4-experts",
        _compressed("nvfp4-pack-quantized", _NVFP4),
        float4(16, 8192.0),
        model="qwen3_moe",
        sizes=_SMALL_EXPERTS,
    ),
    Checkpoint(
        "mxfp4-experts",
        _compressed("mxfp4-pack-quantized", _MXFP4),
        float4(32),
        model="qwen3_moe",
        sizes=_SMALL_EXPERTS,
    ),
]


def _random_mxfp4(weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks, scales, values) of random numbers instead of the weight [experts, out_features, in_features]."""
    experts, out_features, in_features = weight.shape
    sizes = experts, out_features, in_features // 32
    blocks = torch.randint(0, 256, (*sizes, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(119, 124, sizes, generator=generator).to(torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)  # [experts, in_features, out_features]
    assert values.shape == (experts, in_features, out_features)
    return blocks, scales, values


GPT_OSS = Tiny(
    "gpt_oss-mxfp4",
    "gpt_oss",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
    },
)


def save_mxfp4(folder: Path, meant: Path) -> None:
    """A checkpoint as OpenAI publishes it in `folder`, and the same model in floats in `meant`."""
    GPT_OSS.save(folder)
    GPT_OSS.save(meant)
    generator = torch.Generator().manual_seed(2)
    stored, floats = load_file(folder / "model.safetensors"), load_file(meant / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, floats[name] = _random_mxfp4(stored.pop(name).transpose(1, 2), generator)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, meant / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
