"""The memory of a GGUF model in llama.cpp, from the metadata of its file: weights, KV cache, workspace, GPU layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...engine.errors import ModelTooLarge, SettingRefused
from ...engine.files.gguf import TYPES
from ...engine.files.gguf_values import Array
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import RARE, LoadOptions, check_supported
from ..machine import memory
from .library import MAX_SEQUENCES, BuildDevice, gpus_of
from .rope import check_context, check_rope, default_context

PAGE_SIZE = 16  # cells per page
CACHE_SHARE = 0.6  # maximum share of the cache in the memory left after loading
# Without settings, a model has this context and these cells for each row, at most. llama.cpp writes to all cells when
# it allocates them, so a load on a CPU takes a second for each 2 GiB, and other programs cannot use that memory.
DEFAULT_CONTEXT = {"cpu": 16384, "gpu": 2**31}
ROW_TOKENS = {"cpu": 256, "gpu": 4096}
STEP_TOKENS = {"cpu": 512, "gpu": 2048}
UBATCH = 512  # tokens that llama.cpp computes at a time
MASK_BYTES = 2  # of an attention mask, for a cell and a token of the ubatch
MIN_ROW_CACHES = 4  # caches of one row that have room for a context as large as possible
MAX_SPARE_CACHES = 8  # caches of one row beyond those of the rows, for snapshots and cached prefixes
ROW_CACHE_CELLS = 256  # llama.cpp gives a row a multiple of this number of cells
MIN_CONTEXT = 4096  # all layers are computed on GPUs if this context fits there
CACHED_PATHS = 64  # minimum number of cached prefixes; llama.cpp allocates logits for each sequence
MAX_ROWS = 128  # half of llama.cpp's sequences; the others are cached prefixes
GPU_SHARE = 0.9  # share of the free memory of GPUs that a model may use

# Option -> its supported values.
SUPPORTED: Mapping[str, Sequence[object]] = {
    "dtype": ("auto",),
    "quant": ("none",),
    "graphs": ("auto", "off"),
    "attention": ("auto",),
    "lora_backend": ("auto",),
    "ops": ((),),
    **RARE,
}
# Value of the option cache_dtype -> (ggml_type, bytes of one value).
CACHE_TYPES = {name.lower(): (kind, size / count) for kind, (name, count, size) in TYPES.items()}
# Architectures for which llama.cpp computes one sequence at a time: it refuses to copy a sequence in a common cache.
ONE_SEQUENCE = frozenset({"deepseek4"})
# Keys in the metadata of architectures with recurrent states.
_STATE_KEYS = ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes that a load will have."""

    plan: MemoryPlan
    step_tokens: int
    rows: int  # maximum number of rows in a step
    sequences: int  # number of sequence ids of llama.cpp
    snapshots: int  # number of the plan's pages that are snapshots of states
    row_cells: int  # number of cells of each row's cache; 0: all rows share one cache
    gpu_layers: int  # number of layers in the memory of the GPUs; -1: all
    on_gpu: bool  # whether any layer is

    @property
    def cells(self) -> int:
        return self.plan.num_pages * self.plan.page_size


def measure(files: ModelFiles, options: LoadOptions, devices: Sequence[BuildDevice], has_states: bool) -> Size:
    """The sizes of a load. `has_states`: whether each row has a state of its own.

    Raises ModelRefused for a context above that of the model, and SettingRefused.
    """
    _refuse_settings(files, options)
    gpus = gpus_of(devices)
    on_gpu = bool(gpus) and options.gpu_layers != 0
    load = _Load(files, options, has_states, on_gpu)
    main_free = memory()[1]
    if not on_gpu:
        return load.size(load.plan(main_free, "cpu"), 0)
    gpu_free = int(GPU_SHARE * sum(device.free for device in gpus))
    on_gpus = load.plan(gpu_free, "gpu")
    if options.gpu_layers is None and on_gpus.fits(min(on_gpus.context, MIN_CONTEXT)):
        return load.size(on_gpus, -1)
    shared = load.plan(gpu_free + main_free, "cpu")
    if options.gpu_layers is None:
        return load.size(shared, _fitting_layers(files.config.num_layers, shared, gpu_free))
    return load.size(shared, options.gpu_layers)


class _Cache(NamedTuple):
    """Fields of a MemoryPlan."""

    page_size: int
    page_bytes: int
    num_pages: int
    max_pages: int
    context: int
    workspace: int


class _Load:
    """The load of a model with its options: the memory that it plans."""

    def __init__(self, files: ModelFiles, options: LoadOptions, has_states: bool, on_gpu: bool) -> None:
        self._files = files
        self._options = options
        self._has_states = has_states
        self._has_row_caches = options.cache_layout == "rows" and not has_states
        self._on_gpu = on_gpu
        default = STEP_TOKENS["gpu" if on_gpu else "cpu"]
        self._step_tokens = max(options.max_step_tokens or default, options.max_rows)
        self._cell_bytes = _cell_bytes(files, options)
        masks = 2 if files.config.window else 1  # layers with and without a sliding window have different ones
        # Bytes of the attention masks for each cell.
        self._mask_bytes = masks * MASK_BYTES * min(self._step_tokens, UBATCH)
        self._workspace = _workspace(files, options, self._step_tokens)

    def plan(self, free: int, kind: str) -> MemoryPlan:
        """The plan with `free` bytes of memory of this kind: "cpu" or "gpu"."""
        options = self._options
        room = max(0, free - self._files.weight_bytes - self._workspace)
        if options.cache_bytes is None:
            room = int(room * CACHE_SHARE)
        else:
            room = options.cache_bytes
        has_own_caches = self._has_states or self._has_row_caches
        cache = self._row_caches(room, kind) if has_own_caches else self._shared_cache(room, kind)
        return MemoryPlan(
            free=free,
            weights=self._files.weight_bytes,
            token_bytes=_token_bytes(self._files),
            adapters=0,  # adapters take memory as they are loaded, beside the cache
            max_positions=max(default_context(self._files, options), options.context or 0),
            **cache._asdict(),
        )

    def size(self, plan: MemoryPlan, layers: int) -> Size:
        """The sizes of a load with this plan and this number of layers on GPUs."""
        count = plan.num_pages
        rows = self._options.max_rows
        size = Size(plan, self._step_tokens, rows, _sequences(self._options), 0, 0, layers, self._on_gpu)
        if self._has_states:
            snapshots = _num_snapshots(count, rows)
            return replace(size, rows=count - snapshots, sequences=count, snapshots=snapshots)
        if self._has_row_caches:  # with several rows, one cache must be free: see streams.py
            return replace(size, rows=max(1, min(rows, count - 1)), sequences=count, row_cells=plan.page_size)
        return size

    def _shared_cache(self, room: int, kind: str) -> _Cache:
        """The cache of a model that stores only keys and values. `room`: maximum bytes of the cache."""
        options = self._options
        context = self._context(kind)
        page_size = options.page_size or PAGE_SIZE
        page_bytes = max(1, page_size * self._cell_bytes)
        mask_bytes = page_size * self._mask_bytes
        if options.cache_bytes is None:
            max_pages = room // (page_bytes + mask_bytes)
            needed = max(context, options.max_rows * min(context, ROW_TOKENS[kind]))
            num_pages = min(max_pages, -(-needed // page_size))
        else:
            num_pages = max_pages = room // page_bytes
        short = _short_rope(self._files)
        if context <= short:
            num_pages = min(num_pages, short // page_size)
        return _Cache(page_size, page_bytes, num_pages, max_pages, context, self._workspace + num_pages * mask_bytes)

    def _row_caches(self, room: int, kind: str) -> _Cache:
        """The cache of a model whose rows do not share one. A page is the cache of one row: cells for a whole context,
        and its state if the model has states."""
        options = self._options
        context = self._context(kind)
        state_bytes = _state_bytes(self._files) if self._has_states else 0
        mask_bytes = self._mask_bytes if self._cell_bytes else 0
        position_bytes = self._cell_bytes + (mask_bytes if options.cache_bytes is None else 0)
        if options.context is None and position_bytes:
            count = min(options.max_rows + 1, MIN_ROW_CACHES)
            context = max(1, min(context, (room // count - state_bytes) // position_bytes))
        cells = context if self._has_states else -(-context // ROW_CACHE_CELLS) * ROW_CACHE_CELLS
        max_caches = room // (state_bytes + cells * position_bytes)
        wanted = options.max_rows + min(options.max_rows, MAX_SPARE_CACHES)
        if self._files.config.model_type in ONE_SEQUENCE:
            wanted = 1
        caches = min(wanted, max_caches)
        workspace = self._workspace + caches * cells * mask_bytes
        return _Cache(cells, state_bytes + cells * self._cell_bytes, caches, max_caches, context, workspace)

    def _context(self, kind: str) -> int:
        """The context in the options; otherwise that of the model, at most the default if the size of the cache is
        automatic. Raises ContextRefused if the model does not support it."""
        options = self._options
        if options.context is not None:
            check_context(self._files, options, options.context)
            return options.context
        limit = default_context(self._files, options)
        return min(limit, DEFAULT_CONTEXT[kind]) if options.cache_bytes is None else limit


def _num_snapshots(states: int, max_rows: int) -> int:
    """The number of states that are snapshots for prefix hits: at least a quarter, and one of two."""
    return max(states - max_rows, states // 4, min(1, states - 1), 0)


def _fitting_layers(layers: int, plan: MemoryPlan, free: int) -> int:
    """The number of layers that fit into `free` bytes with their part of the cache."""
    needed = plan.weights + plan.num_pages * plan.page_bytes
    return min(layers, max(0, free - plan.workspace) * (layers + 1) // needed)


def _sequences(options: LoadOptions) -> int:
    """The number of sequence ids: at least two for each row, because models with a window need pairs."""
    return min(MAX_SEQUENCES, options.max_rows + max(options.max_rows, CACHED_PATHS))


def _refuse_settings(files: ModelFiles, options: LoadOptions) -> None:
    check_supported(options, SUPPORTED, "llamacpp")
    check_rope(files, options)
    if options.cache_dtype in ("fp8", "int8"):
        message = f"cache_dtype {options.cache_dtype} is not supported by llamacpp"
        raise SettingRefused(message, "set cache_dtype to q8_0", setting="cache_dtype")
    if options.max_rows > MAX_ROWS:
        raise SettingRefused(
            f"max_rows {options.max_rows} is not supported by llamacpp",
            f"set max_rows to {MAX_ROWS} or less",
            setting="max_rows",
            instead=MAX_ROWS,
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


def has_states(files: ModelFiles) -> bool:
    """Whether some layers of the architecture store a recurrent state, or another one that cannot be cut."""
    if files.config.model_type in ONE_SEQUENCE:
        return True
    return any(f"{files.config.model_type}.{key}" in files.metadata for key in _STATE_KEYS)


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
    return int(total * (config.head_dim + values) * item_bytes)


def _state_bytes(files: ModelFiles) -> int:
    """Bytes of the recurrent states of one row, in float32, as llama.cpp's hparams compute them."""
    config = files.config
    heads = _number(files, "wkv.head_size", 0)
    kda = _number(files, "kda.head_dim", 0)
    short = _number(files, "shortconv.l_cache", 0)
    state = _number(files, "ssm.state_size", 0)
    inner = _number(files, "ssm.inner_size", 0)
    taps = max(0, _number(files, "ssm.conv_kernel", 0) - 1)
    if heads:
        values = config.hidden_size * (_number(files, "token_shift_count", 2) + heads)
    elif short:
        values = config.hidden_size * (short - 1)
    elif kda:
        values = 3 * (taps or 3) * config.num_heads * kda + kda * kda * config.num_heads
    else:
        values = taps * (inner + 2 * _number(files, "ssm.group_count", 0) * state) + state * inner
    return 4 * config.num_layers * values


def _workspace(files: ModelFiles, options: LoadOptions, step_tokens: int) -> int:
    """Estimated bytes of the intermediate results of a step, and of its logits."""
    config = files.config
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    values = 4 * config.hidden_size + 2 * heads + 3 * config.intermediate_size
    return 4 * (2 * _sequences(options) * config.vocab_size + min(step_tokens, UBATCH) * values)


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
