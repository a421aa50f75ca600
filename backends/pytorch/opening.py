"""Opens a model on a torch device: loads the weights and builds the runner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import dropwhile

import torch

from ...engine.errors import ModelRefused, ModelTooLarge
from ...engine.files.model_config import ModelConfig
from ...engine.files.model_files import ModelFiles
from ...engine.memory_plan import MemoryPlan
from ...engine.options import NOT_GGUF, RARE, LoadOptions, check_supported
from ...engine.runner import Runner, RunnerSpec
from ...kernels.ops.lora import Lora
from .architecture import Architecture, architecture_of, planned_files
from .cache_plan import Stack, cache_stacks, layer_groups, stack_shape
from .choice import with_attention, with_lora_backend
from .device import Device, Recorder
from .expert_shapes import check_experts
from .failures import load_failures
from .fit_hint import fitting_options
from .forced import with_forced
from .graphs.compiling import Compiler
from .graphs.parallel import SharedExperts
from .graphs.runner import GraphRunner
from .graphs.split import SplitModel
from .kv import GroupedKV, PagedKV
from .loading import Loader
from .measured_workspace import measured_workspace, reserve_workspace
from .memory_plan import cache_dtype, capturable_tokens, chosen_graphs, expected_workspace, measure, plan
from .models import accepts
from .plugins import with_tested_plugins
from .runner import Model, TorchRunner
from .selftest import self_tested
from .states import States
from .weights import Weights

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}  # without "auto", which means Device.dtype

MEASURED_BELOW = 4  # the workspace is measured and reserved if less than this multiple of its estimate stays free


def with_self_test(device: Device, options: LoadOptions, title: str, versions: Iterable[str]) -> Device:
    """`device` with the kernels that pass the self-test, and warnings about the others. If the options name no folder
    for the verdicts, nothing is tested.

    `title`, `versions`: see self_tested. Raises ModelRefused if a kernel breaks the device.
    """
    if options.self_test_dir is None:
        return device
    dtype = DTYPES.get(options.dtype, device.dtype)
    candidates = tuple(kernel_set.ops for kernel_set in device.kernels)
    ops, replacements = self_tested(candidates, device.type, dtype, options.self_test_dir, title, versions)
    # The sets before the one of ops.lora failed, so a user cannot choose their LoRA kernels by name.
    passed = dict(dropwhile(lambda backend: backend[1] != ops.lora, device.lora_backends.items()))
    backends = passed or {"torch_native": Lora()}
    return replace(device, ops=ops, lora_backends=backends, warnings=device.warnings + replacements)


def open_runner(files: ModelFiles, options: LoadOptions, device: Device, free: int) -> Runner:
    """Load a model on a device with `free` bytes of free memory.

    Raises ModelRefused, also if the model does not fit in memory; SettingRefused; and RunnerFailed if the device fails.
    """
    refusal = accepts(files)
    if refusal:
        raise ModelRefused(f"{files.name}: {refusal}")
    device = _configured(device, options)
    try:
        with load_failures(files.name):
            architecture = architecture_of(files, device, options)
            return _load(architecture, options, free)
    except ModelTooLarge as error:
        failed = error

    def memory(changed: LoadOptions) -> MemoryPlan:
        return _plan(architecture.files, changed, device, free)

    numbers = failed.numbers or memory(options).numbers()
    raise ModelTooLarge(str(failed), fitting_options(memory, options), numbers) from failed.__cause__


def plan_memory(files: ModelFiles, options: LoadOptions, device: Device, free: int) -> MemoryPlan:
    """The memory of a model on a device with `free` bytes of free memory, as open_runner would allocate it.

    Raises ModelRefused, also if the tensors of experts differ from config.json, or SettingRefused, but not because the
    model does not fit in memory.
    """
    refusal = accepts(files)
    if refusal:
        raise ModelRefused(f"{files.name}: {refusal}")
    files = planned_files(files)
    check_experts(files)
    return _plan(files, options, _configured(device, options), free)


def _plan(files: ModelFiles, options: LoadOptions, device: Device, free: int) -> MemoryPlan:
    dtype = DTYPES.get(options.dtype, device.dtype)
    loader = Loader(files, options, device, dtype)
    return measure(files, options, free, dtype, loader.expected_bytes(), device, loader.expected_token_bytes())


def _configured(device: Device, options: LoadOptions) -> Device:
    """The device with the ops that the options select. Raises SettingRefused."""
    check_supported(options, NOT_GGUF, device.name)
    check_supported(options, {name: values for name, values in RARE.items() if name not in device.options}, device.name)
    if device.recorder is None:
        check_supported(options, {"graphs": ("auto", "off")}, device.name)
    device = with_lora_backend(with_attention(device, options), options)
    device = with_tested_plugins(device, DTYPES.get(options.dtype, device.dtype))
    return replace(device, ops=with_forced(device.ops, device.kernels, options.ops))


def _load(architecture: Architecture, options: LoadOptions, free: int) -> Runner:
    files, device = architecture.files, architecture.device
    config = files.config
    dtype = DTYPES.get(options.dtype, device.dtype)
    loader = Loader(files, options, device, dtype)
    spec = plan(files, options, free, dtype, loader.expected_bytes(), device)
    capturable = capturable_tokens(config, spec.max_tokens, device)

    def cache(spec: RunnerSpec) -> GroupedKV:
        layers = cache_stacks(config, spec.groups)
        stacks = sorted(set(layers), key=lambda stack: stack.group)
        pages = [
            PagedKV(
                layers.count(stack),
                spec.groups[stack.group].num_pages,
                spec.groups[stack.group].page_size,
                stack_shape(config, stack.kind)[1],
                _part_dims(config, device, stack),
                cache_dtype(config, options, dtype, device),
                device.type,
            )
            for stack in stacks
        ]
        return GroupedKV(
            pages,
            [stack.group for stack in stacks],
            [stacks.index(stack) for stack in layers],
            layer_groups(config, spec.groups),
            _states(config, spec, device),
        )

    with torch.inference_mode():
        build = architecture.build
        model, weights = loader.load(lambda weights: build(weights, spec.max_context), spec.num_adapters)
        estimate = expected_workspace(config, options, dtype, device)
        rest = free - weights.bytes - spec.cache_bytes
        is_short = device.meter is not None and rest < MEASURED_BELOW * estimate
        if device.meter is not None and is_short:
            # The measured steps have the largest context that the memory could have room for.
            largest = plan(files, options, free, dtype, weights.bytes, device, workspace=0)
            model.set_context(largest.max_context)
            probe = replace(spec, max_context=largest.max_context)
            workspace = measured_workspace(model, cache, probe, device, capturable, weights.slots)
            free = device.meter.free() + weights.bytes
            spec = plan(files, options, free, dtype, weights.bytes, device, workspace)
            slots = weights.slots.limit(spec.num_adapters)
            spec = replace(spec, num_adapters=slots, adapters_per_step=slots)
            model.set_context(spec.max_context)
        warnings = (*spec.warnings, *device.layout.warnings())
        spec = replace(spec, weight_bytes=weights.bytes, token_bytes=weights.token_bytes, warnings=warnings)
        kv = cache(spec)
    recorder = None if device.recorder is None else device.recorder()
    split = _split(model, kv, options, device, recorder)
    runner = TorchRunner(model, kv, spec, device, split, capturable, weights.slots)
    opened: Runner = runner
    if recorder is not None and (spec.graph_rows or spec.graph_tokens):
        opened = GraphRunner(runner, recorder, _second_stream(weights, config, options, dtype))
        if device.meter is not None:
            device.meter.release()  # memory of the first steps on the stream of the captures
    if is_short:
        with torch.inference_mode():
            reserve_workspace(runner, weights.slots)
    return opened


def _states(config: ModelConfig, spec: RunnerSpec, device: Device) -> States | None:
    """The memory of recurrent states; None if no layer has one."""
    if config.state_shapes is None or not spec.num_states:
        return None
    entries = spec.num_states + spec.num_snapshots
    return States(config.state_shapes, len(config.state_layers), entries, device.type)


def _part_dims(config: ModelConfig, device: Device, stack: Stack) -> tuple[int, ...]:
    """Values that one head stores for one token, for each part of the cache."""
    if device.latent_parts and config.latent is not None:
        return config.latent.rotary_dim, config.latent.rank
    parts, _, dim = stack_shape(config, stack.kind)
    return (dim,) * parts


def _second_stream(
    weights: Weights, config: ModelConfig, options: LoadOptions, dtype: torch.dtype
) -> SharedExperts | None:
    """The shared experts that may run beside the routed ones; None if the model or the options have none."""
    if options.streams != "measured" or not weights.shared_experts:
        return None
    return SharedExperts(weights.shared_experts, config.hidden_size, dtype)


def _split(
    model: Model, kv: GroupedKV, options: LoadOptions, device: Device, recorder: Recorder | None
) -> SplitModel | None:
    """The model with compiled segments between its attention ops; None if the options do not select split graphs."""
    if recorder is None or chosen_graphs(options, device) != "split":
        return None
    return SplitModel(model, kv, device.ops, Compiler(options.compiler, options.compiled_dir), recorder.call)
