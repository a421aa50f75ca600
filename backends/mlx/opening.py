"""Opens a model on the device of MLX, with a memory plan."""

from __future__ import annotations

import os

import mlx.core as mx

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ...engine.runner import CacheGroup, Runner, RunnerSpec
from .adapter import find_targets
from .cache import Caches
from .families import describes, set_context
from .loading import Loaded, load
from .lora import AdapterSlots
from .machine import memory
from .plan import Planner
from .runner import MlxRunner

PAGE_SIZE = 16  # tokens per page of the KV cache
CACHE_SHARE = 0.6  # maximum share of the cache in the memory left after loading
STEP_TOKENS = 2048
ROW_TOKENS = 4096  # cache tokens for each row, unless a setting gives the size of the cache
ROOM = 1  # number of columns in the groups for each column of the pool
MEMORY_CACHE = 2**30  # bytes of freed memory that MLX keeps for the next arrays
# MLX on CUDA caches graphs and attention plans. Without this variable it raises an error after many different shapes.
CACHE_CHECK = "MLX_ENABLE_CACHE_CACHE_CHECK_CHECK"


def open_on_mlx(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model. Raises ModelRefused or SettingRefused."""
    _refuse_settings(options)
    if not files.config.vocab_size:
        raise ModelRefused(f"{files.name}: config.json: vocab_size should be a whole number, but is missing")
    total, free = _memory()
    if files.weight_bytes > free:
        raise ModelRefused(
            f"{files.name} needs {_size(files.weight_bytes)} for its weights, but {_size(free)} are free",
            "close other programs, or choose a smaller model",
        )
    _limit_memory(total)
    os.environ.setdefault(CACHE_CHECK, "0")
    # One thread loads the model and another computes, one after the other. MLX's default stream ends with its thread.
    stream = mx.new_thread_unsafe_stream(mx.default_device())
    with mx.stream(stream):
        loaded = load(files, options)
        spec = _plan(files, options, loaded, max(0, free - loaded.bytes))
        if describes(files.config):
            set_context(loaded.model, spec.max_context)
        [pages] = spec.groups
        targets = find_targets(loaded.model, loaded.forward) if spec.num_adapters else {}
        adapters = AdapterSlots(targets, options.adapter_rank, loaded.shapes[0].dtype)
        caches = Caches(loaded.shapes, pages.num_pages, pages.page_size)
    room = ROOM * pages.tokens
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    planner = Planner(pages.page_size, room, min(loaded.bytes // token_bytes, room // 4))
    return MlxRunner(loaded, adapters, spec, planner, caches, stream)


def _memory() -> tuple[int, int]:
    """(total, free) bytes of the memory of MLX's device. Only a GPU with separate memory reports free bytes."""
    device = mx.device_info()
    if "free_memory" not in device:
        return memory()
    return int(device["total_memory"]), int(device["free_memory"])


def _refuse_settings(options: LoadOptions) -> None:
    supported = {"cache_dtype": ("auto",), "attention": ("auto", "ours"), "graphs": ("auto", "off")}
    for name, values in supported.items():
        if getattr(options, name) not in values:
            raise SettingRefused(f"{name} {getattr(options, name)} is not supported by mlx", f"set {name} to auto")
    if options.reference_ops:
        raise SettingRefused("reference_ops is not supported by mlx", "leave reference_ops empty")


def _limit_memory(total: int) -> None:
    mx.set_cache_limit(MEMORY_CACHE)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        mx.set_memory_limit(total)


def _plan(files: ModelFiles, options: LoadOptions, loaded: Loaded, free: int) -> RunnerSpec:
    """The spec of the runner. Half of the cache memory is for pages, the other half for groups, whose rows have all
    their positions."""
    config = files.config
    context = config.max_positions if options.context is None else options.context
    if not 1 <= context <= config.max_positions:
        raise ModelRefused(f"{files.name} has a context of {config.max_positions} tokens, not {context}")
    page_size = options.page_size or PAGE_SIZE
    token_bytes = 2 * sum(shape.token_bytes for shape in loaded.shapes)
    room = _cache_room(options, free, context, page_size * token_bytes, page_size)
    num_pages = room // (page_size * token_bytes)
    fitting = num_pages * page_size
    if fitting < (options.context or 1):
        raise ModelRefused(
            f"{files.name}: a context of {context} tokens needs {_size(context * token_bytes)} of KV cache, but "
            f"{_size(room)} are allowed",
            "ask for a shorter context, or allow a larger cache",
        )
    return RunnerSpec(
        vocab_size=config.vocab_size,
        max_tokens=max(options.max_step_tokens or STEP_TOKENS, options.max_rows),
        max_rows=options.max_rows,
        max_context=min(context, fitting),
        groups=(CacheGroup(page_size, num_pages),),
        num_adapters=options.adapter_slots,
        adapters_per_step=options.adapter_slots,
        overlap=True,
        dtype=str(loaded.shapes[0].dtype).removeprefix("mlx.core."),
        quant=loaded.quant,
        weight_bytes=loaded.bytes,
        token_bytes=loaded.token_bytes,
        cache_bytes=fitting * token_bytes,
    )


def _cache_room(options: LoadOptions, free: int, context: int, page_bytes: int, page_size: int) -> int:
    """Bytes for the cache. Without a setting the cache is no larger than the rows need, because other programs need
    memory too."""
    if options.cache_bytes is not None:
        return options.cache_bytes
    if options.cache_share is not None:
        return int(free * options.cache_share)
    need = max(context, options.max_rows * min(context, ROW_TOKENS))
    return min(int(free * CACHE_SHARE), -(-need // page_size) * page_bytes)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
