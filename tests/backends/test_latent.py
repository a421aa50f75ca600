"""Models with latent attention: the size of their cache, the formats of their weights, memory, and adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from localllm.backends.cpu.device import DEVICE, open_on_cpu
from localllm.backends.pytorch import loading
from localllm.backends.pytorch.memory_plan import layer_weights, measure
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.packed import PackedFile
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_config import ModelConfig, parse_config
from localllm.engine.files.model_files import read_model
from localllm.engine.files.quantization import Quant
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops, attention

from .adapters import adapter_of, check_adapter, open_on, put, save_adapter, tiny_of
from .checkpoints import CHECKPOINTS
from .test_experts import BUDGET, FREE, QUANTS, logits
from .tiny import Tiny

LABELS = ["deepseek_v2-lite", "deepseek_v3"]
WIDE = {"kv_lora_rank": 64, "qk_nope_head_dim": 24, "v_head_dim": 40}  # sizes that all formats of weights support

# DeepSeek-V2-Lite, as published.
LITE = {
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}


def lite(**more: Any) -> ModelConfig:
    return parse_config({**LITE, **more})


def wide(label: str) -> Tiny:
    tiny = tiny_of(label)
    query_rank = tiny.more["q_lora_rank"] and 32
    return replace(tiny, more={**tiny.more, "hidden_size": 64, "q_lora_rank": query_rank, **WIDE})


def opened(folder: Path, **more: object) -> TorchRunner:
    return open_on_cpu(read_model(folder), replace(BUDGET, **more), FREE)


def test_published_config_has_the_scale_of_its_context() -> None:
    config = lite()
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert config.ropes["full"].attention_factor == 1.0
    assert config.ropes["full"].rotary_dim == 64
    assert config.cache_shape == (1, 1, 576)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": True}, "norm_topk_prob must be false"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"scoring_func": "sigmoid"}, "scoring_func must be softmax"),
        ({"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited_greedy"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group must be"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be equal to num_attention_heads"),
        ({"attention_bias": True}, "attention_bias must be false, because q_lora_rank is null"),
        ({"qk_rope_head_dim": 7}, "must be an even number, not 7"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be an integer"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, "topk_method must be noaux_tc"),
        ({"model_type": "deepseek_v3", "scoring_func": "sigmoid", "n_group": 64}, "n_group must be at most half"),
    ],
)
def test_unsupported_fields_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        lite(**({"topk_method": None} | changes if "model_type" in changes else changes))


def test_memory_plan_counts_the_latent_cache(tmp_path: Path) -> None:
    wide("deepseek_v3").save(tmp_path)
    files = read_model(tmp_path)
    options = LoadOptions(page_size=8, cache_bytes=2**20, adapter_slots=0)
    plan = measure(files, options, FREE, torch.float32, 0, DEVICE)
    assert plan.page_bytes == 8 * (64 + 8) * 3 * 4, "tokens, values, layers, bytes"
    runner = opened(tmp_path, page_size=8, cache_bytes=2**20)
    stored = runner.kv.keys.untyped_storage().nbytes()
    assert stored == (plan.num_pages + 1) * plan.page_bytes, "page 0 is for padding"
    assert runner.spec.cache_bytes == plan.num_pages * plan.page_bytes
    assert runner.kv.values is None


def test_page_copies_copy_all_layers(tmp_path: Path) -> None:
    wide("deepseek_v2-lite").save(tmp_path)
    kv = opened(tmp_path).kv
    with torch.inference_mode():
        kv.keys.copy_(torch.randn(kv.keys.shape))
        before = kv.keys.clone()
        kv.copy([np.array([[2, 5], [3, 1]], np.int32)], DEVICE)
    assert torch.equal(kv.keys[:, [5, 1]], before[:, [2, 3]])
    assert torch.equal(kv.keys[:, [2, 3, 4]], before[:, [2, 3, 4]])


@pytest.mark.parametrize("label", LABELS)
def test_rotated_keys_and_latents_apart_give_the_same_logits(label: str, tmp_path: Path) -> None:
    wide(label).save(tmp_path)
    files = read_model(tmp_path)
    together, apart = (open_runner(files, BUDGET, replace(DEVICE, latent_parts=parts), FREE) for parts in (False, True))
    assert isinstance(together, TorchRunner)
    assert isinstance(apart, TorchRunner)
    torch.testing.assert_close(logits(apart), logits(together), rtol=0, atol=1e-5)
    assert apart.spec == together.spec
    assert apart.kv.keys.untyped_storage().nbytes() == together.kv.keys.untyped_storage().nbytes()
    assert apart.kv.values is not None
    assert (apart.kv.keys.shape[4], apart.kv.values.shape[4]) == (8, 64)
    with torch.inference_mode():
        apart.kv.copy([np.array([[1, 2]], np.int32)], DEVICE)
        for part in (apart.kv.keys, apart.kv.values):
            part[:, 0] = 0.0  # of padding
            assert part[:, 1].any()
            assert torch.equal(part[:, 2], part[:, 1])


def test_large_steps_compute_some_heads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of all heads would need much memory."""
    wide("deepseek_v3").save(tmp_path)
    runner = opened(tmp_path, ops=("attention.latent=reference",))
    expected = logits(runner)
    calls: list[int] = []
    attend = attention._attend_latents

    def counted(query: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(query.shape[1])
        return attend(query, *others)

    monkeypatch.setattr(attention, "_attend_latents", counted)
    monkeypatch.setattr(attention, "LATENT_SCORES", 3 * 6 * 6)
    torch.testing.assert_close(logits(runner), expected, rtol=0, atol=1e-5)
    assert calls == [3, 1] * 3, "of 4 heads, in 3 layers"


def test_layer_weights_are_those_of_a_token() -> None:
    """Queries, latents, absorbed projections and outputs; 6 of 64 experts, and the shared experts."""
    heads = 16
    attention = 2048 * (heads * 192 + 576 + heads * 128) + heads * 512 * 256
    assert layer_weights(lite()) == attention + 3 * 2048 * (6 + 2) * 1408
    assert layer_weights(lite(first_k_dense_replace=27)) == attention + 3 * 2048 * 10_944
    query_rank = lite(q_lora_rank=1536, first_k_dense_replace=0)
    attention = 2048 * (1536 + 576 + heads * 128) + 1536 * heads * 192 + heads * 512 * 256
    assert layer_weights(query_rank) == attention + 3 * 2048 * (6 + 2) * 1408


def test_fp8_cache_is_refused_by_name(tmp_path: Path) -> None:
    wide("deepseek_v3").save(tmp_path)
    with pytest.raises(SettingRefused, match="cache_dtype fp8 is not supported for latent attention"):
        opened(tmp_path, cache_dtype="fp8", dtype="bfloat16")


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("label", LABELS)
def test_expected_bytes_are_near_the_loaded_bytes(label: str, quant: Quant, tmp_path: Path) -> None:
    wide(label).save(tmp_path)
    files = read_model(tmp_path)
    device = replace(DEVICE, ops=Ops())
    spec = open_runner(files, replace(BUDGET, quant=quant), device, FREE).spec
    loader = loading.Loader(files, replace(BUDGET, quant=quant), device, torch.float32)
    assert loader.expected_bytes() == pytest.approx(spec.weight_bytes, rel=0.01 if quant == "none" else 0.1)
    assert loader.expected_token_bytes() == pytest.approx(spec.token_bytes, rel=0.01 if quant == "none" else 0.1)


@pytest.mark.real
@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("label", LABELS)
def test_quantised_weights_are_near_the_floats(label: str, quant: Quant, tmp_path: Path) -> None:
    wide(label).save(tmp_path)
    plain, small = opened(tmp_path), opened(tmp_path, quant=quant)
    near = torch.cosine_similarity(logits(plain).flatten(), logits(small).flatten(), dim=0)
    assert near > {"int8": 0.95, "int4": 0.5, "fp8": 0.9}[quant]
    assert small.spec.weight_bytes < plain.spec.weight_bytes


@pytest.mark.parametrize("quant", ["int8", "int4", "fp8"])
def test_absorbed_projection_is_not_quantised(quant: Quant, tmp_path: Path) -> None:
    wide("deepseek_v3").save(tmp_path)
    runner = open_runner(read_model(tmp_path), replace(BUDGET, quant=quant), replace(DEVICE, ops=Ops()), FREE)
    assert isinstance(runner, TorchRunner)
    layer = runner.model.layers[1].prepared
    stored = load_file(tmp_path / "model.safetensors")["model.layers.1.self_attn.kv_b_proj.weight"].view(4, 64, 64)
    assert torch.equal(layer.qkv.keys, stored[:, :24])
    assert torch.equal(layer.out.values, stored[:, 24:].transpose(1, 2))
    assert layer.qkv.down.product.op == quant


@pytest.mark.parametrize(
    "label", ["gptq", "gptq-same-order", "awq", "compressed-int4", "compressed-int8", "fp8-blocks"]
)
def test_quantised_checkpoint_equals_its_float_model(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formats also quantise kv_b_proj, which is dequantised while the model loads."""
    tiny = wide("deepseek_v3")
    tiny = replace(tiny, more={**tiny.more, "first_k_dense_replace": 3})  # desc_act is refused for experts
    monkeypatch.setattr("tests.backends.checkpoints.TINIES", [tiny])
    checkpoint = next(replace(one, model=tiny.label) for one in CHECKPOINTS if one.label == label)
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    result, expected = logits(opened(tmp_path / "small")), logits(opened(tmp_path / "meant"))
    if checkpoint.exact:
        torch.testing.assert_close(result, expected, rtol=0.0, atol=2e-4 * expected.abs().max().item())
    else:
        assert torch.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.98


@pytest.mark.real
@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_second_load_reads_the_packed_file(quant: Quant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "MIN_PACKED_BYTES", 0)
    wide("deepseek_v3").save(tmp_path / "model")
    first = opened(tmp_path / "model", quant=quant, packed_dir=tmp_path / "packed")
    written = []
    monkeypatch.setattr(PackedFile, "write", lambda self, products: written.append(products))
    second = opened(tmp_path / "model", quant=quant, packed_dir=tmp_path / "packed")
    assert torch.equal(logits(first), logits(second))
    assert (first.spec.weight_bytes, first.spec.token_bytes) == (second.spec.weight_bytes, second.spec.token_bytes)
    assert not written


def test_next_token_layer_is_ignored(tmp_path: Path) -> None:
    """Published files of deepseek_v3 have one more layer, which predicts several tokens."""
    wide("deepseek_v3").save(tmp_path)
    before = logits(opened(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    assert torch.equal(logits(opened(tmp_path)), before)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("label", LABELS)
def test_adapters_equal_peft(label: str, tmp_path: Path) -> None:
    queries = ["q_proj"] if label == "deepseek_v2-lite" else ["q_a_proj", "q_b_proj"]
    check_adapter(tiny_of(label), [*queries, "kv_a_proj_with_mqa", "o_proj"], tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapter_of_the_absorbed_projection_is_refused_by_name(tmp_path: Path) -> None:
    tiny = tiny_of("deepseek_v3")
    tiny.save(tmp_path / "model")
    config = LoraConfig(r=4, target_modules=["q_b_proj", "kv_b_proj"])
    save_adapter(tiny.save(tmp_path / "copy"), config, tmp_path / "adapter", 1)
    runner = open_on("cpu", tmp_path / "model")
    with pytest.raises(ModelRefused, match="adapters of kv_b_proj are not supported"):
        put(runner, 1, adapter_of(tmp_path / "adapter"))
