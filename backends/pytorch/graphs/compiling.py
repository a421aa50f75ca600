"""Compiling the pieces of a cut forward, each once and for any number of tokens, and noticing what is compiled late."""

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
from .cutting import Part

log = logging.getLogger(__name__)

Compiled = Callable[..., tuple[Tensor, ...]]
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # read by Inductor whenever it compiles


class Compiler:
    """Pieces as they are ("eager"), or as torch.compile's Inductor makes them, which are kept in `folder` from one
    start to the next (None: where Inductor keeps everybody's)."""

    def __init__(self, how: How, folder: Path | None = None) -> None:
        self.fuses = how == "inductor"
        self.late = 0  # pieces that had to be compiled once more, while people waited
        self._folder = folder
        self._kinds: dict[str, Compiled] = {}

    def piece(self, part: Part) -> Compiled:
        """Pieces of one kind are compiled together, at the first call of one."""
        assert part.graph is not None
        if part.kind not in self._kinds:
            self._kinds[part.kind] = self._fused(part.graph, list(part.changing())) if self.fuses else part.graph
        return self._kinds[part.kind]

    @property
    def kinds(self) -> int:
        """How many different pieces there are."""
        return len(self._kinds)

    def _fused(self, graph: fx.GraphModule, changing: Sequence[tuple[int, int]]) -> Compiled:
        """By Inductor, at the first call; `changing` says which dimensions of which arguments will differ later."""
        times = 0

        def backend(traced: fx.GraphModule, given: Sequence[Tensor]) -> Any:
            """Called by torch.compile at first, and again where what it took for granted does not hold."""
            nonlocal times
            if times:
                self.late += 1
                log.warning("a part of the model was compiled again; TORCH_LOGS=recompiles shows the reason")
            made = self._inductor(traced, given)
            times += 1  # not where that failed: the next call is still the first
            return made

        compiled: Any = torch.compile(graph, backend=backend, fullgraph=True)

        def call(*given: Tensor) -> tuple[Tensor, ...]:
            if times == 0:
                for at, dim in changing:
                    torch._dynamo.mark_dynamic(given[at], dim)
            made: tuple[Tensor, ...] = compiled(*given)
            return made

        return call

    def _inductor(self, traced: fx.GraphModule, given: Sequence[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        with self._cached(), torch._inductor.config.patch(compile_threads=1):  # so few need no processes of their own
            return compile_fx(traced, list(given))

    @contextmanager
    def _cached(self) -> Iterator[None]:
        before = os.environ.get(CACHE)
        if self._folder is not None:
            os.environ[CACHE] = str(self._folder)
        try:
            yield
        finally:
            os.environ.pop(CACHE, None)
            if before is not None:
                os.environ[CACHE] = before
