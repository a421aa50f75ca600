"""Teacher-forced logits against transformers, for config.json files with few fields or with unusual fields.

Both programs read the same folder; transformers is the reference.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from localllm.backends import cpu
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused
from localllm.engine.files.families import FAMILIES
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions

from .batches import Row
from .test_parity import BOUND, logits_of, own_pages
from .tiny import TINIES, VOCAB, Tiny

LENGTH = 33
LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 5 + [1.1], "long_factor": [2.0] * 6}
KINDS = ["full_attention", "sliding_attention", "full_attention"]
CAPS = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 7}
BIASES = {"attention_bias": True, "mlp_bias": True}
GEMMA = {"head_dim": 16, "tie_word_embeddings": True, "layer_types": KINDS, "sliding_window": 6}
GONE = "gone"
MULTIPLIERS = {
    "embedding_multiplier": 3,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.7,
}
GLM = {"head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
TIED = {"tie_word_embeddings": True}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
TEXT_SHARE = {"partial_rotary_factor": "0.5"}
FOUR_LAYERS = {"num_hidden_layers": 4}
NARROW = {"sliding_window": 5, "use_sliding_window": True}

# Model type, its config, changes to config.json after saving.
SAME: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama-nothing": ("llama", {}, {"rope_parameters": GONE, "rms_norm_eps": GONE, "hidden_act": GONE}),
    "llama-partial": ("llama", {}, {"partial_rotary_factor": 0.5}),
    "llama-partial-inside": ("llama", {}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "llama-others-fields": ("llama", {}, {**CAPS, "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 3}),
    "llama-both-ropes": ("llama", {}, {"rope_scaling": LINEAR, "rope_parameters": {**LLAMA3, "rope_theta": 99.0}}),
    "llama-outer-original": ("llama", {}, {"rope_parameters": YARN, "original_max_position_embeddings": 16}),
    "llama-no-original": ("llama", {}, {"rope_parameters": LLAMA3, "rope_theta": 100.0}),
    "llama-longrope": ("llama", {}, {"rope_parameters": {**LONG, "original_max_position_embeddings": 64}}),
    "llama-multipliers": ("llama", {}, MULTIPLIERS),
    "glm4-partial": ("glm4", GLM, {"rope_parameters": GONE, "partial_rotary_factor": 0.25}),
    "glm4-nothing": ("glm4", GLM, dict.fromkeys(("rope_parameters", "rms_norm_eps", "attention_bias"), GONE)),
    "glm4-others-fields": ("glm4", GLM, {**CAPS, **NARROW, "mlp_bias": True}),
    "granite-multipliers": ("granite", {}, {**MULTIPLIERS, **CAPS, **NARROW}),
    "granite-nothing": ("granite", MULTIPLIERS, {"embedding_multiplier": GONE, "logits_scaling": GONE}),
    "deepseek_v2-null-flags": ("deepseek_v2", LATENT, dict.fromkeys(("norm_topk_prob", "rope_interleave"))),
    "deepseek_v2-narrow-values": ("deepseek_v2", {**LATENT, "v_head_dim": 1}, {}),
    "deepseek_v3-null-norm": ("deepseek_v3", LATENT, {"norm_topk_prob": None}),
    "deepseek_v3-null-interleave": ("deepseek_v3", LATENT, {"rope_interleave": None}),
    "deepseek_v3-null-truncate": (
        "deepseek_v3",
        LATENT,
        {"rope_parameters": {**YARN, "beta_fast": 3.0, "rope_theta": 300.0, "truncate": None}},
    ),
    "llama-null-truncate": (
        "llama",
        {},
        {"rope_parameters": {**YARN, "beta_fast": 3.0, "rope_theta": 300.0, "truncate": None}},
    ),
    "llama-rope-layers": ("llama", {}, {"no_rope_layers": [0, 0, 0]}),
    "smollm3-nothing": (
        "smollm3",
        {**TIED, **FOUR_LAYERS},
        dict.fromkeys((*TIED, "no_rope_layers", "layer_types"), GONE),
    ),
    "smollm3-long-list": ("smollm3", {}, {"no_rope_layers": [1, 0, 1, 0]}),
    "smollm3-layer-types": ("smollm3", {}, {**NARROW, "layer_types": KINDS}),
    "mistral-others-fields": ("mistral", {}, {**CAPS, **BIASES, "sliding_window": 5}),
    "mistral-layer-types": ("mistral", {}, {"layer_types": KINDS, "sliding_window": 5}),
    "mistral-typed-alike": ("mistral", {}, {"layer_types": ["full_attention"] * 3, "sliding_window": 5}),
    "qwen2-others-fields": ("qwen2", {}, {**CAPS, **BIASES, "head_dim": 12, "sliding_window": 5}),
    "qwen2-layer-types": ("qwen2", {}, {"layer_types": KINDS, "sliding_window": 5, "use_sliding_window": True}),
    "qwen3-layer-types": ("qwen3", {}, {"layer_types": KINDS, "sliding_window": 5, "use_sliding_window": True}),
    "olmo2-nothing": ("olmo2", {}, dict.fromkeys(("rope_parameters", "rms_norm_eps", "attention_bias"), GONE)),
    "olmo2-others-fields": ("olmo2", {}, {**CAPS, **NARROW, "mlp_bias": True, "use_qk_norm": False}),
    "phi3-others-fields": ("phi3", {}, {**CAPS, **BIASES}),
    "phi3-partial": ("phi3", {}, {"rope_parameters": GONE, "partial_rotary_factor": 0.5}),
    "phi3-nothing": ("phi3", {}, {"rms_norm_eps": GONE, "rope_parameters": GONE, "sliding_window": GONE}),
    "gemma3-attention-cap": ("gemma3_text", GEMMA, {"attn_logit_softcapping": 0.5}),
    "gemma3-no-scalar": ("gemma3_text", GEMMA, {"query_pre_attn_scalar": GONE, "hidden_activation": GONE}),
    "gemma3-hidden-act": ("gemma3_text", GEMMA, {"hidden_activation": GONE, "hidden_act": "silu"}),
    "gemma3-silu": ("gemma3_text", GEMMA, {"hidden_activation": "silu"}),
    "gemma3-partial": ("gemma3_text", GEMMA, {"partial_rotary_factor": 0.5}),
    "gemma3-no-ropes": ("gemma3_text", GEMMA, {"rope_parameters": GONE, "rope_scaling": {**LINEAR, "factor": 8.0}}),
    "gemma3-outer-original": (
        "gemma3_text",
        GEMMA,
        {"rope_parameters": {"full_attention": YARN}, "original_max_position_embeddings": 16},
    ),
    "gemma3-flat-ropes": ("gemma3_text", GEMMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gemma3-flat-scaling": (
        "gemma3_text",
        GEMMA,
        {"rope_parameters": {**LINEAR, "rope_theta": 77.0, "sliding_attention": {"rope_theta": 50.0}}},
    ),
    "gemma3-theta-as-text": (
        "gemma3_text",
        GEMMA,
        {
            "rope_parameters": {name: {"rope_theta": 90.0} for name in KINDS},
            "rope_theta": "1e6",
            "rope_local_base_freq": "1e4",
        },
    ),
    "llama-dynamic": ("llama", {}, {"rope_parameters": GONE, "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    "qwen3-dynamic": ("qwen3", {}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 99.0}}),
    "glm4-dynamic": (
        "glm4",
        GLM,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.25}},
    ),
    "gemma3-dynamic": (
        "gemma3_text",
        GEMMA,
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 99.0}}},
    ),
    "llama-swish": ("llama", {}, {"hidden_act": "swish"}),
    "llama-gelu-new": ("llama", {}, {"hidden_act": "gelu_new"}),
    "llama-gelu-fast": ("llama", {}, {"hidden_act": "gelu_fast"}),
    "llama-gelu-accurate": ("llama", {}, {"hidden_act": "gelu_accurate"}),
    "llama-gelu-python-tanh": ("llama", {}, {"hidden_act": "gelu_python_tanh"}),
    "llama-gelu": ("llama", {}, {"hidden_act": "gelu"}),
    "llama-gelu-python": ("llama", {}, {"hidden_act": "gelu_python"}),
    "mixtral-gelu": ("mixtral", {"num_local_experts": 4}, {"hidden_act": "gelu"}),
    "gemma2-gelu": ("gemma2", GEMMA, {"hidden_activation": "gelu"}),
    "qwen2-unused-window": ("qwen2", {}, {"sliding_window": -1, "use_sliding_window": False}),
    "qwen3_moe-unused-window": ("qwen3_moe", MOE, {"sliding_window": 0, "use_sliding_window": False}),
    "smollm3-unused-window": ("smollm3", {}, {"sliding_window": 0, "use_sliding_window": False}),
    "mistral-endless-window": ("mistral", {}, {"sliding_window": 10**9}),
    "gemma3-endless-window": ("gemma3_text", GEMMA, {"sliding_window": 10**9}),
    "gemma2-gelu-new": ("gemma2", GEMMA, {"hidden_activation": "gelu_new"}),
    "gpt_oss-any-activation": ("gpt_oss", {"head_dim": 16, "num_local_experts": 4}, {"hidden_act": "relu"}),
    "llama-theta-as-text": ("llama", {}, {"rope_theta": "10000"}),
    "llama-partial-as-text": ("llama", {}, {"rope_parameters": {**LINEAR, "partial_rotary_factor": 1.0}, **TEXT_SHARE}),
    "llama-endless": ("llama", {}, {"max_position_embeddings": 10**15}),
    "llama-causal-number": ("llama", {}, {"is_causal": 1}),
    "llama-end-beyond-the-vocabulary": ("llama", {}, {"eos_token_id": [2, 999]}),
    "gemma3-pattern": ("gemma3_text", GEMMA, {"layer_types": GONE, "sliding_window_pattern": 3}),
}

# What transformers refuses, or fails on when the model is made or asked: refused here, and the field named.
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "llama-scaled-partial": ("llama", {}, {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary"),
    "qwen2-no-window": ("qwen2", {}, {"layer_types": KINDS, "sliding_window": 5}, "use_sliding_window"),
    "qwen2-nested": ("qwen2", {}, {"rope_parameters": {"full_attention": LINEAR}}, "one rope for all layers"),
    "mistral-no-window": ("mistral", {}, {"layer_types": KINDS, "sliding_window": None}, "sliding_window"),
    "gemma3-no-window": ("gemma3_text", GEMMA, {"sliding_window": None}, "sliding_window"),
    "phi3-linear": ("phi3", {}, {"rope_parameters": LINEAR}, "rope type 'linear'"),
}


ROPES: list[Any] = [
    LINEAR,
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 77.0},
    YARN,
    {**YARN, "original_max_position_embeddings": 16, "truncate": False, "mscale": 0.5, "mscale_all_dim": 0.7},
    {**LONG, "original_max_position_embeddings": 64},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 50.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": {**YARN, "rope_theta": 30.0}},
    {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 7.0, "rope_type": "default"}},
    None,
    GONE,
]
ACTIVATIONS = ["silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", GONE]
CHOICES: dict[str, list[Any]] = {
    "layer_types": [KINDS, ["full_attention"] * 3, ["sliding_attention"] * 3, None, GONE],
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": [100, 5e5, GONE],
    "rope_local_base_freq": [50.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [16, 64],
    "max_position_embeddings": [256, 64, 10**12, GONE],
    "sliding_window": [None, 3, 8, 10**9, GONE],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, GONE],
    "sliding_window_pattern": [1, 2],
    "hidden_act": ACTIVATIONS,
    "hidden_activation": ACTIVATIONS,
    "final_logit_softcapping": [None, 2.0],
    "attn_logit_softcapping": [0.5],
    "query_pre_attn_scalar": [7, GONE],
    "no_rope_layers": [[0, 1, 1], None, GONE],
    "no_rope_layer_interval": [2, GONE],
    "residual_multiplier": [0.3, GONE],
    "attention_multiplier": [0.1, GONE],
    "rms_norm_eps": [1e-2, GONE],
    "is_causal": [True, None, 1],
    "eos_token_id": [[2, 999], None],
    "per_layer_config": [None, {}],
    "num_key_value_heads": [GONE],
    "head_dim": [GONE],
    "tie_word_embeddings": [GONE],
}


# Sizes of families whose defaults are large, or do not fit the other sizes.
SIZES = {"gemma3_text": GEMMA, **{tiny.label: dict(tiny.more) for tiny in TINIES if tiny.label.startswith("deepseek")}}


def saved(folder: Path, family: str, more: dict[str, Any], changes: dict[str, Any]) -> Path:
    Tiny("one", family, {"head_dim": 12, **more} if family == "qwen3" else more).save(folder)
    if family == "mixtral":  # transformers fails without head_dim and with a scaled rope
        changes = {**changes, "head_dim": 12}
    file = folder / "config.json"
    values = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value != GONE}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def transformers_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def prompt_of(seed: int = 6) -> list[int]:
    ids: list[int] = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.mark.real
@pytest.mark.parametrize("label", SAME)
def test_logits_equal_transformers(label: str, tmp_path: Path) -> None:
    family, more, changes = SAME[label]
    folder, prompt = saved(tmp_path, family, more, changes), prompt_of()
    budget = LoadOptions(context=48, cache_bytes=2**21, max_rows=4, page_size=8, threads=1)
    runner = cpu.open(read_model(folder), budget)
    assert isinstance(runner, TorchRunner)
    result = logits_of(runner, [Row(prompt, 0, own_pages(0))])
    torch.testing.assert_close(result, transformers_logits(folder, prompt), rtol=0, atol=BOUND)


HEADS = {  # tied files, tie_word_embeddings beside text_config, and in it
    "tied": (True, GONE, GONE),
    "tied-as-written": (True, True, False),
    "head-of-its-own": (False, GONE, GONE),
    "head-in-spite-of-text-config": (False, False, True),
    "head-in-spite-of-config": (False, True, True),
}


@pytest.mark.real
@pytest.mark.parametrize("label", HEADS)
def test_head_of_a_multimodal_model_is_that_of_transformers(label: str, tmp_path: Path) -> None:
    tied, outer, inner = HEADS[label]
    Tiny("one", "ministral3", {"head_dim": 12, "tie_word_embeddings": tied}, multimodal="mistral3").save(tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text()) | {"tie_word_embeddings": outer}
    values["text_config"]["tie_word_embeddings"] = inner
    for table in (values, values["text_config"]):
        if table["tie_word_embeddings"] == GONE:
            del table["tie_word_embeddings"]
    file.write_text(json.dumps(values))
    files, prompt = read_model(tmp_path), prompt_of()
    runner = cpu.open(files, LoadOptions(context=48, cache_bytes=2**21, max_rows=4, page_size=8, threads=1))
    assert isinstance(runner, TorchRunner)
    with torch.inference_mode():
        model = AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager").eval()
        expected = model(torch.tensor([prompt])).logits[0]
    assert files.config.tie_embeddings is tied is (model.lm_head.weight is model.get_input_embeddings().weight)
    torch.testing.assert_close(logits_of(runner, [Row(prompt, 0, own_pages(0))]), expected, rtol=0, atol=BOUND)


@pytest.mark.parametrize("family", ["gpt_oss", "ministral3"])
def test_an_empty_rope_is_refused_where_its_absence_means_yarn(family: str, tmp_path: Path) -> None:
    """For gpt_oss with an empty rope, transformers computes an unscaled rope."""
    folder = saved(tmp_path, family, {"head_dim": 12}, {"rope_parameters": {}})
    with pytest.raises(ModelRefused, match="rope_parameters must be absent, or an object with the fields of a rope"):
        read_model(folder)


@pytest.mark.parametrize("label", REFUSED)
def test_configs_that_transformers_refuses_are_refused(label: str, tmp_path: Path) -> None:
    family, more, changes, message = REFUSED[label]
    folder = saved(tmp_path, family, more, changes)
    with pytest.raises(ModelRefused, match=message):
        read_model(folder)
    with pytest.raises((ValueError, KeyError, TypeError, RuntimeError, StrictDataclassError)):
        transformers_logits(folder, prompt_of())


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("seed", range(300))
def test_random_configs_equal_transformers_or_are_refused(seed: int, tmp_path: Path) -> None:
    """For any fields in config.json: the logits equal transformers, or the model is refused."""
    draw = random.Random(seed)
    family = draw.choice(sorted(FAMILIES))
    changes = {key: draw.choice(CHOICES[key]) for key in draw.sample(list(CHOICES), draw.randrange(1, 6))}
    folder = saved(tmp_path, family, SIZES.get(family, {}), changes)
    try:
        runner = cpu.open(
            read_model(folder), LoadOptions(context=48, cache_bytes=2**21, max_rows=4, page_size=8, threads=1)
        )
    except ModelRefused:
        return
    assert isinstance(runner, TorchRunner)
    expected = transformers_logits(folder, prompt_of(seed))
    result = logits_of(runner, [Row(prompt_of(seed), 0, own_pages(0))])
    torch.testing.assert_close(result, expected, rtol=0, atol=BOUND * max(1.0, expected.abs().max().item()))
