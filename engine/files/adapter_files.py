"""Reads an adapter: adapter_config.json and safetensors headers, or a GGUF file -> AdapterFiles. Reads no weights.

Two layouts of folders: PEFT (https://huggingface.co/docs/peft/developer_guides/checkpoint) and mlx-lm
(mlx_lm/tuner/utils.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ..errors import ModelRefused
from .adapter_config import (
    CONFIG,
    MAX_RANK,
    NO_EXPERTS,
    PLAIN_LORA,
    WITHOUT_EXPERTS,
    AdapterConfig,
    MlxConfig,
    PeftConfig,
)
from .gguf_adapter import ENDS as GGUF_ENDS
from .gguf_adapter import read_gguf_adapter
from .gguf_shards import SUFFIX as GGUF
from .json_files import read_json
from .peft_names import ENDS as PEFT_ENDS
from .peft_names import PREFIX, text_module
from .tensor_files import FLOATS, StoredTensor, read_header

PEFT_WEIGHTS = "adapter_model.safetensors"
MLX_WEIGHTS = "adapters.safetensors"
EXPERTS = "experts"  # the part of a module's name that all experts of a layer have
ABSORBED = "kv_b_proj"  # the last part of a module's name: the projection from a latent to keys and values

# Ends of tensor names, for the factors A and B.
_MLX_ENDS = {".lora_a": "a", ".lora_b": "b"}
_TRAINING_END = ".lora_velora_embed"  # a tensor that PEFT reads only in training
_BASE_LAYER = ".base_layer"  # in the name of a tensor of the base model that PEFT has saved beside the factors
_BASE_ENDS = (".weight", ".bias")


@dataclass(frozen=True, slots=True)
class Factors:
    """The LoRA factors of one module: the adapter adds scale * B(A(x)) to the module's output."""

    a: StoredTensor  # [rank, in_features]
    b: StoredTensor  # [out_features, rank]
    transposed: bool  # True: stored as [in_features, rank] and [rank, out_features]
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1 if self.transposed else 0]

    @property
    def in_features(self) -> int:
        return self.a.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        return self.b.shape[1 if self.transposed else 0]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The validated metadata of an adapter."""

    path: Path  # the folder, or the GGUF file
    # Module of the base model, as "model.layers.0.self_attn.q_proj", or tensor of a GGUF model -> its factors.
    factors: Mapping[str, Factors]
    base: str  # name or path of the base model in the configuration; empty if it has none
    base_class: str  # class of the base model in transformers, as "MistralForCausalLM"; empty if it has none
    version: str  # SHA-256 over configuration and weights; empty: the weights were not read
    # Tensor of the base model -> a copy of it in the adapter's file: PEFT saves the embedding and the head if they have
    # factors. An adapter is read only for a model with equal tensors.
    copies: Mapping[str, StoredTensor] = field(default_factory=dict)
    warning: str = ""  # a fact that the files do not have, but that changes the effect of the adapter

    @property
    def rank(self) -> int:
        """The largest rank of all modules."""
        return max(factors.rank for factors in self.factors.values())


def read_adapter(path: Path | str) -> AdapterFiles:
    """Read an adapter folder, or a GGUF file. Raises ModelRefused with the file, the field or the tensor."""
    files = read_adapter_header(Path(path))
    contents = (files.path,) if is_gguf(files.path) else (files.path / CONFIG, _weights(files.path))
    return replace(files, version=_content_hash(*contents))


def is_gguf(path: Path) -> bool:
    """Whether the path names a GGUF file."""
    return path.suffix.lower() == GGUF and not path.is_dir()


def read_adapter_header(folder: Path) -> AdapterFiles:
    """Read the configuration and the header of the weights; the version is empty. `folder`: an adapter folder, a folder
    with one GGUF file, or a GGUF file. Raises ModelRefused as read_adapter does."""
    if is_gguf(folder):
        return _read_gguf(folder)
    if not folder.is_dir():
        raise ModelRefused(f"adapter folder {folder} does not exist")
    if not (folder / CONFIG).exists():
        files = [file for file in folder.iterdir() if is_gguf(file)]
        if len(files) == 1:
            return _read_gguf(files[0])
        # PEFT saves an adapter with a name of its own in a folder of this name.
        named = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))[:5]
        one_of = f"name one of its folders: {', '.join(named)}" if named else "use an adapter folder of PEFT or mlx-lm"
        raise ModelRefused(f"{folder.name} has no {CONFIG}", one_of)
    values = read_json(folder / CONFIG)
    weights = _weights(folder)
    tensors = read_header(weights)
    config: AdapterConfig
    copies: dict[str, StoredTensor] = {}
    if "peft_type" in values or weights.name == PEFT_WEIGHTS:
        config = PeftConfig(values)
        copies, tensors = _split_copies(tensors)
        factors = _read_peft(config, tensors)
    else:
        config = MlxConfig(values)
        factors = _text_factors(config, _pairs(tensors, _MLX_ENDS), transposed=True)
    return AdapterFiles(
        folder, MappingProxyType(factors), config.base, config.base_class, version="", copies=MappingProxyType(copies)
    )


def _read_gguf(file: Path) -> AdapterFiles:
    if not file.is_file():
        raise ModelRefused(f"adapter file {file} does not exist")
    adapter = read_gguf_adapter(file)
    factors = {
        module: _validated(module, a.tensor, b.tensor, False, adapter)
        for module, (a, b) in _pairs(adapter.tensors, GGUF_ENDS).items()
    }
    return AdapterFiles(
        file, MappingProxyType(factors), adapter.base, adapter.base_class, version="", warning=adapter.warning
    )


def _weights(folder: Path) -> Path:
    for name in (PEFT_WEIGHTS, MLX_WEIGHTS):
        if (folder / name).exists():
            return folder / name
    if (folder / "adapter_model.bin").exists():
        raise ModelRefused(
            f"{folder.name} has only pickle weights (adapter_model.bin); loading them could run code",
            "save the adapter again with safe_serialization=True",
        )
    raise ModelRefused(f"{folder.name} has no weights: {PEFT_WEIGHTS} and {MLX_WEIGHTS} are missing")


def _split_copies(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """The copies of tensors of the base model, by the names that they have there, and the other tensors."""
    copies: dict[str, StoredTensor] = {}
    others: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if "lora_" in name or not name.startswith(PREFIX) or not name.endswith(_BASE_ENDS):
            others[name] = tensor
            continue
        original = text_module(name.removeprefix(PREFIX).replace(_BASE_LAYER, ""))
        if original:
            copies[original] = tensor
    return copies, others


def _read_peft(config: AdapterConfig, tensors: Mapping[str, StoredTensor]) -> dict[str, Factors]:
    used = {name: tensor for name, tensor in tensors.items() if not name.endswith(_TRAINING_END)}
    pairs: dict[str, tuple[_Named, _Named]] = {}
    for module, (a, b) in _pairs(used, PEFT_ENDS).items():
        if not module.startswith(PREFIX):
            raise ModelRefused(f"tensor {a.name!r:.200} does not begin with {PREFIX}")
        pairs[module.removeprefix(PREFIX)] = a, b
    return _text_factors(config, pairs, transposed=False)


def _text_factors(
    config: AdapterConfig, pairs: Mapping[str, tuple[_Named, _Named]], *, transposed: bool
) -> dict[str, Factors]:
    """The factors of the text model, by the names of its modules in a causal language model. `pairs` and the
    configuration have the names of the modules in the model that was trained."""
    factors: dict[str, Factors] = {}
    for trained, (a, b) in pairs.items():
        _refuse_experts(trained)
        validated = _validated(trained, a.tensor, b.tensor, transposed, config)
        name = text_module(trained)
        if name in factors:
            raise ModelRefused(f"tensor {a.name!r:.200} is a second LoRA factor of {name}")
        if name:
            factors[name] = validated
    if not factors:
        raise ModelRefused("the adapter has no LoRA factors of the text model")
    return factors


def _refuse_experts(module: str) -> None:
    if EXPERTS in module.split("."):
        raise ModelRefused(f"it changes {module!r:.200}: {NO_EXPERTS}", WITHOUT_EXPERTS)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    tensor: StoredTensor


def _pairs(tensors: Mapping[str, StoredTensor], ends: Mapping[str, str]) -> dict[str, tuple[_Named, _Named]]:
    """Module -> its factors A and B. Raises ModelRefused for a tensor that is no LoRA factor, and for a module with
    only one factor."""
    modules: dict[str, dict[str, _Named]] = {}
    for name, tensor in tensors.items():
        end = next((end for end in ends if name.endswith(end)), None)
        if end is None:
            raise ModelRefused(f"tensor {name!r:.200} is not a LoRA factor", PLAIN_LORA)
        sides = modules.setdefault(name.removesuffix(end), {})
        if ends[end] in sides:
            raise ModelRefused(f"tensors {sides[ends[end]].name!r:.200} and {name!r:.200} are the same LoRA factor")
        sides[ends[end]] = _Named(name, tensor)
    if not modules:
        raise ModelRefused("the adapter has no LoRA factors")
    for module, sides in modules.items():
        if len(sides) != 2:
            raise ModelRefused(f"module {module!r:.200} has only one of its two LoRA factors")
    return {module: (sides["a"], sides["b"]) for module, sides in modules.items()}


def _validated(module: str, a: StoredTensor, b: StoredTensor, transposed: bool, config: AdapterConfig) -> Factors:
    for tensor in (a, b):
        if len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
            raise ModelRefused(
                f"{module}: a LoRA factor is {tensor.dtype} {list(tensor.shape)}, "
                f"not a float matrix ({', '.join(FLOATS)})"
            )
    rank = a.shape[1 if transposed else 0]
    other_rank = b.shape[0 if transposed else 1]
    if rank != other_rank or not 1 <= rank <= MAX_RANK:
        raise ModelRefused(f"{module}: LoRA factors of ranks {rank} and {other_rank}; expected 1…{MAX_RANK}")
    return Factors(a, b, transposed, config.scale(module, rank))


def _content_hash(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
