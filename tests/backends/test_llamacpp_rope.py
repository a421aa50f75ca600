"""The settings of RoPE for GGUF models: log-probabilities are llama.cpp's own with the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localllm.backends import llamacpp
from localllm.engine.engine import Engine
from localllm.engine.errors import ContextRefused, SettingRefused
from localllm.engine.files.model_files import read_model
from localllm.engine.options import LoadOptions
from localllm.engine.request import Request, Sampling, TokenLogprobs
from localllm.engine.runner import Unavailable

if isinstance(llamacpp.probe(), Unavailable):
    pytest.skip("llama.cpp is not installed", allow_module_level=True)

from .gguf_random import CONTEXT, VOCAB, write_random
from .llama_decode import Reference, loaded

pytestmark = pytest.mark.real

EXTENDED = 2 * CONTEXT
COUNT = 8  # tokens of an answer
PROMPT = tuple(np.random.default_rng(5).integers(0, VOCAB - 4, CONTEXT + 70).tolist())
NONE, LINEAR, YARN = range(3)  # llama_rope_scaling_type

# Settings, and the fields of llama_context_params that `llama-server` gives for its flags of the same meaning.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "scale": ({"rope_scale": 2.0}, {"rope_freq_scale": 0.5}),
    "linear": (
        {"rope_scaling": "linear", "rope_scale": 4.0},
        {"rope_scaling_type": LINEAR, "rope_freq_scale": 0.25},
    ),
    "yarn": ({"rope_scaling": "yarn", "rope_scale": 2.0}, {"rope_scaling_type": YARN, "rope_freq_scale": 0.5}),
    "base": ({"rope_base": 80000.0}, {"rope_freq_base": 80000.0}),
    "yarn with a base": (
        {"rope_scaling": "yarn", "rope_scale": 3.0, "rope_base": 30000.0},
        {"rope_scaling_type": YARN, "rope_freq_scale": 1 / 3, "rope_freq_base": 30000.0},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rope")


def options(**more: Any) -> LoadOptions:
    return LoadOptions(**{"context": EXTENDED, "max_rows": 1, "threads": 1, "cache_dtype": "f16"} | more)


def answer(file: Path, prompt: tuple[int, ...], **settings: Any) -> list[TokenLogprobs]:
    runner = llamacpp.open(read_model(file), options(**settings))
    engine = Engine(runner)
    engine.submit(Request("a", prompt, COUNT, Sampling(logprobs=3)))
    entries: list[TokenLogprobs] = []
    while engine.has_work:
        for delta in engine.step():
            entries += delta.logprobs
    runner.close()
    return entries


def difference(file: Path, entries: list[TokenLogprobs], prompt: tuple[int, ...], **parameters: float) -> float:
    """The largest difference to the log-probabilities of llama_decode after the same tokens."""
    with loaded(file) as model:
        reference = Reference(model, context=EXTENDED, **parameters)
        rows = [reference.logits(prompt, only_last=True)[-1]]
        rows += [reference.logits([entry.token])[0] for entry in entries[:-1]]
        reference.close()
    logits = np.stack(rows).astype(np.float64)
    logprobs = logits - logits.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    listed = [(row, token, value) for row, entry in enumerate(entries) for token, value in entry.top]
    return max(abs(value - logprobs[row, token]) for row, token, value in listed)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "deepseek2"])
def test_logprobs_beyond_the_trained_context_are_those_of_llamacpp(folder: Path, architecture: str, name: str) -> None:
    file = write_random(folder, architecture)
    settings, parameters = SETTINGS[name]
    entries = answer(file, PROMPT, **settings)
    assert difference(file, entries, PROMPT, **parameters) < 1e-3
    assert difference(file, entries, PROMPT) > 5e-3, "the settings change the answer"


def test_the_scaling_of_a_file_can_be_ended(folder: Path) -> None:
    file = write_random(folder, "llama")
    prompt = PROMPT[:50]
    entries = answer(file, prompt, context=CONTEXT, rope_scaling="none")
    assert difference(file, entries, prompt, rope_scaling_type=NONE) < 1e-3


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({}, CONTEXT),
        ({"rope_scale": 1.5}, 768),
        ({"rope_base": 10000.0}, CONTEXT),  # the base of the file extends nothing
        ({"rope_base": 5000.0}, CONTEXT),
        ({"rope_scaling": "none"}, CONTEXT),
    ],
)
def test_a_context_that_no_setting_allows_is_refused(folder: Path, settings: dict[str, Any], limit: int) -> None:
    files = read_model(write_random(folder, "llama"))
    with pytest.raises(ContextRefused, match=f"has a context of {limit} tokens, not {EXTENDED}") as refused:
        llamacpp.open(files, options(**settings))
    assert "--rope-scale" in refused.value.hint
    assert refused.value.instead == limit


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("llama", {"rope_scaling": "none", "rope_scale": 2.0}, "no effect"),
        ("llama", {"rope_scaling": "yarn"}, "needs rope_scale"),
        ("llama", {"rope_scaling": "linear", "context": None}, "needs rope_scale"),
        ("mamba", {"rope_scale": 2.0}, "has no RoPE"),
        ("mpt", {"rope_base": 5e5}, "has no RoPE"),
        ("mpt", {"rope_scaling": "yarn", "rope_scale": 2.0}, "has no RoPE"),
    ],
)
def test_settings_without_effect_are_refused(
    folder: Path, architecture: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingRefused, match=message) as refused:
        llamacpp.open(read_model(write_random(folder, architecture)), options(**settings))
    assert refused.value.setting in settings
    assert refused.value.hint


def test_the_default_context_is_the_scaled_one(folder: Path) -> None:
    runner = llamacpp.open(read_model(write_random(folder, "llama")), options(context=None, rope_scale=2.0))
    assert runner.spec.max_context == EXTENDED
    runner.close()
