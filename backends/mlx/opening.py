"""Opens a model on the device of MLX, with a memory plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import mlx.core as mx

from ...engine.cache_plan import CachePages, cache_groups
from ...engine.errors import ContextRefused, ModelRefused
from ...engine.files.families import FAMILIES
from ...engine.files.model_files import ModelFiles
from ...engine.files.tied_head import with_stored_head
from ...engine.lora import fitting_slots, slots_hint
from ...engine.memory_plan import MemoryPlan
from ...engine.options import NOT_GGUF, RARE, LoadOptions, check_supported
from ...engine.runner import Runner, RunnerSpec
from .adapter import find_targets
from .architectures import is_described
from .cache import Caches, LayerShape
from .families import set_context
from .loading import DTYPES, Loaded, expected_bytes, load
from .lora import AdapterSlots, slot_bytes
from .machine import memory
from .plan import Planner, Window, kept_columns
from .runner import MlxRunner

EMBEDDING = "model.embed_tokens.weight"
PAGE_SIZE = 16  # tokens per page of the KV cache
CACHE_SHARE = 0.6  # maximum share of the cache in the memory left after loading
STEP_TOKENS = 2048
ROW_TOKENS = 4096  # cache tokens for each row, unless a setting gives the size of the cache
# Option -> its supported values.
SUPPORTED: Mapping[str, Sequence[object]] = {
    "cache_dtype": ("auto",),
    "attention": ("auto", "ours"),
    "graphs": ("auto", "off"),
    "lora_backend": ("auto",),
    "ops": ((),),
    **NOT_GGUF,
    **RARE,
}
ROOM = 1  # number of columns in the groups for each column of the pool
MEMORY_CACHE = 2**30  # bytes of freed memory that MLX keeps for the next arrays
# MLX on CUDA caches graphs and attention plans. Without this variable it raises an error after many different shapes.
CACHE_CHECK = "MLX_ENABLE_CACHE_CACHE_CHECK_CHECK"


def open_on_mlx(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model. Raises ModelRefused or SettingRefused."""
    check_supported(options, SUPPORTED, "mlx")
    if not files.config.vocab_size:
        raise ModelRefused(f"{files.name}: config.json: vocab_size should be a whole number, but is missing")
    files = with_stored_head(files)
    total, free = _memory()
    weight_bytes = expected_bytes(files.tensors.values(), replace(options, quant="none"))
    if weight_bytes > free:
        raise ModelRefused(
            f"{files.name} needs {_size(weight_bytes)} for its weights, but {_size(free)} are free",
            "close other programs, or choose a smaller model",
            {"free_bytes": free, "weight_bytes": weight_bytes},
        )
    _limit_memory(total)
    os.environ.setdefault(CACHE_CHECK, "0")
    # One thread loads the model and another computes, one after the other. MLX's default stream ends with its thread.
    stream = mx.new_thread_unsafe_stream(mx.default_device())
    with mx.stream(stream):
        loaded = load(files, options)
        dtype = loaded.shapes[0].dtype
        targets = find_targets(loaded.model, loaded.forward) if options.adapter_slots else {}
        slot = slot_bytes(targets, options.adapter_rank, dtype)
        spec = _plan(files, options, loaded, max(0, free - loaded.bytes), slot)
        if is_described(files.config):
            set_context(loaded.model, spec.max_context)
        adapters = AdapterSlots(targets, options.adapter_rank, dtype, files.tensors)
        pages, *windows = spec.groups
        caches = Caches(loaded.shapes, pages.num_pages, pages.page_size, sum(group.num_pages for group in windows))
    token_bytes = sum(shape.token_bytes for shape in loaded.shapes)
    room = ROOM * spec.cache_bytes // 2 // token_bytes
    window = None
    if windows:
        share = sum(shape.token_bytes for shape in loaded.shapes if shape.window) / token_bytes
        window = Window(windows[0].window, pages.num_pages, share)
    planner = Planner(pages.page_size, room, min(loaded.bytes // token_bytes, room // 4), window)
    return MlxRunner(loaded, adapters, spec, planner, caches, stream)


def _memory() -> tuple[int, int]:
    """(total, free) bytes of the memory of MLX's device. Only a GPU with separate memory reports free bytes."""
    device = mx.device_info()
    if "free_memory" not in device:
        return memory()
    return int(device["total_memory"]), int(device["free_memory"])


def _limit_memory(total: int) -> None:
    mx.set_cache_limit(MEMORY_CACHE)
    if mx.metal.is_available():
        mx.set_wired_limit(int(mx.device_info()["max_recommended_working_set_size"]))
        mx.set_memory_limit(total)


def _plan(files: ModelFiles, options: LoadOptions, loaded: Loaded, free: int, slot: int) -> RunnerSpec:
    """The spec of the runner. Half of the cache memory is for pages, the other half for groups, whose rows have all
    their positions. Adapter slots, of `slot` bytes each, get what the cache leaves."""
    config = files.config
    memory = _measure(files, options, free + loaded.bytes, loaded.bytes, loaded.token_bytes, loaded.shapes)
    context = memory.context
    fitting = memory.num_pages * memory.page_size
    if fitting < (options.context or 1):
        raise ModelRefused(
            f"{files.name}: a context of {context} tokens needs {_size(memory.cache_bytes(context))} of KV cache, but "
            f"{_size(memory.planned_cache)} are allowed",
            "ask for a shorter context, or allow a larger cache",
            memory.numbers(),
        )
    slots = fitting_slots(options.adapter_slots, slot, free - memory.planned_cache)
    return RunnerSpec(
        vocab_size=config.vocab_size,
        max_tokens=_step_tokens(options),
        max_rows=options.max_rows,
        max_context=min(context, fitting),
        groups=cache_groups(memory, _window(loaded.shapes)),
        num_adapters=slots,
        adapters_per_step=slots,
        slots_hint=slots_hint(options.adapter_slots, slot),
        # mlx-lm's models of other architectures may scale or normalise their states after the attribute `model`.
        hidden_size=config.hidden_size if config.model_type in FAMILIES else 0,
        overlap=True,
        dtype=str(loaded.shapes[0].dtype).removeprefix("mlx.core."),
        quant=loaded.quant,
        warnings=files.warnings,
        weight_bytes=loaded.bytes,
        token_bytes=loaded.token_bytes,
        cache_bytes=memory.planned_cache,
    )


def _measure(
    files: ModelFiles, options: LoadOptions, free: int, weights: int, token_weights: int, shapes: Sequence[LayerShape]
) -> MemoryPlan:
    """The memory of a model with layers of these shapes and `weights` bytes of weights, of which a token reads
    `token_weights` bytes. `free`: bytes before the load. Without a setting, the cache is no larger than the rows need,
    because other programs also need memory. Raises ModelRefused for a context above that of the model."""
    limit = files.config.max_positions
    context = limit if options.context is None else options.context
    if not 1 <= context <= limit:
        raise ContextRefused(files.name, context, limit)
    page_size = options.page_size or PAGE_SIZE
    window = _window(shapes)
    sliding = sum(shape.token_bytes for shape in shapes if shape.window)
    full = sum(shape.token_bytes for shape in shapes if not shape.window)
    pages = CachePages.of(
        page_size, 2 * page_size * full, 2 * page_size * sliding, kept_columns(window), context, _step_tokens(options)
    )
    room = int(max(0, free - weights) * CACHE_SHARE) if options.cache_bytes is None else options.cache_bytes
    size = pages.size(room, context, options.max_rows, ROW_TOKENS if options.cache_bytes is None else None)
    return MemoryPlan(
        free=free,
        weights=weights,
        token_bytes=token_weights,
        adapters=0,  # the slots take memory as adapters are loaded, beside the cache
        page_size=page_size,
        page_bytes=pages.page_bytes,
        num_pages=size.pages,
        max_pages=size.max_pages,
        context=context,
        max_positions=limit,
        window=pages.window,
        window_pages=pages.window.count(size.pages, size.rows),
        max_window_pages=size.max_window_pages,
    )


def _window(shapes: Sequence[LayerShape]) -> int:
    """The widest window; 0: no layer has one."""
    return max(shape.window for shape in shapes)


def _step_tokens(options: LoadOptions) -> int:
    return max(options.max_step_tokens or STEP_TOKENS, options.max_rows)


def plan_on_mlx(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory of a model that is not loaded. Raises ModelRefused for an architecture whose shapes only mlx-lm knows,
    and SettingRefused."""
    check_supported(options, SUPPORTED, "mlx")
    config = files.config
    if not is_described(config):
        raise ModelRefused(f"the memory of {config.model_type:.50} is known only after mlx-lm has loaded it")
    dtype = options.dtype if options.dtype in DTYPES else config.dtype
    kind = DTYPES.get(dtype, mx.float16)
    shapes = [
        LayerShape(
            config.num_kv_heads, config.head_dim, config.head_dim, kind, config.window if name == "sliding" else 0
        )
        for name in config.layer_kinds
    ]
    weights = expected_bytes(files.tensors.values(), options)
    embedding = [tensor for name, tensor in files.tensors.items() if name == EMBEDDING and not config.tie_embeddings]
    token_weights = weights - expected_bytes(embedding, options)
    return _measure(files, options, _memory()[1], weights, token_weights, shapes)


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
