"""How much a runner takes: context, rows and pages from the load options, the model and the free memory."""

from __future__ import annotations

import torch

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.graphs import decode_sizes, token_sizes
from ...engine.modelconfig import ModelConfig
from ...engine.modelfiles import ModelFiles
from ...engine.options import Graphs, LoadOptions
from ...engine.runner import CacheGroup, RunnerSpec, page_bytes
from .device import Device

# Of a step that is captured: what the largest makes on the way is kept as long as the model is.
MOST_TOKENS = 2048


def plan(
    files: ModelFiles, options: LoadOptions, free: int, dtype: torch.dtype, weights: int, device: Device
) -> RunnerSpec:
    """The spec of a runner with a paged cache in `dtype`, on a device with `free` bytes of which the weights take some.

    Raises ModelRefused with both numbers where the options cannot be met, and SettingRefused.
    """
    config, quantised = files.config, files.config.quantization
    if weights > free:
        raise ModelRefused(
            f"{files.name} needs {_size(weights)} for its weights, but {_size(free)} are free",
            "close other programs, or choose a smaller model",
        )
    if options.context is not None and not 1 <= options.context <= config.max_positions:
        raise ModelRefused(
            f"{files.name} has a context of {config.max_positions} tokens, {options.context} were asked for"
        )
    cache = cache_dtype(options, dtype, device)
    page = page_bytes(options.page_size, config.num_kv_heads, config.head_dim, config.num_layers, cache.itemsize)
    wanted = options.context or config.max_positions
    if options.cache_bytes is not None:
        num_pages = options.cache_bytes // page
    else:
        num_pages = int((free - weights) * (options.cache_share or device.cache_share)) // page
        if options.cache_share is None:  # what is not asked for is left to others
            roomy = max(wanted, options.max_rows * min(wanted, device.row_tokens or wanted))
            num_pages = min(-(-roomy // options.page_size), num_pages)
    fitting = num_pages * options.page_size
    if fitting < (options.context or 1):
        raise ModelRefused(
            f"{files.name}: a context of {wanted} tokens needs {_size(-(-wanted // options.page_size) * page)} of KV "
            f"cache, but {_size(num_pages * page)} are allowed",
            "ask for a shorter context, or allow a larger cache",
        )
    graphs = chosen_graphs(options, device)
    max_tokens = max(options.max_step_tokens or device.step_tokens, options.max_rows)
    return RunnerSpec(
        vocab_size=config.vocab_size,
        max_tokens=max_tokens,
        max_rows=options.max_rows,
        max_context=min(wanted, fitting),
        groups=(CacheGroup(options.page_size, num_pages),),
        overlap=device.overlap,
        graph_rows=decode_sizes(options.max_rows) if graphs != "off" and device.records_attention else (),
        graph_tokens=token_sizes(recordable_tokens(config, max_tokens, device))
        if graphs in ("split", "breakable")
        else (),
        dtype=str(dtype).removeprefix("torch."),
        weight_bytes=weights,
        quant=quantised.title if quantised else options.quant if options.quant != "none" else "",
        cache_bytes=num_pages * page,
        warnings=device.warnings,
        step_seconds=device.step_seconds,
    )


def recordable_tokens(config: ModelConfig, max_tokens: int, device: Device) -> int:
    """Of a step that is worth capturing: beyond, computing a layer takes longer than launching it."""
    if device.recorder is None:
        return 0
    heads = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    weights = config.hidden_size * (heads + 3 * config.intermediate_size)
    return int(min(max_tokens, MOST_TOKENS, device.layer_work / weights))


def chosen_graphs(options: LoadOptions, device: Device) -> Graphs:
    """What is recorded on this device; never "auto"."""
    if device.recorder is None:
        return "off"
    return device.graphs if options.graphs == "auto" else options.graphs


def cache_dtype(options: LoadOptions, dtype: torch.dtype, device: Device) -> torch.dtype:
    """Of keys and values where computing is in `dtype`. Raises SettingRefused for what the device cannot do."""
    if options.cache_dtype == "auto":
        return dtype
    if not device.fp8_cache:
        raise SettingRefused(f"cache_dtype fp8 is not for {device.name}", "leave it at auto")
    if dtype != torch.bfloat16:
        raise SettingRefused("cache_dtype fp8 goes with dtype bfloat16 only", "leave it at auto, or dtype")
    return torch.float8_e4m3fn


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
