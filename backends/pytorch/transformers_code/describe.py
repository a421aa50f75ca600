"""The description of a model that transformers' code computes: its class, its calls, and what a load plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ....engine.files.config_files import CONFIG, read_config
from ....engine.files.fields import Fields
from ....engine.files.layer_kinds import FULL, MAX_POSITIONS, SLIDING
from ....engine.files.model_config import EMPTY_CONFIG, LinearLayers, ModelConfig
from ....engine.files.model_files import ModelFiles, read_tensors
from ....engine.files.quantization import parse_quantization
from .classes import config_of, refused
from .names import Names, named
from .probe import Calls, probe
from .twin import CHOICES


@dataclass(frozen=True)
class Description:
    """A model that transformers' code computes."""

    files: ModelFiles  # with the tensors and the configuration that the load plans with
    config: Any  # of transformers
    calls: Calls
    names: Names
    head: str  # name of the output head
    is_tied: bool  # the output head has the weight of the embedding
    top_k: int  # experts of a token; 0: none
    fused: bool = True  # whether our norms and MLPs replace those of the class


def describe(files: ModelFiles) -> Description:
    """Probes the code of the model. Raises ModelRefused with the reason why our cache and weights do not fit it."""
    values = read_config(files.path)
    config = config_of(values)
    model, calls = probe(config)
    layers = int(config.num_hidden_layers)
    names = named(model, read_tensors(files.path), layers)
    head = name_of(model, model.get_output_embeddings())
    is_tied = f"{head}.weight" in model.all_tied_weights_keys and f"{head}.weight" not in names.tensors
    top_k = next((int(value) for key in CHOICES if (value := getattr(config, key, 0))), 0)
    plan = _plan(files.config, values, config, model, calls)
    plan = replace(plan, tie_embeddings=is_tied)
    described = replace(files, config=plan, tensors=names.tensors, warnings=(*files.warnings, *names.warnings))
    return Description(described, config, calls, names, head, is_tied, top_k)


def name_of(model: Any, module: nn.Module | None) -> str:
    """The name of a module of the model; empty if it is not one."""
    return next((name for name, each in model.named_modules() if each is module), "")


def _plan(base: ModelConfig, values: Mapping[str, Any], config: Any, model: Any, calls: Calls) -> ModelConfig:
    """The configuration that a load plans with."""
    shapes = {(each.kv_heads, max(each.key_dim, each.value_dim)) for each in calls.attention}
    if len(shapes) > 1:
        raise refused(base.model_type, "its layers have keys of different shapes")
    quantization = parse_quantization(Fields(values, CONFIG))
    if quantization is not None and quantization.method == "foreign":
        raise refused(base.model_type, "its weights are in MLX's format")
    kv_heads, dim = shapes.pop()
    linear = [module for name, module in model.named_modules() if type(module) is nn.Linear and calls.linear[name]]
    layers = len(calls.attention)
    vocab, hidden = int(config.vocab_size), int(config.hidden_size)
    heads = max(each.heads for each in calls.attention)
    weights = sum(module.weight.numel() for module in linear if module.out_features != vocab)
    attention = 2 * hidden * (heads + kv_heads) * dim
    windows = {each.call.window for each in calls.attention} - {0}
    # Layers with several windows keep all positions.
    window = windows.pop() if len(windows) == 1 else 0
    kinds = [SLIDING if window and each.call.window else FULL for each in calls.attention]
    positions = int(getattr(config, "max_position_embeddings", 0) or base.max_positions)
    return replace(
        EMPTY_CONFIG,
        model_type=base.model_type,
        dtype=base.dtype,
        eos_ids=base.eos_ids,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=max(hidden, (weights // layers - attention) // (3 * hidden)),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_positions=min(positions, MAX_POSITIONS),
        layer_kinds=tuple(kinds),
        window=window,
        quantization=quantization,
        linear=LinearLayers(
            sum(module.in_features + module.out_features for module in linear) + vocab + hidden, len(linear) + 1
        ),
    )
