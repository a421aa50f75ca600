"""Opens a GGUF model in llama.cpp, with a memory plan."""

from __future__ import annotations

from typing import Any

from ...engine.errors import ModelRefused, SettingRefused
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import LoadOptions
from ...engine.runner import CacheGroup, Runner, RunnerSpec
from ..machine import cores
from . import accepts
from .adapters import Adapters
from .attention import avoid_graphs, flash_attention
from .cells import ContextMemory, StreamMemory
from .library import devices, library, load_model
from .memory_plan import (
    CACHE_TYPES,
    DEFAULT_CONTEXT,
    ONE_SEQUENCE,
    PAGE_SIZE,
    UBATCH,
    Size,
    check_fits,
    has_states,
    measure,
)
from .rope import NO_ROPE, refuse_without_rope, set_rope
from .runner import LlamaRunner, Sequences
from .sequences import Memory, PagedSequences, PairedMemory, StateSequences, sequence_ids
from .streams import StreamSequences

# Seconds after which a step counts as hung. Even slow CPUs compute a prefill chunk of an 8B model faster.
STEP_SECONDS = {"cpu": 3600.0, "gpu": 600.0}
SNAPSHOT_INTERVAL = 32  # positions; a snapshot makes llama.cpp copy the state
# Room for outputs of one step. With a smaller buffer, the prefill of llama.cpp is slower on CPUs with AMX.
MIN_OUTPUTS = 64
NO_POOLING = 0  # llama_pooling_type: the hidden state of each token


def plan_memory(files: ModelFiles, options: LoadOptions) -> MemoryPlan:
    """The memory that `open_gguf` would allocate. Raises ModelRefused or SettingRefused."""
    _refuse(files)
    return measure(files, options, devices(), has_states(files)).plan


def open_gguf(files: ModelFiles, options: LoadOptions) -> Runner:
    """Load a model. Raises ModelRefused or SettingRefused."""
    _refuse(files)
    size = measure(files, options, devices(), has_states(files))
    check_fits(files, options, size.plan)
    c = library().c
    model = load_model(files.name, files.gguf, gpu_layers=size.gpu_layers, repack=can_repack(files))
    try:
        _check_model(files, model)
        if c.llama_model_rope_type(model) == NO_ROPE:
            refuse_without_rope(files, options)
        states = bool(c.llama_model_is_recurrent(model) or c.llama_model_is_hybrid(model))
        if states != has_states(files):
            size = measure(files, options, devices(), states)
            check_fits(files, options, size.plan)
        needs_pairs = not states and not size.row_cells and c.llama_model_n_swa(model) > 0
        ids = sequence_ids(size.sequences, paired=needs_pairs)
        spec = _spec(files, options, size, 0 if states else len(ids), c.llama_model_n_embd_out(model))
        context = _new_context(files, options, size, spec, model)
    except BaseException:
        c.llama_model_free(model)
        raise
    sequences = _sequences(context, spec, size, needs_pairs, len(ids))
    threads = options.threads or cores()
    return LlamaRunner(model, context, spec, sequences, ids, Adapters(model, files), threads)


def _sequences(context: Any, spec: RunnerSpec, size: Size, needs_pairs: bool, count: int) -> Sequences:
    """`count`: the number of sequences."""
    if not spec.groups:
        return StateSequences(ContextMemory(context), count)
    page_size = spec.groups[0].page_size
    if size.row_cells:
        return StreamSequences(StreamMemory(context), page_size, count)
    memory: Memory = ContextMemory(context)
    if needs_pairs:
        memory = PairedMemory(memory, count)
    return PagedSequences(memory, page_size, count)


def can_repack(files: ModelFiles) -> bool:
    """Whether llama.cpp may store the weights in the layouts of this CPU's fastest instructions.

    Its AMX products need contiguous inputs, but nothing checks them. Recurrent layers and latent attention (MLA) have
    other inputs: llama.cpp then crashes, or its logits are wrong.
    """
    has_views = has_states(files) or f"{files.config.model_type}.attention.key_length_mla" in files.metadata
    return not (has_views and library().has_amx)


def can_overlap(size: Size) -> bool:
    """Whether a device computes a step while the host plans the next one. On a CPU, llama_decode returns at the end."""
    return size.on_gpu


def _refuse(files: ModelFiles) -> None:
    refusal = accepts(files)
    if refusal:
        raise ModelRefused(f"{files.name}: {refusal}")


def _check_model(files: ModelFiles, model: Any) -> None:
    """Raises ModelRefused if the model contradicts its metadata."""
    c = library().c
    if c.llama_model_has_encoder(model) or not c.llama_model_has_decoder(model):
        raise ModelRefused(f"{files.name}: its architecture {files.config.model_type:.50} is an encoder")
    if c.llama_model_is_diffusion(model):
        raise ModelRefused(f"{files.name}: its architecture {files.config.model_type:.50} generates by diffusion")
    vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    if vocab != files.config.vocab_size:
        raise ModelRefused(
            f"{files.name}: llama.cpp reads a vocabulary of {vocab} tokens, but the metadata has "
            f"{files.config.vocab_size}"
        )


def _spec(files: ModelFiles, options: LoadOptions, size: Size, sequences: int, hidden_size: int) -> RunnerSpec:
    """`sequences`: the number of sequences of a model without states; 0: each row has a state."""
    plan = size.plan
    states = not sequences
    context = plan.context if states else min(plan.context, size.row_cells or size.cells)
    needs_free = size.row_cells > 0 and size.rows > 1
    return RunnerSpec(
        vocab_size=files.config.vocab_size,
        max_tokens=min(size.step_tokens, size.cells),
        max_rows=size.rows,
        max_context=context,
        groups=() if states else (_group(options, size),),
        num_states=size.rows if states else 0,
        num_snapshots=size.snapshots,
        snapshot_interval=SNAPSHOT_INTERVAL,
        max_paths=sequences - needs_free,
        num_adapters=options.adapter_slots,
        adapters_per_step=options.adapter_slots,
        overlap=can_overlap(size),
        slots_hint="raise the setting adapter_slots",
        hidden_size=hidden_size,
        dtype="float32",
        quant=_quant(files),
        weight_bytes=files.weight_bytes,
        token_bytes=plan.token_bytes,
        cache_bytes=plan.num_pages * plan.page_bytes,
        step_seconds=STEP_SECONDS["gpu" if size.on_gpu else "cpu"],
        warnings=(*files.warnings, *_one_sequence(files), *_warnings(options, size, context)),
    )


def _group(options: LoadOptions, size: Size) -> CacheGroup:
    page_size = options.page_size or PAGE_SIZE
    if not size.row_cells:
        return CacheGroup(page_size, size.plan.num_pages)
    return CacheGroup(page_size, size.plan.num_pages * -(-size.row_cells // page_size))


def _one_sequence(files: ModelFiles) -> tuple[str, ...]:
    """The warning for an architecture of ONE_SEQUENCE; empty for others."""
    architecture = files.config.model_type
    if architecture not in ONE_SEQUENCE:
        return ()
    return (f"llama.cpp computes one request at a time with the architecture {architecture}, without a prefix cache",)


def _warnings(options: LoadOptions, size: Size, context: int) -> tuple[str, ...]:
    warnings: list[str] = []
    limit = size.plan.max_positions
    if size.row_cells and size.rows < options.max_rows:
        warnings.append(f"the memory has room for {size.rows} rows of {context} tokens; max_rows is {options.max_rows}")
    if options.context is not None or context >= limit:
        return tuple(warnings)
    if context == DEFAULT_CONTEXT["cpu"]:
        reason = f"the context is {context} tokens, because llama.cpp allocates its whole cache"
        warnings.append(f"{reason}; the setting context selects up to {limit}")
    else:
        warnings.append(f"the memory has room for a context of {context} tokens; the model supports {limit}")
    return tuple(warnings)


def _quant(files: ModelFiles) -> str:
    """The type of most of the weights; empty if it is a float type."""
    sizes: dict[str, int] = {}
    for tensor in files.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return "" if largest in ("F32", "F16", "BF16") else largest


def _new_context(files: ModelFiles, options: LoadOptions, size: Size, spec: RunnerSpec, model: Any) -> Any:
    lib = library()
    params = lib.c.llama_context_default_params()
    params.n_ctx = size.cells
    params.n_batch = spec.max_tokens
    params.n_ubatch = min(UBATCH, spec.max_tokens)
    params.n_seq_max = size.sequences
    params.n_outputs_max = max(MIN_OUTPUTS, params.n_seq_max)
    params.n_threads = options.threads or cores()
    params.n_threads_batch = params.n_threads
    params.pooling_type = NO_POOLING
    set_rope(params, options)
    params.kv_unified = not size.row_cells
    params.swa_full = True
    params.no_perf = True
    params.flash_attn_type = flash_attention(files, size.gpu_layers)
    avoid_graphs(files, params.flash_attn_type)
    if options.cache_dtype != "auto":
        params.type_k = CACHE_TYPES[options.cache_dtype][0]
        params.type_v = params.type_k
    lib.forget_errors()
    context = lib.c.llama_init_from_model(model, params)
    if context:
        return context
    reason = lib.last_errors or "no reason given"
    if options.cache_dtype != "auto":
        message = f"{files.name} does not support cache_dtype {options.cache_dtype}: {reason}"
        raise SettingRefused(message[:500], "set cache_dtype to auto", setting="cache_dtype")
    raise ModelRefused(
        f"{files.name}: llama.cpp cannot allocate its cache: {reason}"[:500],
        "use a smaller context",
        size.plan.numbers(),
    )
