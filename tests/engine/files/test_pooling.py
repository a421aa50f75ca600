"""Which vectors the files of an embedding model describe, and which files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.files.model_files import read_model
from localllm.engine.files.pooling import Pooling, read_pooling

from ...app.embedder import MODULES, POOLING, write_embedder
from ...app.tiny_qwen import write_model

SIZE = 32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_embedder(tmp_path / "model")


def pooling_of(folder: Path, name: str = "org/model") -> Pooling:
    pooling = read_pooling(read_model(folder, name))
    assert pooling is not None
    return pooling


def write(folder: Path, file: str, value: object) -> None:
    (folder / file).write_text(json.dumps(value))


def module(kind: str, path: str = "") -> dict[str, object]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


def test_files_of_qwen3_embedding(folder: Path) -> None:
    pooling = pooling_of(folder)
    assert pooling == Pooling(SIZE)
    assert pooling.title == "last token, normalised, 32 numbers"


def test_chat_model_has_no_pooling(tmp_path: Path) -> None:
    assert read_pooling(read_model(write_model(tmp_path))) is None


def test_without_normalize(folder: Path) -> None:
    write(folder, "modules.json", MODULES[:2])
    assert not pooling_of(folder).normalised


def test_package_of_modules_may_have_other_folders(folder: Path) -> None:
    renamed = [{**entry, "type": entry["type"].replace("models", "base.modules")} for entry in MODULES]
    write(folder, "modules.json", renamed)
    assert pooling_of(folder) == Pooling(SIZE)


@pytest.mark.parametrize(
    "modules",
    [
        [],
        MODULES[:1],
        [*MODULES[:2], module("Dense", "2_Dense"), MODULES[2]],
        [MODULES[0], MODULES[2], MODULES[1]],
        [{**MODULES[0], "type": "custom.Transformer"}, *MODULES[1:]],
        [{**MODULES[0], "path": "0_Transformer"}, *MODULES[1:]],
    ],
)
def test_other_modules_are_refused(folder: Path, modules: list[object]) -> None:
    write(folder, "modules.json", modules)
    assert "modules.json: the modules" in pooling_of(folder).problem


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a/b", "..", "x\0"])
def test_folder_outside_the_model_is_refused(folder: Path, path: str) -> None:
    write(folder, "modules.json", [MODULES[0], {**MODULES[1], "path": path}])
    assert "is not a folder of the model" in pooling_of(folder).problem


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode_lasttoken": False, "pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_mean_tokens": True}, "mean and last token"),
        ({"pooling_mode_lasttoken": False}, "none"),
        ({"pooling_mode_attention": True}, "last token and attention"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["lasttoken", "cls"]}, "last token and cls"),
    ],
)
def test_other_pooling_modes_are_refused(folder: Path, fields: dict[str, Any], mode: str) -> None:
    write(folder, "1_Pooling/config.json", POOLING | fields)
    assert f"1_Pooling/config.json: the pooling {mode} is not supported" in pooling_of(folder).problem
    assert pooling_of(folder).title.startswith("none: ")


def test_mode_is_mean_if_the_configuration_names_none(folder: Path) -> None:
    """The default of sentence-transformers."""
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": SIZE})
    assert "pooling mean" in pooling_of(folder).problem
    write(folder, "1_Pooling/config.json", {"word_embedding_dimension": SIZE, "pooling_mode": "lasttoken"})
    assert not pooling_of(folder).problem


def test_missing_and_damaged_files_are_named(folder: Path) -> None:
    (folder / "1_Pooling" / "config.json").unlink()
    assert "1_Pooling/config.json is missing" in pooling_of(folder).problem
    for text in ("{", "[1]", '{"a": 1}', '[{"type": 1}]'):
        (folder / "modules.json").write_text(text)
        assert "modules.json" in pooling_of(folder).problem
    write(folder, "modules.json", MODULES)
    write(folder, "1_Pooling/config.json", POOLING | {"word_embedding_dimension": 64})
    assert "word_embedding_dimension" in pooling_of(folder).problem


def test_limit_and_prompt(folder: Path) -> None:
    write(folder, "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    prompts = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}
    write(folder, "config_sentence_transformers.json", prompts)
    assert pooling_of(folder) == Pooling(SIZE, max_tokens=100)
    write(folder, "config_sentence_transformers.json", prompts | {"default_prompt_name": "query"})
    assert pooling_of(folder).prompt == "Query: "
    write(folder, "config_sentence_transformers.json", prompts | {"default_prompt_name": "other"})
    assert "default_prompt_name" in pooling_of(folder).problem
    write(folder, "config_sentence_transformers.json", {"truncate_dim": 8})
    assert "truncate_dim" in pooling_of(folder).problem
    write(folder, "sentence_bert_config.json", {"do_lower_case": True})
    assert "do_lower_case" in pooling_of(folder).problem


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, [32]),
        ({"is_matryoshka": True}, range(1, 33)),
        ({"matryoshka_dimensions": [8, 16]}, [8, 16, 32]),
        ({"is_matryoshka": False}, [32]),
    ],
)
def test_sizes_of_matryoshka_models(folder: Path, config: dict[str, object], sizes: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", values | config)
    pooling = pooling_of(folder)
    assert [size for size in range(-1, 40) if pooling.allows(size)] == list(sizes)  # type: ignore[call-overload]


def test_code_of_the_repository_is_refused(folder: Path) -> None:
    """Code may compute other hidden states, for example with attention to later tokens."""
    values = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", values | {"auto_map": {"AutoModelForCausalLM": "modeling.M"}})
    assert pooling_of(folder) == Pooling(SIZE)
    write(folder, "config.json", values | {"auto_map": {"AutoModel": "modeling.M"}})
    assert "auto_map names code that computes the hidden states" in pooling_of(folder).problem


@pytest.mark.parametrize("value", [[0], [33], ["8"], [True], 8])
def test_impossible_sizes_are_refused(folder: Path, value: object) -> None:
    values = json.loads((folder / "config.json").read_text())
    write(folder, "config.json", values | {"matryoshka_dimensions": value})
    assert "matryoshka_dimensions" in pooling_of(folder).problem


@pytest.mark.parametrize(
    ("name", "is_known"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", True),
        ("Qwen/Qwen3-Embedding-8B@1d8ad4c", True),
        ("Qwen/Qwen3-Embedding-4B-GGUF:Q8_0", True),
        ("other/Qwen3-Embedding-0.6B", False),
        ("Qwen/Qwen3-Embedding-0.6B-tuned", False),
    ],
)
def test_models_known_to_be_matryoshka(folder: Path, name: str, is_known: bool) -> None:
    pooling = pooling_of(folder, name)
    assert pooling.allows(32)
    assert pooling.min_size == (32 if is_known else 0)


def gguf_pooling(tmp_path: Path, **metadata: object) -> Pooling | None:
    files = read_model(write_model(tmp_path))
    config = replace(files.config, model_type="qwen3")
    gguf = replace(files, config=config, gguf=(Path("m.gguf"),), path=Path("m.gguf"))
    return read_pooling(replace(gguf, metadata={f"qwen3.{key}": value for key, value in metadata.items()}))


@pytest.mark.parametrize(("number", "mode"), [(0, "none"), (1, "mean"), (2, "cls"), (4, "rank"), (9, "type 9")])
def test_pooling_type_of_gguf_files(tmp_path: Path, number: int, mode: str) -> None:
    assert gguf_pooling(tmp_path) is None
    assert gguf_pooling(tmp_path, pooling_type=3) == Pooling(SIZE)
    refused = gguf_pooling(tmp_path, pooling_type=number)
    assert refused is not None
    assert f"the pooling {mode} is not supported" in refused.problem
    damaged = gguf_pooling(tmp_path, pooling_type="last")
    assert damaged is not None
    assert "qwen3.pooling_type must be an integer" in damaged.problem


def test_gguf_with_another_output_size_is_refused(tmp_path: Path) -> None:
    pooling = gguf_pooling(tmp_path, pooling_type=3, embedding_length_out=16)
    assert pooling is not None
    assert "embedding_length_out" in pooling.problem
