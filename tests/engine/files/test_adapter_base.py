"""The base model that an adapter names: a copy of the loaded model is accepted, another family is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_base import agree, check_base
from localllm.engine.files.adapter_files import AdapterFiles


def check(base: str, model: str, model_type: str = "qwen3", base_class: str = "") -> str:
    return check_base(AdapterFiles(Path("adapter"), {}, base, base_class, "v"), model, model_type)


@pytest.mark.parametrize(
    ("base", "model"),
    [
        ("", "Qwen/Qwen3-0.6B"),
        ("guide", "guide"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B@v2"),
        ("Qwen/Qwen3-0.6B", "mlx-community/Qwen3-0.6B-4bit"),
        ("unsloth/Qwen3-0.6B-unsloth-bnb-4bit", "Qwen/Qwen3-0.6B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"),
        ("mlx-community/Qwen3-0.6B-MLX-8bit", "/models/qwen3-0.6b"),
        ("Qwen/Qwen3-0.6B", "/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd"),
        ("/hub/models--Qwen--Qwen3-0.6B/snapshots/0123abcd", "Qwen/Qwen3-0.6B"),
    ],
)
def test_name_of_the_model_or_of_a_copy_is_accepted(base: str, model: str) -> None:
    assert not check(base, model)


@pytest.mark.parametrize(
    ("base", "model"),
    [
        ("/home/me/llama-factory/output", "Qwen/Qwen3-0.6B"),
        ("./mistral", "Qwen/Qwen3-0.6B"),
        (r"C:\models\mistral", "Qwen/Qwen3-0.6B"),
        ("Qwen/Qwen3-0.6B", "/models/renamed"),
    ],
)
def test_path_says_nothing_about_the_base_model(base: str, model: str) -> None:
    assert not check(base, model)


@pytest.mark.parametrize(
    ("base", "model", "model_type"),
    [
        ("Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-0.6B", "qwen3"),
        ("cognitivecomputations/dolphin-2.9", "Qwen/Qwen3-0.6B", "qwen3"),
        ("results/checkpoint-200", "Qwen/Qwen3-0.6B", "qwen3"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "Qwen/Qwen2.5-1.5B", "qwen2"),
        ("mistralai/Mistral-7B-v0.1", "teknium/OpenHermes-2.5-Mistral-7B", "mistral"),
        ("microsoft/phi-4", "unsloth/phi-4-reasoning", "llama"),
    ],
)
def test_other_name_of_the_same_family_gives_a_warning(base: str, model: str, model_type: str) -> None:
    assert check(base, model, model_type) == (
        f"the adapter is for the base model {base}; with {model}, its answers may be wrong"
    )


@pytest.mark.parametrize(
    ("base", "base_class", "model", "model_type"),
    [
        ("mistralai/Mistral-7B-v0.1", "", "meta-llama/Meta-Llama-3-8B", "llama"),
        ("mistralai/Mistral-7B-v0.1", "", "/models/renamed", "llama"),
        ("google/gemma-2-2b", "", "Qwen/Qwen3-0.6B", "qwen3"),
        ("microsoft/phi-4", "", "org/dolphin-qwen", "qwen2"),
        ("/models/renamed", "MistralForCausalLM", "meta-llama/Meta-Llama-3-8B", "llama"),
        ("", "Phi3ForCausalLM", "guide", "qwen3"),
    ],
)
def test_base_model_of_another_family_is_refused(base: str, base_class: str, model: str, model_type: str) -> None:
    with pytest.raises(ModelRefused, match="the adapter is for the base model") as refused:
        check(base, model, model_type, base_class)
    assert (base or base_class) in str(refused.value)
    assert model in str(refused.value)


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3-0.6B-GGUF:Q4_K_M",
        "bartowski/Qwen_Qwen3-0.6B-GGUF:Q4_K_M",
        "/m/Qwen_Qwen3-0.6B-Q8_0.gguf",
        "local/qwen3-0.6b-Q8_0",
        "/m/Qwen3-0.6B-IQ4_NL.gguf",
        "/m/qwen3-0.6b.gguf",
    ],
)
def test_names_of_gguf_models_agree_with_their_base(model: str) -> None:
    assert agree("Qwen/Qwen3-0.6B", model)
    assert not agree("Qwen/Qwen3-1.7B", model)
