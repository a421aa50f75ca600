"""The ops of torch_npu that the NPU backend calls: documented rules, references, right and wrong calls."""

from __future__ import annotations

from . import attention, cache, elementwise, grouped, moe, products
from .rules import Op

OPS: tuple[Op, ...] = (*elementwise.OPS, *cache.OPS, *attention.OPS, *moe.OPS, *products.OPS, *grouped.OPS)
