"""Describes loaded models for clients."""

from __future__ import annotations

import math

from ..api.admin import LoadedModel
from ..frames import Stats
from .process import WorkerProcess


def describe(worker: WorkerProcess, stats: Stats | None, idle_limit: float, options: tuple[str, ...]) -> LoadedModel:
    """The state of a model. `idle_limit`: seconds until an idle model is unloaded. `options`: of the load."""
    info = worker.info
    if info is None:
        return LoadedModel(id=worker.model, state="loading", pid=worker.pid, options=options)
    return LoadedModel(
        id=worker.model,
        state="ready",
        pid=worker.pid,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        quant=info.quant,
        purpose=info.purpose,
        context=info.context,
        memory=info.weight_bytes + info.cache_bytes,
        token_bytes=info.token_bytes,
        cache_tokens=info.cache_tokens,
        cache_used=stats.cache_used if stats else 0,
        requests=worker.unfinished,
        idle=worker.idle,
        unload_in=None if idle_limit == math.inf or worker.unfinished else max(idle_limit - worker.idle, 0.0),
        warnings=info.warnings,
        sampling=info.sampling,
        options=options,
    )
