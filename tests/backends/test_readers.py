"""One projection of each checkpoint format, in shapes that no tiny model has: values, product, order of inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from localllm.backends.pytorch.mapped import DTYPES
from localllm.backends.pytorch.quant import Loaded
from localllm.backends.pytorch.quant.choose import STORED
from localllm.engine.files.fields import Fields
from localllm.engine.files.quantization import parse_quantization

from .checkpoints import CHECKPOINTS, Checkpoint

EIGHT = {"gptq", "awq"}  # of these, outputs or inputs come in eights
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PRODUCTS = {"gptq": "int4_wide", "awq": "int4_wide", "compressed-int4": "int4_wide", "compressed-int8-wide": "dense"}
PRODUCTS |= {"compressed-int8": "int8", "compressed-fp8": "fp8", "fp8": "fp8"}


class Held:
    """Tensors in memory with the interface of quant.Tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.unread = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.unread

    def dtype(self, name: str) -> str:
        return NAMES[self.unread[name].dtype] if name in self.unread else ""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.unread[name].shape) if name in self.unread else (0,)

    def read(self, name: str, shape: Sequence[int], dtypes: Sequence[str]) -> torch.Tensor:
        assert self.shape(name) == tuple(shape)
        assert self.dtype(name) in dtypes
        return self.unread.pop(name)


def loaded(checkpoint: Checkpoint, out_features: int, in_features: int) -> tuple[Loaded, torch.Tensor]:
    """A loaded projection, and its float weight [out_features, in_features]."""
    config = parse_quantization(Fields({"quantization_config": dict(checkpoint.config)}, "config.json"))
    assert config is not None
    stored, meant = checkpoint.make(out_features, in_features, np.random.default_rng(3))
    if "weight_packed" in stored and in_features % 8:  # the bits after the last input have no meaning
        stored["weight_packed"][:, -1] |= -1 << 4 * (in_features % 8)
    tensors = Held({f"p.{part}": value for part, value in (stored | checkpoint.more("p", out_features)).items()})
    result = STORED[config.method](config).load(tensors, "p", out_features, in_features)
    assert tensors.unread.keys() <= {"p.bias"}
    return result, meant


def dense(weight: object) -> torch.Tensor:
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dense()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
@pytest.mark.parametrize(("out_features", "in_features"), [(24, 40), (40, 104), (21, 37), (33, 71)])
def test_any_range_of_outputs_equals_its_floats(checkpoint: Checkpoint, out_features: int, in_features: int) -> None:
    if checkpoint.label.split("-")[0] in EIGHT and out_features % 8:
        pytest.skip("the format packs eight together")
    result, meant = loaded(checkpoint, out_features, in_features)
    expected = meant if result.order is None else meant[:, result.order]
    assert result.product == max(((len(k), v) for k, v in PRODUCTS.items() if checkpoint.label.startswith(k)))[1]
    tolerance = 0.005 if result.product == "dense" else 1e-6  # rounded to bfloat16
    for start, stop in ((0, out_features), (0, 8), (8, 16), (16, out_features)):
        weight = result.rows(start, stop)
        torch.testing.assert_close(dense(weight), expected[start:stop].float(), rtol=tolerance, atol=1e-8)
        if result.product == "int4_wide" and in_features % 2:
            assert not (weight.data[:, -1] >> 4).any(), "a nibble too many is 0"
