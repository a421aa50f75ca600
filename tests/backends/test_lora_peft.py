"""Families × configurations of adapters: log-probabilities equal to those of PEFT, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from localllm.engine.errors import ModelRefused
from localllm.engine.runner import Runner

from .adapters import (
    BACKENDS,
    LINEAR,
    OPTIONS,
    adapter_of,
    assert_equal,
    log_probabilities,
    open_on,
    pages,
    put,
    run,
    save_adapter,
    tiny_of,
)
from .batches import Row

# PEFT reads properties that transformers deprecates, and warns about tied embeddings and fused phi3 modules.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

PROMPT = list(range(5, 25))
FAMILIES = (
    "llama",
    "llama-tied",
    "llama-biases",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3-biases",
    "gemma3",
    "phi3",
    "granite",
    "ministral3",
    "olmo2",
    "smollm3",
    "glm4",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v2",
    "mistral3",
    "qwen3_next",
    "qwen3_5_text",
    "lfm2-published",
    "granitemoehybrid-mamba",
    "qwen3_5_moe_text",
)
DELTA = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "out_proj")
# Names of one family are ignored by another.
ATTENTION = (*LINEAR[:4], "qkv_proj", "q_a_proj", "q_b_proj", *DELTA)
ENDS = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class Case:
    """A configuration of an adapter. `refused`: the reason, if it is not computed."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    copies: bool = False  # PEFT saves the weights of the embedding and of the head too

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("plain"),
    Case("rslora", {"use_rslora": True, "r": 7}),
    Case("alpha-0", {"lora_alpha": 0}),
    Case("alpha-negative", {"lora_alpha": -5}),
    Case("ranks", {"rank_pattern": {r".*\.1\..*o_proj": 5, "(q|qkv)_proj": 2}}),
    Case("ranks-rslora", {"rank_pattern": {r"layers\.[02]\..*(q|qkv)_proj": 3}, "use_rslora": True}),
    Case("ranks-of-eva", {"rank_pattern": {f"model.layers.{n}.self_attn.o_proj": 2 + n for n in range(3)}}),
    Case("alphas", {"alpha_pattern": {r"^.*layers\.(?:0|1)\..+_proj$": 30, r"o_.*": 1}}),
    Case("alphas-look-ahead", {"alpha_pattern": {r"(?!.*o_proj).*": 25}}),
    Case("regex", {"target_modules": r".*\.[02]\.(?:\w+_attn|mamba|conv)\.(?:q|k|v|o|qkv|out)_proj"}),
    Case("regex-look-ahead", {"target_modules": r"(?!.*\.1\.).*\.(\w+_attn|mamba|conv)\.(q|v|o|qkv|out)_proj"}),
    Case("exclude-list", {"exclude_modules": ["o_proj"]}),
    Case("exclude-regex", {"exclude_modules": r".*layers\.[01]\..*o_proj"}),
    Case("layers", {"layers_to_transform": [0, 2]}),
    Case("layers-pattern", {"layers_to_transform": 1, "layers_pattern": ["layers"]}),
    Case(
        "full-names",
        {
            "target_modules": [
                "model.layers.1.self_attn.o_proj",
                "model.layers.1.self_attn.out_proj",
                "language_model.layers.1.self_attn.o_proj",
            ]
        },
    ),
    Case("all-linear", {"target_modules": "all-linear"}),
    Case("fan-in-fan-out", {"fan_in_fan_out": True}),
    Case("bias-all", {"bias": "all"}),
    Case("bias-lora-only", {"bias": "lora_only"}),
    Case("gaussian", {"init_lora_weights": "gaussian", "lora_dropout": 0.3}),
    Case("embedding", {"target_modules": ["embed_tokens", "o_proj"]}, copies=True),
    Case("head", {"target_modules": ["lm_head", "o_proj"]}, copies=True),
    Case("both-ends", {"target_modules": [*ENDS, "o_proj"], "rank_pattern": {"embed_tokens": 3}}, copies=True),
    Case("dora", {"use_dora": True}, "DoRA is not supported"),
    Case("lora-bias", {"lora_bias": True}, "biases of LoRA products is not supported|only.*bias"),
    Case("modules-to-save", {"modules_to_save": ["norm"]}, "whole modules beside LoRA"),
    Case("tokens", {"trainable_token_indices": [3, 5]}, "trained token embeddings"),
    Case("replicated", {"layer_replication": [(0, 2), (1, 3)]}, "replicated layers"),
    Case("invocation", {"alora_invocation_tokens": [4]}, "activated LoRA"),
)
ALWAYS = ("llama",)


@dataclass
class Host:
    """A model of a family, open on a backend, and a copy of it for PEFT."""

    label: str
    runner: Runner
    make: Callable[[], Any]


@pytest.fixture(
    scope="module", params=[*ALWAYS, *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES if n not in ALWAYS)]
)
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp(request.param)
    tiny = tiny_of(request.param)
    tiny.save(root / "model")
    runner = open_on("torch_native", root / "model", replace(OPTIONS, adapter_rank=16))
    yield Host(request.param, runner, lambda: tiny.save(root / "copy"))
    runner.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_adapter_has_the_effect_of_peft_or_is_refused(host: Host, tmp_path: Path, case: Case) -> None:
    if "layer_replication" in case.fields and host.label == "mistral3":
        pytest.skip("PEFT finds no layers in a multimodal model")
    fields = {"r": 4, "lora_alpha": 8, "target_modules": [*ATTENTION], "task_type": "CAUSAL_LM", **case.fields}
    save_adapter(host.make(), LoraConfig(**fields), tmp_path, 3, copies=case.copies)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    refused = "adapters of the experts of a mixture" if saved["target_parameters"] else case.refused
    if refused:
        with pytest.raises(ModelRefused, match=refused):
            put(host.runner, 1, adapter_of(tmp_path))
        return
    expected = log_probabilities(PeftModel.from_pretrained(host.make(), tmp_path), PROMPT)[-1:]
    put(host.runner, 1, adapter_of(tmp_path))
    assert_equal(run(host.runner, [Row(PROMPT, 0, pages(0))], [1]), expected)
    if case.name != "alpha-0":
        plain = log_probabilities(host.make(), PROMPT)[-1:]
        assert (plain - expected).abs().max() > 0.01


PREFIX = "base_model.model."
# The beginning of the names of modules -> that of the same modules in files of a model of another class.
WRAPPERS = {
    "AutoModel": ("model.", ""),
    "multimodal": ("model.", "model.language_model."),
    "multimodal-of-transformers-4": ("model.", "language_model.model."),
    "text-model": ("model.", "model.text_model."),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """An adapter of llama with ranks and alphas by the beginning of names, and the output of PEFT with it."""
    root = tmp_path_factory.mktemp("adapter")
    tiny = tiny_of("llama")
    base = tiny.save(root / "model")
    config = LoraConfig(r=4, target_modules=[*LINEAR, "lm_head"], alpha_pattern={r"^model\.layers\.1\..*": 32})
    save_adapter(base, config, root / "adapter", 5)
    adapted = PeftModel.from_pretrained(tiny.save(root / "model"), root / "adapter")
    return root / "adapter", log_probabilities(adapted, PROMPT)[-1:]


def rewrite(
    source: Path,
    folder: Path,
    rename: Callable[[str], str],
    fields: Mapping[str, Any],
    more: Mapping[str, torch.Tensor],
) -> Path:
    """A copy of an adapter with other names of tensors, other fields, and more tensors."""
    tensors = {rename(name): values for name, values in load_file(source / "adapter_model.safetensors").items()}
    save_file({**tensors, **more}, folder / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("model")
    tiny_of("llama").save(root)
    runner = open_on("torch_native", root)
    yield runner
    runner.close()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_adapter_of_another_class_has_the_same_effect(
    llama: Runner, adapter: tuple[Path, torch.Tensor], tmp_path: Path, wrapper: str
) -> None:
    """The patterns match the names of the class that was trained. Other parts of a multimodal model see no text."""
    folder, expected = adapter
    begin, other = WRAPPERS[wrapper]
    pattern = {rf"^{other}layers\.1\..*": 32}
    vision = {f"{PREFIX}model.visual.blocks.0.attn.q_proj.lora_{side}.weight": torch.ones(4, 4) for side in "AB"}
    more = {} if wrapper == "AutoModel" else vision

    def rename(name: str) -> str:
        return name.replace(PREFIX + begin, PREFIX + other, 1)

    put(llama, 1, adapter_of(rewrite(folder, tmp_path, rename, {"alpha_pattern": pattern}, more)))
    assert_equal(run(llama, [Row(PROMPT, 0, pages(0))], [1]), expected)


def test_adapter_with_the_names_of_memory_has_the_effect_of_peft(
    llama: Runner, adapter: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    """A trainer that saves state_dict() itself keeps the adapter's name in the names of the tensors."""

    def rename(name: str) -> str:
        return name.replace(".weight", ".default.weight")

    folder = rewrite(adapter[0], tmp_path, rename, {}, {})
    adapted = PeftModel.from_pretrained(tiny_of("llama").save(tmp_path / "model"), folder)
    assert_equal(log_probabilities(adapted, PROMPT)[-1:], adapter[1])
    put(llama, 1, adapter_of(folder))
    assert_equal(run(llama, [Row(PROMPT, 0, pages(0))], [1]), adapter[1])


def test_adapter_of_automodel_has_the_effect_of_peft(tmp_path: Path) -> None:
    """PEFT computes the hidden states; the head is that of the base model."""
    tiny = tiny_of("llama")
    whole = tiny.save(tmp_path / "model")
    layers = AutoModel.from_pretrained(tmp_path / "model")
    save_adapter(layers, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]), tmp_path / "adapter", 6)
    adapted = PeftModel.from_pretrained(layers, tmp_path / "adapter")
    with torch.inference_mode():
        expected = whole.lm_head(adapted(torch.tensor([PROMPT])).last_hidden_state[:, -1]).log_softmax(-1)
    runner = open_on("torch_native", tmp_path / "model")
    put(runner, 1, adapter_of(tmp_path / "adapter"))
    assert_equal(run(runner, [Row(PROMPT, 0, pages(0))], [1]), expected)
    runner.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_of_the_embedding_and_the_head(tmp_path: Path, backend: str, dtype: torch.dtype) -> None:
    """PEFT writes them beside the factors: equal to the base model, or refused by name."""
    tiny = tiny_of("llama")
    base = tiny.save(tmp_path / "model")
    folder = tmp_path / "adapter"
    save_adapter(base, LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]), folder, 1, copies=True)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    names = [name for name in tensors if name.endswith(".base_layer.weight")]
    assert len(names) == 2
    rounded = {name: tensors[name].to(dtype) for name in names}
    save_file({**tensors, **rounded}, file)
    runner = open_on(backend, tmp_path / "model")
    put(runner, 1, adapter_of(folder))
    for name in names:
        changed = rounded[name].clone()
        changed[-1, -1] += 1
        save_file({**tensors, name: changed}, file)
        with pytest.raises(ModelRefused, match=rf"{name.split('.')[-3]}.weight' differs from that of the base model"):
            runner.prepare_adapter(adapter_of(folder))
        longer = torch.cat([rounded[name], rounded[name][:2]])
        save_file({**tensors, name: longer}, file)
        with pytest.raises(ModelRefused, match="differs from that of the base model"):
            runner.prepare_adapter(adapter_of(folder))
    runner.close()


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("model.layers.0.self_attn.q_proj.bias", (48,), "tensor 'model.layers.0.self_attn.q_proj.bias' of its base"),
        ("model.norm.weight", (48,), "tensor 'model.norm.weight' differs"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 48), "trainable_tokens_delta' is not a LoRA"),
        ("model.layers.0.mlp.experts.lora_A.weight", (4, 4), "experts' has only one of its two LoRA factors"),
        ("model.layers.0.self_attn.q_proj.lora_A.bias", (4,), "lora_A.bias' is not a LoRA factor"),
    ],
)
def test_tensor_beside_the_factors_is_refused_by_name(
    llama: Runner, adapter: tuple[Path, torch.Tensor], tmp_path: Path, name: str, shape: tuple[int, ...], reason: str
) -> None:
    folder = rewrite(adapter[0], tmp_path, str, {}, {PREFIX + name: torch.zeros(shape)})
    with pytest.raises(ModelRefused, match=reason) as refused:
        put(llama, 1, adapter_of(folder))
    assert "save_embedding_layers" not in refused.value.hint, "it removes only the embedding and the head"
