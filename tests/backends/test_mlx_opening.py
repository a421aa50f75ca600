"""The memory plan of a runner on MLX, and refused settings."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import mlx.core as mx

from localllm.backends import mlx
from localllm.backends.mlx import opening
from localllm.backends.mlx.cache import LayerShape
from localllm.backends.mlx.lora import slot_bytes
from localllm.engine.errors import ModelRefused, SettingRefused
from localllm.engine.files.model_files import ModelFiles, read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import RunnerSpec

from . import canary
from .mlx_models import DENSE, SMALL

SHAPES = [LayerShape(1, 64, 32, mx.float16, 0), LayerShape(2, 64, 64, mx.float16, 0)]
TOKEN = (64 + 32 + 2 * (64 + 64)) * 2
PAGE = 16 * TOKEN
LOADED: Any = SimpleNamespace(shapes=SHAPES, quant="int4", bytes=1000, token_bytes=900)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return read_model(canary.save(tmp_path_factory.mktemp("canary")))


def planned(files: ModelFiles, budget: LoadOptions, pages: int) -> RunnerSpec:
    """The spec with free memory for this number of pages."""
    return opening._plan(files, budget, LOADED, pages * PAGE, 1)


def test_half_of_the_cache_memory_is_for_pages(files: ModelFiles) -> None:
    spec = planned(files, LoadOptions(max_rows=1, cache_bytes=2000 * PAGE), 4000)
    assert (spec.groups[0].num_pages, spec.cache_bytes) == (1000, 2000 * PAGE)
    assert planned(files, LoadOptions(max_rows=1, cache_bytes=21 * PAGE), 0).groups[0].num_pages == 10
    assert (spec.dtype, spec.quant, spec.weight_bytes, spec.token_bytes) == ("float16", "int4", 1000, 900)


def test_cache_is_no_larger_than_the_rows_need(files: ModelFiles) -> None:
    assert planned(files, LoadOptions(max_rows=1), 100).groups[0].num_pages == 30, "0.6 of the free memory"
    assert planned(files, LoadOptions(max_rows=3), 4000).groups[0].num_pages == 96
    assert planned(files, LoadOptions(max_rows=3, context=40), 4000).groups[0].num_pages == 8
    long = replace(files, config=replace(files.config, max_positions=5000))
    assert planned(long, LoadOptions(max_rows=1), 4000).groups[0].num_pages == 313, "one whole context"
    assert planned(long, LoadOptions(max_rows=2), 4000).groups[0].num_pages == 512, "4096 tokens a row"


def test_context_is_limited_by_the_cache_and_the_model(files: ModelFiles) -> None:
    budget = LoadOptions(context=canary.CONTEXT, cache_bytes=64 * PAGE)
    assert planned(files, budget, 0).max_context == canary.CONTEXT
    assert planned(files, replace(budget, context=None, cache_bytes=8 * PAGE), 0).max_context == 64
    for context in (1, canary.CONTEXT):
        assert planned(files, replace(budget, context=context), 0).max_context == context
    for context in (0, canary.CONTEXT + 1):
        with pytest.raises(ModelRefused, match=f"has a context of 512 tokens, not {context}"):
            planned(files, replace(budget, context=context), 0)
    for too_small in (replace(budget, cache_bytes=64 * PAGE - 1), LoadOptions(cache_bytes=PAGE)):
        with pytest.raises(
            ModelRefused, match=r"a context of 512 tokens needs 0.69 MiB of KV cache, but .* are allowed"
        ):
            planned(files, too_small, 0)


def test_step_has_room_for_every_row(files: ModelFiles) -> None:
    assert planned(files, LoadOptions(max_rows=4), 4000).max_tokens == opening.STEP_TOKENS
    assert planned(files, LoadOptions(max_rows=80, max_step_tokens=64), 4000).max_tokens == 80
    assert planned(files, LoadOptions(max_rows=4, max_step_tokens=64), 4000).max_tokens == 64


def test_weights_beyond_the_free_memory_are_refused(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_memory", lambda: (2**40, files.weight_bytes - 1))
    monkeypatch.setattr(opening, "load", pytest.fail)
    with pytest.raises(ModelRefused, match="for its weights, but"):
        opening.open_on_mlx(files, LoadOptions())


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (LoadOptions(quant="fp8"), "quant fp8"),
        (LoadOptions(cache_dtype="fp8"), "cache_dtype fp8"),
        (LoadOptions(attention="flashinfer"), "attention flashinfer"),
        (LoadOptions(lora_backend="csgmv"), "lora_backend csgmv"),
        (LoadOptions(graphs="full"), "graphs full"),
        (LoadOptions(ops=("norm=reference",)), "ops"),
    ],
)
def test_unsupported_setting_is_refused(tmp_path: Path, budget: LoadOptions, message: str) -> None:
    DENSE.save(tmp_path)
    with pytest.raises(SettingRefused, match=message):
        mlx.open(read_model(tmp_path), budget)


def test_architecture_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    DENSE.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "stablelm", "vocab_size": None}))
    with pytest.raises(ModelRefused, match="vocab_size should be a whole number"):
        mlx.open(read_model(tmp_path), SMALL)


def test_many_shapes_are_no_error_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX on CUDA fails after twice as many shapes as its cache has entries. A server reaches them in days."""
    monkeypatch.delenv(opening.CACHE_CHECK, raising=False)
    DENSE.save(tmp_path)
    mlx.open(read_model(tmp_path), SMALL)
    assert os.environ[opening.CACHE_CHECK] == "0"
    monkeypatch.setenv(opening.CACHE_CHECK, "1")
    mlx.open(read_model(tmp_path), SMALL)
    assert os.environ[opening.CACHE_CHECK] == "1", "a user's value stays"


def test_adapter_slots_use_only_what_the_cache_leaves(files: ModelFiles) -> None:
    options = LoadOptions(max_rows=1, cache_bytes=64 * PAGE, adapter_slots=3)
    plans = [opening._plan(files, options, LOADED, 64 * PAGE + left, 1000) for left in (-1, 1999, 2000, 3000, 99999)]
    assert [plan.num_adapters for plan in plans] == [0, 0, 1, 2, 3]
    assert {plan.cache_bytes for plan in plans} == {64 * PAGE}
    assert "adapters need" in plans[0].slots_hint


def test_slot_bytes_count_the_factors_of_all_targets() -> None:
    targets: Any = {
        "q": SimpleNamespace(in_features=3, out_features=5),
        "k": SimpleNamespace(in_features=3, out_features=1),
    }
    size = 4 if mx.default_device().type == mx.DeviceType.cpu else 2
    assert slot_bytes(targets, 16, mx.bfloat16) == 12 * 16 * size
    assert slot_bytes({}, 16, mx.bfloat16) == 0
