"""The architectures of config.json that llama.cpp supports as GGUF files, for the hint of a refused model."""

from __future__ import annotations

import re
import shlex

# Ends of the names of repositories that have the weights of a model in another format.
_FORMATS = re.compile(
    r"([-_.](\d+-?bits?|awq|gptq|fp8|int[48]|bf16|nvfp4|mxfp4|mlx|w\da\d+|dynamic|block|quantized))+$", re.I
)

# model_type -> architecture in a GGUF file, if the names differ in more than _ and -
_OTHER_NAMES = {
    "bailing_moe": "bailingmoe",
    "bailing_moe_v2": "bailingmoe2",
    "bailing_moe_v3": "bailingmoe3",
    "bamba": "granitehybrid",
    "cohere": "command-r",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "deepseek_v32": "deepseek32",
    "deepseek_v4": "deepseek4",
    "ernie4_5_moe": "ernie4_5-moe",
    "falcon_mamba": "mamba",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "glm": "chatglm",
    "glm4_moe_lite": "deepseek2",
    "glm4v": "glm4",
    "glm4v_moe": "glm4moe",
    "glm_moe_dsa": "glm-dsa",
    "gpt_bigcode": "starcoder",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "internlm3": "llama",
    "kimi_k2": "deepseek2",
    "kimi_k25": "deepseek2",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo2",
    "minimax": "minimax-01",
    "minimax_m3_vl": "minimax-m3",
    "ministral3": "mistral3",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "phi": "phi2",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_5_text": "qwen35",
    "solar_open": "glm4moe",
    "step3p5": "step35",
}
NAMES = frozenset(
    "afmoe apertus arcee arctic baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chatglm codeshell cohere2 "
    "command-r dbrx deepseek deepseek2 deepseek32 deepseek4 dots1 ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 "
    "falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm-dsa glm4 glm4moe gpt-oss gpt2 gptneox granite "
    "granitehybrid granitemoe grok hunyuan-dense hunyuan-moe internlm2 jais jamba kimi-linear laguna lfm2 lfm2moe "
    "llama llama4 mamba mamba2 mellum mimo2 minicpm minicpm3 minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 mpt "
    "nanbeige nemotron nemotron_h olmo olmo2 olmoe openelm orion phi2 phi3 phimoe plamo plamo2 plamo3 qwen qwen2 "
    "qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe rwkv6 rwkv7 seed_oss smollm3 "
    "stablelm starcoder starcoder2 step35 xverse".split()
)


def gguf_architecture(model_type: str) -> str:
    """The architecture of a GGUF file of this model_type; empty if llama.cpp runs none."""
    names = (_OTHER_NAMES.get(model_type, model_type), model_type.replace("_", "-"), model_type.replace("_", ""))
    return next((name for name in names if name in NAMES), "")


def gguf_hint(name: str, model_type: str) -> str:
    """The command that finds GGUF files of a refused model; empty if llama.cpp does not run its architecture.

    `name`: of the model. `model_type`: in its config.json.
    """
    if not gguf_architecture(model_type):
        return ""
    word = _FORMATS.sub("", name.partition("@")[0].rstrip("/").rpartition("/")[2])
    return f"llama.cpp runs GGUF files of this architecture; to find them: localllm search {shlex.quote(word)} gguf"
