"""Checks the registration of ops of localllm while other code calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


def copied(arguments: Any) -> Any:
    return tree_map(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, arguments)


def comparable(arguments: Any) -> bool:
    """Whether torch can compare the arguments before and after a call: it has no arithmetic of float8."""
    return not any(isinstance(one, torch.Tensor) and "float8" in str(one.dtype) for one in tree_leaves(arguments))


class Opchecked(TorchDispatchMode):
    """Runs opcheck on the first call of each op that writes: schema, fake and tracing must agree with what it does.
    Calls with float8 arguments do not count.

    It runs during the call, because an op may read memory through addresses in a tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "localllm" and func._schema.is_mutable and name not in self.ops and comparable(args):
            self.ops.add(name)
            torch.library.opcheck(func, copied(args), kwargs)
        return func(*args, **(kwargs or {}))
