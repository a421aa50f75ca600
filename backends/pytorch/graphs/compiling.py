"""Compiles the pieces of a split forward pass once, for any number of tokens, and counts later recompilations."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ....engine.options import Compiler as How
from .cutting import Segment

log = logging.getLogger(__name__)

Compiled = Callable[..., tuple[Tensor, ...]]
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # read by Inductor whenever it compiles


class Compiler:
    """Runs pieces uncompiled ("eager") or compiled by Inductor ("inductor"). The compiled code is cached in `folder`
    for later starts; None: in Inductor's default folder."""

    def __init__(self, how: How, folder: Path | None = None) -> None:
        self.fuses = how == "inductor"
        self.late = 0  # pieces that were compiled again during requests
        self._folder = folder
        self._kinds: dict[str, Compiled] = {}

    def piece(self, part: Segment) -> Compiled:
        """The callable of a piece. All pieces of one kind share it; its first call compiles."""
        assert part.graph is not None
        if part.kind not in self._kinds:
            self._kinds[part.kind] = self._fused(part.graph, list(part.changing())) if self.fuses else part.graph
        return self._kinds[part.kind]

    @property
    def kinds(self) -> int:
        """Number of distinct pieces."""
        return len(self._kinds)

    def _fused(self, graph: fx.GraphModule, changing: Sequence[tuple[int, int]]) -> Compiled:
        """The piece compiled by Inductor at its first call. `changing` lists dynamic sizes: (argument, dimension)."""
        times = 0

        def backend(traced: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
            """torch.compile calls this once, and again when a call breaks one of its guards."""
            nonlocal times
            if times:
                self.late += 1
                log.warning("a part of the model was compiled again; TORCH_LOGS=recompiles shows the reason")
            compiled_piece = self._inductor(traced, examples)
            times += 1  # after success only: a failed compilation does not count
            return compiled_piece

        compiled: Any = torch.compile(graph, backend=backend, fullgraph=True)

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            if times == 0:
                for at, dim in changing:
                    torch._dynamo.mark_dynamic(inputs[at], dim)
            outputs: tuple[Tensor, ...] = compiled(*inputs)
            return outputs

        return call

    def _inductor(self, traced: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with self._cached(), torch._inductor.config.patch(compile_threads=1):  # few pieces: worker processes cost more
            return compile_fx(traced, list(examples))

    @contextmanager
    def _cached(self) -> Iterator[None]:
        previous = os.environ.get(CACHE)
        if self._folder is not None:
            os.environ[CACHE] = str(self._folder)
        try:
            yield
        finally:
            os.environ.pop(CACHE, None)
            if previous is not None:
                os.environ[CACHE] = previous
