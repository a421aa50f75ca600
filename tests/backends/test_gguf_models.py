"""The GGUF files of the tests, computed by llama.cpp alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from localllm.app import paths
from localllm.engine.files.model_files import read_model

from . import canary, gguf_models, gguf_random

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from .llama_decode import reference

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def guide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_models.write_guide(tmp_path_factory.mktemp("guide") / "guide-F32.gguf")


@pytest.mark.parametrize("key", range(canary.KEYS))
def test_canary_file_gives_the_known_tokens(tmp_path: Path, key: int) -> None:
    prompt = canary.prompt(key, 60, seed=key)
    with reference(gguf_models.write_canary(tmp_path)) as model:
        assert model.generate(prompt, 100)[0] == canary.walk(prompt, 100)


def test_canary_adapter_file_shifts_the_key(tmp_path: Path) -> None:
    prompt = canary.prompt(1, 60, seed=1)
    adapter = gguf_models.write_canary_adapter(tmp_path / "two.gguf", 2)
    with reference(gguf_models.write_canary(tmp_path), adapter) as model:
        assert model.generate(prompt, 40)[0] == canary.walk(canary.under(prompt, 2), 40)


def test_guide_file_has_the_logits_of_transformers(guide: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths.guide_dir(), dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(7, 6144, 64).tolist()
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    with reference(guide) as exact:
        assert np.abs(exact.logits(tokens) - expected).max() < 0.02


@pytest.mark.parametrize(("recipe", "mean"), [("F16", 0.02), ("Q8_0", 0.2), ("Q4_K_M", 1.0)])
def test_guide_is_quantised_by_llamacpp(guide: Path, tmp_path: Path, recipe: str, mean: float) -> None:
    file = gguf_models.quantise(guide, tmp_path / "guide.gguf", recipe)
    tokens = np.random.default_rng(0).integers(7, 6144, 64).tolist()
    with reference(guide) as exact, reference(file) as model:
        difference = np.abs(exact.logits(tokens) - model.logits(tokens)).mean()
    assert 0 < difference < mean
    assert file.stat().st_size < guide.stat().st_size


@pytest.mark.parametrize("architecture", gguf_random.ARCHITECTURES)
def test_random_model_of_each_architecture_has_finite_varied_logits(tmp_path: Path, architecture: str) -> None:
    file = gguf_random.write_random(tmp_path, architecture)
    assert read_model(file).config.model_type == architecture
    with reference(file) as model:
        logits = model.logits(np.random.default_rng(0).integers(0, gguf_random.VOCAB, 100).tolist())
    assert np.isfinite(logits).all()
    assert len(set(logits.argmax(-1).tolist())) > 20
