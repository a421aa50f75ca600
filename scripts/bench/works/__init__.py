"""The work of each op in a model: arguments, the bytes and operations that it needs at least, and the same in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from shapes import Shape

from localllm.kernels.ops import Ops

from .attention import attention, latent
from .elements import elements, lora, sampling
from .products import FORMATS, linear, moe
from .state import state
from .work import Work

__all__ = ["FORMATS", "REFERENCES", "Work", "families"]

REFERENCES = dict(Ops())


def families(
    shape: Shape, experts: Shape, formats: Sequence[str], rows: Sequence[int], dtype: torch.dtype
) -> dict[str, Iterator[Work]]:
    """The works of each family. `dtype`: that of activations."""
    return {
        "linear": linear(shape, formats, rows, dtype),
        "moe": moe(experts, formats, rows, dtype),
        "attention": attention(shape, dtype),
        "latent": latent(dtype),
        "elements": elements(shape, dtype),
        "lora": lora(shape, dtype),
        "sampling": sampling(shape.vocab),
        "state": state(dtype),
    }
