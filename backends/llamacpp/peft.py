"""Writes an adapter of PEFT or mlx-lm as a GGUF file of one GGUF model, for llama.cpp, which reads only files.

The scale of each module is a factor of its B, because the file has one alpha for all modules. Format of the file:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ...engine.errors import ModelRefused
from ...engine.files.adapter_files import AdapterFiles, Factors
from ...engine.files.gguf_adapter import EMBEDDING
from ...engine.files.gguf_values import Array
from ...engine.files.model_files import ModelFiles
from ...engine.files.tensor_values import Floats, read_values

OUTPUT = "output.weight"
_ALIGNMENT = 32  # bytes
_FLOAT32 = 0  # type of a tensor
_STRING = 8  # type of a value
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

# Architectures whose rows of queries and keys llama.cpp stores in pairs: it rotates neighbours, transformers rotates
# the halves of a head.
_PAIRED = frozenset({"llama", "granite", "mistral3", "smollm3"})
_UNCHANGED = frozenset({"gemma", "gemma2", "gemma3", "glm4", "olmo2", "phi3", "qwen2", "qwen2moe", "qwen3", "qwen3moe"})
# Name of a module in a layer -> name of its tensor in the layer of a GGUF file.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.qkv_proj": "attn_qkv",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
    }
)
_OUTSIDE: Mapping[str, str] = MappingProxyType({"model.embed_tokens": EMBEDDING, "lm_head": OUTPUT})


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, int]
    read: Callable[[], Floats]

    @property
    def num_bytes(self) -> int:
        return -(-4 * self.shape[0] * self.shape[1] // _ALIGNMENT) * _ALIGNMENT


def write_adapter(adapter: AdapterFiles, model: ModelFiles, file: Path) -> None:
    """Write the adapter's factors in float32, as tensors of the model. Raises ModelRefused for a module that the model
    does not have, and for an architecture whose tensors are not known."""
    architecture = model.config.model_type
    if architecture not in _PAIRED | _UNCHANGED:
        raise ModelRefused(
            f"for GGUF models of the architecture {architecture:.50}, adapters in the format of PEFT are not supported",
            "use an adapter in a GGUF file",
        )
    tensors = [tensor for module in adapter.factors for tensor in _tensors(adapter, module, model)]
    with file.open("wb") as out:
        out.write(_header(architecture, tensors))
        for tensor in tensors:
            data = tensor.read().tobytes()
            out.write(data + bytes(tensor.num_bytes - len(data)))


def check_tied(name: str, model: ModelFiles) -> None:
    """Raises ModelRefused for factors of a tensor that is both the embedding and the output head of the model.
    llama.cpp would also use the factors of the embedding for the head, and abort because of their shapes."""
    if name in (OUTPUT, EMBEDDING) and OUTPUT not in model.tensors:
        raise ModelRefused(
            f"it changes {name}, but the model has one tensor for its embedding and its output head, and llama.cpp "
            "cannot change one of the two",
            "use the model in safetensors files",
        )


def base_tensors(model: ModelFiles) -> dict[str, str]:
    """The names in safetensors files of the tensors that an adapter can have copies of -> their names in the model."""
    return {f"{module}.weight": name for module, name in _OUTSIDE.items() if name in model.tensors}


def _tensors(adapter: AdapterFiles, module: str, model: ModelFiles) -> tuple[_Tensor, _Tensor]:
    """The tensors A and B of a module's factors."""
    factors = adapter.factors[module]
    name = _name(module, model)
    is_embedding = name == EMBEDDING
    expected = model.tensors[name].shape
    actual = factors.out_features, factors.in_features
    if expected != (actual[::-1] if is_embedding else actual):
        raise ModelRefused(
            f"{module} is {actual[0]} x {actual[1]}, but {name} of the model has the shape {list(expected)}; the "
            "adapter is for another base model"
        )
    heads = _paired_heads(module, model)
    a_shape = (factors.in_features, factors.rank) if is_embedding else (factors.rank, factors.in_features)
    return (
        _Tensor(f"{name}.lora_a", a_shape, lambda: _factor_a(factors, is_embedding)),
        _Tensor(f"{name}.lora_b", (factors.out_features, factors.rank), lambda: _factor_b(module, factors, heads)),
    )


def _name(module: str, model: ModelFiles) -> str:
    """The model's tensor of a module. Raises ModelRefused if it has none."""
    layer = _LAYER.fullmatch(module)
    if layer:
        name = f"blk.{layer[1]}.{_NAMES.get(layer[2], '')}.weight"
    else:
        name = _OUTSIDE.get(module, "")
    check_tied(name, model)
    if name not in model.tensors:
        raise ModelRefused(f"the model has no module {module!r:.200}, or its tensor has another form in GGUF files")
    return name


def _paired_heads(module: str, model: ModelFiles) -> int:
    """The number of heads whose rows are stored in pairs; 0: the rows have the order of PEFT."""
    config = model.config
    kinds = {"q_proj": ("head_count", config.num_heads), "k_proj": ("head_count_kv", config.num_kv_heads)}
    key, heads = kinds.get(module.rpartition(".")[2], ("", 0))
    if not heads or config.model_type not in _PAIRED:
        return 0
    if isinstance(model.metadata.get(f"{config.model_type}.attention.{key}"), Array):
        raise ModelRefused(f"{module}: layers with unlike numbers of heads are not supported for adapters of PEFT")
    return heads


def _factor_a(factors: Factors, is_embedding: bool) -> Floats:
    """[rank, in_features]; of an embedding [in_features, rank]."""
    values = _finite(factors.a.file.name, read_values(factors.a))
    return np.ascontiguousarray(values.T if factors.transposed != is_embedding else values)


def _factor_b(module: str, factors: Factors, heads: int) -> Floats:
    """[out_features, rank], multiplied by the scale. `heads`: see _paired_heads."""
    values = _finite(factors.b.file.name, read_values(factors.b))
    with np.errstate(over="ignore"):
        values = _finite(module, (values.T if factors.transposed else values) * np.float32(factors.scale))
    if not heads:
        return np.ascontiguousarray(values)
    if len(values) % (2 * heads):
        raise ModelRefused(f"{module}: {len(values)} outputs are not divisible by 2 x {heads} heads")
    halves = values.reshape(heads, 2, -1, factors.rank)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _finite(name: str, values: Floats) -> Floats:
    if not np.isfinite(values).all():
        raise ModelRefused(f"{name}: a LoRA factor contains NaN or infinity, or its scale is too large")
    return values


def _header(architecture: str, tensors: list[_Tensor]) -> bytes:
    values = {"general.type": "adapter", "general.architecture": architecture, "adapter.type": "lora"}
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    parts += [_text(key) + struct.pack("<I", _STRING) + _text(value) for key, value in values.items()]
    start = 0
    for tensor in tensors:
        parts.append(_text(tensor.name) + struct.pack("<IQQIQ", 2, *tensor.shape[::-1], _FLOAT32, start))
        start += tensor.num_bytes
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
