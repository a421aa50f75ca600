"""The hint of a refused model: llama.cpp may run a GGUF file of its architecture."""

from __future__ import annotations

import pytest

from localllm.engine.files.gguf_names import NAMES, gguf_architecture, gguf_hint


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("qwen3_next", "qwen3next"),
        ("qwen3_5_moe", "qwen35moe"),
        ("glm", "chatglm"),
        ("glm4_moe_lite", "deepseek2"),
        ("granitemoehybrid", "granitehybrid"),
        ("gemma2", "gemma2"),
        ("gpt_oss", "gpt-oss"),
        ("mixtral", "llama"),
        ("ernie4_5_moe", "ernie4_5-moe"),
        ("whisper", ""),
        ("bert", ""),  # an encoder
        ("dream", ""),  # a diffusion model
        ("mystery", ""),
    ],
)
def test_architecture_of_a_gguf_file(model_type: str, architecture: str) -> None:
    assert gguf_architecture(model_type) == architecture


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B-Instruct"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8@main", "Qwen3-Next-80B-A3B-Instruct"),
        ("ms:org/model-GPTQ-Int4", "model"),
        ("mlx-community/model-4bit", "model"),
        ("/home/me/my model", "'my model'"),
        ("bare", "bare"),
    ],
)
def test_hint_names_the_command(name: str, words: str) -> None:
    assert gguf_hint(name, "qwen3_next").endswith(f"to find them: localllm search {words} gguf")
    assert gguf_hint(name, "mystery") == ""


def test_llama_cpp_knows_every_name() -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from localllm.backends.llamacpp import _REFUSED
    from localllm.backends.llamacpp.architectures import is_known

    assert not NAMES & _REFUSED.keys()
    assert [name for name in NAMES if not is_known(name)] == []
