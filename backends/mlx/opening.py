"""The device that MLX computes on, its memory, and opening a model on it."""

from __future__ import annotations

import os

import mlx.core as mx

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import CacheGroup, Runner, RunnerSpec
from .cache import Caches
from .families import describes, set_context
from .loading import Loaded, load
from .machine import memory
from .plan import Planner
from .runner import MlxRunner

PAGE_SIZE = 16  # tokens per page of the KV cache
CACHE_SHARE = 0.6  # of the memory that is free once the weights are in
STEP_TOKENS = 2048
ROOM = 1  # columns of groups for each column of the pool
# MLX keeps freed memory for the next array of that size; more than this goes back to the system at once, and the rest
# when nothing was computed for a while.
KEPT = 2**30  # bytes
# MLX on CUDA keeps a graph for each sequence of operations, and a plan for each shape of attention. Once it has met
# twice as many as it keeps, however long that took, every new one is an error, unless this variable says not to check.
THRASHING = "MLX_ENABLE_CACHE_THRASHING_CHECK"


def open_on_mlx(files: ModelFiles, budget: LoadOptions) -> Runner:
    """Load a model. Raises ModelRefused or SettingRefused."""
    _refuse_settings(budget)
    if not files.config.vocab_size:
        raise ModelRefused(f"{files.name}: config.json: vocab_size should be a whole number, found none")
    total, free = _memory()
    if files.weight_bytes > free:
        raise ModelRefused(
            f"{files.name} needs {_size(files.weight_bytes)} for its weights, but {_size(free)} are free",
            "close other programs, or choose a smaller model",
        )
    _limit_memory(total)
    os.environ.setdefault(THRASHING, "0")  # read when a stream is used first
    # A stream of the runner's own: MLX's default ones end with the thread that used them first, and a model is loaded
    # on one thread and computed on another, never on two at once.
    stream = mx.new_thread_unsafe_stream(mx.default_device())
    with mx.stream(stream):
        loaded = load(files, budget)
        spec = _plan(files, budget, loaded, max(0, free - loaded.bytes))
        if describes(files.config):
            set_context(loaded.model, files.config, spec.max_context)
        [pages] = spec.groups
        caches = Caches(loaded.shapes, pages.num_pages, pages.page_size)
    room = ROOM * pages.tokens
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    planner = Planner(pages.page_size, room, min(loaded.bytes // token_bytes, room // 4))
    return MlxRunner(loaded, spec, planner, caches, stream)


def _memory() -> tuple[int, int]:
    """(total, free) bytes where MLX computes. A GPU with memory of its own says how much is free."""
    device = mx.device_info()
    if "free_memory" not in device:
        return memory()
    return int(device["total_memory"]), int(device["free_memory"])


def _refuse_settings(budget: LoadOptions) -> None:
    if budget.cache_dtype != "auto":
        raise SettingRefused(f"cache_dtype {budget.cache_dtype} is not for mlx", "leave it at auto")
    if budget.attention not in ("auto", "ours"):
        raise SettingRefused(f"attention {budget.attention} is not for mlx", "leave it at auto")
    if budget.graphs not in ("auto", "off"):
        raise SettingRefused(f"graphs {budget.graphs} is not for mlx, which captures nothing", "leave it at auto")
    if budget.reference_ops:
        raise SettingRefused("reference_ops is not for mlx, whose ops are its own", "leave it out")


def _limit_memory(total: int) -> None:
    mx.set_cache_limit(KEPT)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        mx.set_memory_limit(total)


def _plan(files: ModelFiles, budget: LoadOptions, loaded: Loaded, free: int) -> RunnerSpec:
    """Half of the cache's memory are pages; the other is for sequences that are computed, which lie in groups too.

    Rows that share pages each have all of their positions there: those that find no room pass one by one, more slowly.
    """
    config = files.config
    if budget.context is not None and not 1 <= budget.context <= config.max_positions:
        raise ModelRefused(
            f"{files.name} has a context of {config.max_positions} tokens, {budget.context} were asked for"
        )
    page_size = budget.page_size or PAGE_SIZE
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    page, wanted = page_size * token_bytes, budget.context or config.max_positions
    room = budget.cache_bytes if budget.cache_bytes is not None else int(free * (budget.cache_share or CACHE_SHARE))
    num_pages = room // 2 // page
    if budget.cache_bytes is None and budget.cache_share is None:  # what is not asked for is left to others
        num_pages = min(num_pages, -(-max(wanted, budget.max_rows * min(wanted, 4096)) // page_size))
    fitting = num_pages * page_size
    if fitting < (budget.context or 1):
        raise ModelRefused(
            f"{files.name}: a context of {wanted} tokens needs {_size(2 * wanted * token_bytes)} of KV cache, but "
            f"{_size(room)} are allowed",
            "ask for a shorter context, or allow a larger cache",
        )
    return RunnerSpec(
        vocab_size=config.vocab_size,
        max_tokens=max(budget.max_step_tokens or STEP_TOKENS, budget.max_rows),
        max_rows=budget.max_rows,
        max_context=min(wanted, fitting),
        groups=(CacheGroup(page_size, num_pages),),
        overlap=True,
        dtype=str(loaded.shapes[0].dtype).removeprefix("mlx.core."),
        quant=loaded.quant,
        weight_bytes=loaded.bytes,
        token_bytes=loaded.token_bytes,
        cache_bytes=2 * num_pages * page,
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
