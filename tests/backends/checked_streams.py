"""Streams for tests on the CPU. They run all work in order, and fail where work on two streams could conflict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CheckedStreams(TorchDispatchMode):
    """Streams (kernels/ops/streams.py) whose work must run within this context.

    Between a fork and its join no queue may use memory that the other queue has written, or write memory that the other
    queue has read; and memory that the second queue uses, but has not allocated, must stay referenced: the allocator of
    a GPU would give it to the next tensor of the main queue.
    """

    def __init__(self, after_router: bool = False) -> None:
        super().__init__()
        self.after_router = after_router
        self.forks = 0
        self.is_allowed = True  # whether work may fork
        self.is_forked = False  # between a fork and its join
        self._is_side = False
        self._read: dict[bool, set[StorageWeakRef]] = {}  # whether the queue is the second one -> storages
        self._written: dict[bool, set[StorageWeakRef]] = {}
        self._borrowed: set[StorageWeakRef] = set()  # storages that the second queue has not allocated

    @contextmanager
    def fork(self) -> Iterator[None]:
        assert self.is_allowed, "work without a graph forks"
        assert not self.is_forked, "a second fork before the join"
        self.forks += 1
        self.is_forked = True
        self._is_side = True
        self._read = {False: set(), True: set()}
        self._written = {False: set(), True: set()}
        self._borrowed = set()
        yield
        self._is_side = False

    def join(self) -> None:
        assert self.is_forked, "a join without a fork"
        self._check_references()
        self.is_forked = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        assert error[0] is not None or not self.is_forked, "a fork without a join"

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_forked:
            self._check(func, args, kwargs, result)
        return result

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self._check_references()
        inputs = _storages((args, kwargs))
        outputs = _storages(result)
        names = [argument.name for argument in func._schema.arguments]
        arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
        changed = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = _storages([arguments.get(name) for name in changed]) | (outputs - inputs)
        other = not self._is_side
        assert not (inputs | written) & self._written[other], f"{func} uses memory that the other queue writes"
        assert not written & self._read[other], f"{func} writes memory that the other queue reads"
        self._read[self._is_side] |= inputs
        self._written[self._is_side] |= written
        if self._is_side:
            self._borrowed |= inputs - self._written[True]

    def _check_references(self) -> None:
        expired = [storage for storage in self._borrowed if storage.expired()]
        assert not expired, "memory that the second queue uses was freed before the join"


def _storages(values: Any) -> set[StorageWeakRef]:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}


@torch.inference_mode()
def checked(work: Callable[[CheckedStreams], Tensor], after_router: bool = False) -> Tensor:
    """The result of work(streams), whose forks are checked."""
    streams = CheckedStreams(after_router)
    with streams:
        result = work(streams)
    assert streams.forks, "no fork"
    return result
