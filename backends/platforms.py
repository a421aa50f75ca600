"""A table with the implementation of each op on each torch device, for `localllm doctor` and the docs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from ..kernels.ops import MultiPlatformOp, Ops
from . import ORDER
from .pytorch.references import with_references


def platforms() -> dict[str, Ops]:
    """Backend name -> ops, for each backend that has a `device` module. Imports torch but no vendor library."""
    platforms = {}
    for name in ORDER:
        module = f"{__package__}.{name}.device"
        if find_spec(module):
            platforms[name] = import_module(module).OPS
    return platforms


def matrix(reference_ops: Sequence[str] = ()) -> list[MultiPlatformOp]:
    """Each op with its implementation on every platform. The ops named in `reference_ops` appear as their references.

    Raises SettingRefused for an unknown name.
    """
    columns = {name: with_references(ops, reference_ops) for name, ops in platforms().items()}
    return MultiPlatformOp.matrix(columns)
