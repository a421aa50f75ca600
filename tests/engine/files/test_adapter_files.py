"""Adapter folders with unusual configurations: read as PEFT reads them, or refused with the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_files import AdapterFiles, read_adapter

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "o_proj", "v_proj"]}
MODULES = ("q_proj", "k_proj", "o_proj")
PREFIX = "base_model.model.model.layers.0.self_attn."


def write(folder: Path, *extra: str, **config: Any) -> AdapterFiles:
    """Read a PEFT adapter of rank 4 with these fields, and with these additional tensors [4, 4]."""
    names = [f"{PREFIX}{module}.lora_{side}.weight" for module in MODULES for side in "AB"]
    header: dict[str, Any] = {}
    for index, name in enumerate([*names, *extra]):
        header[name] = {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * index, 64 * index + 64]}
    encoded = json.dumps(header).encode()
    data = struct.pack("<Q", len(encoded)) + encoded + bytes(64 * len(header))
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return read_adapter(folder)


@pytest.mark.parametrize("pattern", ["o_proj", "o.proj", r"self_attn\.o_proj", "^model.layers.0.self_attn.o_proj$"])
def test_keys_of_patterns_are_regular_expressions(tmp_path: Path, pattern: str) -> None:
    factors = write(tmp_path, alpha_pattern={pattern: 40}).factors
    scales = {module.rpartition(".")[2]: each.scale for module, each in factors.items()}
    assert scales == {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 10.0}


@pytest.mark.parametrize("pattern", ["proj", "^o_proj", r"o\.proj", "layers.1.self_attn.o_proj"])
def test_key_that_matches_no_module_changes_nothing(tmp_path: Path, pattern: str) -> None:
    assert {each.scale for each in write(tmp_path, alpha_pattern={pattern: 40}).factors.values()} == {2.0}


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {"o_proj": 0}},
        {"rank_pattern": {"o_proj": 3}},
        {"alpha_pattern": {"(o|q_proj": 1}},
        {"alpha_pattern": {"o_proj": None}},
        {"rank_pattern": {"o_proj": None}},
        {"init_lora_weights": "lora_ga"},
        {"init_lora_weights": "pissa_niter_16"},
        {"kasa_config": {"beta": 0.1, "gamma": 0.1}},
        {"arrow_config": {"top_k": 3}},
        {"monteclora_config": {"num_samples": 8}},
        {"use_bdlora": {"nblocks": 2}},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_field_that_changes_the_result_is_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    field = next(iter(config))
    with pytest.raises(ModelRefused, match=rf"{field}|o_proj: rank 4, but adapter_config.json says 3"):
        write(tmp_path, **config)


@pytest.mark.parametrize(
    "config",
    [
        {"lora_dtype": "AUTO", "lorap_lr_ratio": None, "lorap_emb_lr": 1e-6},
        {"merge_weights": True, "enable_lora": None},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}},
    ],
    ids=["ms-swift", "peft-0.2", "unsloth"],
)
def test_fields_of_other_trainers_without_effect_are_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    assert write(tmp_path, **config).rank == 4


def test_adapter_with_a_name_of_its_own_is_named(tmp_path: Path) -> None:
    """PEFT saves it in a folder of this name."""
    (tmp_path / "poet").mkdir()
    write(tmp_path / "poet")
    with pytest.raises(ModelRefused, match="has no adapter_config") as caught:
        read_adapter(tmp_path)
    assert caught.value.hint == "name one of its folders: poet"


@pytest.mark.parametrize("value", [None, [], False], ids=str)
def test_empty_field_of_an_unsupported_feature_is_accepted(tmp_path: Path, value: object) -> None:
    assert write(tmp_path, modules_to_save=value, kasa_config=value, use_dora=value).rank == 4


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("q_proj.lora_magnitude_vector.weight", "is not a LoRA factor"),
        ("q_proj.lora_embedding_A", "are the same LoRA factor"),
        ("v_proj.lora_A.weight", "only one of its two LoRA factors"),
    ],
)
def test_tensor_that_has_no_use_is_refused_by_name(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        write(tmp_path, PREFIX + name)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.(q|k)_proj"},
        {"exclude_modules": r".*\.(o|k)_proj"},
        {"exclude_modules": ["o_proj"]},
        {"layers_to_transform": [1, 2]},
        {"layers_to_transform": 3},
    ],
    ids=str,
)
def test_factors_that_peft_would_ignore_are_refused_by_name(tmp_path: Path, config: dict[str, Any]) -> None:
    field = next(iter(config))
    with pytest.raises(ModelRefused, match=rf"{field} must be .*_proj"):
        write(tmp_path, **config)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["self_attn.o_proj", "q_proj", "k_proj"]},
        {"layers_to_transform": [0]},
        {"exclude_modules": ["lm_head"]},
    ],
    ids=str,
)
def test_configuration_with_all_factors_is_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    assert write(tmp_path, **config).rank == 4
