"""Rotary frequencies of all scalings against transformers, also at the ends of the ramps."""

from __future__ import annotations

from typing import Any, Literal, cast

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from localllm.backends.pytorch.rotary import Rotary, frequencies
from localllm.engine.files.rope_config import Rope

DIM, ORIGINAL = 32, 64
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": YARN,
    "yarn-whole-range": {**YARN, "beta_fast": 500.0, "beta_slow": 0.0001, "rope_theta": 3.0},
    "yarn-untruncated": {**YARN, "truncate": False, "beta_fast": 8.0},
    "yarn-one-step": {**YARN, "beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn-at-one": {**YARN, "beta_fast": 0.55, "beta_slow": 0.6},  # 5.07 rounded down, 4.92 rounded up
    "yarn-before-the-first": {**YARN, "beta_fast": 4000.0, "beta_slow": 3000.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + at / 10 for at in range(DIM // 2)],
        "long_factor": [2.0 + at / 5 for at in range(DIM // 2)],
        "attention_factor": 1.0,
    },
}
FIELDS = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor", "factor": "factor"}
FIELDS |= {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate"}
FIELDS |= {"short_factor": "short_factors", "long_factor": "long_factors"}


def rope_of(scaling: dict[str, Any]) -> Rope:
    kind = cast("Literal['linear', 'llama3', 'yarn', 'longrope']", scaling["rope_type"])
    fields = {FIELDS[name]: value for name, value in scaling.items() if name in FIELDS}
    return Rope(kind, scaling.get("rope_theta", 10_000.0), DIM, original_positions=ORIGINAL, **fields)


def theirs(scaling: dict[str, Any], context: int) -> torch.Tensor:
    parameters = {"rope_theta": 10_000.0, "original_max_position_embeddings": ORIGINAL, **scaling}
    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    result, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"), context)
    return result


@pytest.mark.parametrize("context", [ORIGINAL, ORIGINAL + 1])
@pytest.mark.parametrize("label", SCALINGS)
def test_frequencies_equal_transformers(label: str, context: int) -> None:
    result = frequencies(rope_of(SCALINGS[label]), context)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, theirs(SCALINGS[label], context), rtol=1e-6, atol=0.0)


def test_plain_frequencies() -> None:
    assert frequencies(Rope("default", 100.0, 4), 8).tolist() == pytest.approx([1.0, 0.1])


def test_rows_include_the_attention_factor() -> None:
    rope = Rope("yarn", 10_000.0, DIM, factor=8.0, original_positions=ORIGINAL, attention_factor=1.25)
    positions = torch.tensor([7, 0, 99])
    cos, sin = Rotary(rope, 100, "cpu").rows(positions)
    angles = positions.unsqueeze(1) * frequencies(rope, 100)
    torch.testing.assert_close(cos, angles.cos() * 1.25)
    torch.testing.assert_close(sin, angles.sin() * 1.25)
