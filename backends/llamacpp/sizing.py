"""The memory of a GGUF model in llama.cpp, from the metadata of its file: weights, KV cache, workspace, GPU layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...engine.errors import ModelRefused, ModelTooLarge, SettingRefused
from ...engine.gguf import TYPES
from ...engine.ggufvalues import Array
from ...engine.memory import MemoryPlan
from ...engine.modelfiles import ModelFiles
from ...engine.options import LoadOptions
from ..machine import memory
from .library import BuildDevice

PAGE_SIZE = 16  # cells per page
CELL_BLOCK = 256  # llama.cpp rounds the number of cells up to a multiple
CACHE_SHARE = 0.6  # maximum share of the cache in the memory left after loading
ROW_TOKENS = {"cpu": 512, "gpu": 4096}  # cells for each row without a setting; llama.cpp writes to all of them at once
STEP_TOKENS = {"cpu": 512, "gpu": 2048}
UBATCH = 512  # tokens that llama.cpp computes at a time
MAX_ROWS = 128  # half of llama.cpp's sequences; the others are cached prefixes
GPU_SHARE = 0.9  # share of the free memory of GPUs that a model may use
GPUS = ("gpu", "igpu")

# Value of the option cache_dtype -> (ggml_type, bytes of one value).
CACHE_TYPES = {name.lower(): (kind, size / count) for kind, (name, count, size) in TYPES.items()}
_STATES = ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")  # keys of recurrent architectures


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes that a load will have."""

    plan: MemoryPlan
    rows: int
    step_tokens: int
    gpu_layers: int  # number of layers in the memory of the GPUs; -1: all
    on_gpu: bool  # whether any layer is


def measure(files: ModelFiles, options: LoadOptions, devices: Sequence[BuildDevice], recurrent: bool) -> Size:
    """The sizes of a load. `recurrent`: whether each row has a state of its own.

    Raises ModelRefused for a context above that of the model, and SettingRefused.
    """
    _refuse_settings(options)
    gpus = [device for device in devices if device.kind in GPUS]
    on_gpu = bool(gpus) and options.gpu_layers != 0
    kind = "gpu" if on_gpu else "cpu"
    step_tokens = max(options.max_step_tokens or STEP_TOKENS[kind], options.max_rows)
    gpu_free = int(GPU_SHARE * sum(device.free for device in gpus))
    plan = _plan(files, options, gpu_free if on_gpu else memory()[1], step_tokens, ROW_TOKENS[kind])
    layers = -1 if options.gpu_layers is None else options.gpu_layers
    if on_gpu and options.gpu_layers is None and not plan.fits(min(plan.context, ROW_TOKENS[kind])):
        needed = plan.weights + plan.cache_bytes(min(plan.context, ROW_TOKENS[kind]))
        layers = max(0, gpu_free - plan.workspace) * (files.config.num_layers + 1) // needed
        layers = min(layers, files.config.num_layers)
    if on_gpu and layers >= 0:
        plan = _plan(files, options, gpu_free + memory()[1], step_tokens, ROW_TOKENS["cpu"])
    rows = options.max_rows
    if recurrent:  # each row needs cells for its whole context
        rows = max(1, min(rows, plan.num_pages * plan.page_size // max(min(plan.context, plan.largest_context()), 1)))
    return Size(plan, rows, step_tokens, layers, on_gpu)


def _refuse_settings(options: LoadOptions) -> None:
    supported = {
        "dtype": ("auto",),
        "quant": ("none",),
        "graphs": ("auto", "off"),
        "attention": ("auto",),
        "lora_backend": ("auto",),
    }
    for name, values in supported.items():
        if getattr(options, name) not in values:
            raise SettingRefused(
                f"{name} {getattr(options, name)} is not supported by llamacpp", f"set {name} to {values[0]}"
            )
    if options.reference_ops:
        raise SettingRefused("reference_ops is not supported by llamacpp", "leave reference_ops empty")
    if options.cache_dtype == "fp8":
        raise SettingRefused("cache_dtype fp8 is not supported by llamacpp", "set cache_dtype to q8_0")
    if options.max_rows > MAX_ROWS:
        raise SettingRefused(
            f"max_rows {options.max_rows} is not supported by llamacpp", f"set max_rows to {MAX_ROWS} or less"
        )


def _plan(files: ModelFiles, options: LoadOptions, free: int, step_tokens: int, row_tokens: int) -> MemoryPlan:
    limit = files.config.max_positions
    context = limit if options.context is None else options.context
    if not 1 <= context <= limit:
        raise ModelRefused(f"{files.name} has a context of {limit} tokens, not {context}")
    page_size = options.page_size or PAGE_SIZE
    page_bytes = page_size * _cell_bytes(files, options)
    workspace = _workspace(files, options, step_tokens)
    room = int(max(0, free - files.weight_bytes - workspace) * (options.cache_share or CACHE_SHARE))
    if options.cache_bytes is not None:
        room = options.cache_bytes
    max_pages = room // page_bytes
    num_pages = max_pages
    if options.cache_bytes is None and options.cache_share is None:
        num_pages = min(max_pages, -(-max(context, options.max_rows * min(context, row_tokens)) // page_size))
    short = _short_rope(files)
    if context <= short:
        num_pages = min(num_pages, short // page_size)
    return MemoryPlan(
        free=free,
        weights=files.weight_bytes,
        token_bytes=_token_bytes(files),
        adapters=0,  # adapters take memory as they are loaded, beside the cache
        page_size=page_size,
        page_bytes=page_bytes,
        num_pages=num_pages,
        max_pages=max_pages,
        context=context,
        max_positions=limit,
        workspace=workspace,
    )


def check_fits(files: ModelFiles, options: LoadOptions, plan: MemoryPlan) -> None:
    """Raises ModelTooLarge if the weights or the requested context do not fit."""
    if not plan.weights_fit:
        raise ModelTooLarge(
            f"{files.name} needs {_size(plan.weights)} for its weights, but only {_size(plan.free)} is free",
            "close other programs, or choose a smaller quantisation of the model",
            plan.numbers(),
        )
    needed = options.context or 1
    if plan.num_pages * plan.page_size < needed:
        raise ModelTooLarge(
            f"{files.name}: a context of {needed} tokens needs {_size(plan.cache_bytes(needed))} of KV cache, but the "
            f"limit is {_size(plan.num_pages * plan.page_bytes)}",
            "use a smaller context, a larger cache, or set cache_dtype to q8_0",
            plan.numbers(),
        )


def is_recurrent(files: ModelFiles) -> bool:
    """Whether some layers of the architecture store a recurrent state."""
    return any(f"{files.config.model_type}.{key}" in files.metadata for key in _STATES)


def _cell_bytes(files: ModelFiles, options: LoadOptions) -> int:
    """Bytes of the keys and values of one position in all layers."""
    config = files.config
    architecture = config.model_type
    _, item_bytes = CACHE_TYPES["f16" if options.cache_dtype == "auto" else options.cache_dtype]
    heads = files.metadata.get(f"{architecture}.attention.head_count_kv")
    total = config.num_kv_heads * config.num_layers
    if isinstance(heads, Array) and len(heads.values) == heads.count:
        total = int(sum(heads.values))
    values = _number(files, "attention.value_length", config.head_dim)
    if _number(files, "attention.key_length_mla", 0):
        values = 0  # with latent attention, the values are a part of the keys
    return max(1, int(total * (config.head_dim + values) * item_bytes))


def _workspace(files: ModelFiles, options: LoadOptions, step_tokens: int) -> int:
    """Estimated bytes of the intermediate results of a step, and of its logits."""
    config = files.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    values = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return 4 * (2 * options.max_rows * config.vocab_size + min(step_tokens, UBATCH) * values)


def _token_bytes(files: ModelFiles) -> int:
    """Bytes of weights that llama.cpp reads to compute one token."""
    experts = _number(files, "expert_count", 0)
    used = _number(files, "expert_used_count", experts)
    total = 0
    for name, tensor in files.tensors.items():
        if name == "token_embd.weight" and "output.weight" in files.tensors:
            continue
        total += tensor.num_bytes * used // experts if experts and "_exps." in name else tensor.num_bytes
    return total


def _short_rope(files: ModelFiles) -> int:
    """The number of cells up to which llama.cpp uses the rope of short contexts; 0: the model has one rope."""
    if not any(name.startswith("rope_factors_long") or ".rope_factors_long" in name for name in files.tensors):
        return 0
    return _number(files, "rope.scaling.original_context_length", 0)


def _number(files: ModelFiles, key: str, default: int) -> int:
    value = files.metadata.get(f"{files.config.model_type}.{key}", default)
    return value if type(value) is int else default


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
