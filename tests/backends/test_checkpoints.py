"""Quantised checkpoints of other programs: they equal their float values, and wrong ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.backends.cpu.device import DEVICE, open_on_cpu
from localllm.backends.pytorch import quant as formats
from localllm.backends.pytorch.loading import Loader
from localllm.backends.pytorch.opening import open_runner
from localllm.backends.pytorch.runner import TorchRunner
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.kernels.ops import Ops

from .batches import Row, make_batch
from .checkpoints import CHECKPOINTS, FLOAT4_CHECKPOINTS, Checkpoint, Tensors
from .tiny import HIDDEN, VOCAB

BUDGET = LoadOptions(cache_bytes=2**20, max_rows=4, threads=1, dtype="float32")
BY_LABEL = {checkpoint.label: checkpoint for checkpoint in (*CHECKPOINTS, *FLOAT4_CHECKPOINTS)}
UP = "model.layers.1.mlp.up_proj"


def logits(folder: Path) -> tuple[TorchRunner, torch.Tensor]:
    runner = open_on_cpu(read_model(folder), BUDGET, 2**30)
    ops = runner.device.ops
    with torch.inference_mode():
        batch = make_batch([Row([5, 9, 77, 3, 20, 101], 0, [1])], VOCAB, groups=len(runner.spec.groups))
        step = runner.inputs.send(batch).step
        every = replace(step, last=torch.arange(6, dtype=torch.int32))
        return runner, runner.model.logits(runner.model(every, ops, runner.kv), ops)


@pytest.mark.real
@pytest.mark.parametrize("at_once", [32 * HIDDEN, formats.SLICE_VALUES], ids=["cut", "whole"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_checkpoint_equals_its_float_model(
    checkpoint: Checkpoint, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "SLICE_VALUES", at_once)  # as a large weight is made: 32 outputs, then the next
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    runner, result = logits(tmp_path / "small")
    meant, expected = logits(tmp_path / "meant")
    assert runner.spec.quant
    assert runner.spec.weight_bytes < meant.spec.weight_bytes
    if checkpoint.exact:
        torch.testing.assert_close(result, expected, rtol=0.0, atol=2e-4 * expected.abs().max().item())
    else:
        assert torch.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.99


# The formats of 4 bits pack 8 outputs.
_HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 0.05,
    "head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_HYBRID_EXPERTS = {**_HYBRID, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_HYBRID_EXPERTS["shared_expert_intermediate_size"] = 56
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID_EXPERTS,
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "norm_eps": 0.01, "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "rms_norm_eps": 0.05,
        "shared_intermediate_size": 56,
        "mamba_n_heads": 8,
        "mamba_d_state": 8,
    },
}


@pytest.mark.real
@pytest.mark.parametrize(
    ("label", "model"),
    [
        ("gptq", "qwen3_next"),
        pytest.param("gptq-order", "qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("awq", "qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("awq", "qwen3_next", marks=pytest.mark.slow),
        pytest.param("compressed-int4", "qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("compressed-fp8", "qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("fp8-blocks", "qwen3_next", marks=pytest.mark.slow),
        pytest.param("awq", "lfm2", marks=pytest.mark.slow),
        pytest.param("gptq", "granitemoehybrid", marks=pytest.mark.slow),
        pytest.param("fp8-blocks", "granitemoehybrid", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_of_a_hybrid_equals_its_float_model(label: str, model: str, tmp_path: Path) -> None:
    """All projections of the recurrent layers are quantised in the files."""
    sizes = _SIZES.get(model, _HYBRID)
    replace(BY_LABEL[label], model=model, sizes=sizes).save(tmp_path / "small", tmp_path / "meant")
    runner, result = logits(tmp_path / "small")
    _, expected = logits(tmp_path / "meant")
    assert runner.spec.quant
    torch.testing.assert_close(result, expected, rtol=0.0, atol=2e-4 * expected.abs().max().item())


@pytest.mark.real
@pytest.mark.parametrize("checkpoint", FLOAT4_CHECKPOINTS, ids=str)
def test_checkpoint_of_4_bit_floats_equals_its_float_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """MXFP4 stays MXFP4. NVFP4 becomes bfloat16, exactly if the scale of the tensor is a power of two."""
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    runner, result = logits(tmp_path / "small")
    meant, expected = logits(tmp_path / "meant")
    scale = expected.abs().max().item()
    torch.testing.assert_close(result, expected, rtol=0.0, atol=(2e-4 if checkpoint.exact else 2e-2) * scale)
    assert runner.spec.quant == f"compressed-tensors {checkpoint.label[:5]}"
    assert runner.spec.weight_bytes < meant.spec.weight_bytes
    check_expected_bytes(tmp_path / "small")


def check_expected_bytes(folder: Path) -> None:
    """The estimate of the memory is near the memory. The ops are the references, which do not pad small weights."""
    device = replace(DEVICE, ops=Ops())
    files = read_model(folder)
    spec = open_runner(files, BUDGET, device, 2**30).spec
    loader = Loader(files, BUDGET, device, torch.float32)
    assert loader.expected_bytes() == pytest.approx(spec.weight_bytes, rel=0.01)
    assert loader.expected_token_bytes() == pytest.approx(spec.token_bytes, rel=0.05)


def test_expected_bytes_of_int8_weights_that_become_bfloat16(tmp_path: Path) -> None:
    checkpoint = replace(BY_LABEL["compressed-int8-wide"], sizes={"hidden_size": 256, "intermediate_size": 512})
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    check_expected_bytes(tmp_path / "small")


BAD_FLOAT4: list[tuple[str, str, str]] = [
    ("weight_global_scale", "nvfp4", "weight_global_scale' is 0, a positive number expected"),
    ("weight_scale", "nvfp4", "weight_scale' has a NaN"),
    ("weight_scale", "mxfp4", "weight_scale' has a NaN"),
]


@pytest.mark.parametrize(("end", "label", "message"), BAD_FLOAT4)
def test_corrupt_scales_of_4_bit_floats_are_refused_by_name(end: str, label: str, message: str, tmp_path: Path) -> None:
    checkpoint = next(one for one in FLOAT4_CHECKPOINTS if one.label == label)
    checkpoint.save(tmp_path / "small", tmp_path / "meant")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.up_proj.{end}"
    if end == "weight_global_scale":
        tensors[name].zero_()
    else:
        tensors[name].view(torch.uint8)[3, 1] = 0x7F if label == "nvfp4" else 255
    save_file(tensors, file)
    with pytest.raises(ModelRefused, match=message):
        logits(tmp_path / "small")


def settings(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update(more)


def scheme(**more: Any) -> Callable[[dict[str, Any]], None]:
    """The description of the weights in config.json of compressed-tensors."""
    return lambda config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(more)


def group(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["config_groups"]["group_0"].update(more)


def activations(**more: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["config_groups"]["group_0"]["input_activations"].update(more)


BAD_CONFIGS: list[tuple[str, str, Callable[[dict[str, Any]], None], str]] = [
    ("three bits", "gptq", settings(bits=3), "bits must be 4 (other bit widths are not supported), not 3"),
    ("eight bits", "awq", settings(bits=8), "bits must be 4"),
    ("an odd group", "gptq", settings(group_size=24), "group_size must be a multiple of 32"),
    ("no group", "awq", settings(group_size=0), "group_size must be a multiple of 32"),
    ("another writer", "gptq", settings(checkpoint_format="marlin"), "checkpoint_format must be gptq or gptq_v2"),
    ("exceptions", "gptq", settings(dynamic={"+:.*up": {"bits": 8}}), "different formats are not supported"),
    (
        "two writers",
        "gptq",
        settings(checkpoint_format="gptq", format="gptq_v2"),
        "must be gptq, the value of checkpoint_format",
    ),
    ("marlin", "gptq", settings(is_marlin_format=True), "is_marlin_format must be false"),
    ("bytes", "gptq", settings(pack_dtype="int8"), "pack_dtype must be int32"),
    ("an adapter", "gptq", settings(adapter={"name": "lora"}), "adapter must be absent"),
    ("a rotation", "gptq", settings(rotation="hadamard"), "rotation must be absent"),
    ("another order", "awq", settings(version="gemv"), "version must be gemm"),
    ("another order, GPTQModel", "awq", settings(format="gemv_fast"), "format must be gemm"),
    ("another writer, awq", "awq", settings(backend="llm-awq"), "backend must be autoawq"),
    ("a rotation, awq", "awq", settings(rotation="random"), "rotation must be absent"),
    ("a small cache, fp8", "fp8-blocks", settings(kv_cache_scheme={"num_bits": 8}), "KV cache is not supported"),
    (
        "rotated activations",
        "compressed-int4",
        settings(transform_config={"config_groups": {"u": {"type": "hadamard"}}}),
        "transform_config must be empty",
    ),
    ("rounded results", "compressed-fp8", group(output_activations={"num_bits": 8}), "output_activations must be"),
    ("floats of four bits", "compressed-int4", scheme(type="float"), "type must be int"),
    ("an unknown order", "compressed-int4", scheme(actorder="random"), "actorder must be one of group"),
    ("four-bit activations", "compressed-int8", activations(num_bits=4), "num_bits must be 8"),
    ("an unknown method", "gptq", settings(quant_method="aqlm"), "quantised by aqlm are not supported"),
    ("no method", "awq", settings(quant_method=None), "quantised by unnamed are not supported"),
    ("odd blocks", "fp8-blocks", settings(weight_block_size=[32, 48]), "inputs a multiple of 32"),
    ("parts of outputs", "fp8-blocks", settings(weight_block_size=[0.5, 32]), "integers, inputs"),
    (
        "odd blocks, compressed",
        "compressed-fp8-blocks",
        scheme(block_structure=[16, 48]),
        "inputs a multiple of 32",
    ),
    ("e5m2", "fp8-blocks", settings(fmt="e5m2"), "fmt must be e4m3"),
    ("not compressed", "compressed-int8", settings(quantization_status="frozen"), "must be compressed"),
    ("a small cache", "compressed-fp8", settings(kv_cache_scheme={"num_bits": 8}), "KV cache is not supported"),
    ("two groups", "compressed-int4", settings(config_groups={"a": {}, "b": {}}), "different formats"),
    ("two bits", "compressed-int4", scheme(num_bits=2), "num_bits must be 4"),
    ("one scale for all", "compressed-int4", scheme(strategy="tensor"), "strategy must be group or channel"),
    ("zero points", "compressed-int8", scheme(symmetric=False), "symmetric must be true"),
    ("groups of 32, nvfp4", "nvfp4", scheme(group_size=32), "group_size must be 16 (nvfp4)"),
    ("zero points, mxfp4", "mxfp4", scheme(symmetric=False), "symmetric must be true (mxfp4 has no zero points)"),
    ("integers, nvfp4", "nvfp4", scheme(type="int"), "type must be float"),
    ("an unknown layout", "compressed-int4", settings(format="marlin-24"), "format must be pack-quantized"),
]


@pytest.mark.parametrize(("label", "change", "message"), [c[1:] for c in BAD_CONFIGS], ids=[c[0] for c in BAD_CONFIGS])
def test_unsupported_checkpoints_are_refused_by_field(
    label: str, change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    BY_LABEL[label].save(tmp_path / "small", tmp_path / "meant")
    file = tmp_path / "small" / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    with pytest.raises(ModelRefused) as refused:
        read_model(tmp_path / "small")
    assert message in str(refused.value)
    assert "config.json" in str(refused.value)


def without(part: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"{UP}.{part}")


def changed(part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{UP}.{part}": change(tensors[f"{UP}.{part}"])})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.float()
    wide.view(-1)[3] = float("nan")
    return wide.to(tensor.dtype)


def with_negative_nan(tensor: torch.Tensor) -> torch.Tensor:
    result = tensor.clone()
    result.view(torch.uint8).view(-1)[-1] = 0xFF  # e4m3; the last output, so not in the first slice
    return result


BAD_TENSORS: list[tuple[str, str, Callable[[Tensors], object], str]] = [
    ("no scales", "gptq", without("scales"), f"'{UP}.scales' is missing, expected [2, 80]"),
    ("no scales, awq", "awq", without("scales"), f"'{UP}.scales' is missing"),
    ("no scale, fp8", "fp8-blocks", without("weight_scale_inv"), f"'{UP}.weight_scale_inv' is missing"),
    ("no scale, int8", "compressed-int8", without("weight_scale"), f"'{UP}.weight_scale' is missing"),
    ("no zero points", "gptq", without("qzeros"), f"'{UP}.qzeros' is missing"),
    ("no order", "gptq-order", without("g_idx"), f"'{UP}.g_idx' is missing"),
    ("no order, int4", "compressed-int4-order", without("weight_g_idx"), f"'{UP}.weight_g_idx' is missing"),
    ("no weight", "awq", without("qweight"), f"'{UP}.qweight' is missing"),
    ("NaN scales", "gptq", changed("scales", with_nan), f"'{UP}.scales' has a NaN"),
    ("NaN scales, awq", "awq", changed("scales", with_nan), f"'{UP}.scales' has a NaN"),
    ("NaN scales, int4", "compressed-int4", changed("weight_scale", with_nan), "weight_scale' has a NaN"),
    ("NaN scales, fp8", "fp8-blocks", changed("weight_scale_inv", with_nan), "weight_scale_inv' has a NaN"),
    ("NaN scales, one an output", "compressed-fp8", changed("weight_scale", with_nan), "weight_scale' has a NaN"),
    ("NaN scales, int8", "compressed-int8", changed("weight_scale", with_nan), "weight_scale' has a NaN"),
    ("NaN weights", "compressed-fp8", changed("weight", with_nan), f"'{UP}.weight' has a NaN"),
    ("negative NaN", "fp8-blocks", changed("weight", with_negative_nan), f"'{UP}.weight' has a NaN"),
    ("huge scales", "gptq", changed("scales", lambda t: t.float() * 1e9), "scales beyond float16"),
    ("another group size", "gptq", changed("scales", lambda t: t[:1]), "scales' must be [2, 80] (config"),
    ("another group size, awq", "awq", changed("qzeros", lambda t: t.repeat(2, 1)), "must be [2, 10] (config"),
    ("a row short", "gptq", changed("qweight", lambda t: t[:-1]), "qweight' must be [6, 80] (config"),
    ("a column long", "awq", changed("qweight", lambda t: torch.cat([t, t[:, :1]], 1)), "must be [48, 10]"),
    ("blocks short", "fp8-blocks", changed("weight_scale_inv", lambda t: t[:, :1]), "must be [3, 2] (config"),
    ("floats", "awq", changed("qweight", lambda t: t.float()), "qweight' must be I32, not F32"),
    ("another stored shape", "compressed-int4", changed("weight_shape", lambda t: t + 1), "weight_shape is [81, 49]"),
    ("groups of other sizes", "gptq", changed("g_idx", lambda t: t * 0), "to groups of 32"),
    ("groups that are not there", "gptq", changed("g_idx", lambda t: t + 7), "to groups of 32"),
    ("a bias", "gptq", lambda t: t.update({f"{UP}.bias": torch.ones(80)}), "not part of"),
]


@pytest.mark.parametrize(("label", "change", "message"), [c[1:] for c in BAD_TENSORS], ids=[c[0] for c in BAD_TENSORS])
def test_tensors_with_wrong_shapes_are_refused_by_name(
    label: str, change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    BY_LABEL[label].save(tmp_path / "small", tmp_path / "meant")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    with pytest.raises(ModelRefused) as refused:
        open_on_cpu(read_model(tmp_path / "small"), BUDGET, 2**30)
    assert message in str(refused.value)


def test_quantised_checkpoints_are_not_quantised_again(tmp_path: Path) -> None:
    BY_LABEL["gptq"].save(tmp_path / "small", tmp_path / "meant")
    with pytest.raises(SettingRefused, match=r"already quantised \(gptq int4\) and cannot be converted to int8"):
        open_on_cpu(read_model(tmp_path / "small"), replace(BUDGET, quant="int8"), 2**30)
