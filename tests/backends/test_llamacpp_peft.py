"""Adapters of PEFT on GGUF models: llama.cpp with the same weights and the same adapter as transformers and PEFT."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from localllm.backends import llamacpp
from localllm.backends.llamacpp import opening
from localllm.backends.llamacpp.attention import DISABLED
from localllm.backends.llamacpp.peft import write_adapter as write_peft
from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_files import read_adapter
from localllm.engine.files.model_files import read_model

from .adapters import LINEAR, OPTIONS, PHI, adapter_of, log_probabilities, pages, put, run, save_adapter, tiny_of
from .batches import Row
from .gguf_models import write_adapter
from .gguf_twins import write_twin
from .tiny import Tiny

# PEFT reads properties that transformers deprecates, and warns about tied embeddings and fused phi3 modules.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]

GGUF_OPTIONS = replace(OPTIONS, dtype="auto", cache_dtype="f32", adapter_rank=64, adapter_slots=8)
PROMPT = list(range(5, 25))
ATTENTION = LINEAR[:4]
FAST = {"llama": LINEAR, "phi3": PHI}  # the other models take too long for every run
HOSTS = FAST | {
    "mistral": LINEAR,
    "granite": LINEAR,
    "smollm3": LINEAR,
    "qwen2": LINEAR,
    "qwen3": LINEAR,
    "olmo2": LINEAR,
    "gemma": LINEAR,
    "gemma2": LINEAR,
    "gemma3": LINEAR,
    "ministral3": LINEAR,
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "mixtral": ATTENTION,
    "qwen3_moe": ATTENTION,
    "qwen2_moe": (*ATTENTION, "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
}

CONSTANTS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 12, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {"query_pre_attn_scalar": 16, "sliding_window": 32, "attn_logit_softcapping": 50.0},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention"] * 4},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 500.0,
            "llama_4_scaling_beta": 0.0,
            "original_max_position_embeddings": 4096,
        }
    },
    "smollm3": {"no_rope_layer_interval": 4},
}


def host(label: str) -> Tiny:
    """The tiny model, with the constants that llama.cpp has for its architecture."""
    tiny = replace(tiny_of("llama"), model_type="gemma") if label == "gemma" else tiny_of(label)
    return replace(tiny, more={**tiny.more, **CONSTANTS[label]}) if label in CONSTANTS else tiny


def configurations(linear: Sequence[str]) -> list[dict[str, Any]]:
    """The data that convert_lora_to_gguf.py loses: it writes only lora_alpha."""
    first, last = linear[0], linear[-1]
    return [
        {"r": 4, "lora_alpha": 8},
        {"r": 9, "lora_alpha": 6, "use_rslora": True},
        {"r": 4, "lora_alpha": 0},
        {"r": 4, "lora_alpha": -3, "rank_pattern": {rf".*\.1\..*{first}": 7}, "alpha_pattern": {last: 9, first: 0}},
        {"r": 5, "use_rslora": True, "alpha_pattern": {r"layers\.[02]\..*": 20}, "layers_to_transform": [0, 1]},
    ]


@pytest.fixture(autouse=True)
def _exact_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention on CPUs rounds queries and keys: the difference from torch would be 0.03."""
    monkeypatch.setattr(opening, "flash_attention", lambda *_: DISABLED)


@pytest.mark.parametrize(
    "label", [*FAST, *(pytest.param(label, marks=pytest.mark.slow) for label in HOSTS if label not in FAST)]
)
def test_adapters_have_the_effect_of_peft(tmp_path: Path, label: str) -> None:
    linear = HOSTS[label]
    tiny = host(label)
    base = tiny.save(tmp_path / "model")
    runner = llamacpp.open(read_model(write_twin(tmp_path / "model", tmp_path / "model.gguf")), GGUF_OPTIONS)
    expected = [log_probabilities(base, PROMPT)[-1]]
    for number, fields in enumerate(configurations(linear), start=1):
        folder = tmp_path / str(number)
        save_adapter(base, LoraConfig(target_modules=list(linear), **fields), folder, number)
        adapted = PeftModel.from_pretrained(base, folder)
        expected.append(log_probabilities(adapted, PROMPT)[-1])
        base = adapted.unload()
        put(runner, number, adapter_of(folder))
    for slot, wanted in enumerate(expected):
        actual = run(runner, [Row(PROMPT, 0, pages(0))], [slot])[0]
        # ggml reads the gelu of Gemma from a table in float16: without an adapter it differs by up to 0.0024.
        torch.testing.assert_close(actual, wanted, rtol=0, atol=5e-3 if label.startswith("gemma") else 2e-3)
    runner.close()
    effects = [float((wanted - expected[0]).abs().max()) for wanted in expected]
    assert effects[0] == effects[3] == 0
    assert min(effects[1], effects[2], effects[4], effects[5]) > 0.2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of Llama's architecture in safetensors and in GGUF."""
    folder = tmp_path_factory.mktemp("llama")
    tiny_of("llama").save(folder)
    write_twin(folder, folder / "twin" / "model.gguf")
    return folder


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapter_of_the_embedding_or_the_head(llama: Path, tmp_path: Path, target: str) -> None:
    """PEFT saves a copy of the module's own weight beside the factors."""
    base = tiny_of("llama").save(tmp_path / "copy")
    folder = tmp_path / "adapter"
    save_adapter(base, LoraConfig(r=4, lora_alpha=6, target_modules=[target]), folder, 1, copies=True)
    expected = log_probabilities(PeftModel.from_pretrained(base, folder), PROMPT)[-1]
    runner = llamacpp.open(read_model(llama / "twin" / "model.gguf"), GGUF_OPTIONS)
    put(runner, 1, adapter_of(folder))
    plain, actual = run(runner, [Row(PROMPT, 0, pages(0)), Row(PROMPT, 0, pages(1))], [0, 1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)
    assert (plain - actual).abs().max() > 0.2
    file = folder / "adapter_model.safetensors"
    changed = {name: values + 0.1 if "base_layer" in name else values for name, values in load_file(file).items()}
    save_file(changed, file)
    with pytest.raises(ModelRefused, match="differs from that of the base model"):
        runner.prepare_adapter(adapter_of(folder))
    runner.close()


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("file", ["", "adapter.gguf"])
def test_tied_head_is_refused(tmp_path: Path, target: str, file: str) -> None:
    """llama.cpp has one tensor for both, and ends the process."""
    tiny = tiny_of("llama-tied")
    base = tiny.save(tmp_path / "model")
    runner = llamacpp.open(read_model(write_twin(tmp_path / "model", tmp_path / "model.gguf")), GGUF_OPTIONS)
    adapter = tmp_path / "adapter"
    save_adapter(base, LoraConfig(r=4, target_modules=[target]), adapter, 1)
    if file:
        adapter = write_adapter(tmp_path / file, "llama", adapter)
    with pytest.raises(ModelRefused, match="one tensor for its embedding and its output head"):
        runner.prepare_adapter(adapter_of(adapter))
    runner.close()


def test_adapter_of_mlx_lm_has_its_effect(llama: Path, tmp_path: Path) -> None:
    """mlx-lm stores transposed factors, and one scale."""
    base = tiny_of("llama").save(tmp_path / "copy")
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for module, (inputs, outputs) in {"self_attn.q_proj": (48, 48), "mlp.down_proj": (80, 48)}.items():
        name = f"model.layers.1.{module}"
        a = torch.randn(inputs, 4, generator=generator) * 0.3
        b = torch.randn(4, outputs, generator=generator) * 0.3
        tensors |= {f"{name}.lora_a": a, f"{name}.lora_b": b}
        base.get_submodule(name).weight.data += 2.5 * (a @ b).T
    save_file(tensors, tmp_path / "adapters.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 4, "scale": 2.5}}))
    runner = llamacpp.open(read_model(llama / "twin" / "model.gguf"), GGUF_OPTIONS)
    put(runner, 1, adapter_of(tmp_path))
    actual = run(runner, [Row(PROMPT, 0, pages(0))], [1])[0]
    torch.testing.assert_close(actual, log_probabilities(base, PROMPT)[-1], rtol=0, atol=2e-3)
    runner.close()


def test_adapter_of_an_unknown_architecture_is_refused(llama: Path, tmp_path: Path) -> None:
    """GGUF files may have the rows of its tensors in another order."""
    files = read_model(llama / "twin" / "model.gguf")
    other = replace(files, config=replace(files.config, model_type="llama4"))
    folder = tmp_path / "adapter"
    save_adapter(tiny_of("llama").save(tmp_path / "copy"), LoraConfig(r=4, target_modules=["q_proj"]), folder, 1)
    with pytest.raises(ModelRefused, match="architecture llama4, adapters in the format of PEFT") as caught:
        write_peft(read_adapter(folder), other, tmp_path / "a.gguf")
    assert "GGUF file" in caught.value.hint


def test_adapter_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    tiny = tiny_of("llama")
    wide = replace(tiny, more={"hidden_size": 64, "head_dim": 12})
    save_adapter(wide.save(tmp_path / "wide"), LoraConfig(r=4, target_modules=["q_proj"]), tmp_path / "a", 1)
    runner = llamacpp.open(read_model(llama / "twin" / "model.gguf"), GGUF_OPTIONS)
    with pytest.raises(ModelRefused, match=r"q_proj is 48 x 64, but blk.0.attn_q.weight .* \[48, 48\]"):
        runner.prepare_adapter(adapter_of(tmp_path / "a"))
    folder = tmp_path / "a"
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["r_proj"]}))
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("q_proj", "r_proj"): values for name, values in load_file(file).items()}, file)
    with pytest.raises(ModelRefused, match=r"no module .model\.layers\.0\.self_attn\.r_proj."):
        runner.prepare_adapter(adapter_of(folder))
    runner.close()
