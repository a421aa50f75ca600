"""generation_config.json: a value that localllm does not use is a warning, never a refusal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localllm.engine.files.model_files import ModelFiles, read_model

from .test_model_files import sound


def read(folder: Path, content: str | bytes) -> ModelFiles:
    path = sound(folder)
    raw = content if isinstance(content, bytes) else content.encode()
    (path / "generation_config.json").write_bytes(raw)
    return read_model(path)


BROKEN = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "null": b"null",
    "another encoding": b"\xff\xfe{}",
    "trailing comma": b'{"top_k": 5,}',
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_ignored_with_a_warning(name: str, tmp_path: Path) -> None:
    files = read(tmp_path, BROKEN[name])
    [warning] = files.warnings
    assert warning.startswith("generation_config.json ")
    assert warning.endswith("the file is ignored")
    assert (files.eos_ids, dict(files.generation)) == ((2, 7), {})


def test_a_pipe_instead_of_the_file_is_ignored(tmp_path: Path) -> None:
    path = sound(tmp_path)
    os.mkfifo(path / "generation_config.json")
    assert "not a regular file" in read_model(path).warnings[0]


IGNORED: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", 200),
    ("temperature", "0.7"),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("temperature", True),
    ("top_k", "20"),
    ("top_k", -2),
    ("top_p", 1.5),
    ("top_p", [0.9]),
    ("min_p", -1),
    ("repetition_penalty", 0),
    ("repetition_penalty", "1.1"),
    ("do_sample", "no"),
    ("do_sample", 1),
    ("eos_token_id", 100),
    ("eos_token_id", -1),
    ("eos_token_id", "2"),
    ("eos_token_id", True),
    ("eos_token_id", {"a": 1}),
    ("eos_token_id", [None]),
    ("eos_token_id", float("inf")),
    ("eos_token_id", float("nan")),
    ("eos_token_id", 2.5),
    ("eos_token_id", [[2]]),
    ("suppress_tokens", [100]),
    ("no_repeat_ngram_size", 3),
    ("bad_words_ids", [[5]]),
    ("typical_p", 0.9),
]


@pytest.mark.parametrize(("key", "value"), IGNORED)
def test_a_value_without_effect_is_named(key: str, value: Any, tmp_path: Path) -> None:
    files = read(tmp_path, json.dumps({key: value}))
    [warning] = files.warnings
    assert warning.startswith(f"generation_config.json: {key} ")
    assert (files.eos_ids, dict(files.generation), files.suppressed) == ((2, 7), {}, ())


SILENT: list[dict[str, Any]] = [
    {"temperature": None, "top_k": None, "top_p": None, "repetition_penalty": None, "do_sample": None},
    {"eos_token_id": None},
    {"eos_token_id": []},
    {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "bad_words_ids": None, "sequence_bias": {}},
    {"transformers_version": "5.0.0", "_from_model_config": True, "pad_token_id": -1, "x": {}},
]


@pytest.mark.parametrize("values", SILENT, ids=str)
def test_a_null_or_a_neutral_value_is_no_warning(values: dict[str, Any], tmp_path: Path) -> None:
    files = read(tmp_path, json.dumps(values))
    assert (files.eos_ids, dict(files.generation), files.warnings) == ((2, 7), {}, ())


@pytest.mark.parametrize(
    ("values", "generation"),
    [
        ({"top_k": 0}, {"top_k": 0.0}),
        ({"temperature": 0, "top_p": 0}, {"temperature": 0.0, "top_p": 0.0}),
        ({"do_sample": False, "temperature": None}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ],
)
def test_recommended_sampling(values: dict[str, Any], generation: dict[str, float], tmp_path: Path) -> None:
    files = read(tmp_path, json.dumps(values))
    assert (files.generation, files.warnings) == (generation, ())


def test_minus_one_means_no_limit(tmp_path: Path) -> None:
    files = read(tmp_path, '{"top_k": -1, "top_p": 0.9}')
    assert files.generation == {"top_p": 0.9}
    assert files.warnings == ("generation_config.json: top_k -1 is read as no limit",)


def test_ids_in_the_vocabulary_stay(tmp_path: Path) -> None:
    files = read(tmp_path, '{"eos_token_id": [3, 999, 9.0], "suppress_tokens": [5, -1]}')
    assert (files.eos_ids, files.suppressed) == ((3, 9), (5,))
    assert len(files.warnings) == 2


def test_many_ids_are_compared_fast(tmp_path: Path) -> None:
    """`2.5 in range(n)` would compare n numbers."""
    path = sound(tmp_path, vocab_size=2**24)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2.5] * 100_000}))
    assert len(read_model(path).warnings) == 1


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    files = read(tmp_path, b'\xef\xbb\xbf{"top_k": 5}')
    assert (files.generation, files.warnings) == ({"top_k": 5.0}, ())


def test_end_ids_of_config_json_beyond_the_vocabulary(tmp_path: Path) -> None:
    files = read_model(sound(tmp_path, eos_token_id=[2, 400, -1]))
    assert files.eos_ids == (2,)
    assert files.warnings == (
        "config.json: eos_token_id [2, 400, -1] is ignored where it is no token id below the vocabulary size 100",
    )
    assert read_model(sound(tmp_path, eos_token_id="</s>")).eos_ids == ()
