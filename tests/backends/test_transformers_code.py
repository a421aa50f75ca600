"""Models that transformers' own code computes over our cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm import backends
from localllm.backends import cpu
from localllm.backends.pytorch import architecture
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.runner import Runner

from . import canary
from .conformance import BUDGET, Conformance
from .teacher import difference, expected
from .tiny import Tiny

OPTIONS = LoadOptions(context=64, max_rows=4, page_size=8, dtype="float32")
SAMPLES = (
    Tiny(
        "stablelm",
        "stablelm",
        {
            "use_qkv_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    Tiny("phimoe", "phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Tiny("starcoder2", "starcoder2", {"sliding_window": 6, "num_key_value_heads": 1}),
    Tiny("gpt2", "gpt2", {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 128}),
)


@pytest.fixture(scope="class")
def forced() -> Any:
    """All models run through transformers' code, also those with a page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "is_native", lambda model_type: False)
        yield


class TestConformance(Conformance):
    backend = "cpu"
    same_bits = False

    @pytest.fixture(scope="class")
    @classmethod
    def runner(cls, forced: None, tmp_path_factory: pytest.TempPathFactory) -> Runner:
        folder = canary.save(tmp_path_factory.mktemp("canary"))
        return backends.load(cls.backend).open(read_model(folder), BUDGET)


@pytest.mark.parametrize("shape", SAMPLES, ids=str)
def test_logits_are_those_of_transformers(shape: Tiny, tmp_path: Path) -> None:
    logits = expected(shape, tmp_path)
    runner = cpu.open(read_model(tmp_path), OPTIONS)
    assert any("transformers' code" in warning for warning in runner.spec.warnings)
    errors, _ = difference(runner, shape, logits)
    assert errors.abs().max() < 1e-4
