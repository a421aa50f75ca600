"""LoRA adapters in GGUF files: read as llama.cpp reads them, or refused with the key or the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from localllm.engine.errors import ModelRefused
from localllm.engine.files.adapter_files import read_adapter, read_adapter_header
from localllm.engine.files.adapter_fit import read_for_model
from localllm.engine.lora import Adapter

Q = "blk.0.attn_q.weight"
SHAPES = {f"{Q}.lora_a": (4, 16), f"{Q}.lora_b": (8, 4)}  # rank 4, 16 in_features, 8 out_features


def write(file: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, **changes: Any) -> Path:
    """An adapter file. `changes`: key, with underscores for points -> another value; None: without the key."""
    values: dict[str, Any] = {"general_type": "adapter", "adapter_type": "lora", "adapter_lora_alpha": 8.0, **changes}
    out = GGUFWriter(file, "llama")
    for key, value in values.items():
        name = key.replace("_", ".")
        match value:
            case None:
                pass
            case np.float64():
                out.add_float64(name, value)
            case float():
                out.add_float32(name, value)
            case int():
                out.add_uint32(name, value)
            case list():
                out.add_array(name, value)
            case _:
                out.add_string(name, value)
    for tensor, shape in shapes.items():
        out.add_tensor(tensor, np.ones(shape, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return file


def test_factors_have_the_shapes_and_the_scale(tmp_path: Path) -> None:
    files = read_adapter(write(tmp_path / "a.gguf"))
    [(module, factors)] = files.factors.items()
    assert module == Q
    assert (factors.rank, factors.in_features, factors.out_features, factors.scale) == (4, 16, 8, 2.0)
    assert files.rank == 4


def test_factor_a_of_the_embedding_is_stored_transposed(tmp_path: Path) -> None:
    name = "token_embd.weight"
    files = read_adapter(write(tmp_path / "a.gguf", {f"{name}.lora_a": (100, 4), f"{name}.lora_b": (16, 4)}))
    factors = files.factors[name]
    assert (factors.rank, factors.in_features, factors.out_features) == (4, 100, 16)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_adapter_without_alpha_has_the_scale_1(tmp_path: Path, alpha: float | None) -> None:
    files = read_adapter(write(tmp_path / "a.gguf", adapter_lora_alpha=alpha))
    assert files.factors[Q].scale == 1.0


@pytest.mark.parametrize(("alpha", "has_scale"), [(8.0, False), (0.0, True), (None, True)])
def test_warning_names_what_the_file_does_not_have(tmp_path: Path, alpha: float | None, has_scale: bool) -> None:
    warning = read_adapter(write(tmp_path / "a.gguf", adapter_lora_alpha=alpha)).warning
    assert "does not have use_rslora and alpha_pattern of PEFT" in warning
    assert ("uses the scale 1" in warning) == has_scale


def test_version_is_that_of_the_content(tmp_path: Path) -> None:
    first = read_adapter(write(tmp_path / "a.gguf")).version
    assert read_adapter(write(tmp_path / "b.gguf")).version == first
    assert read_adapter(write(tmp_path / "c.gguf", adapter_lora_alpha=4.0)).version != first


def test_folder_with_one_file_is_that_adapter(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf")
    assert read_adapter_header(tmp_path).path == file
    write(tmp_path / "b.gguf")
    with pytest.raises(ModelRefused, match=r"has no adapter_config\.json"):
        read_adapter_header(tmp_path)


def test_base_model_is_that_of_the_metadata(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    out = GGUFWriter(file, "llama")
    out.add_string("general.type", "adapter")
    out.add_string("adapter.type", "lora")
    out.add_string("general.base_model.0.name", "Base 1")
    out.add_string("general.base_model.0.repo_url", "https://huggingface.co/org/base-1")
    for tensor, shape in SHAPES.items():
        out.add_tensor(tensor, np.ones(shape, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    assert read_adapter_header(file).base == "org/base-1"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"general_type": "model"}, "its general.type is 'model'"),
        ({"general_type": None}, "its general.type is 'model'"),
        ({"general_type": 3}, "general.type must be a string"),
        ({"adapter_type": "cvec"}, "of the type 'cvec'"),
        ({"adapter_type": None}, "adapter.type"),
        ({"adapter_type": 1}, "adapter.type must be a string"),
        ({"adapter_lora_alpha": 8}, "adapter.lora.alpha must be a 32-bit float"),
        ({"adapter_lora_alpha": "8"}, "adapter.lora.alpha must be a 32-bit float"),
        ({"adapter_lora_alpha": np.float64(8.0)}, "adapter.lora.alpha must be a 32-bit float"),
    ],
)
def test_wrong_metadata_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        read_adapter(write(tmp_path / "a.gguf", **changes))


def test_activated_adapter_is_refused(tmp_path: Path) -> None:
    changes = {"adapter_alora_invocation_tokens": [1, 2]}
    file = write(tmp_path / "a.gguf", **changes)
    file.write_bytes(file.read_bytes().replace(b"adapter.alora.invocation.tokens", b"adapter.alora.invocation_tokens"))
    with pytest.raises(ModelRefused, match="activated LoRA"):
        read_adapter(file)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({f"{Q}.lora_a": (4, 16)}, "has only one of its two LoRA factors"),
        ({**SHAPES, "blk.0.attn_norm.weight": (16,)}, "'blk.0.attn_norm.weight' is not a LoRA factor"),
        ({f"{Q}.lora_a": (4, 16), f"{Q}.lora_b": (8, 5)}, "LoRA factors of ranks 4 and 5"),
        ({f"{Q}.lora_a": (4, 16), f"{Q}.lora_b": (8, 4, 2)}, "not a float matrix"),
        (
            {"token_embd.weight.lora_a": (4, 100), "token_embd.weight.lora_b": (16, 4)},
            "LoRA factors of ranks 100 and 4",
        ),
    ],
)
def test_wrong_tensors_are_refused(tmp_path: Path, shapes: dict[str, tuple[int, ...]], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        read_adapter(write(tmp_path / "a.gguf", shapes))


def test_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="does not exist"):
        read_adapter(tmp_path / "a.gguf")


def test_other_models_refuse_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf")
    with pytest.raises(ModelRefused, match="is a GGUF file, but the model is not"):
        read_for_model(Adapter("a", str(file), read_adapter(file).version), {Q: (8, 16)}, 16, {})
