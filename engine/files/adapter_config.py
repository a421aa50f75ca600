"""Validates adapter_config.json of PEFT and of mlx-lm. Each field is honoured, has no effect on answers, or is refused.

PEFT: https://huggingface.co/docs/peft/package_reference/lora. mlx-lm: mlx_lm/tuner/utils.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol

from ..errors import ModelRefused
from .fields import Fields
from .module_patterns import Steps
from .peft_modules import ALL_LINEAR, EMBEDDING, HEAD, PatternTable, PeftModules

CONFIG = "adapter_config.json"
MAX_RANK = 1024
MAX_SCALE = 1e6
PLAIN_LORA = "train the adapter as plain LoRA"
NO_EXPERTS = "adapters of the experts of a mixture are not supported"
WITHOUT_EXPERTS = "train the adapter with the target modules q_proj, k_proj, v_proj and o_proj"

# Fields of PEFT's LoraConfig that the reader of PEFT's layout validates or computes.
HONOURED = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
# Fields that have no effect on the answers of a trained LoRA adapter.
NO_EFFECT = frozenset(
    {
        "corda_config",  # initial values of the factors: init_lora_weights is validated
        "eva_config",
        "loftq_config",
        "lora_ga_config",
        "fan_in_fan_out",  # PEFT ignores it for linear layers and embeddings
        "inference_mode",
        "lora_dropout",  # training only
        "lora_dtype",  # ms-swift: dtype and learning rates of the training
        "lorap_emb_lr",
        "lorap_lr_ratio",
        "megatron_core",  # used only with megatron_config
        "merge_weights",  # PEFT before 0.3: adds the products to the weights for inference
        "peft_version",
        "qalora_group_size",  # used only with use_qalora
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",  # changes the backward pass only
    }
)
# Features of PEFT that change the answers and are not computed: field -> the feature's name.
UNSUPPORTED = MappingProxyType(
    {
        "use_dora": "DoRA",
        "use_qalora": "QALoRA",
        "lora_bias": "biases of LoRA products",
        "modules_to_save": "whole modules beside LoRA (modules_to_save)",
        "trainable_token_indices": "trained token embeddings (trainable_token_indices)",
        "layer_replication": "replicated layers (layer_replication)",
        "alora_invocation_tokens": "activated LoRA (alora_invocation_tokens)",
        "megatron_config": "Megatron layers (megatron_config)",
        "arrow_config": "Arrow routing between adapters (arrow_config)",
        "kasa_config": "KaSA (kasa_config)",
        "monteclora_config": "MonteCLoRA (monteclora_config)",
        "use_bdlora": "block-diagonal factors (use_bdlora)",
    }
)
PARAMETERS = "target_parameters"  # names of parameters that belong to no linear layer: the weights of experts
BIASES = ("none", "all", "lora_only")  # the trained biases; the file has them as tensors of their own
_LAYER = re.compile(r"^(?:.*?\.)?layers\.(\d+)\.")  # the beginning of the name of a module in a layer
# Values of init_lora_weights that leave the base model as it is, and values that change it.
_KEEPS_BASE = ("gaussian", "eva", "orthogonal", "mica")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class AdapterConfig(Protocol):
    """A validated configuration."""

    @property
    def base(self) -> str:
        """Name or path of the base model; empty if the configuration has none."""

    @property
    def base_class(self) -> str:
        """Class of the base model in transformers; empty if the configuration has none."""

    def scale(self, module: str, rank: int) -> float:
        """The factor of the product B(A(x)) of a module whose factors have this rank.

        Raises ModelRefused if the configuration says another rank, or excludes the module.
        """


class PeftConfig:
    """The configuration of a PEFT adapter."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises ModelRefused with the field, for a feature or a value that is not supported."""
        config = Fields(values, CONFIG)
        _refuse_unsupported(values, config)
        self.base = config.text("base_model_name_or_path", "")
        self.base_class = config.table("auto_mapping").text("base_model_class", "")
        self._config = config
        self._rank = _number(config, "r", 8)
        self._alpha = _number(config, "lora_alpha", 8)
        self._square_root = config.flag("use_rslora", False)
        steps = Steps()
        self._ranks = PatternTable(values, config, "rank_pattern", 1.0, MAX_RANK, steps)
        self._alphas = PatternTable(values, config, "alpha_pattern", -MAX_SCALE, MAX_SCALE, steps)
        self._modules = PeftModules(values, config, steps)
        self._tied = config.flag("ensure_weight_tying", False)

    def scale(self, module: str, rank: int) -> float:
        self._modules.check(module)
        if self._tied and module.endswith((HEAD, EMBEDDING)):
            raise self._config.refuse("ensure_weight_tying", f"false if the file has LoRA factors of {module}")
        expected = self._ranks.value(module, self._rank)
        if rank != expected:
            raise ModelRefused(f"{module}: rank {rank}, but {CONFIG} says {expected:g}")
        divisor = math.sqrt(rank) if self._square_root else rank
        return self._alphas.value(module, self._alpha) / divisor


class MlxConfig:
    """The configuration of an adapter of mlx-lm. The fields outside of lora_parameters are options of its training."""

    base_class = ""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises ModelRefused with the field."""
        config = Fields(values, CONFIG)
        if config.text("fine_tune_type", "lora") != "lora":
            raise config.refuse("fine_tune_type", '"lora"')
        if config.flag("use_dora", False):
            raise config.refuse("use_dora", "false: DoRA is not supported")
        self.base = config.text("model", "")
        parameters = config.table("lora_parameters")
        for field in parameters:
            if field not in {"rank", "scale", "dropout", "keys", "alpha"}:
                raise parameters.refuse(field, "absent: it is not a parameter of mlx-lm")
        self._parameters = parameters
        self._scale = parameters.number("scale", -MAX_SCALE, MAX_SCALE)
        self._keys = parameters.texts("keys") if "keys" in parameters else None

    def scale(self, module: str, rank: int) -> float:
        if "rank" in self._parameters and self._parameters.integer("rank", 1, MAX_RANK) != rank:
            raise self._parameters.refuse("rank", f"{rank}, the rank of the LoRA factors of {module}")
        # The first releases of mlx-lm multiply by alpha / rank, later releases ignore alpha.
        if "alpha" in self._parameters and self._parameters.number("alpha", -MAX_SCALE, MAX_SCALE) != rank:
            raise self._parameters.refuse("alpha", f"absent or {rank}: its meaning depends on the version of mlx-lm")
        if not self._selects(module):
            raise self._parameters.refuse("keys", f"a list with {module}, which has LoRA factors in the file")
        return self._scale

    def _selects(self, module: str) -> bool:
        """Whether mlx-lm adds LoRA to the module. A key names a module of a layer, or a module of the model."""
        name_in_layer = _LAYER.sub("", module)
        if self._keys is None:
            return name_in_layer != module
        return module in self._keys or name_in_layer in self._keys


def _refuse_unsupported(values: Mapping[str, Any], config: Fields) -> None:
    kind = config.text("peft_type", "LORA")
    if kind != "LORA":
        raise ModelRefused(f"{CONFIG}: peft_type {kind!r:.50} is not supported; only LORA is", PLAIN_LORA)
    for field in values:
        if not values[field] or field in NO_EFFECT or field in HONOURED:
            continue
        if field == PARAMETERS:
            named = ", ".join(map(str, config.texts(field)))
            raise ModelRefused(
                f"{CONFIG}: {PARAMETERS} has {named:.200}: {NO_EXPERTS}. PEFT names the experts so, also for "
                f'target_modules "{ALL_LINEAR}"',
                WITHOUT_EXPERTS,
            )
        if field in UNSUPPORTED:
            raise ModelRefused(f"{CONFIG}: {UNSUPPORTED[field]} is not supported", PLAIN_LORA)
        raise ModelRefused(
            f"{CONFIG}: the field {field!r:.100} with the value {values[field]!r:.100} is not known",
            "if the field has no effect on answers, delete it from the file",
        )
    config.choice("bias", BIASES, "none")
    _check_start(values.get("init_lora_weights", True), config)


def _check_start(start: Any, config: Fields) -> None:
    """Validate init_lora_weights: it must be a boolean, or a known method that does not change the base model."""
    if start is None or type(start) is bool:
        return
    name = str(start).lower()
    if name.startswith(_CHANGES_BASE):
        raise ModelRefused(
            f"{CONFIG}: init_lora_weights {start!r:.40} changes the base model, which is not supported",
            "convert the adapter to plain LoRA with PEFT",
        )
    if name not in _KEEPS_BASE:
        raise config.refuse("init_lora_weights", f"true, false or one of {', '.join(_KEEPS_BASE)}")


def _number(config: Fields, key: str, default: int) -> float:
    """r or lora_alpha. PEFT has a default for an absent field, but not for null."""
    if config.null(key):
        raise config.refuse(key, "a number")
    if key == "r":
        return config.integer(key, 1, MAX_RANK, default)
    return config.number(key, -MAX_SCALE, MAX_SCALE, default)
