"""Every field of PEFT's LoraConfig is honoured as PEFT computes it, has no effect, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PeftType, get_peft_model
from peft.tuners.lora import LoraLayer, VeloraConfig
from torch import nn

from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_config import HONOURED, NO_EFFECT, PARAMETERS, UNSUPPORTED, MlxConfig, PeftConfig
from localllm.engine.files.adapter_files import read_adapter

FIELDS = {field.name for field in dataclasses.fields(LoraConfig)}
MODULE = "model.layers.0.self_attn.q_proj"


def scale(fields: dict[str, Any], module: str = MODULE) -> float:
    """The scale of a module with factors of rank 8."""
    return PeftConfig({"target_modules": ["q_proj", "lm_head", "embed_tokens"]} | fields).scale(module, 8)


def test_every_field_of_peft_is_in_one_group() -> None:
    """A field that a later release of PEFT adds fails here."""
    groups = [HONOURED, NO_EFFECT, UNSUPPORTED.keys(), {PARAMETERS}]
    known = set().union(*groups)
    assert not FIELDS - known
    assert sum(map(len, groups)) == len(known)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)
        self.o_proj = nn.Linear(16, 16)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])


class Model(nn.Module):
    """The names and the types of a causal model's modules."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(16, 32)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lora_alpha": 0},
        {"lora_alpha": -16},
        {"r": 5, "lora_alpha": 3, "use_rslora": True},
        {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": -3, "^lm_head": 0}},
        {"rank_pattern": {"o_proj": 2}, "use_rslora": True},
        {"exclude_modules": ["lm_head"], "layers_pattern": None},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": 0},
        {"target_modules": r"model\.layers\.\d\.self_attn\.o_proj"},
        {"target_modules": r".*\.(?:q|o)_proj|lm_head"},
        {"target_modules": r"(?!.*lm_head).*\.layers\.[1-9]\d*\.(?:.*?)(?:q_proj|o_proj)\b"},
        {"target_modules": "all-linear"},
        {"target_modules": "All-Linear", "exclude_modules": ["lm_head"]},
        {"exclude_modules": r".*\.0\..*|lm_head"},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "o_proj"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [0]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "layers"]},
        {"rank_pattern": {r"(q|o)_proj": 3, "q_proj": 2}, "alpha_pattern": {r"layers\.\d+\.self_attn\.q_.*": 5}},
        {"rank_pattern": {r".*\.1\..*": 6}, "alpha_pattern": {r"^model\.layers\.(?:0|5)\..+": 24, ".*": 2}},
        {"rank_pattern": {r"^(?!lm_).*": 2}, "alpha_pattern": {"proj|lm_head": 7, r"[^.]+_proj": 9}},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"target_modules": ["q_proj", "o_proj"], "init_lora_weights": False, "lora_dropout": 0.5},
        {"target_modules": ["q_proj"], "velora_config": VeloraConfig(num_groups=4)},
        {"fan_in_fan_out": True},
        {"revision": "v2", "inference_mode": True, "base_model_name_or_path": "org/repo"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_adapter_has_the_modules_ranks_and_scales_of_peft(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "o_proj", "embed_tokens", "lm_head"]} | fields)
    model = get_peft_model(Model(), config)  # type: ignore[arg-type] - PEFT accepts any module
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    saved = LoraConfig.from_pretrained(tmp_path)  # patterns have another order there
    model = get_peft_model(Model(), saved)  # type: ignore[arg-type]
    expected = {
        name.removeprefix("base_model.model."): (layer.r["default"], layer.scaling["default"])
        for name, layer in model.named_modules()
        if isinstance(layer, LoraLayer)
    }
    actual = read_adapter(tmp_path).factors
    assert {name: (factors.rank, factors.scale) for name, factors in actual.items()} == expected


@pytest.mark.parametrize("field", sorted(UNSUPPORTED))
def test_unsupported_field_is_refused_unless_it_is_empty(field: str) -> None:
    for empty in (None, False, [], {}):
        assert scale({field: empty}) == 1.0
    for value in (True, [1], {"a": 1}):
        with pytest.raises(ModelRefused, match="is not supported"):
            PeftConfig({field: value})


def test_field_of_a_later_release_is_refused_unless_it_is_empty() -> None:
    for value in (None, False, [], {}, "", 0):
        assert scale({"use_new": value}) == 1.0
    for value in (True, "x", 0.5, [1], {"a": 1}):
        with pytest.raises(ModelRefused, match=r"the field .use_new. with the value .* is not known"):
            PeftConfig({"use_new": value})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"lora_alpha": None}, "lora_alpha must be a number"),
        ({"r": None}, "r must be a number"),
        ({"r": 0}, "r must be an integer"),
        ({"lora_alpha": "16"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"init_lora_weights": "later"}, "init_lora_weights must be true, false or one of gaussian"),
        ({"init_lora_weights": "corda"}, "changes the base model"),
        ({"bias": "some"}, "bias must be none or all or lora_only"),
        ({"layers_pattern": "blocks"}, "layers_to_transform must be numbers of layers, because layers_pattern"),
        ({"layers_pattern": "(a+)+", "layers_to_transform": 0}, "layers_pattern must be the name"),
        ({"layers_pattern": "blocks", "layers_to_transform": 0}, "layers_to_transform must be a list with the layer"),
        ({"layers_to_transform": 0, "target_modules": ".*q_proj"}, "layers_to_transform must be absent"),
        ({"target_modules": None}, "target_modules must be a value with model.layers.0.self_attn.q_proj"),
        ({"target_modules": r".*\.(k|v)_proj"}, "target_modules must be a value with model.layers.0.self_attn.q_proj"),
        ({"target_modules": "q_proj"}, "target_modules must be a value with"),
        ({"target_modules": "(q_proj"}, "target_modules must be an expression that can be read .*malformed"),
        ({"exclude_modules": r"model\..*"}, "exclude_modules must be without model.layers.0.self_attn.q_proj"),
        ({"rank_pattern": {"(q|k)_proj": 4}}, "rank 8, but adapter_config.json says 4"),
        ({"rank_pattern": {"q_proj|(": 8}}, "rank_pattern must be an expression that can be read .*malformed"),
        ({"alpha_pattern": {r"(a)\1": 8}}, "alpha_pattern must be an expression that can be read .*groupref"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "experts of a mixture are not supported"),
        ({"layers_to_transform": ["0"]}, "layers_to_transform must be an integer"),
        ({"layers_to_transform": True}, "layers_to_transform must be an integer"),
        ({"target_modules": {"q_proj": 1}}, "target_modules must be a list of strings"),
        ({"exclude_modules": [1]}, "exclude_modules must be a list of strings"),
        ({"auto_mapping": "x"}, "auto_mapping must be an object"),
        ({"base_model_name_or_path": 1}, "base_model_name_or_path must be a string"),
    ],
    ids=str,
)
def test_malformed_field_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        scale(fields)


@pytest.mark.parametrize(
    ("fields", "module"),
    [
        ({"target_modules": "all-linear"}, "lm_head"),
        ({"target_modules": "all-linear"}, "model.embed_tokens"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0]}, "lm_head"),
        ({"ensure_weight_tying": True}, "model.embed_tokens"),
    ],
    ids=str,
)
def test_factors_of_a_module_outside_of_the_layers(fields: dict[str, Any], module: str) -> None:
    assert scale(fields) == 1.0
    with pytest.raises(ModelRefused, match=module):
        scale(fields, module)


@pytest.mark.parametrize("kind", sorted(set(PeftType) - {PeftType.LORA}))
def test_other_type_of_peft_is_refused_by_its_name(kind: PeftType) -> None:
    """The error names the type, not the first field that LoRA does not have."""
    with pytest.raises(ModelRefused, match=f"peft_type '{kind.value}' is not supported; only LORA is"):
        PeftConfig({"peft_type": kind.value, "target_r": 8, "total_step": 100, "use_dora": True})


MLX = {"rank": 8, "scale": 20.0, "dropout": 0.1, "keys": ["self_attn.q_proj", "model.embed_tokens"]}


def mlx_scale(module: str = MODULE, **parameters: Any) -> float:
    return MlxConfig({"lora_parameters": MLX | parameters, "iters": 10, "num_layers": 4}).scale(module, 8)


def test_configuration_of_mlx_lm() -> None:
    assert mlx_scale() == 20.0
    assert mlx_scale("model.embed_tokens", scale=-1) == -1.0
    assert mlx_scale(keys=None, alpha=8) == 20.0


@pytest.mark.parametrize(
    ("module", "parameters", "reason"),
    [
        (MODULE, {"rank": 4}, "rank must be 8"),
        (MODULE, {"alpha": 16.0}, "alpha must be absent or 8"),
        (MODULE, {"rslora": True}, "rslora must be absent"),
        (MODULE, {"scale": None}, "scale must be a number"),
        (MODULE, {"keys": "self_attn.q_proj"}, "keys must be a list of strings"),
        (MODULE, {"keys": ["q_proj"]}, "keys must be a list with model.layers.0.self_attn.q_proj"),
        ("model.embed_tokens", {"keys": None}, "keys must be a list with model.embed_tokens"),
    ],
)
def test_field_of_mlx_lm_is_refused_by_name(module: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        mlx_scale(module, **parameters)


@pytest.mark.parametrize("fields", [{"fine_tune_type": "full"}, {"fine_tune_type": "dora"}, {"use_dora": True}])
def test_other_trainings_of_mlx_lm_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ModelRefused, match=next(iter(fields))):
        MlxConfig(json.loads(json.dumps({"lora_parameters": MLX} | fields)))
