"""A table with the implementation of each op on each torch device, for `localllm doctor` and the docs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..kernels.ops import MultiPlatformOp, Ops
from . import ORDER
from .pytorch.references import with_references

if TYPE_CHECKING:
    from .pytorch.product_check import ProductResult

GPUS = {"cuda": "cuda", "npu": "npu"}  # backend -> torch's type of its device


def platforms() -> dict[str, Ops]:
    """Backend name -> ops, for each backend that has a `device` module. Imports torch but no vendor library."""
    platforms = {}
    for name in ORDER:
        module = f"{__package__}.{name}.device"
        if find_spec(module):
            platforms[name] = import_module(module).OPS
    return platforms


def gpu_products(name: str, dtype: str) -> Iterator[ProductResult]:
    """Tests the products of a backend's GPU with the widths of real models; yields nothing for other backends.

    `dtype`: the name of the activations' dtype. Imports torch.
    """
    if name not in GPUS:
        return
    import torch

    from .pytorch.product_check import run_products

    yield from run_products(platforms()[name], GPUS[name], getattr(torch, dtype))


def matrix(reference_ops: Sequence[str] = ()) -> list[MultiPlatformOp]:
    """Each op with its implementation on every platform. The ops named in `reference_ops` appear as their references.

    Raises SettingRefused for an unknown name.
    """
    columns = {name: with_references(ops, reference_ops) for name, ops in platforms().items()}
    return MultiPlatformOp.matrix(columns)
