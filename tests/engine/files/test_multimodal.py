"""The text model of a multimodal model: its config and the names of its tensors."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, Mistral3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_config import parse_config
from localllm.engine.files.multimodal import TEXT_MODELS, TIE, other_parts, text_tensors
from localllm.engine.files.tensor_files import StoredTensor

TEXT = {
    "model_type": "mistral",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# Sizes of every text model.
SIZES = {
    **TEXT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 16,
    "num_local_experts": 16,
    "num_experts": 16,
    "sliding_window": 8,
    "n_group": 2,
    "topk_group": 2,
}
del SIZES["model_type"]
TENSOR = StoredTensor(Path("model.safetensors"), "BF16", (2,), 0, 4)


def config(text: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "mistral3", "text_config": text, **more}


def test_config_is_that_of_the_text_model() -> None:
    parsed = parse_config(config(TEXT))
    alone = parse_config(TEXT)
    assert (parsed.multimodal, parsed.model_type, alone.multimodal) == ("mistral3", "mistral", "")
    assert (parsed.num_layers, parsed.ropes, parsed.eos_ids) == (alone.num_layers, alone.ropes, alone.eos_ids)


def test_fields_beside_text_config_have_precedence() -> None:
    shared = {"dtype": "bfloat16", "eos_token_id": 7}
    quantised = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    parsed = parse_config(config(TEXT, **shared, **quantised))
    assert (parsed.dtype, parsed.eos_ids) == ("bfloat16", (7,))
    assert parsed.quantization is not None
    assert parsed.quantization.method == "fp8"
    contradictory = parse_config(config({**TEXT, "dtype": "float32", "eos_token_id": 8}, **shared))
    assert (contradictory.dtype, contradictory.eos_ids) == ("bfloat16", (7,))


@pytest.mark.parametrize("inner", [{}, {"eos_token_id": None}, {"eos_token_id": 8}])
@pytest.mark.parametrize("outer", [{}, {"eos_token_id": 7}])
def test_end_ids_are_those_of_transformers(outer: dict[str, int], inner: dict[str, int | None]) -> None:
    values = config(TEXT | inner, **outer)
    expected = GenerationConfig.from_model_config(Mistral3Config.from_dict(values)).eos_token_id
    assert parse_config(values).eos_ids == (() if expected is None else (expected,))


@pytest.mark.parametrize("inner", [None, True, False])
@pytest.mark.parametrize("outer", [None, True, False])
@pytest.mark.parametrize(
    ("multimodal", "model_type"), [(name, text) for name, one in TEXT_MODELS.items() for text in one.texts]
)
def test_the_field_beside_text_config_ties_the_head(
    multimodal: str, model_type: str, outer: bool | None, inner: bool | None
) -> None:
    text = {**SIZES, "model_type": model_type, "num_hidden_layers": 4} | ({} if inner is None else {TIE: inner})
    values = {"model_type": multimodal, "text_config": text} | ({} if outer is None else {TIE: outer})
    expected = CONFIG_MAPPING[multimodal].from_dict(deepcopy(values)).tie_word_embeddings
    assert parse_config(values).tie_embeddings is expected


@pytest.mark.parametrize("multimodal", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("tied", [None, True, False])
def test_published_fields_of_the_text_model_are_beside_vision_config(multimodal: str, tied: bool | None) -> None:
    values = {**SIZES, "model_type": multimodal, "vision_config": {}} | ({} if tied is None else {TIE: tied})
    expected = CONFIG_MAPPING[multimodal].from_dict(deepcopy(values))
    parsed = parse_config(values)
    assert parsed.tie_embeddings is expected.tie_word_embeddings
    assert parsed.hidden_size == expected.text_config.hidden_size == 64


def test_the_sizes_that_published_files_of_gemma_3_leave_out() -> None:
    """google/gemma-3-4b-it has these fields alone."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]}
    parsed = parse_config(values)
    expected = CONFIG_MAPPING["gemma3"].from_dict(deepcopy(values)).text_config
    assert (parsed.vocab_size, parsed.num_heads) == (expected.vocab_size, expected.num_attention_heads)
    assert (parsed.num_kv_heads, parsed.head_dim) == (expected.num_key_value_heads, expected.head_dim)
    assert parsed.ropes["full"].factor == 8.0
    assert parsed.layer_kinds.count("full") == 5


def test_parts_that_read_no_text() -> None:
    names = ("language_model.model.norm.weight", "vision_tower.conv.weight", "model.embed_audio.weight", "visual.x")
    assert other_parts(names) == ["embed_audio", "vision_tower", "visual"]


def test_a_wrong_value_beside_text_config_is_refused() -> None:
    with pytest.raises(ModelRefused, match=r"config\.json: tie_word_embeddings must be true or false"):
        parse_config(config(TEXT, tie_word_embeddings=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "text_config must be an object"),
        ({}, "text_config must be an object"),
        ("mistral", "text_config must be an object"),
        ({**TEXT, "model_type": "qwen3"}, "text_config: model_type must be ministral3 or mistral"),
        ({**TEXT, "model_type": ["mistral"]}, "text_config: model_type must be ministral3 or mistral"),
        ({**TEXT, "hidden_size": 0}, "config.json: text_config: hidden_size must be an integer"),
    ],
)
def test_other_text_models_are_refused_by_name(text: Any, message: str) -> None:
    with pytest.raises(ModelRefused, match=message):
        parse_config(config(text))


@pytest.mark.parametrize(
    "names",
    [
        ("language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.conv.weight"),
        ("model.language_model.norm.weight", "lm_head.weight", "model.multi_modal_projector.norm.weight"),
    ],
    ids=["transformers-4", "transformers-5"],
)
def test_tensors_have_the_names_of_the_text_model(names: tuple[str, ...]) -> None:
    assert text_tensors(dict.fromkeys(names, TENSOR)).keys() == {"model.norm.weight", "lm_head.weight"}


def test_unknown_tensors_keep_their_names() -> None:
    """The load refuses a tensor that the model does not use."""
    assert text_tensors({"other_tower.weight": TENSOR}).keys() == {"other_tower.weight"}


def test_two_tensors_with_one_name_are_refused() -> None:
    names = ("language_model.model.norm.weight", "model.language_model.norm.weight")
    with pytest.raises(ModelRefused, match=r"two tensors of the model are 'model\.norm\.weight'"):
        text_tensors(dict.fromkeys(names, TENSOR))
