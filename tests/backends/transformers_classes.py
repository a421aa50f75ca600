"""The configuration of a small model of each causal decoder in the installed transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from localllm.backends.pytorch.transformers_code.twin import tiny_values

# Fields that published files have, and whose defaults build no model.
_PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ministral": {"head_dim": 128},
    "minimax_m3_vl_text": {"layer_types": ["full_attention"] + ["minimax_m3_sparse"] * 59},
}


def model_types() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_values(model_type: str) -> dict[str, Any]:
    """The fields of config.json of a small model."""
    try:
        config = CONFIG_MAPPING[model_type]()
    except Exception:  # a class without valid defaults
        return {"model_type": model_type}
    values = {**config.to_dict(), **_PUBLISHED.get(model_type, {}), "model_type": model_type}
    for key, default in (("head_dim", 128), ("num_key_value_heads", values.get("num_attention_heads"))):
        if key in values and values[key] is None:
            values[key] = default
    return tiny_values(values, int(getattr(config, "num_hidden_layers", 0) or 0))
