"""The weight format in files beside config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_architecture, read_model
from localllm.engine.files.quantization import Quantization

from .test_model_files import sound

AUTO_GPTQ = {
    "bits": 4,
    "group_size": 128,
    "damp_percent": 0.01,
    "desc_act": True,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": "model",
}
AUTO_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
GPTQ, AWQ, MODELOPT = "quantize_config.json", "quant_config.json", "hf_quant_config.json"
AS_AWQ = Quantization("awq", "int4", 128, symmetric=False)
AS_GPTQ = Quantization("gptq", "int4", 128, symmetric=False, zeros_less_one=True, act_order=True)


def modelopt(**values: Any) -> dict[str, Any]:
    table = {"exclude_modules": ["lm_head"], **values}
    return {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": table}


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        (GPTQ, AUTO_GPTQ, AS_GPTQ),
        (GPTQ, {**AUTO_AWQ, "quant_method": "awq", "bits": 4, "group_size": 128}, AS_AWQ),
        (AWQ, AUTO_AWQ, AS_AWQ),
        (AWQ, {"zero_point": True, "group_size": 128, "bits": 4}, AS_AWQ),
        (MODELOPT, modelopt(quant_algo="FP8", kv_cache_quant_algo=None), Quantization("fp8", "fp8")),
        (MODELOPT, modelopt(quant_algo=None, kv_cache_quant_algo=None), None),
    ],
)
def test_weight_format_of_a_side_file(
    name: str, values: dict[str, Any], expected: Quantization | None, tmp_path: Path
) -> None:
    path = sound(tmp_path)
    (path / name).write_text(json.dumps(values))
    assert read_model(path).config.quantization == read_architecture(path).config.quantization == expected


def test_config_json_has_precedence(tmp_path: Path) -> None:
    path = sound(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    (path / GPTQ).write_text(json.dumps(AUTO_GPTQ))
    assert read_model(path).config.quantization == AS_AWQ


def test_a_quantised_cache_is_a_warning(tmp_path: Path) -> None:
    path = sound(tmp_path)
    (path / MODELOPT).write_text(json.dumps(modelopt(quant_algo="FP8", kv_cache_quant_algo="FP8")))
    [warning] = read_model(path).warnings
    assert "kv_cache_quant_algo 'FP8' is ignored" in warning


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        (GPTQ, {**AUTO_GPTQ, "bits": 3}, "bits must be 4"),
        (GPTQ, [], "quantize_config.json must contain a JSON object"),
        (AWQ, {**AUTO_AWQ, "version": "GEMV"}, "version must be gemm"),
        (AWQ, {**AUTO_AWQ, "w_bit": 8}, "bits must be 4"),
        (MODELOPT, modelopt(quant_algo="NVFP4"), "NVIDIA ModelOpt as NVFP4 are not supported"),
        (MODELOPT, modelopt(quant_algo=5), "quant_algo must be a string"),
        (MODELOPT, {"quantization": []}, "quantization must be an object"),
    ],
)
def test_an_unsupported_side_file_is_refused_by_name(name: str, values: Any, said: str, tmp_path: Path) -> None:
    path = sound(tmp_path)
    (path / name).write_text(json.dumps(values))
    with pytest.raises(ModelRefused, match=said):
        read_model(path)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A8_AWQ", "MIXED_PRECISION"])
def test_modelopt_in_config_json_is_refused_by_name(algorithm: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=f"NVIDIA ModelOpt as {algorithm} are not supported"):
        read_model(sound(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm}))
