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
from .modules import has_our_experts
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
    floats: tuple[str, ...] = ()  # matrices that the class multiplies itself, so that they are never quantised on load
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
    return Description(described, config, calls, names, head, is_tied, top_k, _floats(model, calls))


def _floats(model: Any, calls: Calls) -> tuple[str, ...]:
    found = []
    for name, module in model.named_modules():
        is_ours = type(module) is nn.Linear and calls.linear[name]
        if not (is_ours or isinstance(module, nn.Embedding) or has_our_experts(module)):
            found += [f"{name}.{own}" for own, each in module.named_parameters(recurse=False) if each.dim() > 1]
    return tuple(found)


def name_of(model: Any, module: nn.Module | None) -> str:
    """The name of a module of the model; empty if it is not one."""
    return next((name for name, each in model.named_modules() if each is module), "")


def _plan(base: ModelConfig, values: Mapping[str, Any], config: Any, model: Any, calls: Calls) -> ModelConfig:
    """The configuration that a load plans with."""
    quantization = parse_quantization(Fields(values, CONFIG))
    if quantization is not None and quantization.method == "foreign":
        raise refused(base.model_type, "its weights are in MLX's format")
    positions = int(getattr(config, "max_position_embeddings", 0) or base.max_positions)
    vocab, hidden = int(config.vocab_size), int(config.hidden_size)
    linear = [module for name, module in model.named_modules() if type(module) is nn.Linear and calls.linear[name]]
    width = sum(module.in_features + module.out_features for module in linear)
    plan = replace(
        _attention_plan(base.model_type, calls),
        dtype=base.dtype,
        eos_ids=base.eos_ids,
        vocab_size=vocab,
        hidden_size=hidden,
        max_positions=min(positions, MAX_POSITIONS),
        quantization=quantization,
        linear=LinearLayers(width + vocab + hidden, len(linear) + 1),
    )
    attention = 2 * hidden * (plan.num_heads + plan.num_kv_heads) * plan.head_dim
    weights = sum(module.weight.numel() for module in linear if module.out_features != vocab)
    inner = (weights // plan.num_layers - attention) // (3 * hidden)
    return replace(plan, intermediate_size=max(hidden, inner))


def _attention_plan(model_type: str, calls: Calls) -> ModelConfig:
    """A configuration with the fields of attention. Layers with several windows keep all positions."""
    shapes = {(each.kv_heads, max(each.key_dim, each.value_dim)) for each in calls.attention}
    if len(shapes) > 1:
        raise refused(model_type, "its layers have keys of different shapes")
    [(kv_heads, dim)] = shapes
    windows = {each.call.window for each in calls.attention} - {0}
    window = windows.pop() if len(windows) == 1 else 0
    return replace(
        EMPTY_CONFIG,
        model_type=model_type,
        num_layers=len(calls.attention),
        num_heads=max(each.heads for each in calls.attention),
        num_kv_heads=kv_heads,
        head_dim=dim,
        layer_kinds=tuple(SLIDING if window and each.call.window else FULL for each in calls.attention),
        window=window,
    )
