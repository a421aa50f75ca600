"""Reads an adapter folder: adapter_config.json and safetensors headers -> AdapterFiles. Reads no weights.

Two layouts: PEFT (https://huggingface.co/docs/peft/developer_guides/checkpoint) and mlx-lm (mlx_lm/tuner/utils.py).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .errors import ModelRefused
from .fields import Fields
from .lora import Adapter
from .modelfiles import read_json
from .tensorfiles import StoredTensor, read_header

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = "adapter_model.safetensors"
MLX_WEIGHTS = "adapters.safetensors"
MAX_RANK = 1024
PREFIX = "base_model.model."  # the prefix of every tensor name in PEFT's files
HEAD = "lm_head"
FLOATS = ("F32", "F16", "BF16")

# Ends of tensor names, for the factors A and B.
_PEFT_ENDS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_embedding_A": "a", ".lora_embedding_B": "b"}
_MLX_ENDS = {".lora_a": "a", ".lora_b": "b"}

# Features of PEFT that change the result and are not computed: field -> the feature's name.
_UNSUPPORTED = MappingProxyType(
    {
        "use_dora": "DoRA",
        "use_qalora": "QALoRA",
        "lora_bias": "biases of LoRA products",
        "fan_in_fan_out": "weights of Conv1D layers (fan_in_fan_out)",
        "modules_to_save": "whole modules beside LoRA (modules_to_save)",
        "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
        "layer_replication": "replicated layers (layer_replication)",
        "target_parameters": "parameters that are not linear layers (target_parameters)",
        "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
        "megatron_config": "Megatron layers (megatron_config)",
        "arrow_config": "Arrow routing between adapters (arrow_config)",
        "kasa_config": "KaSA (kasa_config)",
        "monteclora_config": "MonteCLoRA (monteclora_config)",
        "use_bdlora": "block-diagonal factors (use_bdlora)",
    }
)
# Values of init_lora_weights that also change the base model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


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

    path: Path
    factors: Mapping[str, Factors]  # module of the base model, as "model.layers.0.self_attn.q_proj" -> its factors
    base: str  # name of the base model in the configuration; empty if it has none
    version: str  # SHA-256 over configuration and weights

    @property
    def rank(self) -> int:
        """The largest rank of all modules."""
        return max(factors.rank for factors in self.factors.values())


def read_adapter(path: Path | str) -> AdapterFiles:
    """Read an adapter folder. Raises ModelRefused with the file, the field or the tensor."""
    folder = Path(path)
    if not folder.is_dir():
        raise ModelRefused(f"adapter folder {folder} does not exist")
    if not (folder / CONFIG).exists():
        raise ModelRefused(f"{folder.name} has no {CONFIG}", "use an adapter folder of PEFT or mlx-lm")
    values = read_json(folder / CONFIG)
    config = Fields(values, CONFIG)
    weights = _weights(folder)
    tensors = read_header(weights)
    if "peft_type" in config or weights.name == PEFT_WEIGHTS:
        _refuse_unsupported(values, config)
        factors = _read_peft(config, tensors)
        _refuse_excluded(values, config, factors)
        base = config.text("base_model_name_or_path", "")
    else:
        factors = _read_mlx(config, tensors)
        base = config.text("model", "")
    return AdapterFiles(folder, MappingProxyType(factors), base, _content_hash(folder / CONFIG, weights))


def read_for_model(
    adapter: Adapter, shapes: Mapping[str, tuple[int, int]], max_rank: int, tied_embedding: str = ""
) -> AdapterFiles:
    """Read a registered adapter. Raises ModelRefused if its files have changed, or if it does not fit the model.

    `shapes`: (out_features, in_features) of each module of the base model that can have factors. The in_features of an
    embedding are the size of the vocabulary. `tied_embedding`: the embedding that is the output head as well. Its
    factors in an adapter of mlx-lm also change the head, as mlx-lm computes it. In an adapter of PEFT they do not.
    """
    try:
        files = read_adapter(adapter.path)
    except ModelRefused as error:
        raise ModelRefused(f"adapter {adapter.name}: {error}", error.hint) from error
    if files.version != adapter.version:
        raise ModelRefused(f"adapter {adapter.name}: its files have changed", "load the adapter again")
    if files.rank > max_rank:
        raise ModelRefused(
            f"adapter {adapter.name}: rank {files.rank}, but the limit is {max_rank}",
            f"raise the setting adapter_rank to {files.rank} or more",
        )
    for module, factors in files.factors.items():
        if module not in shapes:
            raise ModelRefused(f"adapter {adapter.name}: the model has no module {module!r:.200}")
        expected = shapes[module]
        actual = factors.out_features, factors.in_features
        if actual != expected:
            raise ModelRefused(
                f"adapter {adapter.name}: {module} is {actual[0]} x {actual[1]}, but in the model {expected[0]} x "
                f"{expected[1]}; the adapter is for another base model"
            )
    embedding = files.factors.get(tied_embedding)
    if embedding is None or not embedding.transposed:
        return files
    head = Factors(embedding.b, embedding.a, transposed=False, scale=embedding.scale)
    return replace(files, factors=MappingProxyType({**files.factors, HEAD: head}))


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


def _read_peft(config: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, Factors]:
    if config.text("peft_type", "LORA") != "LORA":
        raise config.refuse("peft_type", "LORA")
    rank = config.integer("r", 1, MAX_RANK)
    alpha = config.number("lora_alpha", 0.0, 1e6)
    root = config.flag("use_rslora", False)
    ranks = _patterns(config, "rank_pattern", 1.0, MAX_RANK)
    alphas = _patterns(config, "alpha_pattern", 0.0, 1e6)
    factors: dict[str, Factors] = {}
    for module, (a, b) in _pairs(tensors, _PEFT_ENDS).items():
        if not module.startswith(PREFIX):
            raise ModelRefused(f"tensor {a.name!r:.200} does not begin with {PREFIX}")
        name = module.removeprefix(PREFIX)
        module_rank = _match(ranks, name, rank)
        module_alpha = _match(alphas, name, alpha)
        divisor = math.sqrt(module_rank) if root else module_rank
        factors[name] = _checked(name, a.tensor, b.tensor, False, module_alpha / divisor)
        if factors[name].rank != module_rank:
            raise ModelRefused(f"{name}: rank {factors[name].rank}, but {CONFIG} says {module_rank:g}")
    return factors


def _refuse_excluded(values: Mapping[str, Any], config: Fields, modules: Iterable[str]) -> None:
    """Refuse factors of modules that the configuration excludes: PEFT ignores them.

    Regular expressions are not evaluated: a hostile one could take for ever.
    """
    targets = values.get("target_modules")
    excluded = values.get("exclude_modules")
    layers = values.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    for module in modules:
        if isinstance(targets, list) and not _is_named(module, targets):
            raise config.refuse("target_modules", f"a list with {module}, which has LoRA factors in the file")
        if isinstance(excluded, list) and _is_named(module, excluded):
            raise config.refuse("exclude_modules", f"a list without {module}, which has LoRA factors in the file")
        number = re.search(r"\.layers\.(\d+)\.", module)
        if layers and number and int(number[1]) not in layers:
            raise config.refuse("layers_to_transform", f"a list with the layer of {module}, which has LoRA factors")


def _is_named(module: str, names: list[Any]) -> bool:
    """Whether one of the names is the module's name or the end of it, as in PEFT."""
    return any(module == name or module.endswith(f".{name}") for name in names)


def _refuse_unsupported(values: Mapping[str, Any], config: Fields) -> None:
    for field, feature in _UNSUPPORTED.items():
        if values.get(field):
            raise ModelRefused(f"{CONFIG}: {feature} is not supported", "use a plain LoRA adapter")
    if "bias" in config and config.text("bias") != "none":
        raise config.refuse("bias", '"none"')
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelRefused(
            f"{CONFIG}: init_lora_weights {start!r:.40} changes the base model, which is not supported",
            "convert the adapter to plain LoRA with PEFT",
        )


def _patterns(config: Fields, key: str, low: float, high: float) -> dict[str, float]:
    """rank_pattern or alpha_pattern: a pattern of module names -> the value in low…high for these modules.

    As in PEFT, a pattern is a regular expression. Operators of repetition are refused: a match could take too long.
    """
    table = config.table(key)
    patterns = {}
    for pattern in table:
        if not re.fullmatch(r"\^?([A-Za-z0-9_.]|\\\.)+\$?", pattern):
            raise ModelRefused(f"{CONFIG}: {key}: {pattern!r:.100} must be a module name, not a regular expression")
        patterns[pattern] = table.number(pattern, low, high)
    return patterns


def _match(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the module, or `default`. A pattern with ^ matches the whole name, a
    pattern without ^ also its end."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _read_mlx(config: Fields, tensors: Mapping[str, StoredTensor]) -> dict[str, Factors]:
    if config.text("fine_tune_type", "lora") != "lora":
        raise config.refuse("fine_tune_type", '"lora"')
    scale = config.table("lora_parameters").number("scale", -1e6, 1e6)
    return {
        module: _checked(module, a.tensor, b.tensor, True, scale)
        for module, (a, b) in _pairs(tensors, _MLX_ENDS).items()
    }


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
            raise ModelRefused(f"tensor {name!r:.200} is not a LoRA factor", "use a plain LoRA adapter")
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


def _checked(module: str, a: StoredTensor, b: StoredTensor, transposed: bool, scale: float) -> Factors:
    for tensor in (a, b):
        if len(tensor.shape) != 2 or tensor.dtype not in FLOATS:
            raise ModelRefused(f"{module}: a LoRA factor is {tensor.dtype} {list(tensor.shape)}, not a float matrix")
    factors = Factors(a, b, transposed, scale)
    other_rank = b.shape[0 if transposed else 1]
    if factors.rank != other_rank or not 1 <= factors.rank <= MAX_RANK:
        raise ModelRefused(f"{module}: LoRA factors of ranks {factors.rank} and {other_rank}; expected 1…{MAX_RANK}")
    return factors


def _content_hash(*files: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.stat().st_size.to_bytes(8, "big"))
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
