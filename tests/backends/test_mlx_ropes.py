"""Rotary embeddings of MLX compared with the reference of kernels/ops and the frequencies of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("mlx_lm", reason="mlx and mlx-lm are not installed")

import mlx.core as mx

from localllm.backends.mlx.ropes import Frequencies, frequencies, rotation
from localllm.backends.pytorch.rotary import Rotary
from localllm.backends.pytorch.rotary import frequencies as torch_frequencies
from localllm.engine.files.rope_config import Rope

pytestmark = pytest.mark.real_otherdevice

DIM = 16
FACTORS = {"short_factors": tuple(1.0 + i / 10 for i in range(8)), "long_factors": tuple(2.0 + i / 5 for i in range(8))}
ROPES = {
    "default": Rope("default", 10_000.0, DIM),
    "linear": Rope("linear", 10_000.0, DIM, factor=4.0),
    "llama3": Rope("llama3", 500_000.0, DIM, factor=8.0, original_positions=64),
    "yarn": Rope("yarn", 10_000.0, DIM, factor=4.0, original_positions=32, attention_factor=1.3),
    "yarn-untruncated": Rope("yarn", 10_000.0, DIM, factor=4.0, original_positions=32, truncate=False),
    "longrope": Rope("longrope", 10_000.0, DIM, factor=4.0, original_positions=64, attention_factor=1.2, **FACTORS),
}


def rotate(x: torch.Tensor, rope: Rope, context: int) -> torch.Tensor:
    """x [heads, positions, dim] by the tables of the torch backend."""
    cos, sin = Rotary(rope, context, "cpu").rows(torch.arange(x.shape[1]))
    half = rope.rotary_dim // 2
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@pytest.mark.parametrize("head_dim", [DIM, DIM + 6])
@pytest.mark.parametrize("context", [64, 65])
@pytest.mark.parametrize("label", ROPES)
def test_rotation_equals_the_torch_backend(label: str, context: int, head_dim: int) -> None:
    x = torch.randn(2, 12, head_dim, generator=torch.Generator().manual_seed(1))
    actual = rotation(ROPES[label], context)(mx.array(x.numpy())[None])
    np.testing.assert_allclose(np.array(actual)[0], rotate(x, ROPES[label], context).numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", ROPES)
def test_frequencies_equal_the_torch_backend(label: str) -> None:
    actual = frequencies(ROPES[label], 64)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, torch_frequencies(ROPES[label], 64).numpy(), rtol=3e-7)


def test_a_new_context_sets_the_factors_of_longrope() -> None:
    module = rotation(ROPES["longrope"], 64)
    assert isinstance(module, Frequencies)
    module.set_context(65)
    x = mx.ones((1, 1, 9, DIM))
    assert mx.array_equal(module(x), rotation(ROPES["longrope"], 65)(x))
    assert not mx.array_equal(module(x), rotation(ROPES["longrope"], 64)(x))
