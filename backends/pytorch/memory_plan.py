"""Computes the size of a runner (context, rows, pages) from the load options, the model and the free memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...engine.errors import ContextRefused, ModelTooLarge, SettingRefused
from ...engine.files.model_config import ModelConfig
from ...engine.files.model_files import ModelFiles
from ...engine.graphs import decode_sizes, limited_sizes, token_sizes
from ...engine.lora import fitting_slots, slots_hint
from ...engine.memory_plan import MemoryPlan
from ...engine.options import Graphs, LoadOptions
from ...engine.runner import RunnerSpec
from .cache_plan import cache_groups, cache_limit, cache_pages, snapshot_interval
from .device import Device
from .lora import slot_values

# Maximum number of tokens in a captured step. The intermediate tensors of the largest capture stay allocated.
MAX_TOKENS = 2048
MIN_STEP_TOKENS = 512
MAX_CONVERTED = 2**26  # weights of experts that kernels convert at a time (MAX_CHUNK in kernels/gpu/widened_product.py)
MIN_CONTEXT = 128  # tokens; with less room for a conversation, an automatic context is refused
LOGITS_COPIES = 4  # copies of the logits in memory while tokens are drawn and log-probabilities are listed


def measure(
    files: ModelFiles,
    options: LoadOptions,
    free: int,
    dtype: torch.dtype,
    weights: int,
    device: Device,
    token_bytes: int = 0,
    workspace: int | None = None,
) -> MemoryPlan:
    """The memory of a model on `device`, with the arguments of `plan`. The model may not fit.

    Raises ModelRefused for a context above that of the model, and SettingRefused for an unsupported cache dtype.
    """
    config = files.config
    context = _requested_context(files, options)
    page_size = options.page_size or device.page_size
    cache = cache_dtype(config, options, dtype, device)
    pages = cache_pages(config, page_size, cache, context, step_tokens(config, options, device))
    if workspace is None:
        workspace = expected_workspace(config, options, dtype, device)
    rest = max(0, free - weights - workspace)
    limit = cache_limit(pages, options, device, rest, context)
    row_tokens = (device.row_tokens or context) if options.cache_bytes is None else None
    size = pages.size(limit, context, options.max_rows, row_tokens)
    slot_bytes = slot_values(config, options.adapter_rank) * dtype.itemsize
    slots = fitting_slots(options.adapter_slots, slot_bytes, rest - pages.bytes(size.pages, size.rows))
    return MemoryPlan(
        free=free,
        weights=weights,
        token_bytes=token_bytes,
        adapters=(slots + 1) * slot_bytes if slots else 0,
        adapter_slots=slots,
        page_size=page_size,
        page_bytes=pages.page_bytes,
        num_pages=size.pages,
        max_pages=size.max_pages,
        context=context,
        max_positions=config.max_positions,
        workspace=workspace,
        window=pages.window,
        window_pages=pages.window.count(size.pages, size.rows),
        max_window_pages=size.max_window_pages,
        state_bytes=pages.state_bytes,
        num_states=size.rows if pages.state_bytes else 0,
        num_snapshots=size.snapshots,
    )


def plan(
    files: ModelFiles,
    options: LoadOptions,
    free: int,
    dtype: torch.dtype,
    weights: int,
    device: Device,
    workspace: int | None = None,
) -> RunnerSpec:
    """The spec of a runner on `device`, which has `free` bytes of free memory and will load `weights` bytes of weights.
    Activations have `dtype`. `workspace`: see MemoryPlan; None: an estimate.

    Raises ModelTooLarge if the weights or the context do not fit, and SettingRefused for an unsupported cache dtype.
    """
    config = files.config
    memory = measure(files, options, free, dtype, weights, device, workspace=workspace)
    _check_fits(files, options, memory)
    context = memory.context
    page_size = memory.page_size
    fitting = memory.num_pages * page_size
    max_tokens = step_tokens(config, options, device)
    graph_rows, graph_tokens = _captured_sizes(config, options, device)
    return RunnerSpec(
        vocab_size=config.vocab_size,
        max_tokens=max_tokens,
        max_rows=options.max_rows,
        max_context=min(context, fitting),
        groups=cache_groups(memory, config.window),
        num_states=memory.num_states,
        num_snapshots=memory.num_snapshots,
        snapshot_interval=snapshot_interval(context, page_size) if memory.num_states else 0,
        num_adapters=memory.adapter_slots,
        adapters_per_step=memory.adapter_slots,
        slots_hint=slots_hint(options.adapter_slots, slot_values(config, options.adapter_rank) * dtype.itemsize),
        hidden_size=config.hidden_size,
        overlap=device.overlap,
        graph_rows=graph_rows,
        graph_tokens=graph_tokens,
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=weights,
        quant=_weight_format(config, options),
        cache_bytes=memory.planned_cache,
        warnings=(*files.warnings, *device.warnings, *_context_warnings(options, memory, min(context, fitting))),
        step_seconds=device.step_seconds,
    )


def _check_fits(files: ModelFiles, options: LoadOptions, memory: MemoryPlan) -> None:
    """Raises ModelTooLarge if the weights or the context do not fit."""
    if not memory.weights_fit:
        steps = f" and {_size(memory.workspace)} for its steps" if memory.workspace else ""
        raise ModelTooLarge(
            f"{files.name} needs {_size(memory.weights)} for its weights{steps}, but only {_size(memory.free)} is free",
            "close other programs, or choose a smaller model",
            memory.numbers(),
        )
    needed = options.context or (min(MIN_CONTEXT, memory.max_positions) if options.cache_bytes is None else 1)
    if memory.num_pages * memory.page_size < needed:
        raise ModelTooLarge(
            f"{files.name}: a context of {needed} tokens needs {_size(memory.cache_bytes(needed))} of KV "
            f"cache, but the limit is {_size(memory.planned_cache)}",
            "use a smaller context, or a larger cache",
            memory.numbers(),
        )


def _context_warnings(options: LoadOptions, memory: MemoryPlan, context: int) -> tuple[str, ...]:
    """The warning of a context that is smaller than that of the model, unless the options have this context."""
    if options.context is not None or context >= memory.max_positions:
        return ()
    return (f"the memory has room for a context of {context} tokens; the model supports {memory.max_positions}",)


def expected_workspace(config: ModelConfig, options: LoadOptions, dtype: torch.dtype, device: Device) -> int:
    """Estimated bytes of the intermediate results of the largest step, of captured graphs and of libraries. 0 for a
    device without a meter."""
    if device.meter is None:
        return 0
    token_values = 4 * config.hidden_size + _attention_values(config) + _mlp_values(config)
    fixed = LOGITS_COPIES * options.max_rows * config.vocab_size * torch.float32.itemsize
    if options.quant != "none" or config.quantization is not None:
        # Products of many rows convert a whole weight to the dtype of activations, or the weights of some experts.
        largest = config.hidden_size * max(2 * _largest_mlp(config), _largest_projection(config))
        if config.moe is not None:
            all_experts = config.moe.experts * 2 * config.moe.inner_size * config.hidden_size
            largest = max(largest, min(all_experts, MAX_CONVERTED))
        fixed += largest * dtype.itemsize
    workspace = device.meter.libraries + fixed + _int8_copy(config, options, device)
    workspace += step_tokens(config, options, device) * token_values * dtype.itemsize
    rows, tokens = _captured_sizes(config, options, device)
    if rows or tokens:
        workspace += fixed + max((*rows, *tokens)) * token_values * dtype.itemsize
        workspace += device.meter.graph * number_of_graphs(rows, tokens, config.num_layers)
    return workspace


def _int8_copy(config: ModelConfig, options: LoadOptions, device: Device) -> int:
    """Bytes of the converted int8 pages of a row, with the maximum context."""
    if options.cache_dtype != "int8":
        return 0
    _, heads, dim = config.cache_shape
    return (options.context or config.max_positions) * heads * dim * device.int8_copy


def _captured_sizes(
    config: ModelConfig, options: LoadOptions, device: Device
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes of captured decode steps in rows, and of captured prefill steps in tokens."""
    graphs = chosen_graphs(options, device)
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    if graphs != "off" and device.captures_attention:
        rows = decode_sizes(min(options.max_rows, device.captured_rows or options.max_rows))
    if graphs in ("split", "breakable"):
        tokens = token_sizes(capturable_tokens(config, step_tokens(config, options, device), device))
    if device.max_graphs is None:
        return rows, tokens
    captures = 2 if options.adapter_slots else 1  # with adapter slots, each size is also captured with adapters
    return limited_sizes(rows, tokens, config.num_layers + 1, device.max_graphs // captures)


def number_of_graphs(rows: Sequence[int], tokens: Sequence[int], layers: int) -> int:
    """The number of graphs of captured decode steps of the sizes `rows`, and of prefill steps of the sizes `tokens`,
    which have a graph for each segment."""
    return len(rows) + len(tokens) * (layers + 1)


def step_tokens(config: ModelConfig, options: LoadOptions, device: Device) -> int:
    """Maximum number of tokens in a step. By default a step takes no longer than other rows may wait for it, but has at
    least MIN_STEP_TOKENS tokens, because much smaller steps compute fewer tokens per second."""
    if options.max_step_tokens is not None:
        return max(options.max_step_tokens, options.max_rows)
    tokens = min(device.step_tokens, device.step_work / (config.num_layers * layer_weights(config)))
    multiple = int(tokens) // MIN_STEP_TOKENS * MIN_STEP_TOKENS
    return max(multiple, min(device.step_tokens, MIN_STEP_TOKENS), options.max_rows)


def _requested_context(files: ModelFiles, options: LoadOptions) -> int:
    """The context in the options, or that of the model. Raises ModelRefused if the model does not support it."""
    limit = files.config.max_positions
    if options.context is None:
        return limit
    if not 1 <= options.context <= limit:
        raise ContextRefused(files.name, options.context, limit)
    return options.context


def _weight_format(config: ModelConfig, options: LoadOptions) -> str:
    """The display name of the weight format; empty for float weights."""
    if config.quantization:
        return config.quantization.title
    return "" if options.quant == "none" else options.quant


def capturable_tokens(config: ModelConfig, max_tokens: int, device: Device) -> int:
    """Maximum number of tokens in a captured step. A capture would not make a longer step faster, because the device
    computes its layers more slowly than the host launches them."""
    if device.recorder is None:
        return 0
    return int(min(max_tokens, MAX_TOKENS, device.layer_work / layer_weights(config)))


def layer_weights(config: ModelConfig) -> int:
    """Number of weights of a layer that a token multiplies once each; of the experts only those that it uses."""
    inner = config.intermediate_size
    if config.moe is not None:
        routed = config.moe.top_k * config.moe.inner_size + config.moe.shared_size
        inner = max(routed, inner) if False in config.moe.layers else routed
    return _attention_weights(config) + config.hidden_size * 3 * inner


def _attention_weights(config: ModelConfig) -> int:
    """Number of weights of the attention of a layer, or of a recurrent mixer: the larger one."""
    if config.latent is not None:
        return config.latent.weights(config.hidden_size, config.num_heads)
    heads = (config.query_parts + 1) * config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * heads * config.largest_head_dim
    return max(attention, config.recurrent.weights(config.hidden_size)) if config.recurrent else attention


def _attention_values(config: ModelConfig) -> int:
    """Number of intermediate values of a token in the attention of a layer."""
    if config.latent is not None:
        return config.latent.token_values(config.num_heads)
    return 2 * _largest_projection(config)


def _largest_projection(config: ModelConfig) -> int:
    """The largest number of outputs of a projection in the attention or the recurrent mixer of a layer."""
    if config.latent is not None:
        return max(config.latent.down_features(config.num_heads), config.num_heads * config.latent.head_dim)
    attention = (config.query_parts * config.num_heads + 2 * config.num_kv_heads) * config.largest_head_dim
    return max(attention, config.recurrent.outputs) if config.recurrent else attention


def _mlp_values(config: ModelConfig) -> int:
    """Number of intermediate values of a token in the MLP of a layer. Each expert of a token has its own values, and a
    result in float32."""
    dense = 3 * _largest_mlp(config)
    if config.moe is None:
        return dense
    return dense + config.moe.top_k * (3 * config.moe.inner_size + 2 * config.hidden_size) + config.moe.experts


def _largest_mlp(config: ModelConfig) -> int:
    """The largest inner size of an MLP; of the experts that of a single one."""
    if config.moe is None:
        return config.intermediate_size
    sizes = config.moe.inner_size, config.moe.shared_size
    return max(*sizes, config.intermediate_size) if False in config.moe.layers else max(sizes)


def chosen_graphs(options: LoadOptions, device: Device) -> Graphs:
    """The kind of graphs in the options; for "auto" that of the device; "off" if the device cannot capture steps."""
    if device.recorder is None:
        return "off"
    return device.graphs if options.graphs == "auto" else options.graphs


def cache_dtype(config: ModelConfig, options: LoadOptions, dtype: torch.dtype, device: Device) -> torch.dtype:
    """The dtype of keys and values, for activations of `dtype`. Raises SettingRefused if the device cannot store it, or
    if the model has a latent cache, which is always of `dtype`."""
    if options.cache_dtype == "auto":
        return dtype
    if config.latent is not None:
        message = f"cache_dtype {options.cache_dtype} is not supported for latent attention ({config.model_type})"
        raise SettingRefused(message, "set cache_dtype to auto", setting="cache_dtype")
    supported = {"fp8": device.fp8_cache and torch.float8_e4m3fn, "int8": device.int8_cache and torch.int8}
    chosen = supported.get(options.cache_dtype)
    if not chosen:
        message = f"cache_dtype {options.cache_dtype} is not supported on {device.name}"
        raise SettingRefused(message, "set cache_dtype to auto", setting="cache_dtype")
    if dtype != torch.bfloat16:
        raise SettingRefused(
            f"cache_dtype {options.cache_dtype} needs dtype bfloat16",
            "set cache_dtype or dtype to auto",
            setting="cache_dtype",
        )
    return chosen


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
