"""The architectures whose class in mlx-lm computes as the class in transformers.

tests/backends/test_mlx_twins.py compares each of them with a tiny model of transformers. All others are refused: a
class of mlx-lm may ignore values of config.json and tensors, and its answers show no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...engine.files.model_config import ModelConfig

VERIFIED = frozenset(
    "afmoe apertus cohere cohere2 deepseek_v2 deepseek_v3 dots1 ernie4_5 exaone4 exaone_moe gemma gemma3_text "
    "gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_neox gpt_oss gptj granite granitemoe helium "
    "hunyuan_v1_dense internlm3 iquestcoder joyai_llm_flash kimi_k2 laguna llama mellum minicpm3 "
    "minimax_m2 ministral3 mistral mixtral nemotron olmo2 olmo3 olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe "
    "seed_oss smollm3 solar_open stablelm starcoder2".split()
)
# model_type of a multimodal model -> the supported values of model_type in its text_config. The first is the default.
MULTIMODAL: Mapping[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",),
    "gemma4": ("gemma4_text",),
    "llava": ("llama", "mistral"),
    "mistral3": ("ministral3", "mistral"),
    "qwen2_vl": ("qwen2_vl_text",),
    "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen3_vl": ("qwen3_vl_text",),
    "qwen3_vl_moe": ("qwen3_vl_moe_text",),
}

_OTHER_STATES = (
    "afm7 baichuan_m1 bailing_hybrid bailing_moe_linear bailing_moe_v3 deepseek_v32 falcon_h1 falcon_mamba gear "
    "glm_moe_dsa granitemoehybrid jamba kimi_k3 kimi_linear lfm2 lfm2_moe llama4 llama4_text longcat_flash "
    "longcat_flash_ngram mamba mamba2 minimax_m3_vl nemotron_h olmo_hybrid plamo2 qwen3_5 qwen3_5_moe qwen3_5_moe_text "
    "qwen3_5_text qwen3_next recurrent_gemma rwkv7"
)
_DIFFERENCES: Mapping[str, str] = {
    "bitnet": "it has only packed weights",
    "ernie4_5_moe": "it drops the correction bias of the routers",
    "gemma2": "it does not use MLX's attention function, and its masks are wrong for several rows",
    "gemma3n": "some layers store no keys and values",
    "gpt_bigcode": "its positions are wrong for several rows",
    "mimo_v2_flash": "its windows are one position shorter",
    "minimax": "it is another architecture, MiniMax-M2",
    "nanochat": "its tensors have other names",
    "olmo": "it needs the package ai2-olmo",
}


# Architectures of FAMILIES for which families.py sets all values.
_DESCRIBED = frozenset("gemma3_text llama mistral olmo2 phi3 qwen2 qwen3 smollm3".split())


def is_described(config: ModelConfig) -> bool:
    """Whether families.py sets all values of this architecture from ModelConfig. The classes of mlx-lm read the values
    of other architectures, such as those with experts, from config.json (config_keys.py)."""
    return config.model_type in _DESCRIBED and not config.multimodal


def refusal(values: Mapping[str, Any]) -> str:
    """The reason why mlx-lm's class of this config.json is not used; empty if it is right."""
    model_type = str(values.get("model_type"))[:50]
    if model_type in MULTIMODAL:
        return _text_refusal(model_type, values.get("text_config"))
    if model_type in VERIFIED:
        return ""
    if model_type in _OTHER_STATES.split():
        return f"layers of {model_type} store other states than keys and values"
    if model_type in _DIFFERENCES:
        return f"mlx-lm computes {model_type} differently from transformers: {_DIFFERENCES[model_type]}"
    return f"{model_type} is not among the architectures that mlx-lm computes as transformers does"


def _text_refusal(model_type: str, text: Any) -> str:
    supported = MULTIMODAL[model_type]
    text_type = text.get("model_type", supported[0]) if isinstance(text, dict) else supported[0]
    if text_type in supported:
        return ""
    return f"mlx-lm does not compute {model_type} with {text_type!s:.50} as transformers does"
