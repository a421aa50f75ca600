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

DEVICES = {"cuda": "cuda", "npu": "npu"}  # backend -> torch's type of its device


def platforms() -> dict[str, Ops]:
    """Backend name -> ops, for each backend that has a `device` module. Imports torch but no vendor library."""
    platforms = {}
    for name in ORDER:
        module = f"{__package__}.{name}.device"
        if find_spec(module):
            platforms[name] = import_module(module).OPS
    return platforms


def device_checks(name: str, dtype: str) -> Iterator[ProductResult]:
    """Tests the ops of a backend's GPU or NPU, its products with the widths of real models, and what its module `check`
    tests; yields nothing for other backends.

    `dtype`: the name of the activations' dtype. Imports torch.
    """
    if name not in DEVICES:
        return
    import torch

    from .pytorch.product_check import run_ops, run_products

    arguments = platforms()[name], DEVICES[name], getattr(torch, dtype)
    if find_spec(f"{__package__}.{name}.check"):
        yield from import_module(f"{__package__}.{name}.check").checks(*arguments)
    yield from run_ops(*arguments)
    yield from run_products(*arguments)


def matrix(reference_ops: Sequence[str] = ()) -> list[MultiPlatformOp]:
    """Each op with its implementation on every platform. The ops named in `reference_ops` appear as their references.

    Raises SettingRefused for an unknown name.
    """
    columns = {name: with_references(ops, reference_ops) for name, ops in platforms().items()}
    return MultiPlatformOp.matrix(columns)
