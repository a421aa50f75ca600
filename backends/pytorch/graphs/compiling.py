"""Compiles the segments of a split forward pass once, for any number of tokens. Counts later recompilations."""

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
CACHE = "TORCHINDUCTOR_CACHE_DIR"  # environment variable that Inductor reads whenever it compiles


class Compiler:
    """Runs segments without compilation ("eager") or compiled by Inductor ("inductor"). The compiled code is cached in
    `folder` for later starts; None: in Inductor's default folder."""

    def __init__(self, how: How, folder: Path | None = None) -> None:
        self.fuses = how == "inductor"
        self.late = 0  # number of segments that were compiled again during requests
        self._folder = folder
        self._kinds: dict[str, Compiled] = {}

    def compiled(self, segment: Segment) -> Compiled:
        """The callable of a segment. All segments of one kind share it; its first call compiles."""
        assert segment.graph is not None
        if segment.kind not in self._kinds:
            call = self._fused(segment.graph, segment.dynamic_sizes()) if self.fuses else segment.graph
            self._kinds[segment.kind] = call
        return self._kinds[segment.kind]

    @property
    def kinds(self) -> int:
        """The number of distinct segments."""
        return len(self._kinds)

    def _fused(self, graph: fx.GraphModule, dynamic: Sequence[tuple[int, int]]) -> Compiled:
        """The segment, which Inductor compiles at its first call. `dynamic` lists (argument, dimension) of its dynamic
        sizes."""
        compilations = 0

        def backend(traced: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
            """torch.compile calls this function to compile: at the first call of the segment, and again if a call
            breaks one of its guards."""
            nonlocal compilations
            if compilations:
                self.late += 1
                log.warning("a part of the model was compiled again; TORCH_LOGS=recompiles shows the reason")
            result = self._inductor(traced, examples)
            compilations += 1  # counted afterwards, because a failed compilation does not count
            return result

        compiled: Any = torch.compile(graph, backend=backend, fullgraph=True)

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            if compilations == 0:
                for argument, dim in dynamic:
                    torch._dynamo.mark_dynamic(inputs[argument], dim)
            outputs: tuple[Tensor, ...] = compiled(*inputs)
            return outputs

        return call

    def _inductor(self, traced: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        # For a few segments, worker processes cost more time than they save.
        with self._cache_folder(), torch._inductor.config.patch(compile_threads=1):
            return compile_fx(traced, list(examples))

    @contextmanager
    def _cache_folder(self) -> Iterator[None]:
        """Within this context, Inductor caches compiled code in `self._folder`."""
        previous = os.environ.get(CACHE)
        if self._folder is not None:
            os.environ[CACHE] = str(self._folder)
        try:
            yield
        finally:
            os.environ.pop(CACHE, None)
            if previous is not None:
                os.environ[CACHE] = previous
