"""The list of adapter folders: facts from the configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localllm.app.store import adapters


@pytest.mark.parametrize(
    ("configuration", "base", "rank"),
    [
        ({"base_model_name_or_path": "org/base", "r": 8}, "org/base", 8),
        ({"base_model_name_or_path": None, "r": 8, "rank_pattern": {"q_proj": 32}}, "", 32),
        ({"model": "org/base", "lora_parameters": {"rank": 16}}, "org/base", 16),
        ({"r": "eight", "rank_pattern": [1], "lora_parameters": 3}, "", 0),
        ([], "", 0),
    ],
)
def test_folder_outside_the_cache_is_described(tmp_path: Path, configuration: object, base: str, rank: int) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(configuration))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"12345")
    folder = next(folder for folder in adapters.folders([tmp_path]) if folder.path == str(tmp_path))
    assert (folder.id, folder.base, folder.rank) == (str(tmp_path), base, rank)
    assert folder.size == 5 + len(json.dumps(configuration))


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\udcff"])
def test_malformed_configuration_has_no_facts(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content.encode(errors="surrogateescape"))
    folder = next(folder for folder in adapters.folders([tmp_path]) if folder.path == str(tmp_path))
    assert (folder.base, folder.rank) == ("", 0)


def test_missing_folder_has_no_facts(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    folder = adapters.folders([missing])[-1]
    assert (folder.path, folder.rank, folder.size) == (str(missing), 0, 0)
