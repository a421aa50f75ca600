"""Model folders: the values that are read, and the error of each malformed folder."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from localllm import backends
from localllm.engine.errors import ModelRefused
from localllm.engine.files.model_files import read_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [2, 7],
    "torch_dtype": "bfloat16",
}

A, B, C = (f"model.{name}.weight" for name in ("embed_tokens", "layers.0.mlp.up_proj", "norm"))


def safetensors(*names: str) -> bytes:
    header = json.dumps(
        {name: {"dtype": "U8", "shape": [4], "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate(names)}
    ).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * len(names))


def folder(path: Path, config: Any = CONFIG, **files: str | bytes) -> Path:
    """A model folder; `files` by name with __ for dots."""
    path.mkdir(exist_ok=True)
    content = config if isinstance(config, (str, bytes)) else json.dumps(config)
    for name, text in {"config__json": content, **files}.items():
        data = text if isinstance(text, bytes) else text.encode()
        (path / name.replace("__", ".")).write_bytes(data)
    return path


def sound(path: Path, **changes: Any) -> Path:
    return folder(path / "tiny", {**CONFIG, **changes}, model__safetensors=safetensors("model.norm.weight"))


def test_a_model_folder_is_read(tmp_path: Path) -> None:
    files = read_model(sound(tmp_path))
    assert files.name == "tiny"
    assert (files.config.num_layers, files.config.head_dim, files.config.num_kv_heads) == (2, 16, 2)
    assert files.config.layer_kinds == ("full", "full")
    assert files.config.ropes["full"].theta == 10000.0
    assert files.config.dtype == "bfloat16"
    assert files.eos_ids == (2, 7)
    assert files.weight_bytes == 4
    assert not files.warnings
    assert read_model(sound(tmp_path), "org/tiny").name == "org/tiny"


def test_generation_config_wins_over_config(tmp_path: Path) -> None:
    path = sound(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": 9, "temperature": 0.6, "top_k": 20, "x": {}}')
    files = read_model(path)
    assert files.eos_ids == (9,)
    assert files.generation == {"temperature": 0.6, "top_k": 20.0}
    (path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    files = read_model(path)
    assert (files.eos_ids, files.generation) == ((2, 7), {"temperature": 0.0})


def test_code_of_the_repository_is_never_run(tmp_path: Path) -> None:
    path = sound(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (path / "modeling.py").write_text("raise SystemExit('run')")
    assert read_model(path).config.model_type == "llama"


BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("model_type", None, "model_type must be a string, not nothing"),
    ("model_type", 3, "model_type must be a string, not 3"),
    ("vocab_size", None, "vocab_size must be an integer"),
    ("vocab_size", 0, "vocab_size must be an integer in 1…16777216, not 0"),
    ("vocab_size", -5, "not -5"),
    ("vocab_size", 1e3, "not 1000.0"),
    ("vocab_size", "100", "not '100'"),
    ("vocab_size", True, "not True"),
    ("vocab_size", 10**30, "vocab_size must be"),
    ("hidden_size", 66, "a multiple of num_attention_heads (4), not 66"),
    ("hidden_size", 2**40, "hidden_size must be"),
    ("intermediate_size", [], "intermediate_size must be"),
    ("num_hidden_layers", 0, "num_hidden_layers must be"),
    ("num_hidden_layers", 10**6, "num_hidden_layers must be"),
    ("num_attention_heads", -4, "num_attention_heads must be"),
    ("num_key_value_heads", 3, "a divisor of num_attention_heads (4), not 3"),
    ("head_dim", 0, "head_dim must be"),
    ("head_dim", 15, "must be an even number"),
    ("max_position_embeddings", 10**20, "max_position_embeddings must be"),
    ("rms_norm_eps", 0, "rms_norm_eps must be a number"),
    ("rms_norm_eps", float("nan"), "rms_norm_eps must be a number"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps must be a number"),
    ("rope_theta", float("inf"), "rope_theta must be"),
    ("rope_theta", -1.0, "rope_theta must be"),
    ("rope_theta", 10**400, "rope_theta must be"),
    ("rope_scaling", [], "rope_scaling must be an object"),
    ("rope_scaling", {"type": "su", "factor": 2.0}, "rope type 'su' is not supported"),
    ("rope_scaling", {"type": "dynamic"}, "factor must be a number"),
    ("rope_scaling", {"rope_type": "linear"}, "factor must be a number"),
    ("rope_scaling", {"rope_type": "linear", "factor": 0}, "factor must be a number"),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "a list of 8 numbers"),
    (
        "rope_scaling",
        {"rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1},
        "greater than low_freq_factor (4)",
    ),
    ("is_causal", None, "is_causal is not supported: the model does not generate text"),
    ("is_causal", False, "is_causal is not supported: the model does not generate text"),
    ("per_layer_config", {"0": {"num_key_value_heads": 1}}, "layers of different shapes are not supported"),
    ("layer_types", ["full_attention", "sliding_attention"], "full_attention for every layer"),
    ("rope_parameters", {"full_attention": {"rope_theta": 5.0}}, "one rope for all layers"),
    (
        "rope_scaling",
        {"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5},
        "partial_rotary_factor must be 1 (rope type linear",
    ),
    ("hidden_act", "relu6", "activation 'relu6' is not supported"),
    ("attention_bias", "yes", "attention_bias must be true or false"),
    ("tie_word_embeddings", 1, "tie_word_embeddings must be true or false"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, "quantised by bitsandbytes are not supported"),
    ("quantization_config", {"quant_method": "gptq", "bits": 3}, "bits must be 4"),
    ("use_bidirectional_attention", True, "does not generate text"),
]


@pytest.mark.parametrize(("key", "value", "reason"), BAD_FIELDS, ids=[f"{k}={str(v)[:40]}" for k, v, _ in BAD_FIELDS])
def test_bad_field_is_refused_by_name(key: str, value: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused) as refused:
        read_model(sound(tmp_path, **{key: value}))
    assert "config.json" in str(refused.value)
    assert reason in str(refused.value)


BAD_FIELDS_OF_FAMILIES: list[tuple[str, dict[str, Any], str]] = [
    ("phi3", {"partial_rotary_factor": 0.01}, "must be an even number"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
    ("phi3", {"layer_types": ["sliding_attention"] * 2}, "full_attention for every layer"),
    ("ministral3", {"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "llama_4_scaling_beta must be a number"),
    ("ministral3", {"rope_parameters": {"llama_4_scaling_beta": 1}}, "original_max_position_embeddings must be"),
    ("ministral3", {"layer_types": ["sliding_attention"] * 2}, "full_attention for every layer"),
    ("mistral", {"sliding_window": None, "layer_types": ["sliding_attention"] * 2}, "sliding_window must be"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "use_sliding_window must be true"),
    ("qwen3", {"rope_parameters": {"full_attention": {}}}, "one rope for all layers"),
    ("gemma2", {"attn_logit_softcapping": 1e4}, "attn_logit_softcapping must be a number in 0.001…500"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier must be a number"),
    ("granite", {"logits_scaling": "8"}, "logits_scaling must be a number"),
    ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 2 numbers"),
    ("smollm3", {"no_rope_layers": [1, 2]}, "no_rope_layers must be a list of 2 numbers"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "use_sliding_window must be true"),
    ("gemma3_text", {"sliding_window": None}, "sliding_window must be an integer"),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8}}, "type must be renamed to rope_type"),
    (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4, "truncate": False}},
        },
        "truncate must be true",
    ),
]


@pytest.mark.parametrize(("family", "changes", "reason"), BAD_FIELDS_OF_FAMILIES)
def test_bad_field_of_a_family_is_refused_by_name(
    family: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused) as refused:
        read_model(sound(tmp_path, model_type=family, **changes))
    assert reason in str(refused.value)


def test_an_unknown_architecture_is_left_to_the_backends(tmp_path: Path) -> None:
    config = read_model(sound(tmp_path, model_type="mamba2")).config
    assert (config.model_type, config.vocab_size, config.max_positions) == ("mamba2", 100, 512)
    assert read_model(sound(tmp_path, model_type="mamba2", eos_token_id=[3, 7])).eos_ids == (3, 7)


def test_an_unknown_architecture_with_a_text_config(tmp_path: Path) -> None:
    whole = {"text_config": {"vocab_size": 77, "max_position_embeddings": 99, "dtype": "bfloat16"}, "vocab_size": None}
    config = read_model(sound(tmp_path, model_type="llava", **whole)).config
    assert (config.vocab_size, config.max_positions, config.dtype) == (77, 99, "bfloat16")


@pytest.mark.parametrize(
    ("family", "ids"), [("gemma3_text", (1,)), ("llama", (2,)), ("mistral", (2,)), ("phi3", ()), ("qwen2", ())]
)
def test_end_of_text_that_is_absent_or_null(family: str, ids: tuple[int, ...], tmp_path: Path) -> None:
    """Absent: transformers' default, unless the vocabulary is too small for it. Null: there is none."""
    values = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    path = folder(tmp_path / "tiny", {**values, "model_type": family}, model__safetensors=safetensors("a"))
    assert read_model(path).eos_ids == ids
    assert read_model(sound(tmp_path, model_type=family, eos_token_id=None)).eos_ids == ()


STRANGE: list[dict[str, Any]] = [
    *({key: None} for key in CONFIG if key != "model_type"),
    *({key: value} for key in CONFIG if key != "model_type" for value in ("many", -1, [], {"a": 1})),
    {"vocab_size": None, "text_config": "bert"},
    {"vocab_size": None, "text_config": {"vocab_size": "many"}},
    {"rope_scaling": 5, "sliding_window": "x", "quantization_config": {"quant_method": "new"}},
]


@pytest.mark.parametrize("changes", STRANGE, ids=str)
def test_an_unknown_architecture_is_refused_by_name_before_other_errors(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    path = sound(tmp_path, model_type="mamba2", **changes)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    files = read_model(path)
    assert files.eos_ids == (7,)
    with pytest.raises(ModelRefused, match="code of mamba2 is not supported"):
        backends.choose("cpu", files)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must contain a JSON object, not a list"),
        ("null", "not a NoneType"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "not JSON"),
        (" " * (32 * 1024 * 1024 + 1), "the limit is"),
    ],
    ids=["empty", "cut", "bytes", "nested", "list", "null", "digits", "huge"],
)
def test_config_that_is_no_object_is_refused(content: str | bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=reason) as refused:
        read_model(folder(tmp_path / "tiny", content, model__safetensors=safetensors("a")))
    assert "config.json" in str(refused.value)


@pytest.mark.parametrize(
    ("key", "least", "most"),
    [
        ("temperature", 0.0, 100.0),
        ("top_k", 0.0, 2.0**31 - 1),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 1e-6, 100.0),
    ],
)
def test_recommended_sampling_may_be_at_its_limits(key: str, least: float, most: float, tmp_path: Path) -> None:
    path = sound(tmp_path)
    for value in (least, most):
        (path / "generation_config.json").write_text(json.dumps({key: value}))
        assert read_model(path).generation == {key: value}
    for value in (least - 1e-7, most * 1.001):
        (path / "generation_config.json").write_text(json.dumps({key: value}))
        files = read_model(path)
        [warning] = files.warnings
        assert not files.generation
        assert f"{key} {value!r} is ignored" in warning


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "has no weights"),
        ({"pytorch_model__bin": b"\x80\x04"}, "loading them could run code"),
        ({"consolidated__00__pth": b"PK"}, "loading them could run code"),
        ({"tiny__gguf": b"GGUF"}, "tiny.gguf is not a valid GGUF file"),
    ],
)
def test_weights_we_cannot_read_are_refused(files: dict[str, bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=reason):
        read_model(folder(tmp_path / "tiny", CONFIG, **files))


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="does not exist"):
        read_model(tmp_path / "absent")
    with pytest.raises(ModelRefused, match=r"model\.Q4_K_M\.gguf cannot be read: No such file"):
        read_model(tmp_path / "model.Q4_K_M.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelRefused, match=r"has no config\.json"):
        read_model(tmp_path / "empty")
    os.mkfifo(tmp_path / "empty" / "config.json")
    with pytest.raises(ModelRefused, match="not a regular file"):
        read_model(tmp_path / "empty")


class TestShards:
    """Weights in several files, by an index."""

    FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def write(self, path: Path, weight_map: Any, **shards: bytes) -> Path:
        index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
        files = {"model__safetensors__index__json": index}
        return folder(path / "tiny", CONFIG, **files, **shards)

    def both(self, path: Path, weight_map: Any, second: bytes | None = None) -> Path:
        made = self.write(path, weight_map)
        (made / self.FIRST).write_bytes(safetensors(A))
        (made / self.SECOND).write_bytes(second or safetensors(B, C))
        return made

    def test_sound_index(self, tmp_path: Path) -> None:
        files = read_model(self.both(tmp_path, {A: self.FIRST, B: self.SECOND, C: self.SECOND}))
        assert {name: tensor.file.name for name, tensor in files.tensors.items()} == {
            A: self.FIRST,
            B: self.SECOND,
            C: self.SECOND,
        }
        assert not files.warnings

    def test_links_of_the_hub_cache_are_followed(self, tmp_path: Path) -> None:
        """There a snapshot's files are links to blobs outside its folder; only the index's names must stay inside."""
        made = self.both(tmp_path, {A: self.FIRST, B: self.SECOND, C: self.SECOND})
        for name in (self.FIRST, self.SECOND):
            (made / name).rename(tmp_path / f"blob-{name}")
            (made / name).symlink_to(Path("..") / f"blob-{name}")
        assert len(read_model(made).tensors) == 3

    @pytest.mark.parametrize(
        "name",
        ["../other.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "x.bin", "a\\b.safetensors", 5, None],
    )
    def test_shard_names_outside_the_folder_are_refused(self, name: Any, tmp_path: Path) -> None:
        (tmp_path / "other.safetensors").write_bytes(safetensors("a"))
        with pytest.raises(ModelRefused, match="file in the model folder"):
            read_model(self.both(tmp_path, {"a": name}))

    @pytest.mark.parametrize(
        ("weight_map", "reason"),
        [
            ([], "weight_map must be an object"),
            ({}, "weight_map must be an object"),
            (None, "weight_map must be an object"),
            ({"a": "model-00003-of-00003.safetensors"}, "model-00003-of-00003.safetensors is missing"),
            ({A: FIRST, "lm_head.weight": SECOND}, "tensor 'lm_head.weight' is not in model-00002"),
            ({A: FIRST, "model.layers.1.mlp.up_proj.weight": SECOND}, "up_proj.weight' is not in model-00002"),
            ({A: FIRST, "layers.1.mlp.up_proj.qweight": SECOND}, "up_proj.qweight' is not in model-00002"),
        ],
    )
    def test_index_that_does_not_fit_is_refused(self, weight_map: Any, reason: str, tmp_path: Path) -> None:
        with pytest.raises(ModelRefused, match=reason):
            read_model(self.both(tmp_path, weight_map))

    def test_damaged_shard_is_refused_by_name(self, tmp_path: Path) -> None:
        made = self.both(tmp_path, {A: self.FIRST, B: self.SECOND, C: self.SECOND}, b"short")
        with pytest.raises(ModelRefused, match=self.SECOND):
            read_model(made)


def test_windows_and_ropes_by_family(tmp_path: Path) -> None:
    def config(**changes: Any) -> Any:
        return read_model(sound(tmp_path, **changes)).config

    assert config(sliding_window=8).window == 0, "Llama has none"
    assert config(model_type="mistral", sliding_window=8).layer_kinds == ("sliding", "sliding")
    assert config(model_type="mistral").window == 4096
    assert config(model_type="mistral", sliding_window=None).window == 0
    assert config(model_type="qwen2", sliding_window=8).window == 0, "only with use_sliding_window"
    flagged = config(model_type="qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert flagged.layer_kinds == ("full", "sliding")
    assert flagged.qkv_bias
    assert not flagged.output_bias
    gemma = config(
        model_type="gemma3_text", sliding_window=8, num_hidden_layers=6, hidden_activation="gelu_pytorch_tanh"
    )
    assert gemma.layer_kinds == ("sliding",) * 5 + ("full",)
    assert (gemma.ropes["sliding"].theta, gemma.ropes["full"].theta) == (10000.0, 10000.0)
    assert gemma.tie_embeddings
    assert gemma.activation == "gelu_tanh"
